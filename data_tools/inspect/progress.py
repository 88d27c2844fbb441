"""Saying how far a long reading has come."""

import sys
import time
from collections.abc import Callable

# Called with what was done, what there is to do, and the unit of both.
Progress = Callable[[int, int, str], None]

_SECONDS_BETWEEN_LINES = 5.0


def no_progress(done: int, total: int, unit: str) -> None:
    """Says nothing."""


class ProgressLines:
    """Prints a line to stderr every few seconds."""

    def __init__(self) -> None:
        self._begun = self._printed = time.monotonic()

    def __call__(self, done: int, total: int, unit: str) -> None:
        now = time.monotonic()
        if now - self._printed < _SECONDS_BETWEEN_LINES:
            return
        self._printed = now
        per_second = done / (now - self._begun)
        print(
            f"{done:,} of {total:,} {unit} ({100 * done / max(total, 1):.1f}%), "
            f"{per_second:,.0f} {unit}/s",
            file=sys.stderr,
        )
