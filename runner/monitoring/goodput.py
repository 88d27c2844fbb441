"""Records the wall time of a run by phase, for `lmlib/runs/goodput.py` to read."""

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path

from lmlib.runs.goodput import FILE_NAME, Goodput, Start, read_starts, total
from lmlib.storage.atomic_file import write_atomically
from runner.errors import error_text, how_ended
from runner.monitoring.phases import Phases

WRITE_SECONDS = 10.0


class GoodputLog:
    """Maintains `workdir/goodput.json`; only the process with `enabled` writes it.

    Attributes:
      problem: describes a record that could not be read; `None` if there is none.
      furthest: the last step that any earlier start has recorded.
    """

    def __init__(
        self,
        workdir: Path,
        phases: Phases,
        check: Callable[[], None] = lambda: None,
        enabled: bool = True,
        start: str = "",
    ):
        """Reads the records of earlier starts; unreadable ones are not counted.

        Args:
          check: called before each write; raises an error to prevent it.
          start: the random id of this start.
        """
        self._file, self._phases = workdir / FILE_NAME, phases
        self._check, self._enabled = check, enabled
        self._earlier, self.problem = read_starts(workdir)
        self.furthest = max((start.last_step for start in self._earlier), default=0)
        began = time.time() - sum(phases.seconds().values())
        self._start = Start(began, began, 0, {}, start=start)
        self._written_at = 0.0

    def update(self, step: int) -> float:
        """Records that `step` is complete; returns the goodput so far, a fraction of 1."""
        self._start = dataclasses.replace(self._start, last_step=step)
        if time.monotonic() - self._written_at >= WRITE_SECONDS:
            self.write()
        return self.total().fraction

    def total(self) -> Goodput:
        return total([*self._earlier, self._now()])

    def write(self) -> None:
        """Replaces the file. Storage errors are ignored, so that they don't end the run."""
        self._written_at = time.monotonic()
        if self._enabled:
            starts = [dataclasses.asdict(start) for start in (*self._earlier, self._now())]
            content = json.dumps({"starts": starts}, indent=1) + "\n"
            with contextlib.suppress(OSError):
                write_atomically(self._file, content, self._check)

    def __enter__(self) -> "GoodputLog":
        """Writes the file, so that it includes this start before the first step."""
        self.write()
        self._written_at = 0.0
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            reason = error_text(error) or type(error).__name__
            self._start = dataclasses.replace(self._start, ended=how_ended(error), reason=reason)
        self.write()

    def _now(self) -> Start:
        seconds = {str(phase): value for phase, value in self._phases.seconds().items()}
        until = self._start.began + sum(seconds.values())
        return dataclasses.replace(self._start, until=until, seconds=seconds)
