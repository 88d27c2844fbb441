"""Likelihoods and continuations of token ids, for the questions of tasks."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lmlib.compute import Compute
from lmlib.evaluate.scoring import Scorer
from lmlib.evaluate.windows import Packing, Window
from lmlib.generate import Generator, Sampling
from lmlib.models.model import check_length
from runner.inference.loaded import Loaded
from runner.monitoring.progress_line import now_and_then

Ids = Sequence[int]

_SHORTEST = 64  # tokens of a row
_BATCH_TOKENS = 16_384
_ROWS = 16  # continuations generated together


class Answering:
    """Computes likelihoods of continuations, and generates continuations.

    Raises ValueError if the model cannot take inputs of this length.

    Args:
      decode: converts ids to text, with the names of special tokens.
      end_ids: tokens that end a text.
      length: maximum length of the model's input in tokens.
      show: called with progress lines.
    """

    def __init__(
        self,
        loaded: Loaded,
        decode: Callable[[list[int]], str],
        end_ids: Sequence[int],
        length: int,
        show: Callable[[str], None],
    ):
        check_length(loaded.model, length, loaded.compute)
        self.length = length
        self._model, self._mesh, self._compute = loaded.model, loaded.mesh, loaded.compute
        self._scorer = Scorer(loaded.mesh, loaded.compute)
        self._generator: Generator | None = None
        self._decode, self._end_ids, self._show = decode, tuple(end_ids), show

    def likelihoods(self, asked: Sequence[tuple[Ids, Ids]]) -> list[tuple[float, bool]]:
        """Returns each continuation's log-probability in nats, and True if it is the greedy one.

        Both have a token, and a continuation has up to `length`. Contexts that are too long are cut
        at the beginning. Raises ValueError if an id is not in the model's vocabulary.
        """
        windows = []
        for number, (context, continuation) in enumerate(asked):
            self._check([*context, *continuation])
            ids = np.array([*context, *continuation][-self.length - 1 :])
            windows.append(Window(number, ids, len(ids) - 1 - len(continuation)))
        if not windows:
            return []
        windows.sort(key=lambda window: -window.inputs)
        found: dict[int, tuple[float, bool]] = {}
        show = now_and_then(self._show)
        for batch, placed in self._packing(windows).batches(windows):
            nats_BS, likeliest_BS = self._scorer(self._model, batch)
            for window, row, start in placed:
                counted = row, slice(start + window.first, start + window.inputs)
                nats = float(nats_BS[counted].sum(dtype=np.float64))
                found[window.document] = -nats, bool(likeliest_BS[counted].all())
            show(lambda: f"{len(found):,} of {len(windows):,} likelihoods")
        return [found[number] for number in range(len(windows))]

    def continuations(
        self,
        prompts: Sequence[Ids],
        max_tokens: int,
        until: Sequence[str],
        sampling: dict[str, Any],
        numbers: Sequence[int],
        made_tokens: int,
    ) -> list[list[int]]:
        """Continues each prompt until its text contains one of `until`, or an end token comes.

        Prompts have a token; prompts that leave no room are cut at the beginning. Raises ValueError
        if `length` leaves no room for a token of the prompt, an id is not in the model's
        vocabulary, or the model cannot compute sequences of this length.

        Args:
          max_tokens: new tokens for which a sequence of `length` must have room.
          sampling: settings of `lmlib.generate.Sampling`.
          numbers: numbers of the prompts, which seed their randomness.
          made_tokens: maximum number of new tokens; if it exceeds `max_tokens`, sequences grow
            beyond `length`.
        """
        if not 0 < max_tokens < self.length:
            raise ValueError(
                f"{max_tokens:,} tokens are to be made, but sequences have {self.length:,} tokens, "
                "prompt included: set max_gen_toks of the task lower, or --sequence_length higher"
            )
        cut = [list(prompt[max_tokens - self.length :]) for prompt in prompts]
        for prompt in cut:
            self._check(prompt)
        longest_first = sorted(range(len(cut)), key=lambda i: -len(cut[i]))
        generator = self._generator_of(len(cut[longest_first[0]]) + made_tokens)
        found: dict[int, list[int]] = {}
        show = now_and_then(self._show)
        for begin in range(0, len(cut), generator.rows):
            batch = longest_first[begin : begin + generator.rows]
            stream = generator.stream(
                [cut[i] for i in batch],
                made_tokens,
                Sampling(**sampling),
                stop_ids=self._end_ids,
                ids=[numbers[i] for i in batch],
            )
            for _ in stream:
                for row, made in enumerate(stream.so_far):
                    if not made.stopped and self._has(made.tokens, until):
                        stream.stop(row)
            for i, made in zip(batch, stream.so_far, strict=True):
                found[i] = self._up_to(made.tokens, until)
            show(lambda: f"{len(found):,} of {len(cut):,} continuations")
        return [found[i] for i in range(len(cut))]

    def _check(self, ids: Ids) -> None:
        if max(ids) >= self._model.vocab:
            raise ValueError(
                f"the tokenizer makes the id {max(ids)}, but the model's vocabulary ends at "
                f"{self._model.vocab - 1}: it is not the model's tokenizer"
            )

    def _packing(self, windows: Sequence[Window]) -> Packing:
        """Chooses one of a few batch shapes, since each shape is compiled."""
        length = min(self.length, max(_SHORTEST, _power_of_two(windows[0].inputs)))
        divisor = self._scorer.divisor
        needed = sum(window.inputs for window in windows) / (length * divisor)
        rows = min(_power_of_two(needed), max(1, _BATCH_TOKENS // (length * divisor)))
        return Packing(divisor * rows, length)

    def _generator_of(self, length: int) -> Generator:
        if self._generator is None or self._generator.length < length:
            length = max(length, min(self.length, max(_SHORTEST, _power_of_two(length))))
            compute = Compute(dtype=self._compute.dtype)
            self._generator = Generator(self._model, self._mesh, compute, _ROWS, length)
        return self._generator

    def _has(self, tokens: list[int], until: Sequence[str]) -> bool:
        text = self._decode(tokens)
        return any(term in text for term in until)

    def _up_to(self, tokens: list[int], until: Sequence[str]) -> list[int]:
        """Returns the tokens up to the first one that completes one of `until`."""
        if not self._has(tokens, until):
            return tokens
        return next(tokens[:n] for n in range(len(tokens) + 1) if self._has(tokens[:n], until))


def _power_of_two(least: float) -> int:
    return 1 << max(0, math.ceil(least) - 1).bit_length()
