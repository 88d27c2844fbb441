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
from runner.inference.answer import Answer, DecodingOptions, acceptance_text
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
        began, first, at_first, written = time.perf_counter(), 0.0, 0, 0
        answers: list[Answer] = []

        def begin(answer: int) -> None:
            several = f"--- {answer + 1} of {manner.samples}\n" if manner.samples > 1 else ""
            self.out.write(f"{several}{echo}")

        def tokens() -> int:
            return sum(len(answer.tokens) for answer in answers)

        try:
            for answers in manner.rounds(self.generator, [prompt], [number]):
                if not first:
                    first, at_first = time.perf_counter(), tokens()
                    begin(0)
                self.out.write(answers[0].text[written:])
                written = len(answers[0].text)
                self.out.flush()
        except KeyboardInterrupt:
            for answer in answers:
                answer.interrupt()
        for row, answer in enumerate(answers):
            if row:
                begin(row)
            rest = answer.text if row else answer.text[written:]
            self.out.write(rest if answer.text.endswith("\n") else f"{rest}\n")
        self.out.flush()
        if answers:
            seconds, more = time.perf_counter() - first, tokens() - at_first
            rate = f", {more / seconds:,.1f} tokens/s" if more else ""
            drafts = ([getattr(each, name) for each in answers] for name in ("drafted", "accepted"))
            rate += acceptance_text(*map(sum, drafts))
            self.tell(
                f"[{tokens():,} tokens{rate}; the first after {duration_text(first - began)}]"
            )
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
