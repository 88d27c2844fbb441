"""Updates that break the numbers."""

import math
from random import Random

from fault_injection.experiment import is_infinite
from fault_injection.faults.fault import Fault, Struck, of_early_end
from fault_injection.job import Job
from lmlib.metrics.log import read_metrics


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
        attempt.kill()
        problems = of_early_end(attempt)
        for line in read_metrics(job.workdir):
            if is_infinite(line["grad_norm"]) and line["update_norm"]:
                problems.append(f"the infinite update of step {line['step']} was made")
            if not all(math.isfinite(value) for value in line.values()):
                problems.append(f"step {line['step']} has a number that is not finite")
        return Struck(attempt, expected, happened, tuple(problems))

    return Fault("an infinite update", weight, strike)
