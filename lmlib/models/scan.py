"""The scan over layers, and the activations that it saves for the backward pass.

Layers and their parts name activations (`lmlib.models.part.Names`). Activations that `Compute` does
not save are recomputed, layer by layer, from "layer_input" and "head_input", which are always saved
(Chen et al. 2016, arXiv:1604.06174). `CHOICES` are always saved too: they are small, and a
recomputation that rounds differently could choose differently.

Shapes: B batch, S sequence, E embed, R repetitions of a pattern, T iterations of the loop, U
repetitions in an iteration.
"""

import dataclasses
import difflib
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Key, PRNGKeyArray

from lmlib.compute import EVERYTHING, Compute
from lmlib.models.context import Context, LayerCall
from lmlib.models.part import Part, Reports, checked
from lmlib.models.weights import fold
from lmlib.parallel.gathering import gather
from lmlib.parallel.matrix import with_keys

CHOICES = "choices"  # the experts that a router chose
_CUDNN_FORWARD = "dot_product_attention_fwd_wrapper"  # JAX's name of the primitive


class Repeated(NamedTuple):
    """Layers of a repeated pattern, one for each place in it; arrays are stacked along R.

    Attributes:
      layers: their weights.
      keys: a key for each repetition; `None` without randomness.
      caches: caches of earlier calls; `None` without a cache.
      counts: True for real repetitions, if some are padding. Padding leaves the residual stream
        unchanged and reports nothing.
    """

    layers: tuple[Part, ...]
    keys: tuple[Key[Array, "R"] | None, ...]
    caches: tuple[Any, ...]
    counts: Bool[Array, "R"] | None = None


class Given(NamedTuple):
    """The results of a layer, without the residual stream."""

    reports: Reports
    cache: Any
    observed: Any


def run(
    context: Context,
    x_BSE: Float[Array, "b s embed"],
    repeated: Repeated,
    repeats: int,
    names: Sequence[str],
    chosen: Callable[[Any], Any] | None = None,
) -> tuple[Float[Array, "b s embed"], tuple[Given, ...]]:
    """Runs all repetitions of a pattern of layers.

    `context.compute.unroll` repetitions make one iteration of the loop; the remaining ones follow
    it. `jax.lax.scan` cannot unroll, since it cannot split saved arrays in a `reduced` layout. A
    single iteration is not a loop: XLA's TPU compiler would run its body twice.

    Args:
      names: activations that may be saved.
      chosen: makes a layer from its entry of `repeated`. It runs again in the backward pass, so
        that no copy of the layer is saved.

    Returns:
      the residual stream, and the other results of each layer of the pattern, stacked along R.
    """
    one = functools.partial(_one, context, names, chosen)
    unroll = context.compute.unroll
    iterations = repeats // unroll
    if iterations < 2:
        return _in_a_row(functools.partial(one, False), x_BSE, repeated, repeats)
    looped_one = functools.partial(one, True)
    if unroll == 1:
        # Slices must be passed to the recomputed function unchanged. JAX would save reshaped
        # slices, and so a copy of all weights, for the backward pass.
        return jax.lax.scan(looped_one, x_BSE, repeated)
    looped = iterations * unroll
    head_R, tail_R = _split(repeated, looped, repeats)
    parts_TU = jax.tree.map(lambda w_R: reshaped(w_R, 1, (iterations, unroll)), head_R)
    x_BSE, out_TU = jax.lax.scan(
        lambda x_BSE, parts_U: _in_a_row(looped_one, x_BSE, parts_U, unroll), x_BSE, parts_TU
    )
    out_R = jax.tree.map(lambda y_TU: reshaped(y_TU, 2, (looped,)), out_TU)
    if looped == repeats:
        return x_BSE, out_R
    left = repeats - looped
    x_BSE, out_tail = _in_a_row(functools.partial(one, False), x_BSE, tail_R, left)
    return x_BSE, jax.tree.map(lambda *each: jnp.concatenate(each), out_R, out_tail)


