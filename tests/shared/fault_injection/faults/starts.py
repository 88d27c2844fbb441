"""Starts that must be refused: beside a run that goes on, and with other code."""

import shutil
from random import Random

from fault_injection.faults.fault import Fault, Struck, changed_files, of_early_end, of_refusal
from fault_injection.job import ROOT, Job
from fault_injection.moments import LOADING, RESTORING, STEPPING

PACKAGES = ("lmlib", "runner", "experiments", "data_tools")
EDITED = "lmlib/train.py"


def started_twice(name: str, weight: float) -> Fault:
    """The same command beside a run that goes on: it is refused, and disturbs nothing."""

    def strike(job: Job, random: Random) -> Struck:
        expected, attempt = job.newest_checkpoint(), job.start()
        if not random.choice((RESTORING, LOADING, STEPPING)).wait(attempt, random):
            return Struck(attempt, expected, happened=False)
        second = job.start(beside_another=True)
        refusal = of_refusal(second, str(job.workdir), "is in use by")
        happened = not attempt.ended  # else the second has rightly gone on
        attempt.kill()
        problems = [*(refusal if happened else []), *of_early_end(attempt)]
        return Struck(attempt, expected, happened, tuple(problems))

    return Fault(name, weight, strike)


def other_code(weight: float) -> Fault:
    """One process of two has a file of code edited: all are refused before anything compiles."""

    def strike(job: Job, random: Random) -> Struck:
        edited = job.scratch / "edited_code"
        for package in PACKAGES:
            shutil.copytree(ROOT / package, edited / package)
        with (edited / EDITED).open("a") as file:
            file.write("# edited\n")
        before = job.files()
        refused = job.start(roots={random.randrange(job.processes): edited})
        problems = of_refusal(refused, "the code of process 1", EDITED)
        problems += changed_files(before, job.files())
        shutil.rmtree(edited)
        expected, attempt = job.newest_checkpoint(), job.start()
        STEPPING.wait(attempt, random)
        attempt.kill()
        problems += of_early_end(attempt)
        return Struck(attempt, expected, problems=tuple(problems))

    return Fault("other code on one process of 2", weight, strike, precedes_start=True)
