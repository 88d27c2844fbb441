"""Faults of runs, for the campaign in benchmarks/faults.py.

Each fault finds the run at rest and leaves it at rest.
"""

import dataclasses
import math
import resource
import shutil
import signal
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from random import Random

from fault_injection import damage
from fault_injection.experiment import BASE, KEEP_CHECKPOINTS, STEPS, TOKENS, is_infinite
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
from lmlib.metrics.log import read_metrics

FINISHED, FAILED, MISTAKE = 0, 1, 2
PEER_ENDED = 3  # the exit code of a process whose peer ended
REQUEUE = 75  # that of a run that a signal stopped, its checkpoint whole
AT_ONCE_SECONDS, PEER_SECONDS = 20.0, 60.0
PRUNE_SECONDS = 0.02  # duration of pruning, in which a moment is drawn
LEFT = 2  # checkpoints that pruning leaves
LESS_THAN_A_WEIGHT = 60_000  # bytes; more than any other file of the run
# Bytes of metrics.jsonl: more than run.log has by then, and less than at the third failed save.
ENOUGH_LINES = 6_000


@dataclasses.dataclass(frozen=True)
class Struck:
    """The result of a fault.

    Has the attempt, which has ended; the step from which it should have gone on, or `None`; True if
    the fault came before the run's end; and the problems.
    """

    attempt: Attempt
    expected: int | None
    happened: bool = True
    problems: tuple[str, ...] = ()


Strike = Callable[[Job, Random], Struck]
# Disturbs a run at some moment; returns the problems, or `None` if the run ended before.
Act = Callable[[Job, Attempt, Random], Iterable[str] | None]


@dataclasses.dataclass(frozen=True)
class Fault:
    """Something that happens to runs, drawn as often as its `weight` says.

    `strike` starts the run, and has it end. The run must have enough whole checkpoints, and the
    entries that it `needs` in its scratch folder. `precedes_start`: the fault is over when the run
    starts.
    """

    name: str
    weight: float
    strike: Strike
    checkpoints: int = 0
    needs: str = "."
    precedes_start: bool = False

    def suits(self, job: Job) -> bool:
        """Returns True if the run is ready for it."""
        enough = len(job.whole_checkpoints()) >= self.checkpoints
        return enough and (job.scratch / self.needs).exists()


def under_way(act: Act, moment: Moment = STEPPING) -> Strike:
    """Starts the run, and does something to it at that moment."""
    return at_any_of(act, moment)


def at_any_of(act: Act, *moments: Moment) -> Strike:
    """Like `under_way`, at one of several moments."""

    def strike(job: Job, random: Random) -> Struck:
        moment = random.choice(moments)
        expected, attempt = job.newest_checkpoint(), job.start(fresh=moment.fresh)
        problems = act(job, attempt, random) if moment.wait(attempt, random) else None
        return Struck(attempt, expected, problems is not None, tuple(problems or ()))

    return strike


def at_rest(act: Callable[[Job, Random], Iterable[str]]) -> Strike:
    """Does something to the run's files, and starts the run for some steps."""

    def strike(job: Job, random: Random) -> Struck:
        problems = act(job, random)
        expected, attempt = job.newest_checkpoint(), job.start()
        STEPPING.wait(attempt, random)
        return Struck(attempt, expected, problems=(*problems, *end_of(attempt)))

    return strike


def end_of(attempt: Attempt) -> list[str]:
    """Kills a run; returns problems if it had ended before."""
    attempt.kill()
    right = (-signal.SIGKILL, FINISHED)
    return [f"it ended with code {code}" for code in attempt.exit_codes() if code not in right]


def of_code(attempt: Attempt, code: int, *texts: str) -> list[str]:
    """Returns problems unless the processes end with `code` and an error with all `texts`."""
    codes, problems = attempt.exit_codes(), []
    if set(codes) != {code}:
        problems.append(f"it ended with {codes}, and not {code}")
    if not lines_with(attempt, "error: ", *texts):
        problems.append(f"it did not say {' … '.join(texts)!r}, see {attempt.files[0]}")
    return problems


def lines_with(attempt: Attempt, *texts: str) -> list[str]:
    """Returns the lines of its output that have all `texts`."""
    lines = attempt.output().splitlines()
    return [line for line in lines if all(text in line for text in texts)]


# Signals


def killed(weight: float, moment: Moment) -> Fault:
    def act(job: Job, attempt: Attempt, random: Random) -> tuple[()]:
        attempt.kill()
        return ()

    return Fault(f"SIGKILL {moment.name}", weight, under_way(act, moment))


