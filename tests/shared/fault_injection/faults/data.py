"""What a run reads, changed while it is at rest, and put back once a start was refused."""

import shutil
from random import Random

from fault_injection import damage
from fault_injection.experiment import BASE, TAUGHT, TOKENS
from fault_injection.faults.fault import Fault, Struck, changed_files, of_early_end, of_refusal
from fault_injection.job import Job
from fault_injection.moments import STEPPING


def data_changed(name: str, weight: float, harm: damage.Harm) -> Fault:
    """Of the data set: the start names what was changed, and touches nothing; with the old data the
    run goes on."""
    return _changed(f"data: {name}", weight, TOKENS, harm)


def teacher_changed(name: str, weight: float, harm: damage.Harm) -> Fault:
    """The same of what a teacher said."""
    return _changed(f"stored teacher: {name}", weight, TAUGHT, harm)


def base_changed(name: str, weight: float, harm: damage.Harm) -> Fault:
    """The same of the checkpoint with the weights that the run begins or is compared with."""
    return _changed(f"base: {name}", weight, f"{BASE}/checkpoints/1", harm, " is damaged: ")


def _changed(name: str, weight: float, folder: str, harm: damage.Harm, between: str = "/") -> Fault:
    """`between` stands in the message between the folder and what in it was changed."""

    def strike(job: Job, random: Random) -> Struck:
        read, whole = job.scratch / folder, job.scratch / f"{folder}.whole"
        before = job.files()
        shutil.copytree(read, whole)
        named = harm(read, random)
        refused = job.start()
        problems = of_refusal(refused, f"{folder}{between}{named.relative_to(read)}")
        problems += changed_files(before, job.files())
        shutil.rmtree(read)
        whole.rename(read)
        expected, attempt = job.newest_checkpoint(), job.start()
        STEPPING.wait(attempt, random)
        attempt.kill()
        problems += of_early_end(attempt)
        return Struck(attempt, expected, problems=tuple(problems))

    return Fault(name, weight, strike, needs=folder, precedes_start=True)
