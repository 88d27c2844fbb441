"""A run on the terminal: a live line while it goes on, plain lines where nobody watches."""

import time
from typing import Self, TextIO

BAR_WIDTH = 24
LIVE_SECONDS = 0.1  # at least so long between two updates of the live line
PLAIN_SECONDS = 10.0  # and so long between two plain lines


class Progress:
    """Shows step, loss, speed and time left; a context manager.

    On a terminal it rewrites one line. Elsewhere it prints a line for the first step, the last, and
    every ten seconds. With `stream=None` it is silent.
    """

    def __init__(self, steps: int, stream: TextIO | None):
        self._steps = steps
        self._stream = stream
        self._live = stream is not None and stream.isatty()
        self._shown = ""
        self._last_time = -float("inf")
        self._began: tuple[int, float] | None = None  # first step seen and when

    def update(self, step: int, loss: float, tokens_per_second: float, mfu: float | None) -> None:
        """Called after each step; prints when it is time to."""
        now = time.monotonic()
        if self._began is None:
            self._began = (step, now)
        pause = LIVE_SECONDS if self._live else PLAIN_SECONDS
        if self._stream is None or (now - self._last_time < pause and step < self._steps):
            return
        self._last_time = now
        parts = [f"step {step:,}/{self._steps:,}", f"loss {loss:.4f}"]
        parts.append(f"{count_text(tokens_per_second)} tokens/s")
        if mfu is not None:
            parts.append(f"MFU {mfu:.1%}")
        parts.append(f"{self._time_left(step, now)} left")
        line = "  ".join(parts)
        if self._live:
            filled = BAR_WIDTH * step // self._steps
            self._show(f"[{'=' * filled}{' ' * (BAR_WIDTH - filled)}] {line}")
        else:
            print(line, file=self._stream, flush=True)

    def message(self, text: str) -> None:
        """Prints `text` on lines of its own, above the live line."""
        if self._stream is None:
            return
        shown = self._shown
        self._show("")
        print(text, file=self._stream, flush=True)
        self._show(shown)

    def close(self) -> None:
        """Leaves the live line as it is and goes to the next."""
        if self._shown:
            print(file=self._stream, flush=True)
            self._shown = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _show(self, line: str) -> None:
        if self._stream is not None and (line or self._shown):
            # Spaces cover what a longer line left behind.
            self._stream.write(f"\r{line.ljust(len(self._shown))}" + ("" if line else "\r"))
            self._stream.flush()
        self._shown = line

    def _time_left(self, step: int, now: float) -> str:
        assert self._began
        first, then = self._began
        if step == first:
            return "0:00:00" if step == self._steps else "?"
        return clock_text((now - then) / (step - first) * (self._steps - step))


def clock_text(seconds: float) -> str:
    """3:05:09 for hours, minutes and seconds."""
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"


def duration_text(seconds: float) -> str:
    """3 min 12 s, or 4.2 s below a minute."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def count_text(count: float) -> str:
    """4.21 M; whole below a thousand."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= 0.9995 * size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f}"


def bytes_text(size: float) -> str:
    """1.25 GiB, in powers of 1,024."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1_000 or unit == "TiB":
            return f"{size:.3g} {unit}"
        size /= 1_024
    raise AssertionError
