"""Layers, and the only scan over them.

A stack is a tuple of segments, one after the other. A segment is a pattern of blocks that repeats:
`(local, local, global)` four times is twelve layers. The arrays of each block of a pattern are
stacked along a leading axis, its repetitions; leading axes have no name and stay whole.

Shapes: B batch, S sequence, E embed, L layers, R repetitions of a pattern.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Key, PRNGKeyArray

from lmlib.compute import Compute
from lmlib.models.block import Block, CachedMixer
from lmlib.models.matrices.adapted import drops, with_keys
from lmlib.models.matrices.quantized import check_quantized
from lmlib.models.parts.rope import Rotary, Turns
from lmlib.models.protocol import Context, Layer, Part, Trunk
from lmlib.models.rematerialization import check_names, policy
from lmlib.models.weights import fold
from lmlib.parallel.axes import M
from lmlib.parallel.layout import gather
from lmlib.parallel.local import platform

Pattern = tuple[Block, ...]
Stack = tuple[Pattern, ...]


class Segment(NamedTuple):
    """`pattern`: functions that make a block from a key; `repeats`: how often they follow each
    other."""

    pattern: Sequence[Callable[[PRNGKeyArray], Block]]
    repeats: int


def segments(layers: Sequence[Callable[[PRNGKeyArray], Block]]) -> list[Segment]:
    """The shortest pattern that repeats in `layers`, each of which makes its block from a key, and
    the layers that are left over."""
    period = next(
        period
        for period in range(1, len(layers) + 1)
        if all(make is layers[i % period] for i, make in enumerate(layers))
    )
    repeats, left = divmod(len(layers), period)
    whole = Segment(layers[:period], repeats)
    return [whole, Segment(layers[:left], 1)] if left else [whole]


def make_stack(segments: Sequence[Segment], key: PRNGKeyArray) -> Stack:
    """The blocks of all layers. A layer's weights depend on `key` and its index only.

    Raises:
      ValueError: if there is no layer.
    """
    stack, first = [], 0
    for pattern, repeats in segments:
        if repeats < 1 or not pattern:
            raise ValueError(f"layers must be at least 1, got {repeats * len(pattern)}")
        keys_L = _layer_keys(key, range(first, first + repeats * len(pattern)))
        stack.append(
            tuple(jax.vmap(make)(keys_L[j :: len(pattern)]) for j, make in enumerate(pattern))
        )
        first += repeats * len(pattern)
    return tuple(stack)


def run_stack(
    stack: Stack, x_BSE: Float[Array, "b s embed"], context: Context, cache: Any = None
) -> Trunk:
    """Every layer in its order.

    Each layer's weights are gathered just before its use, and its activations computed again in the
    backward pass but for those that `context.compute` keeps.

    Args:
      x_BSE: laid out as `context.compute.residual` names.
      context: its key descends to layers as that of the weights does, by index.
      cache: of each block of each pattern, stacked as the weights are: `cache[segment][j]`.
    """
    compute = context.compute
    keys_L = None
    if context.key is not None and (context.dropout > 0 or drops(stack)):
        keys_L = _layer_keys(context.key, range(depth(stack)))
    context = dataclasses.replace(context, key=None, turns=_turns(stack, context))
    losses: dict[str, Array] = {}
    caches, observed, first = [], [], 0
    for number, pattern in enumerate(stack):
        repeats, period = _repeats(pattern), len(pattern)
        keys = tuple(
            None if keys_L is None else keys_L[first + j : first + repeats * period : period]
            for j in range(period)
        )
        cached = (None,) * period if cache is None else cache[number]
        with jax.named_scope("layers"):
            x_BSE, out = _repeated(context, x_BSE, (pattern, keys, cached), repeats, compute.unroll)
        for summed, _, _ in out:
            for name, loss_R in summed.items():
                losses[name] = losses.get(name, 0) + jnp.sum(loss_R)
        caches.append(tuple(new for _, new, _ in out))
        if context.observe is not None:
            observed.append(_in_order([seen for _, _, seen in out]))
        first += repeats * period
    return Trunk(
        x_BSE,
        losses,
        None if cache is None else tuple(caches),
        jax.tree.map(lambda *each: jnp.concatenate(each), *observed) if observed else None,
    )


def stack_cache(stack: Stack, rows: int, length: int, dtype: DTypeLike) -> Any:
    """An empty cache for `run_stack`, as in `lmlib.models.protocol.Cached`; `None` if a layer's
    mixer keeps none."""

    def of_layers(block: Block) -> Any:
        assert isinstance(block.attention, CachedMixer)
        repeats = jax.tree.leaves(block)[0].shape[0]
        one = block.attention.empty_cache(rows, length, dtype)
        return jax.tree.map(lambda x: _stacked(x, repeats), one)

    mixers = [block.attention for pattern in stack for block in pattern]
    if not all(isinstance(mixer, CachedMixer) for mixer in mixers):
        return None
    return tuple(tuple(map(of_layers, pattern)) for pattern in stack)


def stack_switches(stack: Stack) -> tuple[int, ...]:
    """As of `lmlib.models.protocol.Switching`."""
    switches = {rotary.switch for rotary in _rotaries(stack)}
    return tuple(sorted(switch for switch in switches if switch is not None))


def unstacked(model: M) -> M:
    """`model` with each layer of its stacks as a segment of its own, whose weights lie by
    themselves. One loop over tokens then reads them where they are; a loop over layers in it would
    copy each layer's first."""

    def is_stack(node: Any) -> bool:
        return (
            isinstance(node, tuple)
            and len(node) > 0
            and all(isinstance(pattern, tuple) and len(pattern) > 0 for pattern in node)
            and all(isinstance(block, Block) for pattern in node for block in pattern)
        )

    def layer(pattern: Pattern, i: int) -> Pattern:
        return jax.tree.map(lambda w_R: w_R[i : i + 1], pattern)

    def apart(stack: Stack) -> Stack:
        return tuple(
            (block,)
            for pattern in stack
            for i in range(_repeats(pattern))
            for block in layer(pattern, i)
        )

    return jax.tree.map(
        lambda node: apart(node) if is_stack(node) else node, model, is_leaf=is_stack
    )


