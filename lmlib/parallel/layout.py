"""Axis names to mesh axes: where every array lives, and how it moves.

A weight names its axes in its annotation (`Float[Array, "embed mlp"]`). Two tables say which mesh
axes split each name. They differ where FSDP acts: a weight rests in `STORED`, and `gather` moves it
to `COMPUTE` just before use; its gradient moves back. Names that the tables do not have get their
rule where the weight is declared. Without a mesh (no `jax.set_mesh`) nothing is
placed and the same model runs on one device.
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from lmlib.parallel.axes import LAYER, Axes, LayoutError, M, Rules, Weight, map_weights
from lmlib.parallel.collectives import on_each_device
from lmlib.parallel.mesh_axes import COPIES, PARTS, STORAGE, TOKENS, MeshAxes, names_of

COMPUTE: Rules = {
    "batch": ("data", "fsdp"),
    "microbatch": None,
    "seq": None,
    "seq_parallel": "tensor",  # the residual stream between blocks, when sequence-parallel
    "embed": None,
    "mlp": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",
    "group": None,
    "head_dim": None,
    "slot": None,
    "vocab": "tensor",
    "whole_vocab": None,
    "down_rank": "tensor",  # of an adapter, where no other axis of its matrix lies there
    "up_rank": None,
    LAYER: None,
}
STORED: Rules = {**COMPUTE, "embed": "fsdp"}
# A weight with fewer of these than the mesh has places for is stored whole along them, and computed
# with each of them repeated: several devices then hold the same key and value heads.
REPEATED = frozenset({"kv_heads"})


def partition(axes: str | Axes, rules: Rules = COMPUTE) -> PartitionSpec:
    """The partition of an array whose axes are named ("batch seq"); `None` names stay whole.

    Raises:
      LayoutError: if a name has no rule, or two of them lie along one axis of the mesh.
    """
    names = tuple(axes.split()) if isinstance(axes, str) else axes
    for name in names:
        if name is not None and name not in rules:
            raise LayoutError(
                f"axis {name!r} has no rule (known: {', '.join(rules)}); give the weight that has "
                f"it one: `weight(…, rules={{{name!r}: None}})` keeps it whole"
            )
    places = [None if name is None else rules[name] for name in names]
    _refuse_twice(names, places)
    return PartitionSpec(*places)


def _refuse_twice(names: Axes, places: Sequence[MeshAxes]) -> None:
    taken: dict[str, str | None] = {}
    for name, place in zip(names, places, strict=True):
        for mesh_axis in names_of(place):
            if mesh_axis in taken:
                raise LayoutError(
                    f"axes {taken[mesh_axis]!r} and {name!r} of one array both lie along "
                    f"{mesh_axis!r} of the mesh; give one of them another rule where the weight is "
                    f"declared: `weight(…, rules={{{name!r}: None}})` keeps it whole"
                )
            taken[mesh_axis] = name


def in_use(weight: Weight) -> PartitionSpec:
    """The partition in which a weight is used, but for elements that are repeated.

    Raises:
      LayoutError: as `partition`, naming the weight.
    """
    try:
        return partition(weight.axes, {**COMPUTE, **weight.declaration.rules})
    except LayoutError as error:
        raise LayoutError(f"{weight.path}: {error}") from None


def along(axis: str, rules: Rules = COMPUTE) -> MeshAxes:
    """The axes of the mesh that split a named axis: for `parallel.collectives`."""
    return rules[axis]


def pieces(mesh_axes: MeshAxes, mesh: Mesh | AbstractMesh) -> int:
    """Into how many pieces `mesh` splits an axis that lies along `mesh_axes`."""
    return math.prod(mesh.shape[name] for name in names_of(mesh_axes))


def repeats(axis: str | None, size: int, rules: Rules, mesh: Mesh | AbstractMesh) -> int:
    """How often each element along a weight's axis is repeated so that it fills the mesh; 1 where
    `mesh` divides the axis, or cannot be filled so."""
    if axis not in REPEATED:
        return 1
    places = pieces(rules[axis], mesh)
    return places // size if places % size == 0 else 1


def stored(weight: Weight, shape: Sequence[int], mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """How a weight lies between its uses: on `mesh` as `STORED` says, but for what another axis of
    it takes in use, as experts may. A matrix that has no `embed`, as one of an adapter's two, is
    split over `fsdp` along another axis."""
    computed, rules = in_use(weight), {**STORED, **weight.declaration.rules}
    taken = _mesh_axes(computed)
    places = []
    for axis, size, used in zip(weight.axes, shape, computed, strict=True):
        place = used if taken.intersection(names_of(rules[axis])) else rules[axis]
        places.append(None if repeats(axis, size, rules, mesh) > 1 else place)
    if weight.declaration.multiplied and not set(STORAGE) & _mesh_axes(places):
        _spread(places, weight, shape, mesh)
    return PartitionSpec(*places)


def _mesh_axes(places: Iterable[MeshAxes]) -> set[str]:
    return {name for place in places for name in names_of(place)}


def _spread(
    places: list[MeshAxes], weight: Weight, shape: Sequence[int], mesh: Mesh | AbstractMesh
) -> None:
    """Splits a weight over `fsdp` along the axis of which a device would hold most, of those that
    this divides; leaves it as it is where there is none."""
    held = {
        i: shape[i] // pieces(places[i], mesh)
        for i, axis in enumerate(weight.axes)
        if axis != LAYER and axis not in REPEATED
    }
    divided = [i for i, size in held.items() if size % pieces(STORAGE, mesh) == 0]
    if divided:
        longest = max(divided, key=lambda i: held[i])
        both = (*names_of(places[longest]), *STORAGE)
        places[longest] = both if len(both) > 1 else both[0]


def gathered_partition(
    weight: Weight, shape: Sequence[int], mesh: Mesh | AbstractMesh
) -> PartitionSpec:
    """How a weight lies where each device keeps all that it multiplies: `gather` has nothing to
    send. Elements that it repeats are kept once."""
    return _moves(weight, shape, mesh).whole


def shard_shapes(
    weight: Weight, shape: Sequence[int], mesh: Mesh
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What each device holds of a weight between its uses, and what it multiplies."""
    moves = _moves(weight, shape, mesh)
    used = tuple(size * times for size, times in zip(shape, moves.repeats, strict=True))
    return (
        NamedSharding(mesh, moves.stored).shard_shape(tuple(shape)),
        NamedSharding(mesh, moves.computed).shard_shape(used),
    )


