"""Compiled programs of an engine, on rows of one cache.

Rows of a call are adjacent. A text at negative positions is idle: it is not stored and changes no
state.

Shapes: B rows of a call, R rows of the cache, C tokens of a chunk of a prompt, N tokens of a call,
T likeliest tokens, E embed, V vocab.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int32, UInt32

from lmlib.compute import Compute
from lmlib.generate import caches
from lmlib.generate.sampling import Numbers, at_least, likeliest, nucleus, penalised
from lmlib.generate.steps import NOTHING, advance
from lmlib.generate.weights import Weights
from lmlib.models.forward_context import ForwardContext
from lmlib.models.model import Model, logits_of
from lmlib.models.parts.cache import KeysAndValues
from lmlib.parallel.collectives import shard_map
from lmlib.parallel.layout import partition, reshard
from lmlib.serve.requests import MOST_TOP

ROUND = 8  # maximum number of tokens of a call
_SCORED = 16  # tokens whose logits are in memory at once, when a prompt is scored
_COPIED = 128  # tokens that are copied at once


class Cache(NamedTuple):
    """The cache of a model, and the tokens that occur in each row's text; the row is axis 1."""

    layers: Any
    seen_1RV: Bool[Array, "1 r vocab"]


class Rows(NamedTuple):
    """The texts of a call: the newest token, its position, tokens still to generate (0: idle)."""

    token_B: Int32[Array, "b"]
    position_B: Int32[Array, "b"]
    left_B: Int32[Array, "b"]
    seeds_B: UInt32[Array, "b"]
    samples_B: UInt32[Array, "b"]
    numbers: Numbers  # settings of `Sampling`, [B] each; top_k is 0 for `None`
    stop_ids_BS: Int32[Array, "b stop"]
    top_B: Int32[Array, "b"]


class Made(NamedTuple):
    """New tokens, `NOTHING` after a row's end; the likeliest ones are zeros if not asked for."""

    tokens_BN: Int32[Array, "b n"]
    logprobs_BN: Float[Array, "b n"]
    top_ids_BNT: Int32[Array, "b n t"]
    top_logprobs_BNT: Float[Array, "b n t"]


def empty(model: Model, rows: int, length: int, compute: Compute) -> Cache:
    """Returns an empty cache for texts of `length` tokens."""

    def written(part: Any) -> Any:  # `KeysAndValues.empty` is False
        return KeysAndValues(part.keys, part.values) if _is_by_slot(part) else part

    layers = caches.empty(model, rows, length, compute)
    seen_1RV = reshard(jnp.zeros((1, rows, model.vocab), bool), (None, "batch", "whole_vocab"))
    return Cache(jax.tree.map(written, layers, is_leaf=_is_by_slot), seen_1RV)


@functools.partial(jax.jit, static_argnames="compute", donate_argnames="cache")
def prefill(
    weights: Weights,
    cache: Cache,
    tokens_C: Int32[Array, "c"],
    start: Int32[Array, ""],
    end: Int32[Array, ""],
    row: Int32[Array, ""],
    compute: Compute,
) -> tuple[Cache, Float[Array, "c embed"]]:
    """Adds a prompt's tokens from `start` to `end` to a row; also returns their features."""
    part = _rows(cache, row, 1)
    tokens_1C = reshard(tokens_C[None], "batch seq")
    positions_1C = start + jnp.zeros_like(tokens_1C) + jnp.arange(tokens_1C.shape[1])
    positions_1C = jnp.where(positions_1C < end, positions_1C, -1)
    context = _context(positions_1C, end[None], compute)
    x_1CE, layers = advance(weights.model, tokens_1C, context, part.layers)
    h_CE = weights.model.features(x_1CE, context)[0]
    seen_1BV = _mark(part.seen_1RV, tokens_1C, positions_1C >= 0)
    cache = _with_rows(cache, Cache(layers, seen_1BV), row)
    return cache, reshard(h_CE, (None, "embed"))


