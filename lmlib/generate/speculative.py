"""Speculative decoding: a draft guesses several tokens, which the model checks in one call.

Sources: Leviathan et al. 2023 (arXiv:2211.17192); for heads DeepSeek-V3 (arXiv:2412.19437), §2.2.

The draft and the model choose the token of a position with the same noise. A guess is accepted if
it is the model's own choice. So ordinary decoding gives the same tokens, for all settings of
`Sampling`, unless rounding decides between two tokens: products of several rows may be rounded
otherwise than those of one, which matters in bfloat16.

Shapes: B batch (rows), K guesses, T = K + 1 tokens of a call, C tokens of a chunk of prompts, N
tokens of a round, E embed, V vocab.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int32

from lmlib.compute import Compute
from lmlib.generate.caches import is_by_position
from lmlib.generate.generator import Generator, Prompt
from lmlib.generate.sampling import Rules
from lmlib.generate.steps import NOTHING, Chooser, NewTokens, State, advance, everywhere, picked
from lmlib.generate.stream import Generated
from lmlib.generate.weights import Weights
from lmlib.models.forward_context import ForwardContext
from lmlib.models.model import Model, TrunkOutput, WeightGroup
from lmlib.models.multi_token import MultiTokenDecoder
from lmlib.models.part import class_name
from lmlib.parallel.layout import reshard
from lmlib.parallel.mesh import mesh_of


class SpeculativeGenerator(Generator):
    """A `Generator` with a draft. It generates the same tokens in fewer calls of the model.

    `Generated.drafted` and `Generated.accepted` count the guesses.

    Args:
      draft: a smaller model with the same tokenizer; `None`: the model's first multi-token head,
        which makes each further guess from its own features.
      draft_tokens: number of guesses in each call of the model.
      mesh, compute, rows, length, chunk, whole, int8: as in `Generator`, also for the draft.

    Raises:
      ValueError: as `Generator`; or if the draft has another vocabulary, if there is no head, or if
        the model's rotary frequencies change within `length` tokens.
      MemoryError: as `Generator`.
    """

    def __init__(
        self,
        model: Model,
        draft: Model | None = None,
        draft_tokens: int = 4,
        mesh: Mesh | None = None,
        compute: Compute | None = None,
        rows: int = 8,
        length: int = 2_048,
        chunk: int = 512,
        whole: bool = True,
        int8: bool = False,
    ):
        if not 1 <= draft_tokens < length:
            raise ValueError(f"draft_tokens must be in [1, {length}), got {draft_tokens}")
        if draft is None and not isinstance(model, MultiTokenDecoder):
            raise ValueError(f"{class_name(model)} has no multi-token heads: give a draft")
        if draft is not None and draft.vocab != model.vocab:
            raise ValueError(
                f"the draft has {draft.vocab:,} tokens and the model {model.vocab:,}: give a draft "
                "with the model's tokenizer"
            )
        self.spare = draft_tokens
        mesh = mesh or mesh_of(model)
        settings = mesh, compute, rows, length, chunk, whole, int8
        super().__init__(model, *settings)
        if draft is None:
            self._draft = None
            assert isinstance(self._weights.model, MultiTokenDecoder)
            self._weights = self._weights._replace(model=_WithHead(self._weights.model))
        else:
            try:
                self._draft = Generator(draft, *settings)
            except ValueError as error:
                raise ValueError(f"the draft: {error}") from error
            self._draft.spare = draft_tokens
        for each in filter(None, (self, self._draft)):
            if switches := [switch for switch in each._switches if switch < length]:
                raise ValueError(
                    f"rotary frequencies change after {min(switches):,} tokens, which speculative "
                    f"decoding does not support: give at most this length, got {length:,}"
                )

    def _with(self, cache: Any, texts: Sequence[Prompt]) -> tuple["_Caches", jax.Array]:
        found, h_BE = super()._with(cache, texts)
        features = None
        if self._draft is None:
            width = [(0, 0), (0, 0), (0, self.spare), (0, 0)]
            of_model, of_draft, _ = found
            features = jnp.pad(h_BE[None, :, None], width)
        else:
            of_model, of_draft = found, self._draft._with(cache, texts)[0]
        unread = self._placed(
            np.zeros((1, len(texts), self.spare), np.int32), (None, "batch", None)
        )
        count = self._placed(np.zeros((1, len(texts)), np.int32), (None, "batch"))
        return _Caches(of_model, of_draft, unread, count, features), h_BE

    def _more(
        self,
        prompts: Sequence[Prompt],
        chooser: Chooser,
        rules: Rules,
        size: int,
        state: State,
        limit: int,
        left: list[int],
        made: Sequence[Generated],
        stop: list[int],
    ) -> tuple[State, NewTokens, int]:
        with self._on_mesh():
            state = self._stopped(state, stop)
            left_B = np.zeros(self.rows, np.int32)
            left_B[: len(left)] = left
            given = self._placed(np.array(limit, np.int32), ()), self._placed(left_B, "batch")
            draft = self._draft and self._draft._weights
            settings = _Settings(self._compute, rules, size, self.length, self.spare)
            state, new = _next_tokens(self._weights, draft, state, *given, chooser, settings)
            return state, new, limit


class _Caches(NamedTuple):
    """The caches of a model and its draft, in `State.cache`. The row is the second axis.

    The draft has not yet read the first `unread_count` tokens of `unread`, nor `State.token_B`. A
    head reads each with the model's `features` of the token before it.
    """

    model: Any
    draft: Any
    unread: Int32[Array, "1 b k"]
    unread_count: Int32[Array, "1 b"]
    features: Float[Array, "1 b t embed"] | None


class _WithHead(Model):
    """A model whose cache includes its first head's, and the features of the last token.

    The head has read all pairs of a token and the next one.
    """

    vocab: int = eqx.field(static=True)
    logit_cap: float | None = eqx.field(static=True)
    model: MultiTokenDecoder

    def __init__(self, model: MultiTokenDecoder):
        self.vocab, self.logit_cap, self.model = model.vocab, model.logit_cap, model

    def trunk(
        self, tokens_BS: Int32[Array, "b s"], context: ForwardContext, cache: Any = None
    ) -> TrunkOutput:
        of_model, of_head, last = cache
        found = self.model.trunk(tokens_BS, context, of_model)
        h_BSE = reshard(self.features(found.x_BSE, context), "batch seq embed")
        pairs = h_BSE[:, :-1], tokens_BS[:, 1:], context.positions_BS[:, 1:]
        if last is not None:
            before_BSE = jnp.concatenate((last[0], pairs[0]), axis=1)
            pairs = before_BSE, tokens_BS, context.positions_BS
        if pairs[0].shape[1] > 0:
            given = Weights(self, None), None, context.lengths_B, context.compute
            _, of_head = _read(*given, *pairs, of_head)
        return found._replace(cache=(found.cache, of_head, h_BSE[None, :, -1:]))

    def empty_cache(self, rows: int, length: int, dtype: DTypeLike) -> Any:
        both = self.model, self.model.predictors[0]
        caches = [part.empty_cache(rows, length, dtype) for part in both]
        if None in caches:
            raise ValueError(f"{class_name(self.model)} has no cache: it needs one for its heads")
        return (*caches, None)

    def features(self, x_BSE: Array, context: ForwardContext) -> Array:
        return self.model.features(x_BSE, context)

    def unembedding_EV(self) -> Array:
        return self.model.unembedding_EV()

    def weight_groups(self) -> tuple[WeightGroup, ...]:
        return self.model.weight_groups()


def _read(
    weights: Weights,
    draft: Weights | None,
    lengths_B: Int32[Array, "b"] | None,
    compute: Compute,
    before_BTE: Float[Array, "b t embed"] | None,
    tokens_BT: Int32[Array, "b t"],
    positions_BT: Int32[Array, "b t"],
    cache: Any,
) -> tuple[Float[Array, "b t embed"], Any]:
    """The draft reads tokens. Returns its features, which predict the next tokens, and its cache.

    Args:
      draft: `None` for the model's head. It reads each token with the features `before_BTE` of the
        token before, at the position of that one.
    """
    if draft is not None:
        return _features(draft.model, lengths_B, compute, tokens_BT, positions_BT, cache)
    positions_BT = jnp.where(positions_BT < 0, -1, positions_BT - 1)
    context = _context(positions_BT, lengths_B, compute)
    assert isinstance(weights.model, _WithHead) and before_BTE is not None
    found = weights.model.model.ahead(1, before_BTE, tokens_BT, context, cache)
    return reshard(found.x_BSE, "batch seq embed"), found.cache


def _features(
    model: Model,
    lengths_B: Int32[Array, "b"] | None,
    compute: Compute,
    tokens_BT: Int32[Array, "b t"],
    positions_BT: Int32[Array, "b t"],
    cache: Any,
) -> tuple[Float[Array, "b t embed"], Any]:
    context = _context(positions_BT, lengths_B, compute)
    x_BTE, cache = advance(model, tokens_BT, context, cache)
    return model.features(x_BTE, context), cache


def _context(positions_BT: Array, lengths_B: Array | None, compute: Compute) -> ForwardContext:
    return ForwardContext(positions_BT, jnp.zeros_like(positions_BT), compute, lengths_B=lengths_B)


class _Settings(NamedTuple):
    """Static settings of the program."""

    compute: Compute
    rules: Rules
    size: int  # tokens of a round
    length: int
    guesses: int


class _Round(NamedTuple):
    """A round so far; a row has its first `count_B` tokens."""

    state: State
    count_B: Int32[Array, "b"]
    made: NewTokens


@functools.partial(jax.jit, static_argnames="settings", donate_argnames="state")
def _next_tokens(
    weights: Weights,
    draft: Weights | None,
    state: State,
    limit: Int32[Array, ""],
    left_B: Int32[Array, "b"],
    chooser: Chooser,
    settings: _Settings,
) -> tuple[State, NewTokens]:
    """Generates `limit` more tokens of each row or a few more, but at most `left_B`.

    Rows that are ahead of others go on while there is space for their tokens.
    """
    K, space = settings.guesses, 2 * settings.size + settings.guesses

    def runs(now: _Round) -> Bool[Array, "b"]:
        return ~now.state.stopped_B & (now.count_B < left_B) & (now.count_B + K < space)

    def add(now: _Round) -> _Round:
        runs_B = runs(now)
        guesses_BK, of_draft = _guessed(weights, draft, now.state, runs_B, chooser, settings)
        state = now.state._replace(cache=now.state.cache._replace(draft=of_draft))
        most_B = jnp.where(runs_B, left_B - now.count_B, 0)
        now = now._replace(state=state)
        return _checked(weights, guesses_BK, most_B, chooser, settings, now)

    count_B = jnp.zeros_like(state.token_B)
    nothing_BN = count_B[:, None] + jnp.full((1, space), NOTHING)
    dtype = jnp.promote_types(settings.compute.dtype, jnp.float32)
    drafts_B2 = count_B[:, None] + jnp.zeros((1, 2), jnp.int32)
    made = NewTokens(nothing_BN, nothing_BN.astype(dtype), drafts_B2)
    state, _, made = jax.lax.while_loop(
        lambda now: jnp.any(runs(now) & (now.count_B < limit)), add, _Round(state, count_B, made)
    )
    return state, everywhere(made)


def _guessed(
    weights: Weights,
    draft: Weights | None,
    state: State,
    runs_B: Bool[Array, "b"],
    chooser: Chooser,
    settings: _Settings,
) -> tuple[Int32[Array, "b k"], Any]:
    """The draft reads the tokens that it has not read, and guesses the next ones.

    Returns the guesses and its cache, without them.
    """
    compute, K, count_B = settings.compute, settings.guesses, state.cache.unread_count[0]
    read = functools.partial(_read, weights, draft, state.position_B + 1, compute)

    def choose(h_B1E: Array, k: Array | int, seen_BV: Array | None) -> tuple[Array, Array | None]:
        at_B1 = state.position_B[:, None] + k
        seen_B1V = None if seen_BV is None else seen_BV[:, None]
        token_B1, _, _ = picked(
            draft or weights, h_B1E, at_B1, seen_B1V, chooser, compute, settings.rules
        )
        return token_B1, _seen_after(seen_BV, token_B1)

    def further(carry: Any, k: Array) -> tuple[Any, Array]:
        h_B1E, token_B1, seen_BV, trial = carry
        at_B1 = _positions(state.position_B + k, runs_B.astype(jnp.int32), 1, settings.length)
        h_B1E, trial = read(h_B1E, token_B1, at_B1, trial)
        token_B1, seen_BV = choose(h_B1E, k + 1, seen_BV)
        return (h_B1E, token_B1, seen_BV, trial), token_B1[:, 0]

    is_newest_BT = jnp.arange(K + 1) == count_B[:, None]
    unread_BT = jnp.pad(state.cache.unread[0], ((0, 0), (0, 1)))
    tokens_BT = jnp.where(is_newest_BT, state.token_B[:, None], unread_BT)
    first_B, number_B = state.position_B - count_B, jnp.where(runs_B, count_B + 1, 0)
    before_BTE = None if draft is not None else state.cache.features[0]
    at_BT = _positions(first_B, number_B, K + 1, settings.length)
    h_BTE, cache = read(before_BTE, tokens_BT, at_BT, state.cache.draft)
    h_B1E = jnp.sum(jnp.where(is_newest_BT[..., None], h_BTE, 0), axis=1, keepdims=True)
    token_B1, seen_BV = choose(h_B1E, 1, state.seen_BV)
    carry = h_B1E, token_B1, seen_BV, cache
    (*_, trial), tokens_KB = jax.lax.scan(further, carry, jnp.arange(1, K))
    return jnp.concatenate((token_B1, tokens_KB.T), axis=1), _with_states(trial, _states(cache))


def _checked(
    weights: Weights,
    guesses_BK: Int32[Array, "b k"],
    most_B: Int32[Array, "b"],
    chooser: Chooser,
    settings: _Settings,
    now: _Round,
) -> _Round:
    """The model chooses the next tokens of each row, up to the first that differs from the guess.

    Args:
      most_B: maximum number of tokens; rows with 0 stay as they are.
    """
    state, cache, K = now.state, now.state.cache, settings.guesses
    model = weights.model.model if isinstance(weights.model, _WithHead) else weights.model
    tokens_BT = jnp.concatenate((state.token_B[:, None], guesses_BK), axis=1)
    at_T, runs_B = jnp.arange(K + 1), most_B > 0

    def read(count_B: Array, cache: Any) -> tuple[Array, Any]:
        at_BT = _positions(state.position_B, count_B, K + 1, settings.length)
        lengths_B = state.position_B + 1
        return _features(model, lengths_B, settings.compute, tokens_BT, at_BT, cache)

    h_BTE, of_model = read(jnp.where(runs_B, K + 1, 0), cache.model)
    seen_BTV = None
    if state.seen_BV is not None:
        seen: Any = [_seen_after(state.seen_BV, guesses_BK[:, :k]) for k in range(K + 1)]
        seen_BTV = jnp.stack(seen, axis=1)
    next_BT = state.position_B[:, None] + 1 + at_T
    chosen_BT, logprobs_BT, ends_BT = picked(
        weights, h_BTE, next_BT, seen_BTV, chooser, settings.compute, settings.rules
    )

    right_B = _first(chosen_BT[:, :K] != guesses_BK)
    new_B = jnp.minimum(jnp.minimum(right_B, _first(ends_BT)) + 1, most_B)
    is_new_BT, is_newest_BT = at_T < new_B[:, None], at_T == new_B[:, None] - 1

    if states := _states(cache.model):

        def again(of_model: Any) -> Any:
            """Reads the right tokens only, from the states before."""
            return read(new_B, _with_states(of_model, states))[1]

        wrong = jnp.any(runs_B & (new_B <= K))
        of_model = jax.lax.cond(wrong, again, lambda kept: kept, of_model)

    features = None
    if cache.features is not None:
        features = jnp.where(runs_B[:, None, None], h_BTE, cache.features[0])[None]
    cache = _Caches(
        of_model,
        cache.draft,
        jnp.where(runs_B[:, None], guesses_BK, cache.unread[0])[None],
        jnp.where(runs_B, new_B - 1, cache.unread_count[0])[None],
        features,
    )
    newest_B = jnp.sum(jnp.where(is_newest_BT, chosen_BT, 0), axis=1)
    state = State(
        cache,
        jnp.where(runs_B, newest_B, state.token_B),
        state.position_B + new_B,
        state.stopped_B | jnp.any(ends_BT & is_new_BT, axis=1),
        _seen_after(state.seen_BV, jnp.where(is_new_BT, chosen_BT, NOTHING)),
    )

    at_N = jnp.arange(now.made.tokens_BN.shape[1])
    is_it_BNT = (at_N[:, None] == now.count_B[:, None, None] + at_T) & is_new_BT[:, None]

    def added(made_BN: Array, new_BT: Array) -> Array:
        new_BN = jnp.sum(jnp.where(is_it_BNT, new_BT[:, None], 0), axis=2)
        return jnp.where(jnp.any(is_it_BNT, axis=2), new_BN, made_BN)

    assert now.made.drafts_B2 is not None
    accepted_B = jnp.minimum(new_B, right_B)
    drafted_B = jnp.where(new_B > right_B, K, new_B)  # only checked guesses count
    made = NewTokens(
        added(now.made.tokens_BN, chosen_BT),
        added(now.made.logprobs_BN, logprobs_BT),
        now.made.drafts_B2 + jnp.stack((drafted_B, accepted_B), axis=1),
    )
    return _Round(state, now.count_B + new_B, made)


def _positions(first_B: Array, count_B: Array, width: int, length: int) -> Int32[Array, "b t"]:
    """Positions of `count_B` tokens from `first_B` on; padding after them, and beyond `length`."""
    at_T = jnp.arange(width)
    at_BT = first_B[:, None] + at_T
    return jnp.where((at_T < count_B[:, None]) & (at_BT < length), at_BT, -1)


def _first(is_it_BT: Bool[Array, "b t"]) -> Int32[Array, "b"]:
    """The index of each row's first True; the number of columns if there is none."""
    found_B = jnp.argmax(is_it_BT, axis=1).astype(jnp.int32)
    return jnp.where(jnp.any(is_it_BT, axis=1), found_B, is_it_BT.shape[1])


def _seen_after(seen_BV: Array | None, tokens_BT: Int32[Array, "b t"]) -> Array | None:
    """The tokens that occurred, with `tokens_BT`; `NOTHING` is none."""
    if seen_BV is None:
        return None
    for t in range(tokens_BT.shape[1]):
        seen_BV |= jnp.arange(seen_BV.shape[1]) == tokens_BT[:, t, None]
    return seen_BV


def _states(cache: Any) -> list[Any]:
    """The parts of a cache that a wrong token would change for good."""
    parts = jax.tree.leaves(cache, is_leaf=is_by_position)
    return [part for part in parts if not is_by_position(part)]


def _with_states(cache: Any, states: Sequence[Any]) -> Any:
    """The cache with other `_states`."""
    parts, tree = jax.tree.flatten(cache, is_leaf=is_by_position)
    left = iter(states)
    parts = [part if is_by_position(part) else next(left) for part in parts]
    return jax.tree.unflatten(tree, parts)
