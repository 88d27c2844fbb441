"""A table of every parameter: shape, layout, memory, decay and initial scale."""

import dataclasses
import math
from collections.abc import Callable, Sequence

import equinox as eqx
import jax
from jax.sharding import Mesh, NamedSharding

from lmlib.models.initial import initial_scale
from lmlib.optim import matrices
from lmlib.parallel.axes import Axes, map_weights
from lmlib.parallel.layout import STORED, partition
from lmlib.table import columns


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One weight. `axes` and `shape` align; stacked layers lead and have no name."""

    path: str
    axes: Axes
    shape: tuple[int, ...]
    layout: tuple[str, ...]
    bytes_per_device: int
    decays: bool
    initial_scale: float | None

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def cells(self) -> tuple[str, ...]:
        named = (
            f"{axis} {size:,}" if axis else f"{size:,}"
            for axis, size in zip(self.axes, self.shape, strict=True)
        )
        return (
            self.path,
            " × ".join(named),
            ", ".join(self.layout),
            f"{self.bytes_per_device:,}",
            "yes" if self.decays else "no",
            "ones" if self.initial_scale is None else f"{self.initial_scale:.4g}",
        )


@dataclasses.dataclass(frozen=True)
class Description:
    """`str()` is the whole table; `short()` its totals in one line."""

    parameters: Sequence[Parameter]
    mesh: Mesh

    @property
    def size(self) -> int:
        return sum(parameter.size for parameter in self.parameters)

    @property
    def bytes_per_device(self) -> int:
        return sum(parameter.bytes_per_device for parameter in self.parameters)

    def short(self) -> str:
        decaying = sum(parameter.size for parameter in self.parameters if parameter.decays)
        mesh = " × ".join(f"{axis} {size}" for axis, size in self.mesh.shape.items())
        return (
            f"{self.size:,} parameters in {len(self.parameters)} arrays, {decaying:,} decay; "
            f"{self.bytes_per_device:,} bytes on each device of mesh {mesh}"
        )

    def __str__(self) -> str:
        header = ("parameter", "shape", "layout", "bytes per device", "decay", "initial scale")
        rows = [header, *(parameter.cells() for parameter in self.parameters)]
        return f"{columns(rows)}\n{self.short()}"


def describe(
    model: eqx.Module, mesh: Mesh, decays: Callable[[Axes], bool] = matrices
) -> Description:
    """Describes `model` (arrays, or `ShapeDtypeStruct`s out of `jax.eval_shape`) on `mesh`."""
    parameters: list[Parameter] = []

    def visit(path: str, axes: Axes, weight: jax.Array | jax.ShapeDtypeStruct) -> None:
        spec = partition(axes, STORED)
        local = NamedSharding(mesh, spec).shard_shape(weight.shape)
        sizes = {axis: size for axis, size in zip(axes, weight.shape, strict=True) if axis}
        parameters.append(
            Parameter(
                path=path,
                axes=axes,
                shape=weight.shape,
                layout=tuple(str(mesh_axes or "whole") for mesh_axes in spec),
                bytes_per_device=math.prod(local) * weight.dtype.itemsize,
                decays=decays(axes),
                initial_scale=initial_scale(axes, sizes),
            )
        )

    map_weights(visit, model)
    return Description(parameters, mesh)