def depth(stack: Stack) -> int:
    """How many layers there are."""
    return sum(_repeats(pattern) * len(pattern) for pattern in stack)


def stack_parts(stack: Stack) -> tuple[Part, ...]:
    """A part for each block of each pattern, which knows its layers."""
    parts, first = [], 0
    for pattern in stack:
        end = first + _repeats(pattern) * len(pattern)
        parts += [
            Part("layers", block, range(first + j, end, len(pattern)))
            for j, block in enumerate(pattern)
        ]
        first = end
    return tuple(parts)


def stack_flops_per_token(stack: Stack, sequence_length: int, causal: bool) -> float:
    """Of all layers, forward and backward, as `Model.flops_per_token` counts."""
    return sum(
        _repeats(pattern) * block.flops_per_token(sequence_length, causal)
        for pattern in stack
        for block in pattern
    )


def check_stack(stack: Stack, sequence_length: int, compute: Compute) -> None:
    """Raises ValueError if the layers cannot be computed as `compute` says."""
    check_names(saved=compute.saved, offloaded=compute.offloaded)
    check_quantized(compute.quantized or {})
    for pattern in stack:
        for block in pattern:
            block.attention.check(sequence_length, compute)


def _repeated(
    context: Context, x_BSE: Array, parts_R: Any, repeats: int, unroll: int
) -> tuple[Array, Any]:
    """The repetitions of one pattern; what each layer gives besides x is stacked along R.

    `unroll` repetitions make one turn of the loop, and those that are left over follow it;
    this is not left to `jax.lax.scan`, which cannot split what is saved in a `reduced` layout.
    There is no loop of one turn, whose body XLA's TPU compiler would run twice.
    """
    turns = repeats // unroll
    if turns < 2:
        return _in_a_row(context, False, x_BSE, parts_R, repeats)
    if unroll == 1:
        # Slices go as they are into what is computed again: JAX would keep reshaped ones, and so a
        # copy of all weights, for the backward pass.
        return jax.lax.scan(functools.partial(_one, context, True), x_BSE, parts_R)
    looped = turns * unroll
    head_R, tail_R = _split(parts_R, looped, repeats)
    turns_TU = jax.tree.map(lambda w_R: _reshaped(w_R, 1, (turns, unroll)), head_R)
    x_BSE, out_TU = jax.lax.scan(
        lambda x_BSE, parts_U: _in_a_row(context, True, x_BSE, parts_U, unroll), x_BSE, turns_TU
    )
    out_R = jax.tree.map(lambda y_TU: _reshaped(y_TU, 2, (looped,)), out_TU)
    if looped == repeats:
        return x_BSE, out_R
    x_BSE, out_tail = _in_a_row(context, False, x_BSE, tail_R, repeats - looped)
    return x_BSE, jax.tree.map(lambda *each: jnp.concatenate(each), out_R, out_tail)


def _in_a_row(
    context: Context, looped: bool, x_BSE: Array, parts_R: Any, repeats: int
) -> tuple[Array, Any]:
    """Some repetitions without a loop."""
    outs = []
    for parts in _unstacked(parts_R, repeats):
        x_BSE, out = _one(context, looped, x_BSE, parts)
        outs.append(out)
    return x_BSE, jax.tree.map(lambda *each: jnp.stack(each), *outs)


