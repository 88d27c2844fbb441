"""Compiled programs of generation: prefill of the prompts in chunks, then token by token.

Shapes: B batch (rows), C tokens of a chunk of prompts, N tokens of a round, E embed, V vocab.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, UInt32

from lmlib.compute import Compute
from lmlib.generate import caches
from lmlib.generate.sampling import Numbers, Rules, choose
from lmlib.generate.weights import Weights
from lmlib.models.forward_context import ForwardContext
from lmlib.models.model import Model, logits_of
from lmlib.parallel.collectives import shard_map
from lmlib.parallel.layout import partition, reshard

NOTHING = -1  # placeholder for a token of a row that has stopped


class Chooser(NamedTuple):
    """Inputs of the choice of a token: each row's key data, the settings, and padded stop ids."""

    seeds_B2: UInt32[Array, "b 2"]
    numbers: Numbers
    stop_ids: Int32[Array, "stop"]


class State(NamedTuple):
    """The state between two tokens: cache, newest tokens (not cached yet), positions, ended rows.

    `seen_BV` is true for tokens that occur in the row's text; `None` if not needed.
    """

    cache: Any
    token_B: Int32[Array, "b"]
    position_B: Int32[Array, "b"]
    stopped_B: Bool[Array, "b"]
    seen_BV: Bool[Array, "b vocab"] | None


class NewTokens(NamedTuple):
    """The tokens of a round, with `NOTHING` after a row's end.

    With a draft, `drafts_B2` has the numbers of tokens that it guessed, and of the right ones.
    """

    tokens_BN: Int32[Array, "b n"]
    logprobs_BN: Float[Array, "b n"]
    drafts_B2: Int32[Array, "b 2"] | None = None


@functools.partial(
    jax.jit,
    static_argnames=("length", "compute", "spare"),
    donate_argnames=("cache", "h_BE"),
    inline=False,
)
def prefill(
    weights: Weights,
    cache: Any,
    h_BE: Float[Array, "b embed"] | None,
    tokens_BC: Int32[Array, "b c"],
    start: Int32[Array, ""],
    lengths_B: Int32[Array, "b"],
    length: int,
    compute: Compute,
    spare: int = 0,
) -> tuple[Any, Float[Array, "b embed"]]:
    """Adds a chunk of each prompt to the cache, from position `start` on.

    Also returns the features of each prompt's last token, as far as they are known. For the first
    chunk `cache` and `h_BE` are `None`: a cache made inside never writes its zeros.
    """
    if cache is None:
        cache = caches.empty(weights.model, tokens_BC.shape[0], length, compute, spare)
    positions_BC = jnp.zeros_like(tokens_BC) + start + jnp.arange(tokens_BC.shape[1])
    positions_BC = jnp.where(positions_BC < lengths_B[:, None], positions_BC, -1)
    is_last_BC = positions_BC == lengths_B[:, None] - 1
    context = ForwardContext(positions_BC, jnp.zeros_like(tokens_BC), compute, lengths_B=lengths_B)
    x_BCE, cache = advance(weights.model, tokens_BC, context, cache)
    x_B1E = jnp.sum(jnp.where(is_last_BC[..., None], x_BCE, 0), axis=1, keepdims=True)
    new_BE = weights.model.features(x_B1E, context)[:, 0]
    before_BE = jnp.zeros_like(new_BE) if h_BE is None else h_BE
    return cache, jnp.where(jnp.any(is_last_BC, axis=1)[:, None], new_BE, before_BE)


@functools.partial(jax.jit, static_argnames=("compute", "rules"), donate_argnames="cache")
def first_token(
    weights: Weights,
    cache: Any,
    h_BE: Float[Array, "b embed"],
    lengths_B: Int32[Array, "b"],
    stopped_B: Bool[Array, "b"],
    seen_BV: Bool[Array, "b vocab"] | None,
    chooser: Chooser,
    compute: Compute,
    rules: Rules,
) -> tuple[State, NewTokens]:
    """Chooses the first token after each prompt."""
    state = State(cache, jnp.zeros_like(lengths_B), lengths_B - 1, stopped_B, seen_BV)
    state, token_B, logprob_B = _chosen(weights, state, h_BE, chooser, compute, rules)
    return state, everywhere(NewTokens(token_B[:, None], logprob_B[:, None]))


