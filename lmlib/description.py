"""A table of every parameter: shape, layout, memory, decay and first values."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from lmlib.optim import Decays, as_declared
from lmlib.parallel.axes import Axes, Weight, map_weights
from lmlib.parallel.layout import stored
from lmlib.table import columns


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One weight. `axes` and `shape` align; stacked layers lead and have no name. `first_values` is
    "zeros", "ones" or a standard deviation."""

    path: str
    axes: Axes
    shape: tuple[int, ...]
    layout: tuple[str, ...]
    bytes_per_device: int
    decays: bool
    first_values: str

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
            self.first_values,
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
        header = ("parameter", "shape", "layout", "bytes per device", "decay", "first values")
        rows = [header, *(parameter.cells() for parameter in self.parameters)]
        return f"{columns(rows)}\n{self.short()}"


def describe(model: Any, mesh: Mesh, decays: Decays = as_declared) -> Description:
    """Describes `model` (arrays, or `ShapeDtypeStruct`s out of `jax.eval_shape`) on `mesh`."""
    parameters: list[Parameter] = []

    def visit(weight: Weight, array: jax.Array | jax.ShapeDtypeStruct) -> None:
        layout = stored(weight, array.shape, mesh)
        local = NamedSharding(mesh, layout).shard_shape(array.shape)
        sizes = {axis: size for axis, size in zip(weight.axes, array.shape, strict=True) if axis}
        parameters.append(
            Parameter(
                path=weight.path,
                axes=weight.axes,
                shape=array.shape,
                layout=tuple(str(mesh_axes or "whole") for mesh_axes in layout),
                bytes_per_device=math.prod(local) * array.dtype.itemsize,
                decays=decays(weight),
                first_values=weight.declaration.first.text(sizes),
            )
        )

    map_weights(visit, model)
    return Description(parameters, mesh)
