"""What a run shows while it goes on: one live line on a terminal, plain lines in a log file."""

import os
import sys
import time
from collections.abc import Callable
from typing import TextIO

from lmlib.quantities import count_text

BAR_WIDTH = 20
REDRAW_SECONDS = 0.1  # of the live line
PLAIN_LINES_AT_FIRST = 3
PLAIN_LINE_SECONDS = 10.0  # between plain lines from then on
_CLEAR_LINE = "\r\x1b[K"  # the end of what was there may be longer than what replaces it


class Progress:
    """Bar, step, loss, tokens per second, MFU and time left.

    On a terminal the line is redrawn in place. Elsewhere the first steps, then one step in about
    ten seconds, and the last get a line each.

        with Progress(steps=1000) as progress:
            progress.update(1, loss=10.2, tokens_per_second=1e6)
    """

    def __init__(
        self,
        steps: int,
        stream: TextIO | None = sys.stderr,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Shows nothing until the first `update`.

        Args:
          steps: the last step of the run.
          stream: where to write; `None` writes nothing, for all processes but one.
          clock: the time in seconds.
        """
        self._steps = steps
        self._stream = stream
        self._clock = clock
        self._live = stream is not None and stream.isatty()
        self._line = ""
        self._lines_written = 0
        self._written_at = -float("inf")
        self._first: tuple[int, float] | None = None

    def update(
        self,
        step: int,
        *,
        loss: float,
        tokens_per_second: float,
        mfu: float | None = None,
    ) -> None:
        """Records that `step` is done; writes unless a line was written just before.

        Time left is that of the steps since the first update, so compilation is not in it.
        """
        now = self._clock()
        if self._first is None:
            self._first = (step, now)
        bar = ""
        if self._live:
            done = BAR_WIDTH * step // max(self._steps, 1)
            bar = f"[{'=' * done}{' ' * (BAR_WIDTH - done)}] "
        parts = [
            f"{bar}step {step:,}/{self._steps:,}",
            f"loss {loss:.4f}",
            f"{count_text(tokens_per_second)} tokens/s",
            *([] if mfu is None else [f"MFU {mfu:.1%}"]),
            *self._time_left(step, now),
        ]
        self._line = "  ".join(parts)
        begins = not self._live and self._lines_written < PLAIN_LINES_AT_FIRST
        interval = REDRAW_SECONDS if self._live else PLAIN_LINE_SECONDS
        if begins or step >= self._steps or now - self._written_at >= interval:
            self._written_at = now
            self._lines_written += 1
            self._write(f"{_CLEAR_LINE}{self._fitting()}" if self._live else f"{self._line}\n")

    def message(self, text: str) -> None:
        """Writes `text` on lines of its own, above the live line."""
        if self._live:
            self._write(f"{_CLEAR_LINE}{text}\n{self._fitting()}")
        else:
            self._write(f"{text}\n")

    def close(self) -> None:
        """Leaves the last state of the live line on the screen, and the cursor below it."""
        if self._live and self._line:
            self._write(f"{_CLEAR_LINE}{self._fitting()}\n")
        self._line = ""

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _time_left(self, step: int, now: float) -> list[str]:
        assert self._first is not None
        first_step, first_time = self._first
        if step <= first_step:
            return []
        seconds = round((now - first_time) / (step - first_step) * (self._steps - step))
        return [f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02} left"]

    def _fitting(self) -> str:
        """The live line, cut to the terminal: a line that wraps cannot be redrawn."""
        assert self._stream is not None
        width = os.get_terminal_size(self._stream.fileno()).columns
        return self._line[: width - 1] if width else self._line  # 0: the terminal does not say

    def _write(self, text: str) -> None:
        if self._stream is not None:
            self._stream.write(text)
            self._stream.flush()