def _context(positions_BS: Array, lengths_B: Array, compute: Compute) -> ForwardContext:
    alone = jnp.zeros_like(positions_BS)
    return ForwardContext(positions_BS, alone, compute, lengths_B=reshard(lengths_B, "batch"))


@functools.partial(jax.jit, static_argnames="compute", donate_argnames="cache")
def decode(
    weights: Weights,
    cache: Cache,
    rows: Rows,
    first: Int32[Array, ""],
    limit: Int32[Array, ""],
    compute: Compute,
) -> tuple[Cache, Made]:
    """Generates up to `limit` tokens for rows from `first` on, until all have ended."""
    table_EV, cap, V = weights.unembedding_EV(), weights.model.logit_cap, weights.model.vocab
    rows = jax.tree.map(lambda x: reshard(x, ("batch", *(None,) * (x.ndim - 1))), rows)
    keys_B2 = jax.vmap(_key_data)(rows.seeds_B, rows.samples_B)
    nothing_BN = jnp.zeros_like(rows.token_B)[:, None] + jnp.full((1, ROUND), NOTHING)
    wide = jnp.promote_types(compute.dtype, jnp.float32)
    zeros_BNT = jnp.zeros_like(nothing_BN)[:, :, None] + jnp.zeros(min(MOST_TOP, V), jnp.int32)
    made = Made(nothing_BN, nothing_BN.astype(wide), zeros_BNT, zeros_BNT.astype(wide))

    def goes_on(carry: tuple[Array, Rows, Cache, Made]) -> Array:
        n, rows, *_ = carry
        return (n < limit) & jnp.any(rows.left_B > 0)

    def add(carry: tuple[Array, Rows, Cache, Made]) -> tuple[Array, Rows, Cache, Made]:
        n, rows, part, made = carry
        runs_B, tokens_B1 = rows.left_B > 0, rows.token_B[:, None]
        positions_B1 = jnp.where(runs_B, rows.position_B, -1)[:, None]
        context = _context(positions_B1, rows.position_B + 1, compute)
        x_B1E, layers = advance(weights.model, tokens_B1, context, part.layers)
        h_BE = weights.model.features(x_B1E, context)[:, 0]
        logits_BV = logits_of(table_EV, cap, h_BE, compute)
        seen_1BV = _mark(part.seen_1RV, tokens_B1, runs_B[:, None])
        new = _picked(reshard(logits_BV, "batch whole_vocab"), seen_1BV[0], keys_B2, rows)
        token_B, ends_B = new.tokens_BN[:, 0], jnp.any(new.tokens_BN == rows.stop_ids_BS, -1)
        rows = rows._replace(
            token_B=jnp.where(runs_B, token_B, rows.token_B),
            position_B=rows.position_B + runs_B,
            left_B=jnp.where(ends_B, 0, rows.left_B - runs_B),
        )

        def put(x: Array, so_far: Array) -> Array:
            is_n = jnp.arange(ROUND).reshape(-1, *(1,) * (x.ndim - 2)) == n
            return jnp.where(is_n, x, so_far)

        return n + 1, rows, Cache(layers, seen_1BV), jax.tree.map(put, new, made)

    start = jnp.int32(0), rows, _rows(cache, first, rows.token_B.shape[0]), made
    *_, part, made = jax.lax.while_loop(goes_on, add, start)
    made = jax.tree.map(lambda x: reshard(x, (None,) * x.ndim), made)
    return _with_rows(cache, part, first), made


@functools.partial(jax.jit, donate_argnames="cache")
def copy(
    cache: Cache, source: Int32[Array, ""], target: Int32[Array, ""], length: Int32[Array, ""]
) -> Cache:
    """Copies a row with a text of `length` tokens."""

    def copied(part: Any) -> Any:
        if not _is_by_slot(part):
            return _with_rows(part, _rows(part, source, 1), target)
        keys, values = (
            _over_rows(functools.partial(_slots_copied, axis=axis), x, source, target, length)
            for x, axis in ((part.keys, 4), (part.values, 3))
        )
        return KeysAndValues(keys, values)

    made: Cache = jax.tree.map(copied, cache, is_leaf=_is_by_slot)
    return made


