"""Functions of whole matrices whose weights are stored split over the mesh.

Each device receives its share of the matrices by all-to-all, computes, and sends the results back.
No device ever holds all matrices.

Results have the same bits on every mesh of one kind of devices: the number of matrices computed at
once depends only on their size.

Shapes: N matrices, R rows, C columns, R ≤ C.
"""

import dataclasses
import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array

from lmlib.parallel.axes import Weight
from lmlib.parallel.collectives import (
    all_gather,
    all_to_all,
    axis_index,
    devices_along,
    platform,
    shard_map,
)
from lmlib.parallel.layout import mesh_axes_of
from lmlib.parallel.mesh_axes import MeshAxes

APART = ("experts", "choice")  # axes along which each index is a separate matrix
_OF_GATES = {"heads", "kv_heads", "one"}  # axes of a layer's gates, decays and rates
_BUSY = 2**22  # elements that keep an accelerator busy
_MOST_AT_ONCE = 32


@dataclasses.dataclass(frozen=True)
class Matrices:
    """The array of a weight as a stack of matrices; fields are positions of axes."""

    apart: tuple[int, ...]  # they enumerate the matrices
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    summed: tuple[int, ...]  # products sum over them: either the rows or the columns

    @property
    def order(self) -> tuple[int, ...]:
        return (*self.apart, *self.rows, *self.columns)

    def beside(self, side: tuple[int, ...]) -> "Matrices":
        """The form of arrays that have the axes apart, those of `side`, and one more axis.

        Examples are the products of rows with rows, and bases of rows or columns.
        """
        first, last = len(self.apart), len(self.apart) + len(side)
        return Matrices((*range(first),), (*range(first, last),), (last,), ())

    def shape_beside(self, side: tuple[int, ...], matrices: Array, length: int) -> tuple[int, ...]:
        """The shape of the form `beside(side)` for `matrices`, with a last axis of this length.

        All axes of a side have size 1 if `length` is 0, which stands for no array.
        """
        of_side = [matrices.shape[i] if length else 1 for i in side]
        return (*(matrices.shape[i] for i in self.apart), *of_side, length or 1)

    def layout_beside(self, side: tuple[int, ...], matrices: Array, length: int) -> PartitionSpec:
        """The layout of an array of `shape_beside` on the current mesh: that of `matrices`.

        If mesh axes divide it, the last axis is split like the other side.
        """
        layout, other = layout_of(matrices), self.columns if side == self.rows else self.rows
        divide = [layout[i] for i in other if length and length % devices_along(layout[i]) == 0]
        places = [layout[i] for i in self.apart] + [layout[i] if length else None for i in side]
        return PartitionSpec(*places, next(filter(None, divide), None))

    def zeros_beside(self, side: tuple[int, ...], matrices: Array, length: int) -> Array:
        """Zeros of `shape_beside`, laid out like `layout_beside`."""
        shape = self.shape_beside(side, matrices, length)
        if jax.sharding.get_abstract_mesh().empty:
            return jnp.zeros(shape, jnp.float32)
        layout = self.layout_beside(side, matrices, length)
        return jnp.zeros(shape, jnp.float32, out_sharding=layout)

    def stacked(self, x: Array) -> Array:
        """x as an array with one axis for all matrices, then the axes of rows and columns."""
        x = jnp.transpose(x, self.order)
        first = len(self.apart)
        return jnp.reshape(x, (math.prod(x.shape[:first]), *x.shape[first:]))

    def unstacked(self, x: Array, shape: Sequence[int]) -> Array:
        """The inverse of `stacked` for an array of `shape`."""
        x = jnp.reshape(x, [shape[i] for i in self.order])
        return jnp.transpose(x, sorted(range(x.ndim), key=self.order.__getitem__))


def is_matrix(weight: Weight, apart: Collection[str]) -> bool:
    """True if `matrices_of` finds matrices in a weight.

    The weight must multiply activations, must not have the vocabulary as an axis, and must have two
    sides. A router does not have two sides if `apart` names the experts, nor does a gate that makes
    one number for each head.
    """
    _, summed, kept = _sides(weight, apart)
    is_of_vocabulary = "vocab" in weight.axes
    has_sides = bool(summed) and not {weight.axes[i] for i in kept} <= _OF_GATES
    return weight.declaration.multiplied and not is_of_vocabulary and has_sides