def one_killed(process: int) -> Fault:
    """SIGKILL to one process of two: the other ends, with a code that says why."""

    def act(job: Job, attempt: Attempt, random: Random) -> list[str]:
        attempt.send(signal.SIGKILL, process)
        code = attempt.exit_codes(PEER_SECONDS)[1 - process]
        right = code == PEER_ENDED
        return [] if right else [f"the other process ended with code {code}, not {PEER_ENDED}"]

    return Fault(f"SIGKILL of process {process} of 2", 1, at_any_of(act, STEPPING, SAVING))


def asked_to_stop(
    weight: float, number: signal.Signals, moment: Moment, *other_codes: int
) -> Fault:
    """A signal after which the run saves a checkpoint and ends with `REQUEUE`."""

    def act(job: Job, attempt: Attempt, random: Random) -> list[str]:
        attempt.send(number)
        (code,) = attempt.exit_codes()
        problems = []
        made_all = code == FINISHED and job.last_step() == STEPS
        if code not in (REQUEUE, *other_codes) and not made_all:
            problems.append(f"it ended with code {code}, and not {REQUEUE}")
        if attempt.trains and job.newest_checkpoint() != job.last_step():
            problems.append(f"its last step, {job.last_step()}, is in no checkpoint")
        return problems

    return Fault(f"{number.name} {moment.name}", weight, under_way(act, moment))


def interrupted_twice(weight: float, moment: Moment) -> Fault:
    """Ctrl-C, and again: the run ends at once, at any moment."""

    def act(job: Job, attempt: Attempt, random: Random) -> list[str]:
        attempt.send(signal.SIGINT)
        attempt.send(signal.SIGINT)
        (code,) = attempt.exit_codes(AT_ONCE_SECONDS)
        # Two signals of one kind may arrive as one; then it ends as after one.
        right = (-signal.SIGINT, 128 + signal.SIGINT, REQUEUE, FINISHED)
        return [] if code in right else [f"it ended with code {code}"]

    return Fault(f"SIGINT twice {moment.name}", weight, under_way(act, moment))


def held(weight: float, moment: Moment) -> Fault:
    """SIGSTOP, as Ctrl-Z sends it, and after a while SIGCONT: a start meanwhile is refused, and the
    run goes on as if nothing had been."""

    def act(job: Job, attempt: Attempt, random: Random) -> list[str] | None:
        attempt.send(signal.SIGSTOP)
        happened = not attempt.ended  # else the second has rightly gone on
        second = job.start(beside_another=True)
        problems = of_code(second, MISTAKE, str(job.workdir), "is in use by")
        attempt.send(signal.SIGCONT)
        attempt.wait_for_checkpoint()
        return [*problems, *end_of(attempt)] if happened else None

    return Fault(f"SIGSTOP {moment.name}, and SIGCONT", weight, under_way(act, moment))


def prune_killed(weight: float) -> Fault:
    """SIGKILL of `runner.checkpoint prune`: no checkpoint is half there, and the run goes on."""

    def act(job: Job, random: Random) -> list[str]:
        before = job.whole_checkpoints()
        pruning = job.prune(LEFT)
        if pruning.wait_until(lambda: job.whole_checkpoints() != before):
            end = pruning.seconds + random.uniform(0, PRUNE_SECONDS)
            pruning.wait_until(lambda: pruning.seconds >= end)
        problems, newest = end_of(pruning), job.newest_checkpoint()
        if newest != before[-1]:
            problems.append(f"the newest checkpoint is {newest}, and was {before[-1]}")
        return problems

    return Fault("SIGKILL in prune", weight, at_rest(act), LEFT + 1, precedes_start=True)


def started_twice(name: str, weight: float) -> Fault:
    """The same command beside a run that goes on: it is refused, and disturbs nothing."""

    def act(job: Job, attempt: Attempt, random: Random) -> list[str] | None:
        refusal = of_code(job.start(beside_another=True), MISTAKE, str(job.workdir), "is in use by")
        # If the first has ended, the second was right to go on.
        return None if attempt.ended else [*refusal, *end_of(attempt)]

    return Fault(name, weight, at_any_of(act, RESTORING, LOADING, STEPPING))


# Files


