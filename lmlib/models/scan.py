"""The scan over layers, and the activations that it saves for the backward pass.

Others are recomputed, layer by layer, from "layer_input" and "head_input" (Chen et al. 2016,
arXiv:1604.06174). `CHOICES` are always saved: a recomputation could round and choose differently.

Shapes: B batch, S sequence, E embed, R repetitions of a pattern.
"""

import dataclasses
import difflib
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Key, PRNGKeyArray

from lmlib.compute import EVERYTHING, Compute
from lmlib.models.forward_context import ForwardContext, LayerCall
from lmlib.models.part import AuxOutputs, Part, checked
from lmlib.models.weights import fold_in_name
from lmlib.parallel.gathering import gather
from lmlib.parallel.matrix import with_keys

CHOICES = "choices"  # the experts that a router chose
_CUDNN_FORWARD = "dot_product_attention_fwd_wrapper"  # JAX's name of the primitive
_Choose = Callable[[Any], Any]


class StackedLayers(NamedTuple):
    """Layers of a repeated pattern, one for each place in it; arrays are stacked along R."""

    layers: tuple[Part, ...]
    keys: tuple[Key[Array, "R"] | None, ...]  # `None` without randomness
    caches: tuple[Any, ...]
    # False for padding, which leaves the residual stream unchanged and reports nothing; optional.
    counts: Bool[Array, "R"] | None = None


class LayerOutputs(NamedTuple):
    """The results of a layer, without the residual stream."""

    aux: AuxOutputs
    cache: Any
    observed: Any


def run(
    context: ForwardContext,
    x_BSE: Float[Array, "b s embed"],
    repeated: StackedLayers,
    repeats: int,
    names: Sequence[str],
    chosen: _Choose | None = None,
) -> tuple[Float[Array, "b s embed"], tuple[LayerOutputs, ...]]:
    """Runs all repetitions of a pattern; also returns each layer's other results, stacked along R.

    `names` may be saved. `chosen` makes a layer from its entry of `repeated`, again in the backward
    pass, which saves no copy. One repetition never is a loop: XLA for TPUs would run it twice.
    """

    def run_layer(
        choose: _Choose | None, x_BSE: Array, layer: Any, key: PRNGKeyArray | None, cache: Any
    ) -> tuple[Array, LayerOutputs]:
        """Runs one layer; the backward pass recomputes this function."""
        x_BSE = checkpoint_name(x_BSE, "layer_input")
        layer = layer if choose is None else choose(layer)
        layer = gather(layer, context.compute.dtype, after=x_BSE)
        if key is not None:
            layer = with_keys(layer, functools.partial(fold_in_name, fold_in_name(key, "adapters")))
        own = dataclasses.replace(context, key=key if context.dropout > 0 else None)
        returned = layer(x_BSE, own, cache)
        y_BSE, aux, cache = checked(layer, returned, x_BSE, "reports", "cache")
        observed = own.observe and own.observe(LayerCall(layer, x_BSE, y_BSE, own))
        return y_BSE, LayerOutputs(aux, cache, observed)

    def one(
        looped: bool, choose: _Choose | None, x_BSE: Array, repeated: StackedLayers
    ) -> tuple[Array, tuple[LayerOutputs, ...]]:
        """One repetition of the pattern."""
        # Inside a loop nothing can merge the recomputation with the forward pass, so CSE is safe.
        recomputed = jax.checkpoint(
            functools.partial(run_layer, choose),
            policy=policy(context.compute, names),
            prevent_cse=not looped,
        )
        outs, before_BSE = [], x_BSE
        for layer, key, cache in zip(*repeated[:3], strict=True):
            x_BSE, out = recomputed(x_BSE, layer, key, cache)
            outs.append(out)
        if repeated.counts is not None:
            x_BSE = jnp.where(repeated.counts, x_BSE, before_BSE)
            outs = [out._replace(aux=counted(out.aux, repeated.counts)) for out in outs]
        return x_BSE, tuple(outs)

    if repeats > context.compute.unroll:
        return jax.lax.scan(functools.partial(one, True, chosen), x_BSE, repeated)
    outs = []
    for i, piece in enumerate([repeated] if repeats == 1 else _split(repeated, repeats)):
        own = jax.tree.map(lambda x_1: jnp.squeeze(x_1, 0), piece)

        def of_stack(pair: Any, i: int = i) -> Any:
            # A recomputed layer saves the stack, which exists anyway, and no copy of its slice.
            taken = jax.tree.map(functools.partial(_piece, i), *pair)
            return taken if chosen is None else chosen(taken)

        pairs = tuple(zip(repeated.layers, own.layers, strict=True))
        x_BSE, out = one(False, of_stack, x_BSE, own._replace(layers=pairs))
        outs.append(out)
    return x_BSE, jax.tree.map(lambda *each: jnp.stack(each), *outs)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _piece(index: int, stack_R: Array, own: Array) -> Array:
    """`stack_R[index]`, which equals `own`, and whose gradient is `own`'s.

    Gradients of slices are concatenated; gradients of the stack would be padded and added.
    """
    return jnp.squeeze(jax.lax.slice_in_dim(stack_R, index, index + 1), 0)


