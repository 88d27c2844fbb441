"""Answers in a terminal, shown while they are generated."""

import dataclasses
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from typing import TextIO

from lmlib.generate import Generator
from lmlib.terminal.quantities import duration_text
from runner.errors import ConfigError
from runner.inference.answer import Answer, DecodingOptions
from runner.inference.prompts import Reader

_PREPARED = 512  # tokens of a prompt that is compiled in advance


@dataclasses.dataclass(frozen=True)
class Terminal:
    """Asks a model and shows its answers. Text goes to `out`, messages to `told`."""

    generator: Generator
    reader: Reader
    manner: DecodingOptions
    out: TextIO = dataclasses.field(default_factory=lambda: sys.stdout)
    told: TextIO = dataclasses.field(default_factory=lambda: sys.stderr)

    def prepare(self, prompt: Sequence[int]) -> None:
        """Compiles the programs for an answer, so that later times exclude compilation."""
        began = time.perf_counter()
        manner = dataclasses.replace(self.manner, max_tokens=2)
        room = self.generator.length - manner.max_tokens
        if room > 0:
            for _ in manner.rounds(self.generator, [prompt[: min(room, _PREPARED)]], [0]):
                pass
            self.tell(f"[ready after {duration_text(time.perf_counter() - began)}]")

    def show(self, prompt: Sequence[int], number: int, echo: str = "") -> list[Answer]:
        """Shows the answers to a prompt, the first as it is generated, then the others.

        Ctrl-C ends all answers. Raises ConfigError if the prompt leaves no room for an answer.

        Args:
          number: number of the prompt, which seeds its randomness.
          echo: text written before each answer.
        """
        room = self.generator.length - len(prompt)
        if room < 1:
            raise ConfigError(
                f"{len(prompt):,} tokens leave no room for an answer in "
                f"--length={self.generator.length}"
            )
        manner = dataclasses.replace(self.manner, max_tokens=min(self.manner.max_tokens, room))
        began, first, at_first = time.perf_counter(), 0.0, 0
        page = _Page(self.out, manner.samples, echo)
        answers: list[Answer] = []
        try:
            for answers in manner.rounds(self.generator, [prompt], [number]):
                if not first:
                    first, at_first = time.perf_counter(), _tokens(answers)
                page.write(answers)
        except KeyboardInterrupt:
            for answer in answers:
                answer.interrupt()
            page.write(answers)
        if answers:
            seconds = time.perf_counter() - first
            tokens = _tokens(answers)
            rate = f", {(tokens - at_first) / seconds:,.1f} tokens/s" if tokens > at_first else ""
            self.tell(f"[{tokens:,} tokens{rate}; the first after {duration_text(first - began)}]")
        return answers

    def converse(self, read: Callable[[], str], chat: bool) -> None:
        """Answers each text that `read` returns until it raises EOFError. Ctrl-C ends an answer.

        Args:
          chat: True if the texts are turns of a chat; otherwise each text is continued.
        """
        turns: list[dict[str, str]] = []
        for number in itertools.count():
            try:
                if not (text := read()):
                    continue
                if not chat:
                    self.show(self.reader.of_text(text), number)
                    continue
                asked = [*turns, {"role": "user", "content": text}]
                answers = self.show(self.reader.of_chat(asked), number)
                if answers:
                    said = answers[0].text.strip()  # the template adds the surrounding space
                    turns = [*asked, {"role": "assistant", "content": said}]
            except EOFError:
                self.tell("")
                return
            except KeyboardInterrupt:
                self.tell("")
            except ConfigError as error:
                self.tell(f"error: {error}{'; the chat begins anew' if turns else ''}")
                turns = []

    def tell(self, line: str) -> None:
        print(line, file=self.told, flush=True)


class _Page:
    """Writes several answers one after the other."""

    def __init__(self, out: TextIO, samples: int, echo: str):
        self._out, self._samples, self._echo = out, samples, echo
        self._number = 0  # the current answer
        self._written = -1  # characters written of it; -1: not even its heading

    def write(self, answers: Sequence[Answer]) -> None:
        """Writes the text that is new since the last call."""
        while self._number < len(answers):
            answer = answers[self._number]
            if self._written < 0:
                if self._samples > 1:
                    self._out.write(f"--- {self._number + 1} of {self._samples}\n")
                self._out.write(self._echo)
                self._written = 0
            self._out.write(answer.text[self._written :])
            self._written = len(answer.text)
            if answer.ended is None:
                break
            self._out.write("" if answer.text.endswith("\n") else "\n")
            self._number, self._written = self._number + 1, -1
        self._out.flush()


def _tokens(answers: Sequence[Answer]) -> int:
    return sum(len(answer.tokens) for answer in answers)
