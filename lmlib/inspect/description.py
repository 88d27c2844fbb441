"""Table of every parameter: shape, layout, memory, training group, decay, initial values."""

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from lmlib.optim.optimizer import Decays, as_declared
from lmlib.parallel.axes import Weight, map_weights
from lmlib.parallel.layout import splitting, storage_spec
from lmlib.parallel.matrix import counts
from lmlib.parallel.mesh import sizes_text
from lmlib.terminal.quantities import bytes_text
from lmlib.terminal.table import columns, wrapped

EVERYTHING = "yes"  # the group of all weights if none are frozen


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One weight. `axes`, `shape` and `layout` align; stacked layers lead, as `layer`."""

    path: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    size: int  # weights, which `lmlib.parallel.matrix.counts` counts
    layout: tuple[str, ...]  # "whole", or the mesh axes over which it is sharded
    bytes_per_device: int
    group: str | None  # for training; `None` if it is frozen
    decays: bool
    initial_values: str  # "zeros", "ones" or a standard deviation

    def cells(self) -> tuple[str, ...]:
        named = (f"{axis} {size:,}" for axis, size in zip(self.axes, self.shape, strict=True))
        return (
            self.path,
            " × ".join(named),
            ", ".join(self.layout),
            bytes_text(self.bytes_per_device),
            "frozen" if self.group is None else self.group,
            "yes" if self.decays else "no",
            self.initial_values,
        )


@dataclasses.dataclass(frozen=True)
class Description:
    """A table of parameters: `str()` returns all of it, `short()` its totals in one line."""

    parameters: Sequence[Parameter]
    mesh: Mesh

    @property
    def size(self) -> int:
        return sum(parameter.size for parameter in self.parameters)

    @property
    def bytes_per_device(self) -> int:
        return sum(parameter.bytes_per_device for parameter in self.parameters)

    def short(self) -> str:
        groups: Counter[str] = Counter()
        for parameter in self.parameters:
            groups[parameter.group or "frozen"] += parameter.size
        listed = ", ".join(f"{name} {size:,}" for name, size in groups.items())
        apart = "" if groups.keys() == {EVERYTHING} else f" ({listed})"
        decaying = sum(parameter.size for parameter in self.parameters if parameter.decays)
        mesh = sizes_text(self.mesh.shape)
        where = f"each device of mesh {mesh}" if mesh else "one device"
        return (
            f"{self.size:,} parameters in {len(self.parameters)} arrays{apart}, "
            f"{decaying:,} with weight decay; {bytes_text(self.bytes_per_device)} on {where}"
        )

    def __str__(self) -> str:
        header = (
            "parameter", "shape", "layout", "per device", "trains", "decay", "initial values",
        )  # fmt: skip
        rows = [header, *(parameter.cells() for parameter in self.parameters)]
        return f"{columns(rows)}\n{wrapped(self.short())}"


def describe(
    model: Any,
    mesh: Mesh,
    decays: Decays = as_declared,
    groups: Mapping[str, str] | None = None,
) -> Description:
    """Describes `model` (arrays, or `ShapeDtypeStruct`s from `jax.eval_shape`) on `mesh`.

    `groups` has the group of each trained weight, by its path (`lmlib.optim.trainable.grouped`);
    `None` if all weights train.
    """
    parameters: list[Parameter] = []
    sizes_in_order = iter(jax.tree.leaves(counts(model)))

    def visit(weight: Weight, array: jax.Array | jax.ShapeDtypeStruct) -> None:
        layout = storage_spec(weight, array.shape, mesh)
        local = NamedSharding(mesh, layout).shard_shape(array.shape)
        sizes = dict(zip(weight.axes, array.shape, strict=True))
        parameters.append(
            Parameter(
                path=weight.path,
                axes=weight.axes,
                shape=array.shape,
                size=next(sizes_in_order),
                layout=tuple(" × ".join(splitting(axes, mesh)) or "whole" for axes in layout),
                bytes_per_device=math.prod(local) * array.dtype.itemsize,
                group=EVERYTHING if groups is None else groups.get(weight.path),
                decays=(groups is None or weight.path in groups) and decays(weight),
                initial_values=weight.declaration.initial.text(sizes),
            )
        )

    map_weights(visit, model)
    return Description(parameters, mesh)