@functools.partial(jax.jit, static_argnames="compute")
def score(
    weights: Weights,
    h_CE: Float[Array, "c embed"],
    next_C: Int32[Array, "c"],
    top: Int32[Array, ""],
    compute: Compute,
) -> Made:
    """Scores the tokens of a prompt that follow the features `h_CE`; B = 1, N = C."""
    table_EV, cap = weights.unembedding_EV(), weights.model.logit_cap

    def of_some(arguments: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        h_ME, next_M = arguments
        logits_MV = logits_of(table_EV, cap, h_ME, compute)
        logits_MV = reshard(logits_MV, (None, "whole_vocab"))
        log_p_MV = logits_MV - jax.nn.logsumexp(logits_MV, axis=-1, keepdims=True)
        logprob_M = jnp.take_along_axis(log_p_MV, next_M[:, None], axis=1)[:, 0]
        return logprob_M, *_likeliest_of(log_p_MV, top)

    pieces = h_CE.reshape(-1, _SCORED, h_CE.shape[-1]), next_C.reshape(-1, _SCORED)
    found = jax.lax.map(of_some, pieces)
    logprob_C, ids_CT, logprobs_CT = (x.reshape(-1, *x.shape[2:]) for x in found)
    made = Made(next_C[None], logprob_C[None], ids_CT[None], logprobs_CT[None])
    return jax.tree.map(lambda x: reshard(x, (None,) * x.ndim), made)


def _key_data(seed: Array, sample: Array) -> Array:
    """The key data of a sample, as that of `lmlib.generate.Generator` for prompt 0."""
    key = jax.random.fold_in(jax.random.key(seed), 0)
    return jax.random.key_data(jax.random.fold_in(key, sample))


def _picked(logits_BV: Array, seen_BV: Array, keys_B2: Array, rows: Rows) -> Made:
    """Chooses a token for each row by a program of its own, of shapes that all rows share."""
    table, row = partition("batch whole_vocab"), partition("batch")
    pair, triple = partition(("batch", None)), partition(("batch", None, None))
    given = logits_BV, seen_BV, keys_B2, rows.position_B + 1, rows.left_B, rows.top_B, rows.numbers
    numbers = dict.fromkeys(rows.numbers, row)
    pick = shard_map(
        lambda *given: tuple(jax.lax.map(lambda each: _one_picked(*each), given)),
        (table, table, pair, row, row, row, numbers),
        (pair, pair, triple, triple),
        tracked=False,
    )
    return Made(*pick(*given))


def _one_picked(
    logits_V: Array,
    seen_V: Array,
    key_2: Array,
    position: Array,
    left: Array,
    top: Array,
    numbers: Numbers,
) -> Made:
    def chosen() -> Made:
        z_V = jax.lax.cond(
            numbers["repetition_penalty"] != 1,
            lambda: penalised(logits_V, seen_V, numbers["repetition_penalty"]),
            lambda: logits_V,
        )
        z_V = jax.lax.cond(numbers["temperature"] > 0, lambda: drawn(z_V), lambda: z_V)
        # Two passes: XLA for CPUs vectorizes each of them, unlike `jnp.argmax`.
        token = jnp.min(jnp.where(z_V == jnp.max(z_V), jnp.arange(len(z_V)), len(z_V) - 1))
        log_p_V = logits_V - jax.nn.logsumexp(logits_V)
        return Made(token[None], log_p_V[token][None], *_likeliest_of(log_p_V[None], top))

    def drawn(z_V: Array) -> Array:
        z_1V = z_V[None] / numbers["temperature"]
        for name, applied, unused in (
            ("top_k", likeliest, 0),
            ("top_p", nucleus, 1),
            ("min_p", at_least, 0),
        ):
            number = numbers[name]
            z_1V = jax.lax.cond(number != unused, applied, lambda z, _: z, z_1V, number)
        key = jax.random.fold_in(jax.random.wrap_key_data(key_2), position)
        return z_1V[0] + jax.random.gumbel(key, z_V.shape, z_V.dtype)

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(chosen))
    nothing = zeros._replace(tokens_BN=zeros.tokens_BN + NOTHING)
    made: Made = jax.lax.cond(left > 0, chosen, lambda: nothing)
    return made