def _in_a_row(
    one: Callable[..., Any], x_BSE: Array, repeated_R: Repeated, repeats: int
) -> tuple[Array, Any]:
    """Runs some repetitions without a loop."""
    outs, layers_R = [], repeated_R.layers
    for i, repeated in enumerate(_unstacked(repeated_R, repeats)):
        layers = jax.tree.map(functools.partial(_Piece, i), layers_R, repeated.layers)
        x_BSE, out = one(x_BSE, repeated._replace(layers=layers))
        outs.append(out)
    return x_BSE, jax.tree.map(lambda *each: jnp.stack(each), *outs)


def _one(
    context: Context,
    names: Sequence[str],
    chosen: Callable[[Any], Any] | None,
    looped: bool,
    x_BSE: Array,
    repeated: Repeated,
) -> tuple[Array, tuple[Given, ...]]:
    """One repetition of a pattern."""
    # Inside a loop nothing can merge the recomputation with the forward pass, so CSE is safe.
    run_layer = jax.checkpoint(
        functools.partial(_layer, context, chosen),
        policy=policy(context.compute, names),
        prevent_cse=not looped,
    )
    outs, before_BSE = [], x_BSE
    for layer, key, cache in zip(*repeated[:3], strict=True):
        x_BSE, out = run_layer(x_BSE, layer, key, cache)
        outs.append(out)
    if repeated.counts is not None:
        x_BSE = jnp.where(repeated.counts, x_BSE, before_BSE)
        outs = [out._replace(reports=counted(out.reports, repeated.counts)) for out in outs]
    return x_BSE, tuple(outs)


def _layer(
    context: Context,
    chosen: Callable[[Any], Any] | None,
    x_BSE: Array,
    layer: Any,
    key: PRNGKeyArray | None,
    cache: Any,
) -> tuple[Array, Given]:
    """Runs one layer; the backward pass recomputes this function."""
    x_BSE = checkpoint_name(x_BSE, "layer_input")
    layer = jax.tree.map(_taken, layer, is_leaf=_is_piece)
    layer = layer if chosen is None else chosen(layer)
    layer = gather(layer, context.compute.dtype, after=x_BSE)
    if key is not None:
        layer = with_keys(layer, functools.partial(fold, fold(key, "adapters")))
    key = key if context.dropout > 0 else None
    context = dataclasses.replace(context, key=key)
    returned = layer(x_BSE, context, cache)
    y_BSE, reports, cache = checked(layer, returned, x_BSE, "reports", "cache")
    observed = context.observe and context.observe(LayerCall(layer, x_BSE, y_BSE, context))
    return y_BSE, Given(reports, cache, observed)


class _Piece(eqx.Module):
    """`stack_R[index]`, which equals `own`.

    A recomputed layer then saves the stack, which exists anyway, and no copy of a slice. The
    gradient goes to `own`: gradients of slices are concatenated, but gradients of the stack would
    be padded and added.
    """

    index: int = eqx.field(static=True)
    stack_R: Array
    own: Array


def _is_piece(node: Any) -> bool:
    return isinstance(node, _Piece)


def _taken(leaf: Any) -> Any:
    return _piece(leaf.index, leaf.stack_R, leaf.own) if _is_piece(leaf) else leaf


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _piece(index: int, stack_R: Array, own: Array) -> Array:
    return jnp.squeeze(jax.lax.slice_in_dim(stack_R, index, index + 1), 0)


def _piece_forward(index: int, stack_R: Array, own: Array) -> tuple[Array, None]:
    return _piece(index, stack_R, own), None


def _piece_backward(index: int, nothing: None, d_own: Array) -> tuple[None, Array]:
    return None, d_own


_piece.defvjp(_piece_forward, _piece_backward)


def counted(reports: Reports, counts: Bool[Array, ""]) -> Reports:
    """`reports` if `counts`, else zeros."""
    return jax.tree.map(lambda each: jnp.where(counts, each, jnp.zeros_like(each)), reports)


