"""FSDP: a weight moves from `STORED` to `COMPUTE` for its use, and its gradient moves back."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jax.typing import DTypeLike

from lmlib.parallel.axes import M, Weight, map_weights
from lmlib.parallel.collectives import in_a_stage, in_steps, psum, psum_scatter, shard_map
from lmlib.parallel.layout import COMPUTE, compute_spec, mesh_axes_of, named, repeats, storage_spec
from lmlib.parallel.matrix import is_matrix
from lmlib.parallel.mesh_axes import (
    NAMES,
    REPLICA_AXES,
    STAGE,
    TOKENS,
    MeshAxes,
    names_of,
    place_of,
)


def gather(module: M, dtype: DTypeLike, after: jax.Array | None = None) -> M:
    """Casts each weight of `module` to `dtype` and moves it from `STORED` to `COMPUTE`.

    This is FSDP's all-gather, after the cast, so that bf16 is sent. A weight's declared dtype
    overrides `dtype`. Integer weights are moved unchanged; a `Matrix` that holds them then converts
    them to `dtype`, but not before `after` is available.

    In the backward pass, each device has a multiplied weight's gradient for its own tokens. It is
    summed and split over `fsdp` (a reduce-scatter), then summed over `data` (a psum), in `dtype`,
    but not over mesh axes that split the weight in use. JAX sums other gradients, which are small.
    """
    mesh = jax.sharding.get_abstract_mesh()

    def to_compute(weight: Weight, array: jax.Array) -> jax.Array:
        if jnp.issubdtype(array.dtype, jnp.floating):
            array = array.astype(weight.declaration.dtype or dtype)
        if mesh.empty:
            return array
        moves = moves_of(weight, array.shape, mesh)
        return _move(moves._replace(given=jax.typeof(array).sharding.spec), array)

    return jax.tree.map(
        lambda node: node.gathered(dtype, after) if is_matrix(node) else node,
        map_weights(to_compute, module),
        is_leaf=is_matrix,
    )


class Moves(NamedTuple):
    """The layouts that a weight passes through to its use, and its gradient on the way back."""

    given: PartitionSpec  # its current layout: usually `stored`, but a notebook may use another
    stored: PartitionSpec
    whole: PartitionSpec  # `computed`, but whole along the axes that are repeated
    computed: PartitionSpec
    copies: PartitionSpec  # `storage_spec`, but split along the axes that are repeated
    repeats: tuple[int, ...]  # copies of each element, for each axis
    summed: frozenset[str]  # mesh axes over which the devices' own gradients are summed
    in_a_stage: bool


def moves_of(weight: Weight, shape: Sequence[int], mesh: Mesh | AbstractMesh) -> Moves:
    """The layouts of a stored weight on `mesh`."""
    rules = {**COMPUTE, **weight.declaration.rules}
    sizes = zip(weight.axes, shape, strict=True)
    times = tuple(repeats(axis, size, rules, mesh) for axis, size in sizes)
    stored, computed = storage_spec(weight, shape, mesh), compute_spec(weight, shape, mesh)

    def chosen(repeated: Sequence[MeshAxes], others: PartitionSpec) -> PartitionSpec:
        triples = zip(times, repeated, others, strict=True)
        return PartitionSpec(*(a if n > 1 else b for n, a, b in triples))

    whole, copies = chosen([None] * len(times), computed), chosen([*computed], stored)
    tokens = names_of(named(TOKENS, mesh)) if weight.declaration.multiplied else ()
    summed = frozenset(tokens) - mesh_axes_of(computed)
    return Moves(stored, stored, whole, computed, copies, times, summed, in_a_stage())


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _move(moves: Moves, array: jax.Array) -> jax.Array:
    # Otherwise XLA would transpose a whole stack of layers for the all-gather of one. Each device
    # constrains its own shard: the partitioner of JAX 0.10 would gather the array for it.
    rows_first = Layout(tuple(range(array.ndim)))
    constrained = shard_map(
        lambda shard: with_layout_constraint(shard, rows_first), (moves.given,), moves.given
    )
    array = constrained(array)
    for step in _steps(moves, moves.given):
        array = jax.sharding.reshard(array, step)
    if moves.whole != moves.computed:
        array = jax.sharding.reshard(array, moves.whole)
        for axis, times in enumerate(moves.repeats):
            array = jnp.repeat(array, times, axis) if times > 1 else array
    return jax.sharding.reshard(array, moves.computed.update(reduced=moves.summed))


def _steps(moves: Moves, rest: PartitionSpec) -> list[PartitionSpec]:
    """The layouts between `rest` and use, if a gather takes several steps."""
    # One in a stage, where JAX maps no explicit scatter, or if stored pieces cross the used ones.
    places, layouts = [*rest.partitions], []
    for axis, (there, used) in enumerate(zip(places, moves.computed.partitions, strict=True)):
        if moves.repeats[axis] > 1:
            continue
        names, kept = names_of(there), len(names_of(used))
        if moves.in_a_stage or names[:kept] != names_of(used):
            return []
        for step in reversed(in_steps(names[kept:])[1:]):
            names = names[: -len(names_of(step))]
            places[axis] = place_of(names)
            layouts.append(PartitionSpec(*places))
    return layouts


def _scattered(moves: Moves, gradient: jax.Array) -> jax.Array:
    """The sum of all devices' gradients in the layout `copies`, one mesh axis after the other."""
    pairs = zip(moves.computed.partitions, moves.copies.partitions, strict=True)
    new = [tuple(n for n in names_of(b) if n not in names_of(a)) for a, b in pairs]
    others = tuple(name for name in NAMES if name in moves.summed.difference(*new))

    def own(gradient: jax.Array) -> jax.Array:
        for axis, names in enumerate(new):
            gradient = psum_scatter(gradient, names, axis)
        return psum(gradient, others)

    unsummed = moves.computed.update(unreduced=moves.summed)
    return shard_map(own, (unsummed,), moves.copies, tracked=False)(gradient)


def _forward(moves: Moves, array: jax.Array) -> tuple[jax.Array, None]:
    if not moves.in_a_stage:
        return _move(moves, array), None
    from lmlib.parallel.stages import retraced_in_stage

    return retraced_in_stage(True, functools.partial(_move, moves))(array), None


def _backward(moves: Moves, _: None, gradient: jax.Array) -> tuple[jax.Array]:
    over_copies = moves.summed.intersection(REPLICA_AXES)
    if moves.summed and _steps(moves, moves.copies):
        gradient = _scattered(moves, gradient)
    elif over_copies:
        gradient = jax.sharding.reshard(gradient, moves.copies.update(unreduced=over_copies))
    gradient = jax.sharding.reshard(gradient, moves.copies)
    if moves.copies != moves.stored:
        gradient = jax.sharding.reshard(gradient, moves.stored)
        for axis, times in enumerate(moves.repeats):
            if times > 1:  # the gradients of an element's copies add up to its own
                size = gradient.shape[axis] // times
                apart = (*gradient.shape[:axis], size, times, *gradient.shape[axis + 1 :])
                gradient = jnp.sum(gradient.reshape(apart), axis + 1)
    return (jax.sharding.reshard(gradient, moves.given),)


_move.defvjp(_forward, _backward)


def unstaged(module: M) -> M:
    """Moves stacked layers to a layout in which stages do not split layers, for a scan over all."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.shape[STAGE] == 1:
        return module

    def move(weight: Weight, w_R: jax.Array) -> jax.Array:
        return jax.sharding.reshard(w_R, storage_spec(weight.unstaged, w_R.shape, mesh))

    return map_weights(move, module)
