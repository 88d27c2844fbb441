"""The layout of arrays: maps axis names to mesh axes.

A weight names its axes in its annotation (`Float[Array, "embed mlp"]`). Two tables list the mesh
axes that split each name; others have rules in the weight's declaration. FSDP stores a weight in
`STORED`, and `gathering.gather` moves it to `COMPUTE` just before use. Without a mesh
(`jax.set_mesh`) nothing is placed and the same model runs on one device.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from lmlib.parallel.axes import LAYER, WHOLE_LAYER, Axes, LayoutError, Rules, Weight
from lmlib.parallel.collectives import in_a_stage
from lmlib.parallel.mesh_axes import (
    NAMED_IF_USED,
    STAGE,
    STORAGE,
    TENSOR_AXES,
    MeshAxes,
    names_of,
    place_of,
)

COMPUTE: Rules = {
    "batch": ("data", "stage", "fsdp", "expert"),
    "microbatch": None,
    "seq": "context",
    # The residual stream between blocks, when sequence-parallel.
    "seq_parallel": ("context", "tensor"),
    "embed": None,
    "mlp": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",
    "group": None,
    "head_dim": None,
    "latent": None,  # keys and values are computed from it
    "slot": None,
    "experts": "expert",
    "choice": None,  # a router's scores of a token for all experts
    "vocab": "tensor",
    "whole_vocab": None,
    # Columns of a table that is never gathered.
    "looked_up": ("tensor", "stage", "fsdp", "expert", "context"),
    "down_rank": "tensor",  # of an adapter, if no other axis of its matrix is split over it
    "up_rank": None,
    LAYER: "stage",  # if it divides the layers
    WHOLE_LAYER: None,
    "stages": "stage",
    "stage_batch": ("data", "fsdp", "expert"),  # rows of a stage's microbatch
}
STORED: Rules = {**COMPUTE, "embed": ("stage", "fsdp", "expert", "context")}
# If a weight has fewer elements along these axes than the mesh has devices, it is stored whole
# along them and repeated in use: several devices then have the same key and value heads.
REPEATED = frozenset({"kv_heads"})


def partition(
    axes: str | Axes, rules: Rules = COMPUTE, mesh: Mesh | AbstractMesh | None = None
) -> PartitionSpec:
    """The partition of an array with named axes ("batch seq") on `mesh`, by default the current.

    `None` names stay whole. Raises LayoutError for a name without a rule, or if one mesh axis would
    split two of them.
    """
    names = tuple(axes.split()) if isinstance(axes, str) else axes
    for name in names:
        if name is not None and name not in rules:
            raise LayoutError(
                f"axis {name!r} has no rule (known: {', '.join(rules)}); give the weight that has "
                f"it one: `weight(…, rules={{{name!r}: None}})` keeps it whole"
            )
    places = [None if name is None else named(rules[name], mesh) for name in names]
    _refuse_twice(names, places)
    return PartitionSpec(*places)


def sharding(axes: str | Axes, mesh: Mesh) -> NamedSharding:
    """`partition` as a sharding on `mesh`."""
    return NamedSharding(mesh, partition(axes, mesh=mesh))


def named(place: MeshAxes, mesh: Mesh | AbstractMesh | None = None) -> MeshAxes:
    """The mesh axes to name in a layout on `mesh`, by default the current one.

    Unused axes of `NAMED_IF_USED` are dropped, and `STAGE` inside a stage.
    """
    mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh
    unused = [] if mesh.empty else [name for name in NAMED_IF_USED if mesh.shape[name] == 1]
    return _without(unused, whole_place(place))


def whole_place(place: MeshAxes) -> MeshAxes:
    """The mesh axes of `place`, including axes of size 1, but without `STAGE` inside a stage.

    JAX would sum gradients over axes that the arguments of `shard_map` do not name.
    """
    return _without([STAGE], place) if in_a_stage() else place


def _without(names: Sequence[str], place: MeshAxes) -> MeshAxes:
    if not {*names} & {*names_of(place)}:
        return place
    return place_of([name for name in names_of(place) if name not in names])


def _refuse_twice(names: Axes, places: Sequence[MeshAxes]) -> None:
    taken: dict[str, str | None] = {}
    pairs = zip(names, places, strict=True)
    for name, mesh_axis in [(name, each) for name, place in pairs for each in names_of(place)]:
        if mesh_axis in taken:
            who, own = f"axes {taken[mesh_axis]!r} and {name!r} of one array", name
            if taken[mesh_axis] == name:
                who, own = f"two axes of one array are named {name!r} and", f"{name}_out"
            raise LayoutError(
                f"{who} both map to mesh axis {mesh_axis!r}; where the weight is declared, use "
                f"the name {own!r} with another rule: `weight(…, rules={{{own!r}: None}})` keeps "
                "it whole"
            )
        taken[mesh_axis] = name


def compute_spec(weight: Weight, shape: Sequence[int], mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """The partition of a weight in use on `mesh`, before elements are repeated.

    If the stages do not divide the layers, each stage computes all of them. Raises LayoutError.
    """
    stages = num_shards(COMPUTE[LAYER], mesh)
    staged = weight.stacked == 1 and shape[0] % stages == 0
    axes = tuple(None if axis == LAYER and not staged else axis for axis in weight.axes)
    _check_rules(weight, mesh)
    try:
        return partition(axes, {**COMPUTE, **weight.declaration.rules}, mesh)
    except LayoutError as error:
        raise LayoutError(f"{weight.path}: {error}") from None


def _check_rules(weight: Weight, mesh: Mesh | AbstractMesh) -> None:
    """Raises LayoutError for a rule in a weight's declaration that `mesh` cannot follow."""
    rules = weight.declaration.rules
    places = rules.values() if isinstance(rules, Mapping) else [0]
    if not all(isinstance(place, str | tuple | None) for place in places):
        raise LayoutError(
            f"{weight.path}: rules must map names of axes to a mesh axis, a tuple of mesh axes or "
            f"None, as in `weight(…, rules={{'own': None}})`, got {rules!r}"
        )
    for name, place in rules.items():
        rule, own = f"{weight.path}: the rule of axis {name!r}", names_of(place)
        if unknown := [each for each in own if each not in mesh.axis_names]:
            raise LayoutError(
                f"{rule} names {unknown[0]!r}, which the mesh lacks (it has "
                f"{', '.join(mesh.axis_names)}); name one of these, None to keep the axis whole, "
                f"or make the mesh with `others={{{unknown[0]!r}: …}}`"
            )
        if twice := [each for each in own if own.count(each) > 1]:
            raise LayoutError(f"{rule} names {twice[0]!r} twice: {place!r}")


