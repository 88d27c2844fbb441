"""Random moments for disturbing a run, chosen by its activity."""

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from random import Random

from fault_injection.experiment import CHECKPOINT_EVERY, EVALUATE_EVERY
from fault_injection.job import COMPILED, READY, Attempt, step_of


@dataclasses.dataclass(frozen=True)
class Moment:
    """An activity of a run.

    Args:
      name: as in "while {name}".
      aim: called with a fresh attempt; returns the condition that it has come to.
      caught: returns True if an attempt was killed there, judged by its files.
      spread: the moment is at most this many seconds after the condition holds.
      fresh: True if it may be during imports: `Job.start(fresh=True)`.
    """

    name: str
    aim: Callable[[Attempt, Random], Callable[[], bool]]
    caught: Callable[[Attempt], bool]
    spread: float = 0.0
    fresh: bool = False

    def wait(self, attempt: Attempt, random: Random) -> bool:
        """Returns True if it came before the attempt ended."""
        if not attempt.wait_until(self.aim(attempt, random)):
            return False
        end = attempt.seconds + random.uniform(0, self.spread)
        return attempt.wait_until(lambda: attempt.seconds >= end)


def _starting(attempt: Attempt, random: Random) -> Callable[[], bool]:
    end = random.uniform(0, 1)  # seconds; imports take longer
    return lambda: attempt.seconds >= end or attempt.says(READY)


def _restoring(attempt: Attempt, random: Random) -> Callable[[], bool]:
    return lambda: attempt.says(READY)


def _loading(attempt: Attempt, random: Random) -> Callable[[], bool]:
    begins = not attempt.job.whole_checkpoints()
    return lambda: attempt.says(READY) and (begins or attempt.resumed_step is not None)


def _stepping(attempt: Attempt, random: Random) -> Callable[[], bool]:
    more = random.randint(1, 8)
    return lambda: attempt.trains and attempt.job.last_step() >= _begin(attempt) + more


def _evaluating(attempt: Attempt, random: Random) -> Callable[[], bool]:
    more = random.randint(0, 4)

    def has_come() -> bool:
        if not attempt.trains or attempt.job.last_step() < _begin(attempt) + more:
            return False
        return _before_evaluation(attempt)

    return has_come


def _saving(attempt: Attempt, random: Random) -> Callable[[], bool]:
    """During the first or second save, with some share of the files there."""
    more = random.choice([0, CHECKPOINT_EVERY])
    share = random.random()

    def has_come() -> bool:
        if not attempt.trains:
            return False
        folder = attempt.job.unfinished_checkpoint()
        if folder is None or step_of(folder) <= _begin(attempt) + more:
            return False
        whole = attempt.job.whole_checkpoints()
        files = _count_files(attempt.job.checkpoints / str(whole[-1])) if whole else 0
        return _count_files(folder) >= share * files

    return has_come


def _any_time(attempt: Attempt, random: Random) -> Callable[[], bool]:
    end = random.uniform(0, 15)
    return lambda: attempt.seconds >= end


def _begin(attempt: Attempt) -> int:
    """The step that it began after."""
    return attempt.resumed_step or 0


def _count_files(folder: Path) -> int:
    """Those below a folder, which may be renamed meanwhile."""
    return sum(len(files) for _, _, files in os.walk(folder))


def _before_evaluation(attempt: Attempt) -> bool:
    """Returns True between the line of the step before and the line with the evaluation."""
    return attempt.job.last_step() % EVALUATE_EVERY == EVALUATE_EVERY - 1


STARTING = Moment("starting", _starting, lambda attempt: not attempt.says(READY), fresh=True)
RESTORING = Moment(
    "restoring",
    _restoring,
    lambda attempt: attempt.says(READY) and attempt.resumed_step is None and not attempt.trains,
    spread=0.1,
)
LOADING = Moment(
    "compiling and loading data",
    _loading,
    lambda attempt: attempt.says(READY) and not attempt.says(COMPILED),
    spread=0.2,
)
STEPPING = Moment("in a step", _stepping, lambda attempt: attempt.trains, spread=0.05)
EVALUATING = Moment(
    "evaluating",
    _evaluating,
    lambda attempt: attempt.trains and _before_evaluation(attempt),
    spread=0.03,
)
SAVING = Moment(
    "saving",
    _saving,
    lambda attempt: attempt.trains and attempt.job.unfinished_checkpoint() is not None,
)
ANY_TIME = Moment("at any time", _any_time, lambda attempt: True, fresh=True)
