"""The phases of a run, the seconds spent in each, and their limits."""

import contextlib
import dataclasses
import enum
import time
from collections.abc import Iterator

from lmlib.runs.goodput import STEPS


class Phase(enum.StrEnum):
    """The phases of a run. Each second of wall time belongs to exactly one."""

    STARTUP = "start-up"  # imports, config, finding the other processes, opening the data
    INITIALISATION = "initialisation"  # making new weights
    RESTORE = "restore"  # reading a checkpoint
    COMPILE = "compile"
    DATA = "data wait"
    STEP = STEPS
    REPEATED = "repeated steps"  # steps that an earlier process made but did not save
    EVALUATION = "evaluation"  # includes samples and user-defined actions
    CHECKPOINT = "checkpoint"  # only the time in which saving blocks training
    TRACKERS = "trackers"  # the final wait until metric trackers have all data


@dataclasses.dataclass(frozen=True)
class Limits:
    """Seconds that each phase may last without a break; a process that takes longer ends."""

    compile: float = 7_200.0
    step: float = 1_800.0
    data: float = 600.0  # the wait for one batch
    evaluation: float = 7_200.0
    checkpoint: float = 3_600.0  # the wait for a save

    def of(self, phase: Phase) -> float:
        name = "step" if phase is Phase.REPEATED else phase.name.lower()
        return getattr(self, name, float("inf"))


class Phases:
    """Measures the time in each phase."""

    def __init__(self, started: float | None = None):
        """Starts in the start-up phase.

        Args:
          started: when the phase began, in seconds since the epoch; `None` for now.
        """
        self._seconds = dict.fromkeys(Phase, 0.0)
        if started is not None:
            self._seconds[Phase.STARTUP] = max(0.0, time.time() - started)
        self._current = Phase.STARTUP, time.monotonic()

    def enter(self, phase: Phase) -> None:
        """Switches to `phase`."""
        before, since = self._current
        now = time.monotonic()
        self._current = phase, now
        self._seconds[before] += now - since

    @contextlib.contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Switches to `phase` for the block, then back to the previous phase."""
        before, _ = self._current
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    @property
    def current(self) -> tuple[Phase, float]:
        """The current phase, and its start by `time.monotonic`. Thread-safe."""
        return self._current

    def seconds(self) -> dict[Phase, float]:
        """Returns the seconds spent in each phase so far."""
        phase, since = self._current
        return self._seconds | {phase: self._seconds[phase] + time.monotonic() - since}

    def text(self) -> str:
        """Formats the total time and its parts: "9.1 s: 3.0 s start-up, 6.1 s compile"."""
        seconds = self.seconds()
        parts = (f"{spent:.1f} s {phase}" for phase, spent in seconds.items() if spent >= 0.05)
        return f"{sum(seconds.values()):.1f} s: {', '.join(parts)}"
