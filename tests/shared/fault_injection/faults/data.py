"""Data that is changed while the run is at rest, and put back once a start was refused."""

import shutil
from random import Random

from fault_injection.damage import Harm
from fault_injection.experiment import TOKENS
from fault_injection.faults.fault import Fault, Struck, changed_files, of_early_end, of_refusal
from fault_injection.job import Job
from fault_injection.moments import STEPPING


def data_changed(name: str, weight: float, harm: Harm) -> Fault:
    """The start names what was changed, and touches nothing; with the old data the run goes on."""

    def strike(job: Job, random: Random) -> Struck:
        tokens, whole = job.scratch / TOKENS, job.scratch / f"{TOKENS}.whole"
        before = job.files()
        shutil.copytree(tokens, whole)
        named = harm(tokens, random)
        refused = job.start()
        problems = of_refusal(refused, str(named.relative_to(job.scratch)))
        problems += changed_files(before, job.files())
        shutil.rmtree(tokens)
        whole.rename(tokens)
        expected, attempt = job.newest_checkpoint(), job.start()
        STEPPING.wait(attempt, random)
        attempt.kill()
        problems += of_early_end(attempt)
        return Struck(attempt, expected, problems=tuple(problems))

    return Fault(f"data: {name}", weight, strike, precedes_start=True)
