"""Files of the workdir that are harmed while the run is at rest."""

from collections.abc import Callable
from pathlib import Path
from random import Random

from fault_injection.damage import Harm
from fault_injection.experiment import KEEP_CHECKPOINTS
from fault_injection.faults.fault import Fault, Struck, lines_with, of_early_end
from fault_injection.job import Job
from fault_injection.moments import STEPPING


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
        named = lines_with(attempt, str(folder), str(file.relative_to(folder)))
        problems = of_early_end(attempt)
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
        return Struck(attempt, expected, problems=tuple(of_early_end(attempt)))

    return Fault(name, weight, strike, checkpoints=1, precedes_start=True)
