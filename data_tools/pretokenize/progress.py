"""How far the making of a split has come, and lines that say so."""

import sys
import time
from dataclasses import dataclass

from lmlib.terminal.quantities import bytes_text

_SECONDS_BETWEEN_LINES = 5.0


@dataclass(frozen=True)
class Progress:
    """What was written so far, by this run and those before it."""

    documents: int = 0
    tokens: int = 0
    bytes: int = 0  # of UTF-8 text
    fraction: float | None = 0.0  # of the source that was read; None if that is unknown

    def plus(self, shard: "Progress", shards: int) -> "Progress":
        """With one shard of `shards` more."""
        known = self.fraction is not None and shard.fraction is not None
        return Progress(
            self.documents + shard.documents,
            self.tokens + shard.tokens,
            self.bytes + shard.bytes,
            self.fraction + shard.fraction / shards if known else None,  # type: ignore[operator]
        )


class SendingLines:
    """Prints a line to stderr every few seconds while something is sent."""

    def __init__(self, what: str) -> None:
        self._what, self._printed = what, time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        if time.monotonic() - self._printed >= _SECONDS_BETWEEN_LINES:
            self._printed = time.monotonic()
            print(
                f"sending {self._what}: {bytes_text(done)} of {bytes_text(total)}", file=sys.stderr
            )


class ProgressLines:
    """Prints a line to stderr every few seconds: counts, speed, and the time that is left."""

    def __init__(self, max_tokens: int | None = None) -> None:
        self._max_tokens = max_tokens
        self._at_begin: Progress | None = None
        self._begun = self._printed = 0.0

    def __call__(self, progress: Progress) -> None:
        now = time.monotonic()
        if self._at_begin is None:
            # What a run before this one made, and the start of workers, are no part of the speed.
            self._at_begin = progress
            self._begun = self._printed = now
        if now - self._printed >= _SECONDS_BETWEEN_LINES:
            self._printed = now
            print(self._line(progress, self._at_begin, now - self._begun), file=sys.stderr)

    def _line(self, progress: Progress, begin: Progress, seconds: float) -> str:
        parts = [
            f"{progress.documents:,} documents",
            f"{progress.tokens:,} tokens",
            f"{(progress.tokens - begin.tokens) / seconds:,.0f} tokens/s",
        ]
        if progress.tokens:
            parts.append(f"{progress.bytes / progress.tokens:.2f} bytes per token")
        done, done_at_begin = self._fraction(progress), self._fraction(begin)
        if done is not None and done_at_begin is not None and done > done_at_begin:
            left = seconds * (1 - done) / (done - done_at_begin)
            parts.append(f"{done:.0%} done, {_duration(left)} left")
        return ", ".join(parts)

    def _fraction(self, progress: Progress) -> float | None:
        of_tokens = progress.tokens / self._max_tokens if self._max_tokens else None
        known = [fraction for fraction in (progress.fraction, of_tokens) if fraction is not None]
        return min(1.0, max(known)) if known else None


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {seconds:02} s"
