"""Where the wall time of a run went since it first began, all its starts together.

`workdir/goodput.json` has an entry for each start, kept up to date while it lasts. What a killed
process did after its last entry counts as time in which nothing ran.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lmlib.storage.stored_json import read_json
from lmlib.storage.unlinked import unlinked
from lmlib.terminal.quantities import duration_text
from lmlib.terminal.table import columns

FILE_NAME = "goodput.json"
STEPS = "steps"  # the phase in which steps are made for the first time
NOT_RUNNING = "not running"
# Between two starts. More, or less than nothing, and a clock was set: then nobody knows how long.
LONGEST_PAUSE = 365 * 86_400.0


@dataclasses.dataclass(frozen=True)
class Start:
    """One process's share of a run (process 0's, where there are many).

    `seconds` are those of each phase, by a clock that nobody can set. `began` and `until` are
    seconds since the epoch, by the clock on the wall when the process began. `ended` and `reason`
    say how it ended before the last step, and why in words; both are empty while it lasts. `start`
    is the random text of the start, as in its start.json.
    """

    began: float
    until: float
    last_step: int
    seconds: Mapping[str, float]
    ended: str = ""
    reason: str = ""
    start: str = ""


@dataclasses.dataclass(frozen=True)
class Goodput:
    """`seconds` of each phase and between starts; they add up to the wall time."""

    starts: int
    seconds: Mapping[str, float]

    @property
    def fraction(self) -> float:
        """The part of the wall time in which steps were made for the first time."""
        return self.seconds.get(STEPS, 0.0) / max(sum(self.seconds.values()), 1e-9)

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


def total(starts: list[Start]) -> Goodput:
    """All starts together, and the pauses between them, as far as the clock can be believed."""
    seconds = {STEPS: 0.0, NOT_RUNNING: 0.0}
    until = None
    for start in starts:
        for name, value in start.seconds.items():
            seconds[name] = seconds.get(name, 0.0) + value
        if until is not None and 0 <= start.began - until <= LONGEST_PAUSE:
            seconds[NOT_RUNNING] += start.began - until
        until = start.until
    return Goodput(len(starts), seconds)


def read_starts(workdir: Path) -> tuple[list[Start], str | None]:
    """The starts in `goodput.json` that make sense, none if it is absent; and what does not, in
    words."""
    file = workdir / FILE_NAME
    if not file.exists():
        return [], None
    try:
        entries = read_json(unlinked(workdir, FILE_NAME))["starts"]
        starts = [start for entry in entries if (start := _parsed(entry)) is not None]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return [], f"{file} cannot be read ({error!r:.200}): earlier starts are not counted"
    if lost := len(entries) - len(starts):
        return starts, f"{file}: {lost} of {len(entries)} starts make no sense and are not counted"
    return starts, None


def _parsed(entry: Any) -> Start | None:
    """`None` if no run has written it."""
    try:
        start = Start(
            _seconds(entry["began"]),
            _seconds(entry["until"]),
            entry["last_step"],
            {str(name): _seconds(value) for name, value in entry["seconds"].items()},
            *(str(entry.get(name, "")) for name in ("ended", "reason", "start")),
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return start if type(start.last_step) is int and start.last_step >= 0 else None


def _seconds(value: Any) -> float:
    """Raises ValueError for what is no number of seconds that can pass until the year 5138."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1e11:
        raise ValueError(f"{value!r:.80} is no number of seconds")
    return float(value)