_piece.defvjp(
    lambda index, stack_R, own: (_piece(index, stack_R, own), None),
    lambda index, nothing, d_own: (None, d_own),
)


def counted(aux: AuxOutputs, counts: Bool[Array, ""]) -> AuxOutputs:
    """`aux` if `counts`, else zeros."""
    return jax.tree.map(lambda each: jnp.where(counts, each, jnp.zeros_like(each)), aux)


def _split(tree_R: Any, repeats: int) -> list[Any]:
    """Splits the leading axis. Gradients are then concatenated; gradients of slices are added."""

    def parts(x_R: Array) -> list[Array]:
        if jnp.issubdtype(x_R.dtype, jax.dtypes.prng_key):
            return [x_R[i : i + 1] for i in range(repeats)]
        return list(jax.lax.split(x_R, (1,) * repeats))

    leaves, structure = jax.tree.flatten(tree_R)
    return [jax.tree.unflatten(structure, each) for each in zip(*map(parts, leaves), strict=True)]


def reshaped(x: Array, leading: int, sizes: tuple[int, ...]) -> Array:
    """Reshapes the first `leading` axes, which are whole; the others keep their layout."""
    # JAX forgets the layout of an axis of size 1.
    layout = _layout_behind(len(sizes), x, leading)
    return jnp.reshape(x, (*sizes, *x.shape[leading:]), out_sharding=layout)


def stacked(x: Array, repeats: int) -> Array:
    """Copies of `x` along a new leading axis."""
    return jnp.broadcast_to(x, (repeats, *x.shape), out_sharding=_layout_behind(1, x, 0))


def _layout_behind(whole: int, x: Array, first: int) -> PartitionSpec | None:
    """The layout of the axes of x from `first` on, behind axes that are `whole`."""
    if jax.sharding.get_abstract_mesh().empty:
        return None
    return PartitionSpec(*(None,) * whole, *jax.typeof(x).sharding.spec.partitions[first:])


def policy(compute: Compute, names: Sequence[str]) -> Callable[..., Any]:
    """Returns a policy for `jax.checkpoint`, which saves or offloads names as `compute` says."""

    def inner(names: Sequence[str]) -> list[str]:
        # Kernels use their own name for their output and one number per head and position.
        return ["attention_kernel" if name == "attention" else name for name in names]

    saved = compute.kept(names)
    by_name = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[*inner(saved), CHOICES],
        names_which_can_be_offloaded=inner(compute.offloaded),
        offload_src="device",
        offload_dst="pinned_host",
    )

    def keep(primitive: Any, *arguments: Any, **parameters: Any) -> Any:
        # The kernel cannot name its result.
        if primitive.name == _CUDNN_FORWARD and "attention" in saved:
            return True
        return by_name(primitive, *arguments, **parameters)

    return keep


def check_names(compute: Compute, names: Sequence[str]) -> None:
    """Raises ValueError if `compute` saves or offloads a name that is not among `names`."""
    for setting in ("saved", "offloaded"):
        for name in getattr(compute, setting):
            if name not in names and getattr(compute, setting) != EVERYTHING:
                near = difflib.get_close_matches(name, names, n=1)
                hint = f"did you mean {near[0]!r}? " if near else ""
                raise ValueError(
                    f"{setting} has the unknown name {name!r}; {hint}(this model's layers name "
                    f"{', '.join(names)})"
                )