def _unstacked(tree_R: Any, repeats: int) -> list[Any]:
    """Returns a tree for each index of the leading axis."""
    if repeats == 1:
        return [jax.tree.map(lambda x_R: jnp.squeeze(x_R, 0), tree_R)]

    def pieces(x_R: Array) -> list[Array]:
        if jnp.issubdtype(x_R.dtype, jax.dtypes.prng_key):
            return list(x_R)
        # The backward pass of a split concatenates; the backward pass of indexing would pad and
        # add.
        return [jnp.squeeze(x, 0) for x in jax.lax.split(x_R, (1,) * repeats)]

    leaves, structure = jax.tree.flatten(tree_R)
    columns = [pieces(leaf) for leaf in leaves]
    return [
        jax.tree.unflatten(structure, [column[i] for column in columns]) for i in range(repeats)
    ]


def _split(tree_R: Any, at: int, repeats: int) -> tuple[Any, Any]:
    """Splits off the first `at` repetitions."""
    if at == repeats:
        return tree_R, None

    def both(x_R: Array) -> tuple[Array, Array]:
        if jnp.issubdtype(x_R.dtype, jax.dtypes.prng_key):
            return x_R[:at], x_R[at:]
        first, second = jax.lax.split(x_R, (at, repeats - at))
        return first, second

    leaves, structure = jax.tree.flatten(tree_R)
    first, second = zip(*map(both, leaves), strict=True)
    return jax.tree.unflatten(structure, first), jax.tree.unflatten(structure, second)


def reshaped(x: Array, leading: int, sizes: tuple[int, ...]) -> Array:
    """Reshapes the first `leading` axes, which are whole; the others keep their layout."""
    # JAX forgets the layout of an axis of size 1.
    layout = None
    if not jax.sharding.get_abstract_mesh().empty:
        others = jax.typeof(x).sharding.spec.partitions[leading:]
        layout = PartitionSpec(*(None,) * len(sizes), *others)
    return jnp.reshape(x, (*sizes, *x.shape[leading:]), out_sharding=layout)


def stacked(x: Array, repeats: int) -> Array:
    """Copies of `x` along a new leading axis."""
    layout = None
    if not jax.sharding.get_abstract_mesh().empty:
        layout = PartitionSpec(None, *jax.typeof(x).sharding.spec.partitions)
    return jnp.broadcast_to(x, (repeats, *x.shape), out_sharding=layout)


def policy(compute: Compute, names: Sequence[str]) -> Callable[..., Any]:
    """Returns a policy for `jax.checkpoint`.

    It saves the activations among `names` that `compute` saves on the device, offloads the ones
    that it offloads to the host's memory, and saves no others.
    """
    saved = compute.kept(names)
    by_name = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[*_inner_names(saved), CHOICES],
        names_which_can_be_offloaded=_inner_names(compute.offloaded),
        offload_src="device",
        offload_dst="pinned_host",
    )

    def keep(primitive: Any, *arguments: Any, **parameters: Any) -> Any:
        # The kernel cannot name its result.
        if primitive.name == _CUDNN_FORWARD and "attention" in saved:
            return True
        return by_name(primitive, *arguments, **parameters)

    return keep


def _inner_names(names: Sequence[str]) -> list[str]:
    """Replaces "attention" by the name that kernels give to their outputs.

    Kernels use it for the output of attention and for one number per head and position.
    """
    return ["attention_kernel" if name == "attention" else name for name in names]


def check_names(compute: Compute, names: Sequence[str]) -> None:
    """Raises ValueError if `compute` saves or offloads a name that is not among `names`."""
    for setting in ("saved", "offloaded"):
        chosen = getattr(compute, setting)
        for name in () if setting == "saved" and chosen == EVERYTHING else chosen:
            if name not in names:
                near = difflib.get_close_matches(name, names, n=1)
                hint = f"did you mean {near[0]!r}? " if near else ""
                raise ValueError(
                    f"{setting} has the unknown name {name!r}; {hint}(this model's layers name "
                    f"{', '.join(names)})"
                )
