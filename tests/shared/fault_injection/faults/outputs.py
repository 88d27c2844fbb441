"""Output that nobody takes: a log on a full disk, a reader that has gone."""

import resource
from random import Random

from fault_injection.experiment import STEPS
from fault_injection.faults.fault import Fault, Struck, of_early_end
from fault_injection.job import Job
from fault_injection.moments import STEPPING

LOST = "bytes were lost here"


def log_disk_full_for_a_while(weight: float) -> Fault:
    """The log of one supervised process takes nothing: the run goes on, and the log says so."""

    def strike(job: Job, random: Random) -> Struck:
        expected, attempt = job.newest_checkpoint(), job.start()
        if not STEPPING.wait(attempt, random):
            return Struck(attempt, expected, happened=False)
        process = random.randrange(job.processes)
        log = job.workdir / "logs" / f"process_{process:05}.log"
        told = log.read_text().count(LOST)
        attempt.limit_file_sizes(log.stat().st_size, process)
        attempt.wait_for_checkpoint()
        attempt.limit_file_sizes(resource.RLIM_INFINITY, process)
        attempt.wait_until(lambda: log.read_text().count(LOST) > told)
        attempt.kill()
        problems = of_early_end(attempt)
        if log.read_text().count(LOST) == told and job.last_step() < STEPS:
            problems.append(f"{log} does not say what it lacks")
        return Struck(attempt, expected, problems=tuple(problems))

    return Fault("log disk full for a while, of 2", weight, strike, checkpoints=1)


def reader_closed(name: str, weight: float) -> Fault:
    """As with `| head`: whoever reads stdout and stderr goes away, and the run goes on."""

    def strike(job: Job, random: Random) -> Struck:
        expected, attempt = job.newest_checkpoint(), job.start(readers=True)
        happened = STEPPING.wait(attempt, random)
        attempt.close_readers()
        if happened:
            attempt.wait_for_checkpoint()
            attempt.kill()
        return Struck(attempt, expected, happened, tuple(of_early_end(attempt)))

    return Fault(name, weight, strike)
