"""Writes `workdir/run.log`: the progress and messages of all starts, with timestamps."""

import contextlib
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

from runner.errors import WorkdirLost

FILE_NAME = "run.log"


class RunLog:
    """Appends lines to the log.

    Lines are dropped if the storage fails or another run has taken over the workdir. Neither ends
    the run.
    """

    def __init__(
        self,
        workdir: Path,
        clock: Callable[[], float] = time.time,
        check: Callable[[], None] = lambda: None,
    ):
        """Opens the log and writes a line about this start.

        Args:
          clock: returns the time in seconds since the epoch.
          check: called before each write; raises WorkdirLost if another run has taken over.
        """
        self._file = workdir / FILE_NAME
        self._clock, self._check = clock, check
        with contextlib.suppress(OSError, WorkdirLost):
            # Separates this start from the previous one, whose last line may be incomplete.
            if self._file.exists() and self._file.stat().st_size:
                self._append("\n")
        self.write(f"=== start of process {os.getpid()} on {socket.gethostname()}")

    def write(self, text: str, at: float | None = None) -> None:
        """Appends each line of `text` with a UTC timestamp, of `at` or now.

        Args:
          at: seconds since the epoch; `None` for now.
        """
        seconds = self._clock() if at is None else at
        stamp = time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(seconds))
        with contextlib.suppress(OSError, WorkdirLost):
            self._append("".join(f"{stamp}  {line}\n" for line in text.splitlines()))

    def _append(self, text: str) -> None:
        self._check()
        # Opened for each write. There are few lines, and nothing needs to be closed at the end.
        with self._file.open("a", encoding="utf-8") as file:
            file.write(text)