def damaged(name: str, weight: float, harm: damage.Harm) -> Fault:
    """Damage to the newest checkpoint: the run says so and goes on from the one before."""

    def strike(job: Job, random: Random) -> Struck:
        *_, before, last = job.whole_checkpoints()
        folder = job.checkpoints / str(last)
        file = harm(folder, random)
        attempt = job.start()
        # Up to its next checkpoint, so that the sound ones do not become fewer.
        attempt.wait_until(lambda: attempt.trains and job.whole_checkpoints()[-1] >= last)
        problems = end_of(attempt)
        if not lines_with(attempt, str(folder), str(file.relative_to(folder))):
            problems.append(f"it did not say that {file} is damaged")
        return Struck(attempt, before, problems=tuple(problems))

    return Fault(
        f"checkpoint: {name}", weight, strike, checkpoints=KEEP_CHECKPOINTS, precedes_start=True
    )


def left_behind(name: str, weight: float, harm: Callable[[Path, Random], None]) -> Fault:
    """Harm to what else is in the workdir; nobody need notice."""
    strike = at_rest(lambda job, random: harm(job.workdir, random) or ())
    return Fault(name, weight, strike, checkpoints=1, precedes_start=True)


def changed(name: str, weight: float, folder: str, harm: damage.Harm, between: str = "/") -> Fault:
    """Changes a file that the run reads, and restores it. A start in between is refused, names the
    file after the folder and `between`, and touches nothing."""

    def act(job: Job, random: Random) -> list[str]:
        read, whole = job.scratch / folder, job.scratch / f"{folder}.whole"
        before = job.files()
        shutil.copytree(read, whole)
        named = harm(read, random)
        problems = of_code(job.start(), MISTAKE, f"{folder}{between}{named.relative_to(read)}")
        after = job.files()
        names = sorted(before.keys() | after.keys())
        problems += [f"it touched {n}" for n in names if before.get(n) != after.get(n)]
        shutil.rmtree(read)
        whole.rename(read)
        return problems

    return Fault(name, weight, at_rest(act), needs=folder, precedes_start=True)


def lock_deleted(weight: float) -> Fault:
    """Deletes the lock and starts the same command: the first run ends, and the second goes on as
    usual. In half of the cases the first is asleep until the second makes steps."""

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
        happened = first.exit_codes() != [FINISHED]  # else it ended before the lock was deleted
        second.wait_for_checkpoint()
        told = of_code(first, FAILED, str(job.workdir), "lock was deleted: this process ends")
        problems = [*told, *end_of(second)] if happened else end_of(second)
        return Struck(second, expected, happened, tuple(problems))

    return Fault("lock deleted while another starts", weight, strike, precedes_start=True)


def workdir_gone(
    name: str, weight: float, take: Callable[[Job], object], then: Callable[[Job], object]
) -> Fault:
    """The run ends at once, and leaves nothing there."""

    def act(job: Job, attempt: Attempt, random: Random) -> list[str] | None:
        take(job)
        happened = attempt.exit_codes() != [FINISHED]  # else it ended before
        problems = of_code(attempt, FAILED, str(job.workdir), "deleted") if happened else []
        if job.workdir.exists():
            left = [str(path.relative_to(job.workdir)) for path in job.workdir.rglob("*")]
            problems.append(f"it made {job.workdir} again: {left[:5]}")
            shutil.rmtree(job.workdir)
        then(job)
        return problems if happened else None

    return Fault(f"workdir {name} under the run", weight, under_way(act))


def delete(job: Job) -> None:
    while job.workdir.exists():  # the run may still make a file there
        shutil.rmtree(job.workdir, ignore_errors=True)


def elsewhere(job: Job) -> Path:
    return job.scratch / f"{job.name}_elsewhere"


def metrics_gone(name: str, weight: float, take: Callable[[Path], object]) -> Fault:
    """metrics.jsonl is put back, with all that was in it."""

    def act(job: Job, attempt: Attempt, random: Random) -> list[str] | None:
        file, lines = job.workdir / "metrics.jsonl", job.last_step()
        take(file)
        put_back = attempt.wait_until(lambda: attempt.says("its lines are put back"))
        attempt.wait_for_checkpoint()
        problems = end_of(attempt)
        if put_back and job.last_step() <= lines:
            problems.append(f"{file} has {job.last_step()} lines, and had {lines} before")
        return problems if put_back else None

    return Fault(f"metrics.jsonl {name} under the run", weight, under_way(act))


