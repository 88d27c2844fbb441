"""Functions of whole matrices whose weights are stored split over the mesh.

Each device receives its share of the matrices by all-to-all, computes, and sends the results back.
No device ever holds all matrices.

Results have the same bits on every mesh of one kind of devices: the number of matrices computed at
once depends only on their size.

Shapes: N matrices, R rows, C columns, R ≤ C.
"""

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence

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


def on_whole_matrices(
    function: Callable[..., Arrays], matrices: Sequence[Matrices], *kinds: Sequence[Array]
) -> list[list[Array]]:
    """Applies `function` to all matrices; matrices of equal shapes are sent together.

    Args:
      function: gets some matrices [N, R, C] and the arrays that belong to them, such as a number
        for each column, [N, 1, C]; returns as many arrays of the same shapes. The result for a
        matrix must not depend on the others.
      matrices: for each weight.
      kinds: each weight's matrices, and each weight's other arrays, as stored. All have the same
        axes; an axis may have size 1, and then no mesh axis splits it. The result is like them.
    """
    weights = [*zip(*kinds, strict=True)]
    groups: dict[object, list[int]] = defaultdict(list)
    for i, (form, arrays) in enumerate(zip(matrices, weights, strict=True)):
        groups[_shapes_and_layouts(form, arrays)].append(i)
    made: dict[int, Arrays] = {}
    for group in groups.values():
        results = _of_group(function, [matrices[i] for i in group], [weights[i] for i in group])
        made |= zip(group, results, strict=True)
    return [[made[i][k] for i in range(len(weights))] for k in range(len(kinds))]


def _shapes_and_layouts(form: Matrices, arrays: Arrays) -> object:
    """A key that is equal for weights whose matrices can be in one stack."""
    sides = form.order[len(form.apart) :]
    shapes = [tuple(array.shape[i] for i in sides) for array in arrays]
    layouts = [tuple(layout_of(array)[i] for i in form.order) for array in arrays]
    return len(form.apart), len(form.rows), *shapes, *layouts


def _of_group(
    function: Callable[..., Arrays], forms: Sequence[Matrices], weights: Sequence[Arrays]
) -> list[Arrays]:
    layouts = [layout_of(array) for arrays in weights for array in arrays]
    kinds = len(weights[0])
    ways = [_way(forms[0], layout, layouts[0]) for layout in layouts[:kinds]]

    def on_shares(*parts: Array) -> Arrays:
        """Computes, on each device, its parts of all results from its parts of all arrays."""
        of_kinds = [parts[k::kinds] for k in range(kinds)]
        stacks = [[*map(Matrices.stacked, forms, parts)] for parts in of_kinds]
        shares = [*map(_sent, map(jnp.concatenate, stacks), ways)]
        made = _in_turns(function, [_as_matrices(x, len(forms[0].rows)) for x in shares])
        shaped = (jnp.reshape(y, x.shape) for y, x in zip(made, shares, strict=True))
        returned = [*map(_returned, shaped, ways)]
        ends = list(itertools.accumulate(len(x) for x in stacks[0]))[:-1]
        split = [jnp.split(y[: sum(map(len, stacks[0]))], ends) for y in returned]
        return tuple(
            form.unstacked(split[k][i], of_kinds[k][i].shape)
            for i, form in enumerate(forms)
            for k in range(kinds)
        )

    # Not tracked: JAX does not know that arrays gathered over copies are the same on each device.
    mapped = shard_map(on_shares, layouts, tuple(layouts), tracked=False)
    made = mapped(*(array for arrays in weights for array in arrays))
    return [tuple(made[i : i + kinds]) for i in range(0, len(made), kinds)]


_Way = Sequence[tuple[MeshAxes, int | None]]


def _way(matrices: Matrices, layout: PartitionSpec, of_matrices: PartitionSpec) -> _Way:
    """The steps that assemble arrays of `layout` for matrices with the layout `of_matrices`.

    Each step has mesh axes, along which a device takes its share of the matrices, and the array
    axis along which it receives their parts. `None` means that each device already has the whole
    axis, and sends nothing.
    """
    mesh = jax.sharding.get_abstract_mesh()
    copies = tuple(name for name in mesh.axis_names if name not in mesh_axes_of(of_matrices))
    way: list[tuple[MeshAxes, int | None]] = [(copies, None)]
    for axis, i in enumerate(matrices.order[len(matrices.apart) :], start=1):
        if of_matrices[i] is not None:
            way.append((of_matrices[i], None if layout[i] is None else axis))
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


def layout_of(array: Array) -> PartitionSpec:
    """The layout of an array on the current mesh, axis by axis."""
    if jax.sharding.get_abstract_mesh().empty:
        return PartitionSpec(*[None] * array.ndim)
    return PartitionSpec(*jax.typeof(array).sharding.spec.partitions)