def matrices_of(weight: Weight, shape: Sequence[int], apart: Collection[str]) -> Matrices | None:
    """Describes an array of `shape` as a stack of matrices; `None` if it is not one.

    There is one matrix for each stacked layer, and for each index of the axes named in `apart`.
    Products sum over the axes of one side. Rows are the shorter side.
    """
    if not is_matrix(weight, apart):
        return None
    stacked, summed, kept = _sides(weight, apart)

    def length_and_names(side: tuple[int, ...]) -> tuple[int, list[str]]:
        return math.prod(shape[i] for i in side), [weight.axes[i] for i in side]

    rows, columns = sorted((summed, kept), key=length_and_names)
    return Matrices(stacked, rows, columns, summed)


def _sides(weight: Weight, apart: Collection[str]) -> tuple[tuple[int, ...], ...]:
    """Positions of the axes that enumerate matrices, that products sum over, and the others."""
    places = range(len(weight.axes))
    stacked = [i for i in places if i < weight.stacked or weight.axes[i] in apart]
    summed = [i for i in places if i not in stacked and weight.axes[i] in weight.declaration.summed]
    kept = [i for i in places if i not in stacked and i not in summed]
    return tuple(stacked), tuple(summed), tuple(kept)


Arrays = tuple[Array, ...]
Kind = tuple[Sequence[Matrices], Sequence[Array]]  # an array for each weight, and its form


def on_whole_matrices(
    function: Callable[..., Arrays],
    *kinds: Kind,
    returned: int | None = None,
    numbers: Sequence[Array] = (),
) -> list[list[Array]]:
    """Applies `function` to whole matrices, and returns its results laid out as they are stored.

    Matrices of equal shapes are sent together.

    Args:
      function: gets some matrices [N, R, C] and the arrays that belong to them, such as a number
        for each column, [N, 1, C], or products of rows, [N, R, R]; returns arrays of the shapes of
        the first ones. The result for a matrix must not depend on the others.
      kinds: each weight's matrices, then each weight's other arrays, as stored. An axis may have
        size 1, and then no mesh axis splits it. The results are like them.
      returned: the number of arrays that `function` returns, if fewer than it gets.
      numbers: scalars, which `function` gets before the arrays.
    """
    returned = len(kinds) if returned is None else returned
    pairs = [zip(forms, arrays, strict=True) for forms, arrays in kinds]
    weights = [[*zip(*each, strict=True)] for each in zip(*pairs, strict=True)]
    groups: dict[object, list[int]] = defaultdict(list)
    for i, (forms, arrays) in enumerate(weights):
        groups[tuple(map(_shape_and_layout, forms, arrays))].append(i)
    made: dict[int, Arrays] = {}
    for group in groups.values():
        results = _of_group(function, [weights[i] for i in group], returned, numbers)
        made |= zip(group, results, strict=True)
    return [[made[i][k] for i in range(len(weights))] for k in range(returned)]


def _shape_and_layout(form: Matrices, array: Array) -> object:
    """A key that is equal for weights whose matrices can be in one stack."""
    shape = tuple(array.shape[i] for i in form.order[len(form.apart) :])
    layout = layout_of(array)
    return len(form.apart), len(form.rows), shape, tuple(layout[i] for i in form.order)


def _of_group(
    function: Callable[..., Arrays],
    weights: Sequence[Sequence[Any]],
    returned: int,
    numbers: Sequence[Array],
) -> list[Arrays]:
    forms, layouts = weights[0][0], [[*map(layout_of, arrays)] for _, arrays in weights]
    kinds = len(forms)
    ways = [
        _way(form, layout, forms[0], layouts[0][0])
        for form, layout in zip(forms, layouts[0], strict=True)
    ]

    def on_shares(numbers: Sequence[Array], *parts: Array) -> Arrays:
        """Computes, on each device, its parts of all results from its parts of all arrays."""
        of_kinds = [parts[k::kinds] for k in range(kinds)]
        stacks = [
            [each[0][k].stacked(x) for each, x in zip(weights, of_kind, strict=True)]
            for k, of_kind in enumerate(of_kinds)
        ]
        shares = [*map(_sent, map(jnp.concatenate, stacks), ways)]
        flat = [_as_matrices(x, len(form.rows)) for x, form in zip(shares, forms, strict=True)]
        made = _in_turns(functools.partial(function, *numbers), flat)
        shaped = (jnp.reshape(y, x.shape) for y, x in zip(made, shares[:returned], strict=True))
        sent_back = [*map(_returned, shaped, ways)]
        ends = list(itertools.accumulate(len(x) for x in stacks[0]))[:-1]
        split = [jnp.split(y[: sum(map(len, stacks[0]))], ends) for y in sent_back]
        return tuple(
            each[0][k].unstacked(split[k][i], of_kinds[k][i].shape)
            for i, each in enumerate(weights)
            for k in range(returned)
        )

    # Not tracked: JAX does not know that arrays gathered over copies are the same on each device.
    of_results = tuple(layout for each in layouts for layout in each[:returned])
    given = [[PartitionSpec()] * len(numbers), *itertools.chain(*layouts)]
    mapped = shard_map(on_shares, given, of_results, tracked=False)
    made = mapped([*numbers], *(array for _, arrays in weights for array in arrays))
    return [tuple(made[i : i + returned]) for i in range(0, len(made), returned)]