def _likeliest_of(log_p_MV: Array, top: Array) -> tuple[Array, Array]:
    """The ids and log-probabilities of the likeliest tokens, or zeros if `top` is 0."""
    count = min(MOST_TOP, log_p_MV.shape[1])

    def found() -> tuple[Array, Array]:
        logprobs_MT, ids_MT = jax.lax.top_k(log_p_MV, count)
        return ids_MT.astype(jnp.int32), logprobs_MT

    zeros_MT = jnp.zeros_like(log_p_MV[:, :count])
    return jax.lax.cond(top > 0, found, lambda: (zeros_MT.astype(jnp.int32), zeros_MT))


def _mark(seen_1BV: Array, tokens_BS: Array, counts_BS: Array) -> Array:
    """Adds the tokens that count."""

    def marked(seen_1BV: Array, tokens_BS: Array, counts_BS: Array) -> Array:
        row_B1 = jnp.arange(len(tokens_BS))[:, None]
        outside = seen_1BV.shape[2]  # dropped
        tokens_BS = jnp.where(counts_BS, tokens_BS, outside)
        return seen_1BV.at[0, row_B1, tokens_BS].set(True, mode="drop")

    table, row = partition((None, "batch", "whole_vocab")), partition("batch seq")
    mark = shard_map(marked, (table, row, row), table, tracked=False)
    made: Array = mark(seen_1BV, tokens_BS, counts_BS)
    return made


def _is_by_slot(part: Any) -> bool:
    return isinstance(part, KeysAndValues)


def _over_rows(function: Callable[..., Array], x: Array, *others: Array) -> Array:
    """`function` of arrays whose second axis is the row, on each device, and of numbers."""
    given = x, *others
    if jax.sharding.get_abstract_mesh().empty:
        return function(*given)
    layouts = [jax.typeof(x).sharding.spec if x.ndim else PartitionSpec() for x in given]
    made: Array = shard_map(function, layouts, layouts[0], tracked=False)(*given)
    return made


def _rows(cache: Any, first: Array, count: int) -> Any:
    """The part of a cache for `count` rows. Keys and values are not copied."""

    def taken(x: Array, first: Array) -> Array:
        return jax.lax.dynamic_slice_in_dim(x, first, count, axis=1)

    def chosen(part: Any) -> Any:
        if not _is_by_slot(part):
            return _over_rows(taken, part, first)
        firsts = jnp.broadcast_to(first, part.keys.shape[:1])
        return KeysAndValues(part.keys, part.values, first=firsts)

    return jax.tree.map(chosen, cache, is_leaf=_is_by_slot)


def _with_rows(cache: Any, part: Any, first: Array) -> Any:
    """The cache with the rows of a part."""

    def put(x: Array, new: Array, first: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(x, new, first, axis=1)

    def joined(whole: Any, new: Any) -> Any:
        if not _is_by_slot(whole):
            return _over_rows(put, whole, new, first)
        return KeysAndValues(new.keys, new.values)

    return jax.tree.map(joined, cache, part, is_leaf=_is_by_slot)


def _slots_copied(x: Array, source: Array, target: Array, length: Array, *, axis: int) -> Array:
    """Copies blocks of slots along `axis`, as far as the text goes."""
    slots = x.shape[axis]
    size = min(_COPIED, slots)
    shape = [*x.shape[:1], 1, *x.shape[2:]]
    shape[axis] = size

    def copied(block: Array, x: Array) -> Array:
        at = [jnp.int32(0)] * x.ndim
        at[axis] = jnp.minimum(block * size, slots - size)
        at[1] = source
        part = jax.lax.dynamic_slice(x, at, shape)
        at[1] = target
        return jax.lax.dynamic_update_slice(x, part, at)

    made: Array = jax.lax.fori_loop(0, -(-jnp.minimum(length, slots) // size), copied, x)
    return made
