"""Generates continuations of prompts.

Shapes: B batch (rows), P prompts, C tokens of a chunk of prompts, E embed, V vocab.
"""

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, UInt32

from lmlib.compute import Compute
from lmlib.generate import caches, weights
from lmlib.generate.sampling import Rules, Sampling, numbers_of, rules_of
from lmlib.generate.steps import (
    NOTHING,
    Chooser,
    NewTokens,
    State,
    first_token,
    next_tokens,
    prefill,
)
from lmlib.generate.stream import Generated, Stream
from lmlib.models.model import Model, check_length, padded_length, usual_dtype
from lmlib.parallel.axes import Axes
from lmlib.parallel.collectives import platform
from lmlib.parallel.layout import COMPUTE, num_shards, sharding
from lmlib.parallel.mesh import mesh_of
from lmlib.parallel.other_meshes import undivided_model

Prompt = Sequence[int]
ROUND = 64  # maximum number of tokens between two transfers to the host
_SHORTEST_CHUNK = 16
# XLA multiplies one row by a matrix in two kernels on NVIDIA GPUs. The first writes all terms to
# memory, rounded to the dtype of the row, and the second reads them: three times the bytes.
_LEAST_ROWS = {"cuda": 2}  # of each device
_TOKENS_IN_CACHE = 1_024  # tokens of a chunk; its activations then fit in the cache of a CPU core
_STOP_IDS = 8  # programs are compiled for multiples of this number
_LENGTHS = 64  # caches made by `generate` are a multiple of this number of tokens long