def spec(axes: str | Axes) -> PartitionSpec | None:
    """For `out_sharding=`: the compute layout of `axes`, or `None` where no mesh is set."""
    return None if jax.sharding.get_abstract_mesh().empty else partition(axes)


def reshard(x: jax.Array, axes: str | Axes) -> jax.Array:
    """`x` in the compute layout of `axes`; communicates if it lies otherwise."""
    target = spec(axes)
    return x if target is None else jax.sharding.reshard(x, target)


def share(x: jax.Array, axes: str | Axes) -> jax.Array:
    """`x` in the compute layout of `axes`, the same on all devices that multiply it by other parts
    of a weight: those along `tensor`.

    Forward it is an all-gather over `tensor` if `x` was split along it, else nothing. Backward, the
    gradients that these devices give are added up before they travel, in one psum (the f of
    Megatron-LM: Shoeybi et al. 2019, arXiv:1909.08053, §3) or, where `x` was split, in one
    reduce-scatter.
    """
    target = spec(axes)
    return x if target is None else jax.sharding.reshard(x, target.update(reduced={*PARTS}))


def gather(module: M, dtype: DTypeLike, after: jax.Array | None = None) -> M:
    """`module` with each weight cast to `dtype`, or to what it declares, then moved from `STORED`
    to `COMPUTE`.

    Weights of integers are moved as they are; then the modules that hold them, which have a method
    `in_use`, make an array of `dtype` of them, not before `after` is there.

    This is FSDP's all-gather. The cast comes first, so that bf16 travels. Backward the gradient of
    a weight that is multiplied, of which each device has the part that its own tokens give, is
    summed and split over `fsdp` (a reduce-scatter), and what is left of it is summed over `data` (a
    psum), all in `dtype`. Nothing is summed over an axis that splits the weight in use, as experts
    may lie along one. The gradients of others, which are small, JAX sums at once.
    """
    mesh = jax.sharding.get_abstract_mesh()

    def to_compute(weight: Weight, array: jax.Array) -> jax.Array:
        if jnp.issubdtype(array.dtype, jnp.floating):
            array = array.astype(weight.declaration.dtype or dtype)
        if mesh.empty:
            return array
        moves = _moves(weight, array.shape, mesh)
        return _move(moves._replace(given=jax.typeof(array).sharding.spec), array)

    def rests(node: Any) -> bool:
        return hasattr(node, "in_use")

    return jax.tree.map(
        lambda node: node.in_use(dtype, after) if rests(node) else node,
        map_weights(to_compute, module),
        is_leaf=rests,
    )