def half_of(file: Path) -> None:
    """Replaces it like an editor by a new file, here with half of the lines."""
    lines = file.read_bytes().splitlines(keepends=True)
    half = file.with_name("half")
    half.write_bytes(b"".join(lines[: len(lines) // 2]))
    half.rename(file)


# Disks and numbers


def disk_full_for_a_while(weight: float) -> Fault:
    """A checkpoint cannot be saved: the run says so, goes on, and saves a later one."""

    def act(job: Job, attempt: Attempt, random: Random) -> list[str] | None:
        attempt.limit_file_sizes(LESS_THAN_A_WEIGHT)
        happened = attempt.wait_until(lambda: attempt.says(FULL))
        attempt.limit_file_sizes(resource.RLIM_INFINITY)
        attempt.wait_for_checkpoint()
        problems = end_of(attempt)
        # The last checkpoint of all is not tried again.
        return (problems if job.last_step() != STEPS else []) if happened else None

    return Fault("disk full for a while", weight, under_way(act))


def disk_full_for_good(name: str, weight: float, size: Callable[[Job], int]) -> Fault:
    """No file grows beyond `size`: the run says that of `name`, and ends with a code for it."""

    def act(job: Job, attempt: Attempt, random: Random) -> list[str]:
        attempt.limit_file_sizes(size(job))
        return of_code(attempt, FAILED, FULL, name)

    return Fault(f"disk full for {name}", weight, under_way(act))


def metrics_size(job: Job) -> int:
    """Returns the size of metrics.jsonl in bytes, but at least `ENOUGH_LINES`."""
    return max(ENOUGH_LINES, (job.workdir / "metrics.jsonl").stat().st_size)


def infinite_update(weight: float) -> Fault:
    """An update is infinite, as in the undisturbed run: it is not made, and all stays finite."""

    def strike(job: Job, random: Random) -> Struck:
        expected, attempt = job.newest_checkpoint(), job.start()
        begin = job.last_step()

        def has_come() -> bool:
            return attempt.trains and any(
                line["step"] > begin and is_infinite(line["grad_norm"])
                for line in read_metrics(job.workdir)
            )

        happened = attempt.wait_until(has_come)
        attempt.wait_for_checkpoint()
        problems = end_of(attempt)
        for line in read_metrics(job.workdir):
            if is_infinite(line["grad_norm"]) and line["update_norm"]:
                problems.append(f"the infinite update of step {line['step']} was made")
            if not all(math.isfinite(value) for value in line.values()):
                problems.append(f"step {line['step']} has a number that is not finite")
        return Struck(attempt, expected, happened, tuple(problems))

    return Fault("an infinite update", weight, strike)


CHECKPOINT_OF_BASE = f"{BASE}/checkpoints/1"
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
    held(2, STEPPING),
    held(2, SAVING),
    prune_killed(3),
    started_twice("a second start", 4),
    damaged("a bit flipped", 5, damage.flip_a_bit),
    damaged("a block zeroed", 3, damage.zero_a_block),
    damaged("a file cut short", 3, damage.truncate),
    damaged("a file deleted", 3, damage.delete),
    damaged("the manifest deleted", 2, damage.delete_the_manifest),
    damaged("a stray file", 2, damage.add_a_stray_file),
    left_behind("half a line in metrics.jsonl", 2, damage.cut_the_last_line),
    left_behind("half of a new config.json", 2, damage.leave_half_a_config),
    lock_deleted(4),
    workdir_gone("deleted", 1, delete, lambda job: None),
    workdir_gone(
        "moved away",
        2,
        lambda job: job.workdir.rename(elsewhere(job)),
        lambda job: elsewhere(job).rename(job.workdir),
    ),
    metrics_gone("deleted", 2, Path.unlink),
    metrics_gone("exchanged for half", 2, half_of),
    disk_full_for_a_while(4),
    disk_full_for_good("checkpoints", 3, lambda job: LESS_THAN_A_WEIGHT),
    disk_full_for_good("metrics.jsonl", 2, metrics_size),
    infinite_update(5),
    changed("data: shards swapped", 4, TOKENS, damage.swap_shards),
    changed("data: chunks swapped", 3, TOKENS, damage.swap_chunks),
    changed("data: a bit of metadata flipped", 3, TOKENS, damage.flip_a_bit_of_metadata),
    changed("base: a bit flipped", 5, CHECKPOINT_OF_BASE, damage.flip_a_bit, " is damaged: "),
    changed("base: a file deleted", 3, CHECKPOINT_OF_BASE, damage.delete, " is damaged: "),
)
OF_TWO_PROCESSES = (one_killed(0), one_killed(1), started_twice("a second start of 2", 1))


def draw(faults: tuple[Fault, ...], job: Job, random: Random) -> Iterator[Fault]:
    """Yields faults for a run, without end; skips faults for which the run is not ready."""
    while True:
        (fault,) = random.choices(faults, [fault.weight for fault in faults])
        if fault.suits(job):
            yield fault