class Generator:
    """Continues prompts with one model; its programs are compiled once, for all calls.

    A row's tokens depend on its prompt, its id, its sample's number and the seed. Apart from
    rounding, they do not depend on the rest of the batch, the mesh, or `chunk`.

    Args:
      model: copied in the dtype of `compute`.
      mesh: where the weights are placed; `None`: the mesh that they were made on, if any. Rows are
        never split over devices, for any mesh.
      compute: only `dtype` and `attention` are used; `None`: in `usual_dtype`.
      rows: rows of a batch: prompts times samples. NVIDIA GPUs have at least two each.
      length: tokens of the longest row, including the prompt.
      chunk: number of tokens of each prompt that are computed at once; longer prompts need several
        chunks.
      whole: True if each device keeps all the weights that it multiplies; otherwise they are split
        over `fsdp`, and gathered for every token.
      int8: True to store matrices in rounded 8-bit form, which saves memory but is not faster.

    Raises:
      ValueError: if a size is not in [1, 2^31), or the model does not support such long sequences.
      MemoryError: if the cache and the logits do not fit in free memory, in a run of one process.
    """

    spare = 0  # number of newest tokens that a cache can take back

    def __init__(
        self,
        model: Model,
        mesh: Mesh | None = None,
        compute: Compute | None = None,
        rows: int = 8,
        length: int = 2_048,
        chunk: int = 512,
        whole: bool = True,
        int8: bool = False,
    ):
        for name, size in (("rows", rows), ("length", length), ("chunk", chunk)):
            if not 1 <= size < 2**31:
                raise ValueError(f"{name} must be in [1, 2^31), got {size}")
        mesh = mesh or mesh_of(model)
        if mesh is not None:
            model, mesh = undivided_model(model, mesh)
        self._mesh, self.length, self._chunk = mesh, length, chunk
        with self._on_mesh():
            least = _LEAST_ROWS.get(platform(), 1) * self._divisible(1)
            self.rows = self._divisible(max(rows, least))
            compute = compute or Compute(dtype=usual_dtype())
            self._compute = Compute(dtype=compute.dtype, attention=compute.attention)
            check_length(model, length, self._compute)
            self._weights = weights.ready(model, self._compute.dtype, mesh, whole, int8)
            sizes = self.rows, length, self._compute, self.spare
            caches.check_memory(self._weights.model, mesh, *sizes)
        switches = (length for key in model.reads for length in getattr(key, "switches", ()))
        self._switches = tuple(dict.fromkeys(switches))
        self._vocab = model.vocab

    def __call__(
        self,
        prompts: Sequence[Prompt],
        max_tokens: int,
        sampling: Sampling = Sampling(),
        *,
        samples: int = 1,
        seed: int = 0,
        stop_ids: Sequence[int] = (),
        ids: Sequence[int] | None = None,
    ) -> list[list[Generated]]:
        """Returns `samples` continuations of each prompt, in batches; see `stream`."""
        ids = range(len(prompts)) if ids is None else ids
        together = max(1, self.rows // samples)
        results: list[list[Generated]] = []
        for first in range(0, len(prompts), together):
            batch = slice(first, first + together)
            stream = self.stream(
                prompts[batch], max_tokens, sampling,
                samples=samples, seed=seed, stop_ids=stop_ids, ids=ids[batch], round=ROUND,
            )  # fmt: skip
            rows = stream.finish()
            results += [rows[i : i + samples] for i in range(0, len(rows), samples)]
        return results

    def stream(
        self,
        prompts: Sequence[Prompt],
        max_tokens: int,
        sampling: Sampling = Sampling(),
        *,
        samples: int = 1,
        seed: int = 0,
        stop_ids: Sequence[int] = (),
        ids: Sequence[int] | None = None,
        round: int = 8,
    ) -> "Stream":
        """Streams continuations: a row for each sample of the first prompt, then of the second …

        Args:
          prompts: token ids, at least one each.
          max_tokens: maximum number of tokens of each continuation.
          samples: continuations of each prompt, which is computed once.
          seed, ids: determine the randomness; each prompt has an id, 0, 1, … by default.
          stop_ids: tokens that end a row.
          round: maximum number of tokens between two transfers to the host; the first rounds are
            shorter.

        Raises:
          ValueError: if a prompt is empty, has an id outside the vocabulary, or is too long for
            `max_tokens` more; if there are more rows than the generator has; or if a seed or an id
            is not in [0, 2^32).
        """
        ids = range(len(prompts)) if ids is None else ids
        rows = len(prompts) * samples
        self._check(prompts, max_tokens, samples, rows, [seed, *ids])
        rules = rules_of(sampling)
        with self._on_mesh():
            lengths_P, cache, h_PE = self._prefilled(prompts)
            # Unused rows are stopped from the start.
            prompt_B = np.minimum(np.arange(self.rows) // samples, len(prompts) - 1)
            if not np.array_equal(prompt_B, np.arange(len(lengths_P))):
                row_B = self._placed(prompt_B, (None,))
                cache, h_1BE = caches.rows_of((cache, h_PE[None]), row_B)
                h_PE = h_1BE[0]
            seen_BV = None
            if "repetition_penalty" in rules:
                seen_PV = np.zeros((len(prompts), self._vocab), bool)
                for row, prompt in enumerate(prompts):
                    seen_PV[row, list(prompt)] = True
                seen_BV = self._placed(seen_PV[prompt_B], "batch whole_vocab")
            chooser = self._chooser(sampling, seed, ids, samples, stop_ids)
            lengths_B = self._placed(lengths_P[prompt_B], "batch")
            rest = self._placed(np.arange(self.rows) >= rows, "batch"), seen_BV, chooser
            state, made = first_token(
                self._weights, cache, h_PE, lengths_B, *rest, self._compute, rules
            )
        more = functools.partial(self._more, prompts, chooser, rules, round)
        return Stream(state, made, more, rows, max_tokens, round, frozenset(stop_ids))

    def _chooser(
        self,
        sampling: Sampling,
        seed: int,
        ids: Sequence[int],
        samples: int,
        stop_ids: Sequence[int],
    ) -> Chooser:
        seeds_P2 = _seeds(np.array(seed, np.uint32), np.array(ids, np.uint32), samples)
        row_B = np.minimum(np.arange(self.rows), len(seeds_P2) - 1)
        padding = [NOTHING] * (-len(stop_ids) % _STOP_IDS)
        return Chooser(
            self._placed(np.asarray(seeds_P2)[row_B], ("batch", None)),
            jax.tree.map(lambda x: self._placed(np.asarray(x), ()), numbers_of(sampling)),
            self._placed(np.array([*stop_ids, *padding], np.int32), (None,)),
        )

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
        """Computes a round of up to `limit` tokens after `made`; first stops the rows `stop`.

        `left` counts the tokens that each row still lacks. The round ends before a text exceeds one
        of the lengths in `Rotary.switches`.
        """
        samples = len(made) // len(prompts)
        texts = {
            row: [*prompts[row // samples], *each.tokens]
            for row, each in enumerate(made)
            if self._switches and left[row]
        }
        with self._on_mesh():
            state = self._stopped(state, stop)
            again = {row: text for row, text in texts.items() if len(text) - 1 in self._switches}
            if again:
                cache, _ = self._with(state.cache, [again.get(row, ()) for row in range(self.rows)])
                state = state._replace(cache=cache)
            room = [s + 1 - len(text) for text in texts.values() for s in self._switches]
            limit = min([limit, *(tokens for tokens in room if tokens > 0)])
            n = self._placed(np.array(limit, np.int32), ())
            state, new = next_tokens(self._weights, state, n, chooser, self._compute, rules, size)
            return state, new, limit

    def _stopped(self, state: State, rows: list[int]) -> State:
        if not rows:
            return state
        ends_B = self._placed(np.isin(np.arange(self.rows), rows), "batch")
        return state._replace(stopped_B=state.stopped_B | ends_B)

    def _prefilled(self, prompts: Sequence[Prompt]) -> tuple[np.ndarray, Any, jax.Array]:
        """Computes the prompts; returns their lengths, a cache and their last tokens' features.

        Dummy prompts are added so that the mesh divides their number, or groups on a CPU are full.
        """
        rows = self._divisible(len(prompts))
        if platform() == "cpu" and self._divisible(1) == 1:
            longest = min(self._chunk, max(map(len, prompts)))
            rows = min(rows, max(1, _TOKENS_IN_CACHE // longest))
        texts = [*prompts, *[(0,)] * (-len(prompts) % rows)]
        starts = range(0, len(texts), rows)
        groups = [self._with(None, texts[first : first + rows]) for first in starts]
        lengths_P = np.array([*map(len, texts)], np.int32)
        if len(groups) == 1:
            return lengths_P, *groups[0]
        parts, features = zip(*groups, strict=True)
        return lengths_P, *caches.concatenate_caches(parts, features)

    def _with(self, cache: Any, texts: Sequence[Prompt]) -> tuple[Any, jax.Array]:
        """Computes texts in the rows of `cache` (a new one if `None`), from their first tokens on.

        Returns the cache and the features of the last tokens. Rows with empty texts stay unchanged.
        """
        rows = len(texts)
        lengths_B = np.array([*map(len, texts)], np.int32)
        tokens_BS = np.zeros((rows, self.length), np.int32)
        for row, text in enumerate(texts):
            tokens_BS[row, : len(text)] = text
        lengths = self._placed(lengths_B, "batch")
        h_BE: Any = None
        start, longest = 0, int(lengths_B.max())
        while start < longest:
            size = min(self._chunk, max(_SHORTEST_CHUNK, 1 << (longest - start - 1).bit_length()))
            chunk_BC = np.zeros((rows, size), np.int32)
            part_BC = tokens_BS[:, start : start + size]
            chunk_BC[:, : part_BC.shape[1]] = part_BC
            part = self._placed(chunk_BC, "batch seq"), self._placed(np.array(start, np.int32), ())
            cache, h_BE = prefill(
                self._weights, cache, h_BE, *part, lengths, self.length, self._compute, self.spare
            )
            start += size
        return cache, h_BE

    def _check(
        self,
        prompts: Sequence[Prompt],
        max_tokens: int,
        samples: int,
        rows: int,
        seeds: Sequence[int],
    ) -> None:
        if max_tokens < 1 or samples < 1:
            raise ValueError(
                f"max_tokens and samples must be at least 1, got {max_tokens} and {samples}"
            )
        if not 1 <= rows <= self.rows:
            raise ValueError(
                f"{len(prompts)} prompts with {samples} samples each, but the generator has "
                f"{self.rows} rows; give fewer, or make it with more rows"
            )
        if not all(0 <= seed < 2**32 for seed in seeds):
            raise ValueError(f"seed and ids must be in [0, 2^32), got {seeds[0]} and {seeds[1:]}")
        for number, prompt in enumerate(prompts):
            check_prompt(f"prompt {number}", prompt, max_tokens, self._vocab, self.length)

    def _divisible(self, rows: int) -> int:
        """Rounds `rows` up to a multiple that the mesh can split."""
        parts = 1 if self._mesh is None else num_shards(COMPUTE["batch"], self._mesh)
        return -(-rows // parts) * parts

    def _placed(self, x: np.ndarray, axes: str | Axes) -> jax.Array:
        if self._mesh is None:
            return jnp.asarray(x)
        return jax.device_put(x, sharding(axes, self._mesh))

    def _on_mesh(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self._mesh is None else jax.set_mesh(self._mesh)


@functools.partial(jax.jit, static_argnums=2)
def _seeds(seed: UInt32[Array, ""], ids_P: UInt32[Array, "p"], samples: int) -> jax.Array:
    """Returns each row's key data, derived from seed, prompt id and sample number."""

    def of_prompt(id: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(seed), id)
        return jax.vmap(lambda n: jax.random.key_data(jax.random.fold_in(key, n)))(
            jnp.arange(samples)
        )

    return jax.vmap(of_prompt)(ids_P).reshape(-1, 2)


def check_prompt(name: str, prompt: Prompt, max_tokens: int, vocab: int, length: int) -> None:
    """Raises ValueError if a prompt is empty, has an unknown token, or leaves too little room."""
    if len(prompt) == 0:
        raise ValueError(f"{name} is empty; every prompt needs at least one token")
    if wrong := [token for token in prompt if not 0 <= token < vocab]:
        raise ValueError(
            f"{name} has the token {wrong[0]}, but the model's vocabulary ends at {vocab - 1}"
        )
    if len(prompt) + max_tokens > length:
        raise ValueError(
            f"{name} has {len(prompt):,} tokens, and {max_tokens:,} more are to follow, but the "
            f"length is {length:,}"
        )


def generate(
    model: Model,
    prompts: Sequence[Prompt],
    max_tokens: int,
    sampling: Sampling = Sampling(),
    *,
    samples: int = 1,
    seed: int = 0,
    stop_ids: Sequence[int] = (),
    mesh: Mesh | None = None,
    compute: Compute | None = None,
) -> list[list[Generated]]:
    """Returns `samples` continuations of each prompt, all computed in one batch.

    For several calls, use `Generator`.
    """
    longest = max(map(len, prompts), default=0) + max_tokens
    length = padded_length(model, longest, _LENGTHS)
    generator = Generator(model, mesh, compute, max(1, len(prompts) * samples), length)
    return generator(prompts, max_tokens, sampling, samples=samples, seed=seed, stop_ids=stop_ids)