class _Moves(NamedTuple):
    """The layouts that a weight passes through to its use, and its gradient on the way back."""

    given: PartitionSpec  # where it is; as `stored`, but in a notebook it may lie in another way
    stored: PartitionSpec
    whole: PartitionSpec  # as `computed`, but whole along the axes that are repeated
    computed: PartitionSpec
    copies: PartitionSpec  # as `stored`, but split along the axes that are repeated
    repeats: tuple[int, ...]  # of each element, for each axis
    summed: frozenset[str]  # axes of the mesh over which devices' own gradients are added up


def _moves(weight: Weight, shape: Sequence[int], mesh: Mesh | AbstractMesh) -> _Moves:
    rules = {**COMPUTE, **weight.declaration.rules}
    times = tuple(
        repeats(axis, size, rules, mesh) for axis, size in zip(weight.axes, shape, strict=True)
    )
    at_rest, computed = stored(weight, shape, mesh), in_use(weight)
    multiplied = weight.declaration.multiplied

    def chosen(repeated: PartitionSpec | None, others: PartitionSpec) -> PartitionSpec:
        places = [None] * len(times) if repeated is None else repeated
        return PartitionSpec(
            *(a if n > 1 else b for n, a, b in zip(times, places, others, strict=True))
        )

    return _Moves(
        given=at_rest,
        stored=at_rest,
        whole=chosen(None, computed),
        computed=computed,
        copies=chosen(computed, at_rest),
        repeats=times,
        summed=frozenset(TOKENS) - _mesh_axes(computed) if multiplied else frozenset(),
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _move(moves: _Moves, array: jax.Array) -> jax.Array:
    # Else XLA would turn a whole stack of layers for the sake of the all-gather of one. Each device
    # constrains its own shard: the partitioner of JAX 0.10 would gather the array for it.
    rows_first = Layout(tuple(range(array.ndim)))
    constrained = on_each_device(
        lambda shard: with_layout_constraint(shard, rows_first), (moves.given,), moves.given
    )
    array = constrained(array)
    if moves.whole != moves.computed:
        array = jax.sharding.reshard(array, moves.whole)
        for axis, times in enumerate(moves.repeats):
            array = jnp.repeat(array, times, axis) if times > 1 else array
    return jax.sharding.reshard(array, moves.computed.update(reduced=moves.summed))


def _forward(moves: _Moves, array: jax.Array) -> tuple[jax.Array, None]:
    return _move(moves, array), None


def _backward(moves: _Moves, _: None, gradient: jax.Array) -> tuple[jax.Array]:
    over_copies = moves.summed.intersection(COPIES)
    if over_copies:
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


def creator(make: Callable[[], M], mesh: Mesh, made: M | None = None) -> Callable[[], M]:
    """`make` compiled to build its weights on `mesh` in the stored layout, none ever whole.

    Call it under `jax.set_mesh(mesh)`. Random numbers do not depend on the layout: the values are
    the same bits on every mesh. `made`: the shapes of what `make` makes, where they are known.
    """
    model = jax.eval_shape(make) if made is None else made
    specs = map_weights(lambda weight, array: stored(weight, array.shape, mesh), model)
    layout = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    return jax.jit(
        jax.sharding.auto_axes(make, out_sharding=specs),
        out_shardings=layout,
        compiler_options=quick_to_compile(model, mesh.devices.flat[0].platform),
    )


def quick_to_compile(model: Any, platform: str) -> dict[str, int]:
    """For `compiler_options` of the program that makes `model`, which runs once.

    On CPUs LLVM takes long to compile random numbers. Its level 1 makes them as fast as its highest
    one does; for few numbers not even that is worth its time.
    """
    if platform != "cpu":
        return {}
    few = sum(leaf.size for leaf in jax.tree.leaves(model)) < 2**22
    return {"xla_backend_optimization_level": 0 if few else 1}


def shardings(tree: Any) -> Any:
    """The sharding of each array of `tree`."""
    return jax.tree.map(lambda leaf: leaf.sharding, tree)