def _one(context: Context, looped: bool, x_BSE: Array, parts: Any) -> tuple[Array, Any]:
    """One repetition of a pattern."""
    compute = context.compute
    # Inside a loop nothing can merge the recomputation with the forward pass, so CSE is safe.
    layer = jax.checkpoint(
        functools.partial(_layer, context),
        policy=policy(compute.saved, compute.offloaded),
        prevent_cse=not looped,
    )
    outs = []
    for block, key, cache in zip(*parts, strict=True):
        x_BSE, out = layer(x_BSE, block, key, cache)
        outs.append(out)
    return x_BSE, tuple(outs)


def _layer(
    context: Context, x_BSE: Array, block: Block, key: PRNGKeyArray | None, cache: Any
) -> tuple[Array, tuple[dict[str, Array], Any, Any]]:
    """One layer, as it is computed again in the backward pass."""
    x_BSE = checkpoint_name(x_BSE, "layer_input")
    block = gather(block, context.compute.dtype, after=x_BSE)
    if key is not None:
        block = with_keys(block, fold(key, "adapters"))
    key = key if context.dropout > 0 else None
    context = dataclasses.replace(context, key=key)
    y_BSE, losses, cache = block(x_BSE, context, cache)
    seen = context.observe and context.observe(Layer(block, x_BSE, y_BSE, context))
    return y_BSE, (losses, cache, seen)


def _unstacked(tree_R: Any, repeats: int) -> list[Any]:
    """A tree for each index of the leading axis."""
    if repeats == 1:
        return [jax.tree.map(lambda x_R: jnp.squeeze(x_R, 0), tree_R)]

    def pieces(x_R: Array) -> list[Array]:
        if jnp.issubdtype(x_R.dtype, jax.dtypes.prng_key):
            return list(x_R)
        # Backward, pieces of a split are concatenated; those of an index would be padded and added.
        return [jnp.squeeze(x, 0) for x in jax.lax.split(x_R, (1,) * repeats)]

    leaves, structure = jax.tree.flatten(tree_R)
    columns = [pieces(leaf) for leaf in leaves]
    return [
        jax.tree.unflatten(structure, [column[i] for column in columns]) for i in range(repeats)
    ]


def _split(tree_R: Any, at: int, repeats: int) -> tuple[Any, Any]:
    """The first `at` repetitions, and the others."""
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


def _reshaped(x: Array, leading: int, sizes: tuple[int, ...]) -> Array:
    """`x` with `sizes` for its first axes, which are whole; the others lie as they did. (JAX alone
    forgets how an axis of size 1 lies.)"""
    layout = None
    if not jax.sharding.get_abstract_mesh().empty:
        others = jax.typeof(x).sharding.spec.partitions[leading:]
        layout = PartitionSpec(*(None,) * len(sizes), *others)
    return jnp.reshape(x, (*sizes, *x.shape[leading:]), out_sharding=layout)


def _stacked(x: Array, repeats: int) -> Array:
    """Copies of `x` along a new leading axis."""
    layout = None
    if not jax.sharding.get_abstract_mesh().empty:
        layout = PartitionSpec(None, *jax.typeof(x).sharding.spec.partitions)
    return jnp.broadcast_to(x, (repeats, *x.shape), out_sharding=layout)


def _turns(stack: Stack, context: Context) -> dict[Any, Any]:
    """The rotary tables of all layers, each made once, outside of the loop."""
    rotaries = _rotaries(stack)

    def tables() -> list[Turns]:
        dtype, lengths_B = context.compute.dtype, context.lengths_B
        return [rotary.turns(context.positions_BS, dtype, lengths_B) for rotary in rotaries]

    on_one_cpu = platform() == "cpu" and jax.sharding.get_abstract_mesh().empty
    if context.lengths_B is None or not on_one_cpu:
        return dict(zip(rotaries, tables(), strict=True))
    # Layers that lie apart have no loop: XLA's CPU compiler would take each cosine anew wherever it
    # is read, by every head of every layer, but not out of a branch.
    absent = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(tables))
    made = jax.lax.cond(jnp.any(context.positions_BS >= 0), tables, lambda: absent)
    return dict(zip(rotaries, made, strict=True))


def _rotaries(stack: Stack) -> list[Rotary]:
    """The different ones, in the layers' order."""
    settings = [getattr(block.attention, "rotary", None) for pattern in stack for block in pattern]
    return [rotary for rotary in dict.fromkeys(settings) if rotary is not None]


def _in_order(seen: list[Any]) -> Any:
    """(R, …) of each block of a pattern, as one (layers, …)."""
    return jax.tree.map(
        lambda *each_R: _reshaped(
            jnp.stack(each_R, axis=1), 2, (len(each_R) * each_R[0].shape[0],)
        ),
        *seen,
    )


def _repeats(pattern: Pattern) -> int:
    return jax.tree.leaves(pattern)[0].shape[0]


def _layer_keys(key: PRNGKeyArray, layers: range) -> Key[Array, "L"]:
    """A key for each layer, which depends on `key` and the layer's index only."""
    indices_L = jnp.arange(layers.start, layers.stop, dtype=jnp.int32)
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(fold(key, "blocks"), indices_L)
