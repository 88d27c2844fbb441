"""The wall time of a run since it first began, by phase, over all its starts.

`workdir/goodput.json` has an entry for each start, updated while it runs. The time after the last
entry of a killed process counts as time in which nothing ran.
"""

import contextlib
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

from lmlib.storage.stored_json import read_json
from lmlib.storage.unlinked import unlinked
from lmlib.terminal.quantities import duration_text
from lmlib.terminal.table import columns

FILE_NAME = "goodput.json"
STEPS = "steps"  # the phase in which steps run for the first time
ONCE = ("start-up", "initialisation", "restore", "compile", "trackers")  # phases of each start
# States of a run. The first ones say how a start ended before the last step.
Ended: TypeAlias = Literal["interrupted", "diverged", "failed"]
FINISHED, RUNNING, NOT_RUNNING, NOT_BEGUN = "finished", "running", "not running", "not begun"
# Seconds between two starts. A longer or a negative pause means that a clock was set, so the
# length of the pause is unknown.
LONGEST_PAUSE = 365 * 86_400.0


@dataclasses.dataclass(frozen=True)
class Start:
    """One process's part of a run (process 0's in multi-process runs).

    `began` and `until` are seconds since the epoch, `seconds` the monotonic time of each phase, and
    `ended` and `reason` say why it ended before the last step. `start` is as in start.json.
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
    """The `seconds` of each phase and between starts; they add up to the wall time."""

    starts: int
    seconds: Mapping[str, float]

    @property
    def fraction(self) -> float:
        """The fraction of the wall time in which steps were made for the first time."""
        return self.seconds.get(STEPS, 0.0) / max(sum(self.seconds.values()), 1e-9)

    def text(self) -> str:
        """Returns a table of the phases, the longest first."""
        wall = sum(self.seconds.values())
        starts = "1 start" if self.starts == 1 else f"{self.starts} starts"
        longest = sorted(self.seconds.items(), key=lambda item: -item[1])
        rows = [(name, duration_text(s), f"{s / wall:.1%}") for name, s in longest if s > 0]
        return columns([("wall time", duration_text(wall), f"in {starts}"), *rows])


def seconds_left(start: Start, first_step: int, steps: int, now: float) -> float | None:
    """Estimates the time until `steps` steps are made, with their evaluations and checkpoints.

    `first_step` is that of the newest `start`, whose pace counts; `None` before it was made.
    """
    made = start.last_step - first_step + 1
    if made < 1 or start.last_step >= steps:
        return None
    seconds = sum(spent for phase, spent in start.seconds.items() if phase not in ONCE)
    return max(0.0, seconds / made * (steps - start.last_step) - (now - start.until))


def total(starts: list[Start]) -> Goodput:
    """Adds up all starts and the pauses between them, as far as the clock is plausible."""
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
    """Returns the valid starts in `goodput.json`, and a message about damage or `None`."""
    file = workdir / FILE_NAME
    if not file.exists():
        return [], None
    try:
        entries = read_json(unlinked(workdir, FILE_NAME))["starts"]
        starts = []
        for entry in entries:
            with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
                starts.append(_parsed(entry))
    except (OSError, ValueError, KeyError, TypeError) as error:
        return [], f"{file} cannot be read ({error!r:.200}); earlier starts are not counted"
    if lost := len(entries) - len(starts):
        return starts, f"{file}: {lost} of {len(entries)} starts are damaged and not counted"
    return starts, None


def _parsed(entry: Any) -> Start:
    """Parses an entry; raises what `read_starts` catches if it is damaged."""
    times = {"began": entry["began"], "until": entry["until"], **entry["seconds"]}
    for name, value in times.items():  # valid until the year 5138
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1e11:
            raise ValueError(f"{name} is {value!r:.80}, not a number of seconds")
    step = entry["last_step"]
    if type(step) is not int or step < 0:
        raise ValueError(f"the last step is {step!r:.80}")
    seconds = {str(name): float(value) for name, value in entry["seconds"].items()}
    texts = (str(entry.get(name, "")) for name in ("ended", "reason", "start"))
    return Start(float(entry["began"]), float(entry["until"]), step, seconds, *texts)
