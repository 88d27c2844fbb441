"""What a run is doing, and how many seconds it has spent on each thing it does."""

import contextlib
import enum
import time
from collections.abc import Iterator

from lmlib.runs.goodput import STEPS


class Phase(enum.StrEnum):
    """Each second of a run belongs to one of these."""

    STARTUP = "start-up"  # imports, config, finding the other processes, opening the data
    INITIALISATION = "initialisation"  # of new weights
    RESTORE = "restore"  # of a checkpoint
    COMPILE = "compile"
    DATA = "data wait"
    STEP = STEPS
    REPEATED = "repeated steps"  # made before by a process that ended before it saved them
    EVALUATION = "evaluation"  # samples and a user's own actions, too
    CHECKPOINT = "checkpoint"  # what saving holds training up for
    TRACKERS = "trackers"  # the wait at the end until they have the run


class Phases:
    """Charges the time to phases.

    phases = Phases()
    with phases.during(Phase.COMPILE):
        ...
    phases.enter(Phase.STEP)
    """

    def __init__(self, started: float | None = None):
        """Begins with the start-up, at the time `started` (seconds since the epoch) or now."""
        self._seconds = dict.fromkeys(Phase, 0.0)
        if started is not None:
            self._seconds[Phase.STARTUP] = max(0.0, time.time() - started)
        self._current = Phase.STARTUP, time.monotonic()

    def enter(self, phase: Phase) -> None:
        """Charges the time from now on to `phase`."""
        before, since = self._current
        now = time.monotonic()
        self._current = phase, now
        self._seconds[before] += now - since

    @contextlib.contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Charges the time of a block to `phase`, and then goes back to the phase before."""
        before, _ = self._current
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    @property
    def current(self) -> tuple[Phase, float]:
        """The phase, and when it was entered, by `time.monotonic`. For other threads too."""
        return self._current

    def seconds(self) -> dict[Phase, float]:
        """Of each phase up to now."""
        phase, since = self._current
        return self._seconds | {phase: self._seconds[phase] + time.monotonic() - since}

    def text(self) -> str:
        """All seconds so far and what they went into: "9.1 s: 3.0 s start-up, 6.1 s compile"."""
        seconds = self.seconds()
        parts = (f"{spent:.1f} s {phase}" for phase, spent in seconds.items() if spent >= 0.05)
        return f"{sum(seconds.values()):.1f} s: {', '.join(parts)}"