@functools.partial(
    jax.jit, static_argnames=("compute", "rules", "size"), donate_argnames=("state",)
)
def next_tokens(
    weights: Weights,
    state: State,
    limit: Int32[Array, ""],
    chooser: Chooser,
    compute: Compute,
    rules: Rules,
    size: int,
) -> tuple[State, NewTokens]:
    """Generates up to `limit` more tokens, at most `size`; fewer if all rows stop."""
    nothing_BN = jnp.zeros_like(state.token_B)[:, None] + jnp.full((1, size), NOTHING)
    made = NewTokens(nothing_BN, nothing_BN.astype(jnp.promote_types(compute.dtype, jnp.float32)))

    def goes_on(carry: tuple[Array, State, NewTokens]) -> Array:
        n, state, _ = carry
        return (n < limit) & ~jnp.all(state.stopped_B)

    def add(carry: tuple[Array, State, NewTokens]) -> tuple[Array, State, NewTokens]:
        n, state, made = carry
        positions_B1 = jnp.where(state.stopped_B, -1, state.position_B)[:, None]
        tokens_B1, lengths_B = state.token_B[:, None], state.position_B + 1
        alone = jnp.zeros_like(tokens_B1)
        context = ForwardContext(positions_B1, alone, compute, lengths_B=lengths_B)
        x_B1E, cache = advance(weights.model, tokens_B1, context, state.cache)
        h_BE, state = weights.model.features(x_B1E, context)[:, 0], state._replace(cache=cache)
        state, *new = _chosen(weights, state, h_BE, chooser, compute, rules)
        pairs = zip(new, made[:2], strict=True)
        is_n_N = jnp.arange(size) == n
        added = NewTokens(*(jnp.where(is_n_N, x_B[:, None], so_far) for x_B, so_far in pairs))
        return n + 1, state, added

    _, state, made = jax.lax.while_loop(goes_on, add, (jnp.int32(0), state, made))
    return state, everywhere(made)


def advance(
    model: Model, tokens_BS: Array, context: ForwardContext, cache: Any
) -> tuple[Array, Any]:
    """Returns the residual stream of the tokens, and the new cache."""
    if isinstance(cache, caches.TokensSoFar):
        x_BSE, cache = caches.recompute(model, tokens_BS, context, cache)
    else:
        x_BSE, _, cache, _ = model.trunk(tokens_BS, context, cache)
        x_BSE = reshard(x_BSE, "batch seq embed")
    return x_BSE, cache


def _chosen(
    weights: Weights, state: State, h_BE: Array, chooser: Chooser, compute: Compute, rules: Rules
) -> tuple[State, Array, Array]:
    """Adds a token to each running row; returns state, tokens and log-probabilities."""
    position_B, seen_BV = state.position_B + 1, state.seen_BV
    seen_B1V = None if seen_BV is None else seen_BV[:, None]
    found = picked(weights, h_BE[:, None], position_B[:, None], seen_B1V, chooser, compute, rules)
    token_B, logprob_B, ends_B = (x_B1[:, 0] for x_B1 in found)
    was_B = state.stopped_B
    if seen_BV is not None:
        seen_BV |= (jnp.arange(seen_BV.shape[1]) == token_B[:, None]) & ~was_B[:, None]
    new = State(
        state.cache,
        jnp.where(was_B, state.token_B, token_B),
        jnp.where(was_B, state.position_B, position_B),
        was_B | ends_B,
        seen_BV,
    )
    return new, jnp.where(was_B, NOTHING, token_B), jnp.where(was_B, 0, logprob_B)


def picked(
    weights: Weights,
    h_BSE: Float[Array, "b s embed"],
    positions_BS: Int32[Array, "b s"],
    seen_BSV: Bool[Array, "b s vocab"] | None,
    chooser: Chooser,
    compute: Compute,
    rules: Rules,
) -> tuple[Int32[Array, "b s"], Float[Array, "b s"], Bool[Array, "b s"]]:
    """Returns tokens for positions, from features of the tokens before them.

    Also returns their log-probabilities, and True if a token ends a row. A choice depends on the
    features, the position and the row's seed only.
    """
    logits_BSV = logits_of(weights.unembedding_EV(), weights.model.logit_cap, h_BSE, compute)
    table = partition(("batch", None, "whole_vocab"))
    logits_BSV = reshard(logits_BSV, ("batch", None, "whole_vocab"))
    rows = partition(("batch", None))
    of_row = jax.vmap(
        functools.partial(_picked, rules=rules), in_axes=(1, 1, 1, *[None] * 3), out_axes=1
    )
    pick = shard_map(
        of_row,
        (table, rows, table, rows, partition(()), partition((None,))),
        (rows, rows, rows),
        tracked=False,
    )
    return pick(
        logits_BSV, positions_BS, seen_BSV, chooser.seeds_B2, chooser.numbers, chooser.stop_ids
    )


def _picked(
    logits_BV: Array,
    position_B: Array,
    seen_BV: Array | None,
    seeds_B2: Array,
    numbers: Numbers,
    stop_ids: Array,
    rules: Rules,
) -> tuple[Array, Array, Array]:
    """Returns tokens, log-probabilities, and True if a row ends, for one device's rows."""

    def noise(seed_2: Array, position: Array) -> Array:
        key = jax.random.fold_in(jax.random.wrap_key_data(seed_2), position)
        return jax.random.gumbel(key, logits_BV.shape[1:], logits_BV.dtype)

    noise_BV = None if "temperature" not in rules else jax.vmap(noise)(seeds_B2, position_B)
    token_B, logprob_B = choose(logits_BV, noise_BV, seen_BV, numbers, rules)
    return token_B, logprob_B, jnp.any(token_B[:, None] == stop_ids, axis=1)


def everywhere(made: NewTokens) -> NewTokens:
    """Replicates the tokens on all devices, so that every process can read them."""
    found: NewTokens = jax.tree.map(lambda x: reshard(x, (None, None)), made)
    return found
