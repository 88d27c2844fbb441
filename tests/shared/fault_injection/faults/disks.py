"""Disks that take nothing."""

import resource
from collections.abc import Callable
from random import Random

from fault_injection.experiment import STEPS
from fault_injection.faults.fault import FAILED, Fault, Struck, lines_with, of_early_end
from fault_injection.job import FULL, Job
from fault_injection.moments import STEPPING

LESS_THAN_A_WEIGHT = 60_000  # bytes; more than any other file of the run
# Bytes of metrics.jsonl: more than run.log has by then, and less than at the third failed save.
ENOUGH_LINES = 6_000


def disk_full_for_a_while(weight: float) -> Fault:
    """A checkpoint cannot be saved: the run says so, goes on, and saves a later one."""

    def strike(job: Job, random: Random) -> Struck:
        expected, attempt = job.newest_checkpoint(), job.start()
        if not STEPPING.wait(attempt, random):
            return Struck(attempt, expected, happened=False)
        attempt.limit_file_sizes(LESS_THAN_A_WEIGHT)
        happened = attempt.wait_until(lambda: attempt.says(FULL))
        attempt.limit_file_sizes(resource.RLIM_INFINITY)
        attempt.wait_for_checkpoint()
        attempt.kill()
        # The last checkpoint of all is not tried again.
        problems = [] if job.last_step() == STEPS else of_early_end(attempt)
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
        if not lines_with(attempt, "error: ", FULL, name):
            problems.append(f"it did not say that it ended because of {name}")
        return Struck(attempt, expected, problems=tuple(problems))

    return Fault(f"disk full for {name}", weight, strike)


def metrics_size(job: Job) -> int:
    """Of metrics.jsonl, in bytes, or of what is longer."""
    return max(ENOUGH_LINES, (job.workdir / "metrics.jsonl").stat().st_size)
