"""Answers task questions given as token ids: one process asks, and all compute."""

import json
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from lmlib.compute import Compute
from lmlib.evaluate.scoring import Scorer
from lmlib.evaluate.windows import Packing, Window
from lmlib.generate import Generator, Sampling
from lmlib.models.model import check_length
from runner.inference.loaded import Loaded
from runner.monitoring.telling import now_and_then

Result = TypeVar("Result")
Ids = Sequence[int]

_SHORTEST = 64  # tokens of a row
_BATCH_TOKENS = 16_384
_ROWS = 16  # continuations generated together


class Answering:
    """Computes likelihoods of continuations, and generates continuations.

    Args:
      decode: converts ids to text, with the names of special tokens.
      end_ids: tokens that end a text.
      length: maximum length of the model's input in tokens.
      show: called with progress lines.

    Raises:
      ValueError: if the model cannot take inputs of this length.
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
        self._model, self._vocab = loaded.model, loaded.model.vocab
        self._mesh, self._compute = loaded.mesh, loaded.compute
        self._scorer = Scorer(loaded.mesh, loaded.compute)
        self._generator: Generator | None = None
        self._decode, self._end_ids, self._show = decode, tuple(end_ids), show
        self._broken = False

    def ask(self, question: Callable[[], Result]) -> Result | None:
        """Runs `question` on the first process; every process must call `ask`.

        `question` may call the other methods; the other processes then take part. Returns its
        result on the first process and `None` on the others.
        """
        if jax.process_index() > 0:
            while (call := _told(None)) is not None:
                self._computed(*call)
            return None
        try:
            return question()
        finally:
            if not self._broken:  # otherwise the other processes have raised the same error
                _told(None)

    def likelihoods(self, asked: Sequence[tuple[Ids, Ids]]) -> list[tuple[float, bool]]:
        """Returns each continuation's log-probability in nats, and True if it is the greedy one.

        Contexts that are too long are cut at the beginning. Raises ValueError if a context or a
        continuation is empty, a continuation is longer than `length`, or an id is not in the
        model's vocabulary.
        """
        for context, continuation in asked:
            if not context or not 0 < len(continuation) <= self.length:
                raise ValueError(
                    f"a context of {len(context):,} tokens and a continuation of "
                    f"{len(continuation):,}: both need one, and a continuation has up to "
                    f"{self.length:,}"
                )
            self._check(context)
            self._check(continuation)
        return [tuple(each) for each in self._together("likelihoods", asked=asked)] if asked else []

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

        Prompts that leave no room are cut at the beginning.

        Args:
          max_tokens: new tokens for which a sequence of `length` must have room.
          sampling: settings of `lmlib.generate.Sampling`.
          numbers: numbers of the prompts, which seed their randomness.
          made_tokens: maximum number of new tokens; if it exceeds `max_tokens`, sequences grow
            beyond `length`.

        Raises:
          ValueError: if `length` leaves no room for a token of the prompt, a prompt is empty, an id
            is not in the model's vocabulary, or the model cannot compute sequences of this length.
        """
        if not 0 < max_tokens < self.length:
            raise ValueError(
                f"{max_tokens:,} tokens are to be made, but sequences have {self.length:,} tokens, "
                "prompt included: set max_gen_toks of the task lower, or --sequence_length higher"
            )
        prompts = [list(prompt[max_tokens - self.length :]) for prompt in prompts]
        for prompt in prompts:
            if not prompt:
                raise ValueError("a prompt has no token")
            self._check(prompt)
        Sampling(**sampling)
        return self._together(
            "continuations",
            prompts=prompts,
            max_tokens=made_tokens,
            until=list(until),
            sampling=sampling,
            numbers=list(numbers),
        )

    def _check(self, ids: Ids) -> None:
        if max(ids) >= self._vocab:
            raise ValueError(
                f"the tokenizer makes the id {max(ids)}, but the model's vocabulary ends at "
                f"{self._vocab - 1}: it is not the model's tokenizer"
            )

    def _together(self, name: str, **arguments: Any) -> Any:
        if jax.process_count() > 1:
            _told((name, arguments))
        try:
            return self._computed(name, arguments)
        except BaseException:
            self._broken = True
            raise

    def _computed(self, name: str, arguments: dict[str, Any]) -> Any:
        if name == "likelihoods":
            return self._likelihoods(**arguments)
        return self._continuations(**arguments)

    def _likelihoods(self, asked: Sequence[tuple[Ids, Ids]]) -> list[tuple[float, bool]]:
        windows = []
        for number, (context, continuation) in enumerate(asked):
            ids = np.array([*context, *continuation][-self.length - 1 :])
            windows.append(Window(number, ids, len(ids) - 1 - len(continuation)))
        windows.sort(key=lambda window: -window.inputs)
        found: dict[int, tuple[float, bool]] = {}
        tell = self._telling("likelihoods", len(windows))
        for batch, placed in self._packing(windows).batches(windows):
            nats_BS, likeliest_BS = self._scorer(self._model, batch)
            for window, row, start in placed:
                counted = row, slice(start + window.first, start + window.inputs)
                nats = float(nats_BS[counted].sum(dtype=np.float64))
                found[window.document] = -nats, bool(likeliest_BS[counted].all())
            tell(len(found))
        return [found[number] for number in range(len(windows))]

    def _packing(self, windows: Sequence[Window]) -> Packing:
        """Chooses one of a few batch shapes, since each shape is compiled."""
        length = min(self.length, max(_SHORTEST, _power_of_two(windows[0].inputs)))
        divisor = self._scorer.divisor
        needed = sum(window.inputs for window in windows) / (length * divisor)
        rows = min(_power_of_two(needed), max(1, _BATCH_TOKENS // (length * divisor)))
        return Packing(divisor * rows, length)

    def _continuations(
        self,
        prompts: list[list[int]],
        max_tokens: int,
        until: list[str],
        sampling: dict[str, Any],
        numbers: list[int],
    ) -> list[list[int]]:
        longest_first = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
        generator = self._generator_of(len(prompts[longest_first[0]]) + max_tokens)
        found: dict[int, list[int]] = {}
        tell = self._telling("continuations", len(prompts))
        for begin in range(0, len(prompts), generator.rows):
            batch = longest_first[begin : begin + generator.rows]
            stream = generator.stream(
                [prompts[i] for i in batch],
                max_tokens,
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
            tell(len(found))
        return [found[i] for i in range(len(prompts))]

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

    def _telling(self, what: str, count: int) -> Callable[[int], None]:
        show = now_and_then(self._show if jax.process_index() == 0 else lambda line: None)
        return lambda done: show(lambda: f"{done:,} of {count:,} {what}")


def _power_of_two(least: float) -> int:
    return 1 << max(0, math.ceil(least) - 1).bit_length()


def _told(call: tuple[str, dict[str, Any]] | None) -> Any:
    """Broadcasts a JSON value from the first process to all."""
    if jax.process_count() == 1:
        return call
    content = np.frombuffer(json.dumps(call).encode(), np.uint8)
    length = int(multihost_utils.broadcast_one_to_all(np.int32(content.size)))
    padded = np.resize(content, length)
    return json.loads(np.asarray(multihost_utils.broadcast_one_to_all(padded)).tobytes())
