"""Signals: kills, and polite ones."""

import signal
from random import Random

from fault_injection.experiment import STEPS
from fault_injection.faults.fault import (
    FINISHED,
    PEER_ENDED,
    REQUEUE,
    Fault,
    Struck,
    of_early_end,
    of_refusal,
)
from fault_injection.job import Job
from fault_injection.moments import SAVING, STEPPING, Moment

AT_ONCE_SECONDS = 20.0
LEFT = 2  # checkpoints that pruning leaves
PRUNE_SECONDS = 0.02  # in which a moment of it lies, once it has begun
PEER_SECONDS = 60.0  # in which a process notices that another one has died


def killed(weight: float, moment: Moment) -> Fault:
    """SIGKILL."""

    def strike(job: Job, random: Random) -> Struck:
        expected, attempt = job.newest_checkpoint(), job.start(fresh=moment.fresh)
        happened = moment.wait(attempt, random)
        attempt.kill()
        return Struck(attempt, expected, happened)

    return Fault(f"SIGKILL {moment.name}", weight, strike)


def asked_to_stop(
    weight: float, number: signal.Signals, moment: Moment, *other_codes: int
) -> Fault:
    """A signal after which the run saves a checkpoint and ends with `REQUEUE`."""

    def strike(job: Job, random: Random) -> Struck:
        expected, attempt = job.newest_checkpoint(), job.start(fresh=moment.fresh)
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


def held(weight: float, moment: Moment) -> Fault:
    """SIGSTOP, as Ctrl-Z sends it, and after a while SIGCONT: a start meanwhile is refused, and the
    run goes on as if nothing had been."""

    def strike(job: Job, random: Random) -> Struck:
        expected, attempt = job.newest_checkpoint(), job.start()
        if not moment.wait(attempt, random):
            return Struck(attempt, expected, happened=False)
        attempt.send(signal.SIGSTOP)
        happened = not attempt.ended  # else the second has rightly gone on
        second = job.start(beside_another=True)
        problems = of_refusal(second, str(job.workdir), "is in use by") if happened else []
        second.exit_codes()
        attempt.send(signal.SIGCONT)
        if attempt.wait_for_checkpoint():
            attempt.kill()
        return Struck(attempt, expected, happened, (*problems, *of_early_end(attempt)))

    return Fault(f"SIGSTOP {moment.name}, and SIGCONT", weight, strike)


def prune_killed(weight: float) -> Fault:
    """SIGKILL of `runner.checkpoint prune`: no checkpoint is half there, and the run goes on."""

    def strike(job: Job, random: Random) -> Struck:
        before = job.whole_checkpoints()
        pruning = job.command("runner.checkpoint", "prune", str(job.workdir), f"--keep={LEFT}")
        if pruning.wait_until(lambda: job.whole_checkpoints() != before):
            end = pruning.seconds + random.uniform(0, PRUNE_SECONDS)
            pruning.wait_until(lambda: pruning.seconds >= end)
        pruning.kill()
        problems = of_early_end(pruning)
        expected, attempt = job.newest_checkpoint(), job.start()
        STEPPING.wait(attempt, random)
        attempt.kill()
        problems += of_early_end(attempt)
        if expected != before[-1]:
            problems.append(f"the newest checkpoint is {expected}, and was {before[-1]}")
        return Struck(attempt, expected, problems=tuple(problems))

    return Fault("SIGKILL in prune", weight, strike, checkpoints=LEFT + 1, precedes_start=True)


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
