"""Where the wall time of a run went since it first began, all its starts together.

`workdir/goodput.json` has an entry for each start, kept up to date while it lasts. What a killed
process did after its last entry counts as time in which nothing ran.
"""

import contextlib
import dataclasses
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lmlib.quantities import duration_text
from lmlib.table import columns
from lmlib.whole_file import write_whole
from runner.command_line.errors import WorkdirTaken
from runner.watch.phases import Phase, Phases

FILE_NAME = "goodput.json"
NOT_RUNNING = "not running"
WRITE_SECONDS = 10.0


@dataclasses.dataclass(frozen=True)
class Start:
    """One process's share of a run (process 0's, where there are many).

    Times are seconds since the epoch; `seconds` are those of each phase.
    """

    began: float
    until: float
    last_step: int
    seconds: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Goodput:
    """`seconds` of each phase and between starts; they add up to the wall time."""

    starts: int
    seconds: Mapping[str, float]

    @property
    def fraction(self) -> float:
        """The part of the wall time in which steps were made for the first time."""
        return self.seconds[Phase.STEP] / max(sum(self.seconds.values()), 1e-9)

    def text(self) -> str:
        """A table, the longest first."""
        wall = sum(self.seconds.values())
        starts = "1 start" if self.starts == 1 else f"{self.starts} starts"
        spent = sorted(self.seconds.items(), key=lambda item: -item[1])
        rows = [
            (name, duration_text(seconds), f"{seconds / wall:.1%}")
            for name, seconds in spent
            if seconds > 0
        ]
        return columns([("wall time", duration_text(wall), f"in {starts}"), *rows])


class GoodputLog:
    """Keeps `workdir/goodput.json`; writes it if `enabled`, which it is on one process."""

    def __init__(self, workdir: Path, phases: Phases, enabled: bool = True):
        """Reads what earlier starts left; what cannot be read is not counted."""
        self._file = workdir / FILE_NAME
        self._phases = phases
        self._enabled = enabled
        self._earlier = read_starts(workdir)
        self._earlier_steps = sum(start.seconds.get(Phase.STEP, 0.0) for start in self._earlier)
        self._began = time.time() - sum(phases.seconds().values())
        self._first_began = self._earlier[0].began if self._earlier else self._began
        self._last_step = 0
        self._written_at = 0.0

    @property
    def furthest(self) -> int:
        """The last step that any earlier start is known to have made."""
        return max((start.last_step for start in self._earlier), default=0)

    def update(self, step: int) -> float:
        """Records that `step` is made; returns the goodput up to now (0.9 for 90 %)."""
        self._last_step = step
        if time.monotonic() - self._written_at >= WRITE_SECONDS:
            self.write()
        steps = self._earlier_steps + self._phases.seconds()[Phase.STEP]
        return steps / max(time.time() - self._first_began, 1e-9)

    def total(self) -> Goodput:
        return total([*self._earlier, self._start()])

    def write(self) -> None:
        """Replaces the file. Where the storage fails it stays as it is: no run ends for that."""
        self._written_at = time.monotonic()
        if not self._enabled:
            return
        starts = [dataclasses.asdict(start) for start in (*self._earlier, self._start())]
        with contextlib.suppress(OSError):
            write_whole(self._file, json.dumps({"starts": starts}, indent=1) + "\n")

    def __enter__(self) -> "GoodputLog":
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if kind is not WorkdirTaken:
            self.write()

    def _start(self) -> Start:
        seconds = {str(phase): value for phase, value in self._phases.seconds().items()}
        return Start(self._began, time.time(), self._last_step, seconds)


def total(starts: list[Start]) -> Goodput:
    """All starts together. One that began before the one before ended overlaps it by nothing."""
    seconds: dict[str, float] = {str(phase): 0.0 for phase in Phase} | {NOT_RUNNING: 0.0}
    until = None
    for start in starts:
        for name, value in start.seconds.items():
            seconds[name] = seconds.get(name, 0.0) + value
        if until is not None:
            seconds[NOT_RUNNING] += max(0.0, start.began - until)
        until = start.until
    return Goodput(len(starts), seconds)


def read_starts(workdir: Path) -> list[Start]:
    """What `goodput.json` says; nothing if it is absent or damaged."""
    try:
        found = json.loads((workdir / FILE_NAME).read_text())["starts"]
        return [_parsed(entry) for entry in found]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []


def _parsed(entry: dict[str, Any]) -> Start:
    return Start(
        float(entry["began"]),
        float(entry["until"]),
        int(entry["last_step"]),
        {str(name): float(value) for name, value in entry["seconds"].items()},
    )
