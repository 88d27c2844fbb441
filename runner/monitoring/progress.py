"""Shows the progress of a run: a live line on a terminal, plain lines elsewhere."""

import contextlib
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TextIO

from lmlib.terminal.quantities import count_text
from lmlib.terminal.table import wrapped
from runner.errors import WorkdirLost
from runner.monitoring.progress_line import LiveLine, bar

REDRAW_SECONDS = 0.1  # minimum time between redraws of the live line
PLAIN_LINES_AT_FIRST = 3
PLAIN_LINE_SECONDS = 10.0  # minimum time between later plain lines


class Progress:
    """Shows a progress bar, step, loss, tokens per second, MFU and the remaining time.

    On a terminal, one line is redrawn in place. Elsewhere, a line is written for the first few
    steps, then about every ten seconds, and for the last step.

        with Progress(steps=1000) as progress:
            progress.update(1, loss=10.2, seconds=0.5, tokens_per_second=1e6)
    """

    def __init__(
        self,
        steps: int,
        stream: TextIO | None = sys.stderr,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Shows nothing until the first `update`; `steps` is the last step of the run.

        A `stream` of `None` shows nothing, on all processes except one.
        """
        self._steps = steps
        self._shown = LiveLine(stream)
        self._clock = clock
        self._redrawn_at = -float("inf")
        self._plain_lines, self._plain_line_at = 0, 0.0
        self._first: tuple[int, float] | None = None
        self._log: Path | None = None
        self._before_log: list[tuple[float, str]] = []  # messages, and when they were written

    def keep(self, workdir: Path, check: Callable[[], None] = lambda: None) -> None:
        """Also writes plain lines to `workdir/run.log`, starting with all messages so far.

        Args:
          check: called before each write; raises an error to prevent it.
        """
        self._log, self._check = workdir / "run.log", check
        with contextlib.suppress(OSError, WorkdirLost):
            # Separates this start from the previous one, whose last line may be incomplete.
            if self._log.stat().st_size:
                check()
                with self._log.open("a") as file:
                    file.write("\n")
        self._record(f"=== start of process {os.getpid()} on {socket.gethostname()}")
        for at, text in self._before_log:
            self._record(text, at)

    def _record(self, text: str, at: float | None = None) -> None:
        """Appends each line of `text` to run.log with a UTC timestamp, of `at` or now.

        Lines are dropped if the storage fails or another run has taken over the workdir.
        """
        if self._log is None:
            return
        stamp = time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(at))
        with contextlib.suppress(OSError, WorkdirLost):
            self._check()
            # Opened for each write. There are few lines, and nothing needs to be closed at the end.
            with self._log.open("a", encoding="utf-8") as file:
                file.write("".join(f"{stamp}  {line}\n" for line in text.splitlines()))

    def update(
        self,
        step: int,
        *,
        loss: float,
        seconds: float,
        tokens_per_second: float,
        mfu: float | None = None,
        others: Mapping[str, float] | None = None,
        loss_name: str = "loss",
    ) -> None:
        """Records a completed step, and shows it unless a line was written just before.

        The remaining time is estimated from the steps since the first update, so it excludes
        compilation. At the first update it is estimated from `seconds`.

        Args:
          seconds: the duration of this step.
          others: metrics to show after the loss, by name.
          loss_name: the name to show for the loss.
        """
        now = self._clock()
        if self._first is None:
            self._first = (step, now)
        first_step, first_time = self._first
        if step > first_step:
            seconds = (now - first_time) / (step - first_step)
        parts = [
            f"step {step:,}/{self._steps:,}",
            f"{loss_name} {loss:.4f}",
            *(f"{name.replace('_', ' ')} {value:.4f}" for name, value in (others or {}).items()),
            f"{count_text(tokens_per_second)} tokens/s",
            *([] if mfu is None else [f"MFU {mfu:.1%}"]),
            _left(seconds * (self._steps - step)),
        ]
        line = "  ".join(parts)
        always = step >= self._steps
        first_few = self._plain_lines < PLAIN_LINES_AT_FIRST
        if always or first_few or now - self._plain_line_at >= PLAIN_LINE_SECONDS:
            self._plain_lines, self._plain_line_at = self._plain_lines + 1, now
            self._record(line)
            if not self._shown.live:
                self._shown.message(line)
        self._shown.line = f"{bar(step / max(self._steps, 1))} {line}"
        if self._shown.live and (always or now - self._redrawn_at >= REDRAW_SECONDS):
            self._redrawn_at = now
            self._shown.draw()

    def validated(self, step: int, found: str) -> None:
        """Shows the validation result `found` after `step`, on its own line."""
        self.message(wrapped(f"step {step:,}/{self._steps:,}  {found}"))

    def message(self, text: str) -> None:
        """Writes `text` on separate lines, above the live line."""
        self._record(text)
        if self._log is None:
            self._before_log.append((time.time(), text))
        self._shown.message(text)

    def close(self) -> None:
        """Leaves the live line on the screen, and moves the cursor below it."""
        self._shown.close()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        self.close()
        # After WorkdirLost, the log may belong to another run.
        if kind is not None and not issubclass(kind, WorkdirLost):
            self._record(f"ended by {kind.__name__}: {error}")


def _left(seconds: float) -> str:
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02} left"
