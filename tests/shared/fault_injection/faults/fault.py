"""What a fault is, and what all of them look for."""

import dataclasses
import signal
from collections.abc import Callable
from random import Random

from fault_injection.job import Attempt, Job

FINISHED, FAILED, MISTAKE = 0, 1, 2
PEER_ENDED = 3  # the exit code of a process that another one left alone
REQUEUE = 75  # that of a run that a signal stopped, its checkpoint whole


@dataclasses.dataclass(frozen=True)
class Struck:
    """What came of a fault.

    Attributes:
      attempt: what ran, and has ended.
      expected: the step that it should have gone on from; `None`: from the beginning.
      happened: whether the fault came before the run had ended.
      problems: what went wrong once it had come.
    """

    attempt: Attempt
    expected: int | None
    happened: bool = True
    problems: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Fault:
    """Something that happens to runs.

    Args:
      name: for the table.
      weight: how often it is drawn, in proportion.
      strike: starts the run, and has it end.
      checkpoints: how many whole ones the run must have.
      needs: what must lie in its scratch folder: BASE, say.
      precedes_start: whether it is over when the run starts, which then shows what came of it.
    """

    name: str
    weight: float
    strike: Callable[[Job, Random], Struck]
    checkpoints: int = 0
    needs: str = "."
    precedes_start: bool = False

    def suits(self, job: Job) -> bool:
        """Whether the run is ready for it."""
        enough = len(job.whole_checkpoints()) >= self.checkpoints
        return enough and (job.scratch / self.needs).exists()


def of_early_end(attempt: Attempt) -> list[str]:
    """What is wrong with a run that should have gone on until it was killed."""
    right = (-signal.SIGKILL, FINISHED)
    return [f"it ended with code {code}" for code in attempt.exit_codes() if code not in right]


def of_refusal(attempt: Attempt, *texts: str) -> list[str]:
    """What is wrong with a start that should have been refused, by a message with all `texts`."""
    codes = attempt.exit_codes()
    problems = []
    if set(codes) != {MISTAKE}:
        problems.append(f"it ended with {codes}, and not {MISTAKE}")
    if not lines_with(attempt, "error: ", *texts):
        problems.append(f"it did not say {' … '.join(texts)!r}, see {attempt.files[0]}")
    return problems


def changed_files(before: dict[str, bytes], after: dict[str, bytes]) -> list[str]:
    """What is wrong with a start that should have touched nothing."""
    names = before.keys() | after.keys()
    return [f"it touched {name}" for name in sorted(names) if before.get(name) != after.get(name)]


def lines_with(attempt: Attempt, *texts: str) -> list[str]:
    """What it said that has all of them in one line."""
    lines = attempt.output().splitlines()
    return [line for line in lines if all(text in line for text in texts)]
