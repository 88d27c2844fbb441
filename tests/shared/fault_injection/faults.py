"""What can happen to a run. Each fault finds the run at rest and leaves it at rest."""

import dataclasses
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

from fault_injection import damage
from fault_injection.damage import Harm
from fault_injection.experiment import KEEP_CHECKPOINTS, STEPS
from fault_injection.job import FULL, Attempt, Job
from fault_injection.moments import (
    ANY_TIME,
    EVALUATING,
    LOADING,
    RESTORING,
    SAVING,
    STARTING,
    STEPPING,
    Moment,
)

FINISHED, FAILED, MISTAKE = 0, 1, 2
PEER_ENDED = 3  # the exit code of a process that another one left alone
REQUEUE = 75  # that of a run that a signal stopped, its checkpoint whole

AT_ONCE_SECONDS = 20.0
PEER_SECONDS = 60.0  # in which a process notices that another one has died
LESS_THAN_A_WEIGHT = 60_000  # bytes; more than any other file of the run
ENOUGH_LINES = 8_000  # bytes of metrics.jsonl: by then it is the longest file that is appended to


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
      precedes_start: whether it is over when the run starts, which then shows what came of it.
    """

    name: str
    weight: float
    strike: Callable[[Job, Random], Struck]
    checkpoints: int = 0
    precedes_start: bool = False


def killed(weight: float, moment: Moment) -> Fault:
    """SIGKILL."""

    def strike(job: Job, random: Random) -> Struck:
        expected, attempt = job.newest_checkpoint(), job.start()
        happened = moment.wait(attempt, random)
        attempt.kill()
        return Struck(attempt, expected, happened)

    return Fault(f"SIGKILL {moment.name}", weight, strike)


def asked_to_stop(
    weight: float, number: signal.Signals, moment: Moment, *other_codes: int
) -> Fault:
    """A signal after which the run saves a checkpoint and ends with `REQUEUE`."""

    def strike(job: Job, random: Random) -> Struck:
        expected, attempt = job.newest_checkpoint(), job.start()
        if not moment.wait(attempt, random):
            return Struck(attempt, expected, happened=False)
        attempt.send(number)
        (code,) = attempt.exit_codes()
        problems = []
        made_all = code == FINISHED and job.last_step() == STEPS
        if code not in (REQUEUE, *other_codes) and not made_all:
            problems.append(f"it ended with code {code}, and not {REQUEUE}")
        if attempt.trains and job.newest_checkpoint() != job.last_step():
            problems.append(f"its last step, {job.last_step()}, is in no checkpoint")
        return Struck(attempt, expected, problems=tuple(problems))

    return Fault(f"{number.name} {moment.name}", weight, strike)


def interrupted_twice(weight: float, moment: Moment) -> Fault:
    """Ctrl-C, and again: the run ends at once, whatever it is doing."""

    def strike(job: Job, random: Random) -> Struck:
        expected, attempt = job.newest_checkpoint(), job.start()
        if not moment.wait(attempt, random):
            return Struck(attempt, expected, happened=False)
        attempt.send(signal.SIGINT)
        attempt.send(signal.SIGINT)
        (code,) = attempt.exit_codes(AT_ONCE_SECONDS)
        # Two signals of one kind may arrive as one; then it ends as after one.
        right = (-signal.SIGINT, 128 + signal.SIGINT, REQUEUE, FINISHED)
        problems = () if code in right else (f"it ended with code {code}",)
        return Struck(attempt, expected, problems=problems)

    return Fault(f"SIGINT twice {moment.name}", weight, strike)


def damaged(name: str, weight: float, harm: Harm) -> Fault:
    """Damage to the newest checkpoint: the run says so and goes on from the one before."""

    def strike(job: Job, random: Random) -> Struck:
        *_, before, last = job.whole_checkpoints()
        folder = job.checkpoints / str(last)
        file = harm(folder, random)
        attempt = job.start()
        # Up to its next checkpoint, so that the sound ones do not become fewer.
        attempt.wait_until(lambda: attempt.trains and job.whole_checkpoints()[-1] >= last)
        attempt.kill()
        named = _lines_with(attempt, str(folder), str(file.relative_to(folder)))
        problems = _of_early_end(attempt)
        if not named:
            problems.append(f"it did not say that {file} is damaged")
        return Struck(attempt, before, problems=tuple(problems))

    return Fault(
        f"checkpoint: {name}", weight, strike, checkpoints=KEEP_CHECKPOINTS, precedes_start=True
    )


def left_behind(name: str, weight: float, harm: Callable[[Path, Random], None]) -> Fault:
    """Harm to what else is in the workdir; nobody need notice."""

    def strike(job: Job, random: Random) -> Struck:
        harm(job.workdir, random)
        expected, attempt = job.newest_checkpoint(), job.start()
        STEPPING.wait(attempt, random)
        attempt.kill()
        return Struck(attempt, expected, problems=tuple(_of_early_end(attempt)))

    return Fault(name, weight, strike, checkpoints=1, precedes_start=True)


def disk_full_for_a_while(weight: float) -> Fault:
    """A checkpoint cannot be saved: the run says so, goes on, and saves a later one."""

    def strike(job: Job, random: Random) -> Struck:
        expected, attempt = job.newest_checkpoint(), job.start()
        if not STEPPING.wait(attempt, random):
            return Struck(attempt, expected, happened=False)
        attempt.limit_file_sizes(LESS_THAN_A_WEIGHT)
        happened = attempt.wait_until(lambda: attempt.says(FULL))
        attempt.limit_file_sizes(resource.RLIM_INFINITY)
        last = job.newest_checkpoint() or 0
        attempt.wait_until(lambda: (job.newest_checkpoint() or 0) > last)
        attempt.kill()
        # The last checkpoint of all is not tried again.
        problems = [] if job.last_step() == STEPS else _of_early_end(attempt)
        return Struck(attempt, expected, happened, tuple(problems))

    return Fault("disk full for a while", weight, strike)


def disk_full_for_good(name: str, weight: float, size: Callable[[Job], int]) -> Fault:
    """No file grows beyond `size`: the run says that of `name`, and ends with a code for it."""

    def strike(job: Job, random: Random) -> Struck:
        expected, attempt = job.newest_checkpoint(), job.start()
        if not STEPPING.wait(attempt, random):
            return Struck(attempt, expected, happened=False)
        attempt.limit_file_sizes(size(job))
        (code,) = attempt.exit_codes()
        problems = []
        if code != FAILED:
            problems.append(f"it ended with code {code}, and not {FAILED}")
        if not _lines_with(attempt, "error: ", FULL, name):
            problems.append(f"it did not say that it ended because of {name}")
        return Struck(attempt, expected, problems=tuple(problems))

    return Fault(f"disk full for {name}", weight, strike)


def started_twice(name: str, weight: float) -> Fault:
    """The same command beside a run that goes on: it is refused, and disturbs nothing."""

    def strike(job: Job, random: Random) -> Struck:
        expected, attempt = job.newest_checkpoint(), job.start()
        if not random.choice((RESTORING, LOADING, STEPPING)).wait(attempt, random):
            return Struck(attempt, expected, happened=False)
        second = job.start(beside_another=True)
        codes = second.exit_codes()
        happened = not attempt.ended  # else the second has rightly gone on
        problems = []
        if happened and set(codes) != {MISTAKE}:
            problems.append(f"the second start ended with {codes}, and not {MISTAKE}")
        if happened and not _lines_with(second, "error: ", str(job.workdir), "is in use by"):
            problems.append("the second start did not say that a run goes on there")
        attempt.kill()
        problems += _of_early_end(attempt)
        return Struck(attempt, expected, happened, tuple(problems))

    return Fault(name, weight, strike)


def one_killed(process: int) -> Fault:
    """SIGKILL to one process of two: the other ends, with a code that says why."""

    def strike(job: Job, random: Random) -> Struck:
        expected, attempt = job.newest_checkpoint(), job.start()
        if not random.choice((STEPPING, SAVING)).wait(attempt, random):
            return Struck(attempt, expected, happened=False)
        attempt.send(signal.SIGKILL, process)
        codes = attempt.exit_codes(PEER_SECONDS)
        other = 1 - process
        if codes[other] == PEER_ENDED:
            return Struck(attempt, expected)
        problem = f"process {other} ended with code {codes[other]}, and not {PEER_ENDED}"
        return Struck(attempt, expected, problems=(problem,))

    return Fault(f"SIGKILL of process {process} of 2", 1, strike)


def _of_early_end(attempt: Attempt) -> list[str]:
    """What is wrong with a run that should have gone on until it was killed."""
    right = (-signal.SIGKILL, FINISHED)
    return [f"it ended with code {code}" for code in attempt.exit_codes() if code not in right]


def _lines_with(attempt: Attempt, *texts: str) -> list[str]:
    """What it said that has all of them in one line."""
    lines = attempt.output().splitlines()
    return [line for line in lines if all(text in line for text in texts)]


def _metrics_size(job: Job) -> int:
    return max(ENOUGH_LINES, (job.workdir / "metrics.jsonl").stat().st_size)


OF_ONE_PROCESS = (
    killed(4, STARTING),
    killed(6, RESTORING),
    killed(5, LOADING),
    killed(9, STEPPING),
    killed(9, EVALUATING),
    killed(15, SAVING),
    killed(8, ANY_TIME),
    asked_to_stop(1, signal.SIGTERM, STARTING, -signal.SIGTERM),
    asked_to_stop(2, signal.SIGTERM, LOADING),
    asked_to_stop(4, signal.SIGTERM, STEPPING),
    asked_to_stop(2, signal.SIGTERM, EVALUATING),
    asked_to_stop(3, signal.SIGTERM, SAVING),
    asked_to_stop(3, signal.SIGINT, STEPPING),
    asked_to_stop(2, signal.SIGINT, SAVING),
    interrupted_twice(2, STEPPING),
    interrupted_twice(2, SAVING),
    damaged("a bit flipped", 5, damage.flip_a_bit),
    damaged("a block zeroed", 3, damage.zero_a_block),
    damaged("a file cut short", 3, damage.truncate),
    damaged("a file deleted", 3, damage.delete),
    damaged("the manifest deleted", 2, damage.delete_the_manifest),
    damaged("a stray file", 2, damage.add_a_stray_file),
    started_twice("a second start", 4),
    left_behind("half a line in metrics.jsonl", 2, damage.cut_the_last_line),
    left_behind("tensorboard/ deleted", 2, damage.delete_tensorboard),
    left_behind("half of a new config.json", 2, damage.leave_half_a_config),
    disk_full_for_a_while(4),
    disk_full_for_good("checkpoints", 3, lambda job: LESS_THAN_A_WEIGHT),
    disk_full_for_good("metrics.jsonl", 2, _metrics_size),
)
OF_TWO_PROCESSES = (one_killed(0), one_killed(1), started_twice("a second start of 2", 1))


def draw(faults: tuple[Fault, ...], job: Job, random: Random) -> Iterator[Fault]:
    """Faults for a run, without end; those that it is not ready for are passed over."""
    while True:
        (fault,) = random.choices(faults, [fault.weight for fault in faults])
        if len(job.whole_checkpoints()) >= fault.checkpoints:
            yield fault
