"""`workdir/run.log`: what a run shows while it goes on, with the time, across all its starts."""

import contextlib
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

from runner.errors import WorkdirLost

FILE_NAME = "run.log"


class RunLog:
    """Appends lines to the log. Where the storage fails, or the workdir is another run's now, they
    are lost: no run ends for that."""

    def __init__(
        self,
        workdir: Path,
        clock: Callable[[], float] = time.time,
        check: Callable[[], None] = lambda: None,
    ):
        """Begins with a line about this start; `clock` gives seconds since the epoch. `check`,
        called before each write, raises WorkdirLost where the workdir is another run's."""
        self._file = workdir / FILE_NAME
        self._clock, self._check = clock, check
        with contextlib.suppress(OSError, WorkdirLost):
            # Apart from the start before, whose last line a kill may have cut short.
            if self._file.exists() and self._file.stat().st_size:
                self._append("\n")
        self.write(f"=== start of process {os.getpid()} on {socket.gethostname()}")

    def write(self, text: str, at: float | None = None) -> None:
        """Appends each line of `text` with its time in UTC: now, or `at`."""
        seconds = self._clock() if at is None else at
        stamp = time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(seconds))
        with contextlib.suppress(OSError, WorkdirLost):
            self._append("".join(f"{stamp}  {line}\n" for line in text.splitlines()))

    def _append(self, text: str) -> None:
        self._check()
        # Opened anew each time: the few lines are worth it, and nothing is left to close.
        with self._file.open("a", encoding="utf-8") as file:
            file.write(text)