def mesh_axes_for(axis: str, rules: Rules = COMPUTE) -> MeshAxes:
    """The axes of the current mesh that split a named axis, for `parallel.collectives`."""
    return named(rules[axis])


def num_shards(mesh_axes: MeshAxes, mesh: Mesh | AbstractMesh) -> int:
    """The number of pieces into which `mesh_axes` split an axis."""
    return math.prod(mesh.shape[name] for name in names_of(mesh_axes))


def splitting(mesh_axes: MeshAxes, mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """The `mesh_axes` of size 2 or more."""
    return tuple(name for name in names_of(mesh_axes) if mesh.shape[name] > 1)


def repeats(axis: str | None, size: int, rules: Rules, mesh: Mesh | AbstractMesh) -> int:
    """The number of copies of each element along a weight's axis that fill the mesh, or 1."""
    if axis not in REPEATED:
        return 1
    places = num_shards(rules[axis], mesh)
    return places // size if places % size == 0 else 1


def storage_spec(weight: Weight, shape: Sequence[int], mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """The partition of a stored weight: `STORED`, without mesh axes of another axis in use.

    A matrix without `embed`, such as one of an adapter's two, is split over `fsdp` and `expert`
    along another axis.
    """
    computed, rules = compute_spec(weight, shape, mesh), {**STORED, **weight.declaration.rules}
    taken = mesh_axes_of(computed)
    places: list[MeshAxes] = []
    for axis, size, used in zip(weight.axes, shape, computed, strict=True):
        elsewhere = taken.difference(names_of(used))
        at_rest = used if axis == LAYER else named(rules[axis], mesh)
        left = [name for name in names_of(at_rest) if name not in elsewhere]
        places.append(None if repeats(axis, size, rules, mesh) > 1 else place_of(left))
    try:
        _refuse_twice(weight.axes, places)
    except LayoutError as error:
        raise LayoutError(f"{weight.path}: {error}") from None
    if weight.declaration.multiplied:
        _spread(places, weight, shape, mesh)
    return PartitionSpec(*places)


def mesh_axes_of(places: Iterable[MeshAxes]) -> set[str]:
    return {name for place in places for name in names_of(place)}


def _spread(
    places: list[MeshAxes], weight: Weight, shape: Sequence[int], mesh: Mesh | AbstractMesh
) -> None:
    """Splits a weight over the storage axes left, along its longest axis that they divide."""
    left = [name for name in names_of(named(STORAGE, mesh)) if name not in mesh_axes_of(places)]
    held = {
        i: shape[i] // num_shards(places[i], mesh)
        for i, axis in enumerate(weight.axes)
        if axis not in (LAYER, WHOLE_LAYER) and axis not in REPEATED
    }
    divided = [i for i, size in held.items() if size % num_shards(tuple(left), mesh) == 0]
    if left and divided:
        longest = max(divided, key=lambda i: held[i])
        places[longest] = place_of([*names_of(places[longest]), *left])


def spec(axes: str | Axes) -> PartitionSpec | None:
    """The compute layout of `axes` for `out_sharding=`, or `None` without a mesh."""
    return None if jax.sharding.get_abstract_mesh().empty else partition(axes)


def reshard(x: jax.Array, axes: str | Axes) -> jax.Array:
    """`x` in the compute layout of `axes`; communicates if it has another one."""
    target = spec(axes)
    return x if target is None else jax.sharding.reshard(x, target)


def replicate_for_tp(x: jax.Array, axes: str | Axes) -> jax.Array:
    """Replicates `x` over `tensor` in the compute layout of `axes`.

    The forward pass sends nothing, and the backward pass is a psum (the f of Megatron-LM: Shoeybi
    et al. 2019, arXiv:1909.08053, §3). If `tensor` split `x`, they are all-gather and
    reduce-scatter.
    """
    target = spec(axes)
    return x if target is None else jax.sharding.reshard(x, target.update(reduced={*TENSOR_AXES}))


def shardings(tree: Any) -> Any:
    """The sharding of each array of `tree`."""
    return jax.tree.map(lambda leaf: leaf.sharding, tree)
