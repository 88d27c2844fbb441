"""What people delete, move or exchange under a run that goes on: its files, its whole workdir."""

import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from random import Random

from fault_injection.faults.fault import FAILED, FINISHED, Fault, Struck, lines_with, of_early_end
from fault_injection.job import Attempt, Job
from fault_injection.moments import STEPPING


def lock_deleted(weight: float) -> Fault:
    """The lock is deleted, and the same command started: the first run ends, and the second goes on
    as if it were alone. In half of the cases the first is asleep until the second makes steps."""

    def strike(job: Job, random: Random) -> Struck:
        first, asleep = job.start(), random.random() < 0.5
        if not STEPPING.wait(first, random):
            return Struck(first, None, happened=False)
        if asleep:
            first.send(signal.SIGSTOP)
        (job.workdir / "lock").unlink(missing_ok=True)
        expected, second = job.newest_checkpoint(), job.start(beside_another=True)
        if asleep:
            STEPPING.wait(second, random)
            first.send(signal.SIGCONT)
        codes = first.exit_codes()
        second.wait_for_checkpoint()
        second.kill()
        problems = [*_of_loss(first, "lock was deleted: this process ends"), *of_early_end(second)]
        happened = codes != [FINISHED]  # else it ended before the lock was deleted
        return Struck(second, expected, happened, tuple(problems if happened else ()))

    return Fault("lock deleted while another starts", weight, strike, precedes_start=True)


def workdir_deleted(weight: float) -> Fault:
    """The run ends at once, and leaves nothing there; the next start begins anew."""
    return _workdir_gone("deleted", weight, _delete, lambda job: None)


def workdir_moved(weight: float) -> Fault:
    """The run ends at once, and leaves nothing there; moved back, it goes on."""
    return _workdir_gone(
        "moved away",
        weight,
        lambda job: job.workdir.rename(_elsewhere(job)),
        lambda job: _elsewhere(job).rename(job.workdir),
    )


def _workdir_gone(
    name: str, weight: float, take: Callable[[Job], object], then: Callable[[Job], object]
) -> Fault:
    def strike(job: Job, random: Random) -> Struck:
        expected, attempt = job.newest_checkpoint(), job.start()
        if not STEPPING.wait(attempt, random):
            return Struck(attempt, expected, happened=False)
        take(job)
        happened = attempt.exit_codes() != [FINISHED]  # else it ended before
        problems = _of_loss(attempt, "deleted") if happened else []
        if job.workdir.exists():
            left = [str(path.relative_to(job.workdir)) for path in job.workdir.rglob("*")]
            problems.append(f"it made {job.workdir} again: {left[:5]}")
            shutil.rmtree(job.workdir)
        then(job)
        return Struck(attempt, expected, happened, tuple(problems))

    return Fault(f"workdir {name} under the run", weight, strike)


def metrics_gone(name: str, weight: float, take: Callable[[Path], object]) -> Fault:
    """metrics.jsonl is put back, with all that was in it."""

    def strike(job: Job, random: Random) -> Struck:
        expected, attempt = job.newest_checkpoint(), job.start()
        if not STEPPING.wait(attempt, random):
            return Struck(attempt, expected, happened=False)
        file, lines = job.workdir / "metrics.jsonl", job.last_step()
        take(file)
        put_back = attempt.wait_until(lambda: attempt.says("its lines are put back"))
        attempt.wait_for_checkpoint()
        attempt.kill()
        problems = of_early_end(attempt)
        if put_back and job.last_step() <= lines:
            problems.append(f"{file} has {job.last_step()} lines, and had {lines} before")
        return Struck(attempt, expected, put_back, tuple(problems))

    return Fault(f"metrics.jsonl {name} under the run", weight, strike)


def half_of(file: Path) -> None:
    """As an editor leaves it: a new file, here of half of the lines."""
    lines = file.read_bytes().splitlines(keepends=True)
    half = file.with_name("half")
    half.write_bytes(b"".join(lines[: len(lines) // 2]))
    half.rename(file)


def checkpoints_deleted(weight: float) -> Fault:
    """All checkpoints are gone; the run saves the next ones all the same."""

    def strike(job: Job, random: Random) -> Struck:
        expected, attempt = job.newest_checkpoint(), job.start()
        if not STEPPING.wait(attempt, random):
            return Struck(attempt, expected, happened=False)
        shutil.rmtree(job.checkpoints, ignore_errors=True)  # a save may go on
        happened = attempt.wait_for_checkpoint()
        attempt.kill()
        return Struck(attempt, expected, happened, tuple(of_early_end(attempt)))

    return Fault("checkpoints/ deleted under the run", weight, strike, checkpoints=1)


def _of_loss(attempt: Attempt, text: str) -> list[str]:
    """What is wrong with a run that should have ended with `text`, since its workdir is lost."""
    problems = []
    if (codes := attempt.exit_codes()) != [FAILED]:
        problems.append(f"the run that lost its workdir ended with {codes}, and not {FAILED}")
    if not lines_with(attempt, "error: ", str(attempt.job.workdir), text):
        problems.append(f"it did not say {text!r}, see {attempt.files[0]}")
    if "Traceback" in attempt.output():
        problems.append(f"it shows a traceback, see {attempt.files[0]}")
    return problems


def _delete(job: Job) -> None:
    while job.workdir.exists():  # the run may still make a file there
        shutil.rmtree(job.workdir, ignore_errors=True)


def _elsewhere(job: Job) -> Path:
    return job.scratch / f"{job.name}_elsewhere"