_Way = Sequence[tuple[MeshAxes, int | None]]


def _way(
    form: Matrices, layout: PartitionSpec, matrices: Matrices, of_matrices: PartitionSpec
) -> _Way:
    """The steps that assemble arrays of `layout` for matrices with the layout `of_matrices`.

    Each step has mesh axes, along which a device takes its share of the matrices, and the array
    axis along which it receives their parts. `None` means that each device already has the whole
    axis, and sends nothing.
    """
    mesh = jax.sharding.get_abstract_mesh()
    copies = tuple(name for name in mesh.axis_names if name not in mesh_axes_of(of_matrices))
    way: list[tuple[MeshAxes, int | None]] = [(copies, None)]
    axes = {layout[i]: axis for axis, i in enumerate(form.order[len(form.apart) :], start=1)}
    for i in matrices.order[len(matrices.apart) :]:
        if of_matrices[i] is not None:
            way.append((of_matrices[i], axes.get(of_matrices[i])))
    return way


def _sent(x: Array, way: _Way) -> Array:
    """Returns this device's share of the matrices, each whole; zeros pad the last shares."""
    shares = math.prod(devices_along(mesh_axes) for mesh_axes, _ in way)
    x = jnp.pad(x, [(0, -len(x) % shares)] + [(0, 0)] * (x.ndim - 1))
    # Joined into one array: otherwise XLA on CPUs would send the concatenated parts separately, in
    # different layouts, and then reject its own program.
    x = jax.lax.optimization_barrier(x)
    for mesh_axes, axis in way:
        if axis is not None:
            x = all_to_all(x, mesh_axes, split=0, joined=axis)
        elif (devices := devices_along(mesh_axes)) > 1:
            length = len(x) // devices
            x = jax.lax.dynamic_slice_in_dim(x, axis_index(mesh_axes) * length, length)
    return x


def _returned(x: Array, way: _Way) -> Array:
    """The inverse of `_sent`, except that padding stays."""
    for mesh_axes, axis in reversed(way):
        if axis is None:
            x = all_gather(x, mesh_axes, axis=0)
        else:
            x = all_to_all(x, mesh_axes, split=axis, joined=0)
    return x


def _as_matrices(x: Array, rows: int) -> Array:
    """Reshapes to [N, R, C]; the first `rows` axes after the first one form the rows."""
    sides = x.shape[1 : 1 + rows], x.shape[1 + rows :]
    return jnp.reshape(x, (len(x), *map(math.prod, sides)))


def _in_turns(function: Callable[..., Arrays], stacks: Sequence[Array]) -> Arrays:
    """Applies `function` in turns that keep a device busy; CPUs take one matrix at a time."""
    N, R, C = stacks[0].shape
    batch = 1 if platform() == "cpu" else max(1, min(_MOST_AT_ONCE, _BUSY // (R * C)))
    turns = -(-N // batch)

    def cut(x: Array) -> Array:
        filled = jnp.pad(x, [(0, turns * batch - N), (0, 0), (0, 0)])
        return jnp.reshape(filled, (turns, batch, *x.shape[1:]))

    # Barriers, so that surrounding operations do not enter the same kernels on some meshes.
    def turn(arrays: Arrays) -> Arrays:
        return jax.lax.optimization_barrier(function(*jax.lax.optimization_barrier(arrays)))

    given = tuple(map(cut, stacks))
    if turns == 1:  # without a loop, since XLA's TPU compiler would run its body twice
        made = jax.tree.map(lambda y: y[None], turn(tuple(x[0] for x in given)))
    else:
        made = jax.lax.map(turn, given)
    return tuple(jnp.reshape(y, (turns * batch, *y.shape[2:]))[:N] for y in made)


def norms(x_NRC: Array) -> Array:
    """The Frobenius norm of each matrix, [N, 1, 1]."""
    return jnp.sqrt(jnp.sum(x_NRC**2, axis=(1, 2), keepdims=True))


def layout_of(array: Array) -> PartitionSpec:
    """The layout of an array on the current mesh, axis by axis."""
    if jax.sharding.get_abstract_mesh().empty:
        return PartitionSpec(*[None] * array.ndim)
    return PartitionSpec(*jax.typeof(array).sharding.spec.partitions)
