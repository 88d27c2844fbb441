"""What a run shows while it goes on: one live line on a terminal, plain lines in a log file."""

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TextIO

from lmlib.terminal.quantities import count_text
from runner.errors import WorkdirLost
from runner.monitoring.live_line import CLEAR_LINE, fitting
from runner.monitoring.run_log import RunLog

BAR_WIDTH = 20
REDRAW_SECONDS = 0.1  # of the live line
PLAIN_LINES_AT_FIRST = 3
PLAIN_LINE_SECONDS = 10.0  # between plain lines from then on


class Progress:
    """Bar, step, loss, tokens per second, MFU and time left.

    On a terminal the line is redrawn in place. Elsewhere the first steps, then one step in about
    ten seconds, and the last get a line each.

        with Progress(steps=1000) as progress:
            progress.update(1, loss=10.2, seconds=0.5, tokens_per_second=1e6)
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
        self._redrawn_at = -float("inf")
        self._stream_pace, self._log_pace = _Pace(), _Pace()
        self._first: tuple[int, float] | None = None
        self._log: RunLog | None = None
        self._before_log: list[tuple[float, str]] = []  # messages, and when they were written

    def keep(self, workdir: Path, check: Callable[[], None] = lambda: None) -> None:
        """From now on `workdir/run.log` gets the plain lines too, each after a `check`; first the
        messages so far."""
        self._log = RunLog(workdir, check=check)
        for at, text in self._before_log:
            self._log.write(text, at)

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
        """Records that `step` is done; writes unless a line was written just before. After the
        loss, under `loss_name`, come the metrics of `others` by name.

        The time left follows from the steps since the first update, so compilation is not in it; at
        the first update it is guessed from that step's own `seconds`.
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
        if self._log is not None and self._log_pace.has_turn(now, always):
            self._log.write(line)
        if not self._live:
            if self._stream_pace.has_turn(now, always):
                self._write(f"{line}\n")
            return
        done = BAR_WIDTH * step // max(self._steps, 1)
        self._line = f"[{'=' * done}{' ' * (BAR_WIDTH - done)}] {line}"
        if always or now - self._redrawn_at >= REDRAW_SECONDS:
            self._redrawn_at = now
            self._write(f"{CLEAR_LINE}{self._fitting()}")

    def validated(self, step: int, found: str) -> None:
        """Shows what validation `found` after `step`, on a line of its own."""
        self.message(f"step {step:,}/{self._steps:,}  {found}")

    def message(self, text: str) -> None:
        """Writes `text` on lines of its own, above the live line."""
        if self._log is not None:
            self._log.write(text)
        else:
            self._before_log.append((time.time(), text))
        if self._live:
            self._write(f"{CLEAR_LINE}{text}\n{self._fitting()}")
        else:
            self._write(f"{text}\n")

    def close(self) -> None:
        """Leaves the last state of the live line on the screen, and the cursor below it."""
        if self._live and self._line:
            self._write(f"{CLEAR_LINE}{self._fitting()}\n")
        self._line = ""

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        self.close()
        taken = kind is not None and issubclass(kind, WorkdirLost)
        if kind is not None and self._log is not None and not taken:  # else it is another's
            self._log.write(f"ended by {kind.__name__}: {error}")

    def _fitting(self) -> str:
        assert self._stream is not None
        return fitting(self._line, self._stream)

    def _write(self, text: str) -> None:
        if self._stream is not None:
            self._stream.write(text)
            self._stream.flush()


class _Pace:
    """Which steps get a plain line: the first few, then one in about ten seconds."""

    def __init__(self) -> None:
        self._lines = 0
        self._written_at = -float("inf")

    def has_turn(self, now: float, always: bool) -> bool:
        """Whether a step that is done `now` (seconds) gets a line; `always` says that it does."""
        begins = self._lines < PLAIN_LINES_AT_FIRST
        if not (always or begins or now - self._written_at >= PLAIN_LINE_SECONDS):
            return False
        self._lines += 1
        self._written_at = now
        return True


def _left(seconds: float) -> str:
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02} left"
