"""Axis names to mesh axes: where every array lives, and how it moves.

A weight names its axes in its annotation (`Float[Array, "embed mlp"]`). Two tables say which mesh
axes split each name. They differ where FSDP acts: a weight rests in `STORED`, and `gather` moves it
to `COMPUTE` just before use; the gradient takes the same way back. Without a mesh (no
`jax.set_mesh`) nothing is placed and the same model runs on one device.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from lmlib.parallel.axes import Axes, LayoutError, M, map_weights

MeshAxes = str | tuple[str, ...] | None
Rules = Mapping[str, MeshAxes]

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
    "vocab": "tensor",
    "whole_vocab": None,
}
STORED: Rules = {**COMPUTE, "embed": "fsdp"}
_BATCH = frozenset(COMPUTE["batch"] or ())  # each device along these sees other tokens


def partition(axes: str | Axes, rules: Rules = COMPUTE) -> PartitionSpec:
    """The partition of an array whose axes are named ("batch seq"); `None` names stay whole.

    Raises:
      LayoutError: if a name has no rule.
    """
    names = tuple(axes.split()) if isinstance(axes, str) else axes
    for name in names:
        if name is not None and name not in rules:
            raise LayoutError(
                f"axis {name!r} has no rule; add it to the tables in lmlib/parallel/layout.py "
                f"(known: {', '.join(rules)})"
            )
    return PartitionSpec(*(None if name is None else rules[name] for name in names))


def spec(axes: str | Axes) -> PartitionSpec | None:
    """For `out_sharding=`: the compute layout of `axes`, or `None` where no mesh is set."""
    return None if jax.sharding.get_abstract_mesh().empty else partition(axes)


def move(x: jax.Array, axes: str | Axes) -> jax.Array:
    """`x` in the compute layout of `axes`; communicates if it lies otherwise."""
    target = spec(axes)
    return x if target is None else jax.sharding.reshard(x, target)


def share(x: jax.Array, axes: str | Axes) -> jax.Array:
    """`x` in the compute layout of `axes`, the same on all devices along `tensor`.

    Backward, the gradients that these devices give are added up before they travel, in one sum
    (the f of Megatron-LM: Shoeybi et al. 2019, arXiv:1909.08053, §3) or, where `x` came from a
    layout that splits it over `tensor`, in one reduce-scatter.
    """
    target = spec(axes)
    return x if target is None else jax.sharding.reshard(x, target.update(reduced={"tensor"}))


def gather(module: M, dtype: DTypeLike) -> M:
    """`module` with each weight cast to `dtype`, then moved from `STORED` to `COMPUTE`.

    The cast comes first, so that bf16 travels. Backward a matrix's gradient, of which each device
    has the part that its own tokens give, is summed and split over `fsdp` (a reduce-scatter), and
    what is left of it is summed over `data`, all in `dtype`.
    """
    return map_weights(lambda path, axes, weight: _gathered(axes, weight.astype(dtype)), module)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gathered(axes: Axes, weight: jax.Array) -> jax.Array:
    target = spec(axes)
    if target is None:
        return weight
    if len(axes) < 2:  # JAX sums a vector's gradient at once: there is little of it
        return jax.sharding.reshard(weight, target)
    return jax.sharding.reshard(weight, target.update(reduced=_BATCH))


def _forward(axes: Axes, weight: jax.Array) -> tuple[jax.Array, None]:
    return _gathered(axes, weight), None


def _backward(axes: Axes, _: None, gradient: jax.Array) -> tuple[jax.Array]:
    if spec(axes) is None:
        return (gradient,)
    stored = partition(axes, STORED)
    if len(axes) >= 2:
        gradient = jax.sharding.reshard(gradient, stored.update(unreduced={"data"}))
    return (jax.sharding.reshard(gradient, stored),)


_gathered.defvjp(_forward, _backward)


def creator(make: Callable[[], M], mesh: Mesh) -> Callable[[], M]:
    """`make` compiled to build its weights on `mesh` in the stored layout, none ever whole.

    Call it under `jax.set_mesh(mesh)`. Random numbers do not depend on the layout: the values are
    the same bits on every mesh.
    """
    specs = map_weights(lambda path, axes, _: partition(axes, STORED), jax.eval_shape(make))
    layout = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    return jax.jit(jax.sharding.auto_axes(make, out_sharding=specs), out_shardings=layout)


def shardings(tree: Any) -> Any:
    """The sharding of each array of `tree`."""
    return jax.tree.map(lambda leaf: leaf.sharding, tree)
