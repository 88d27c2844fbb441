"""Commands that read beside a run that goes on."""

from random import Random

from forked_processes import Ended, run_forked

from fault_injection.faults.fault import FINISHED, Fault, Struck, of_early_end
from fault_injection.job import Job
from fault_injection.moments import STEPPING

TIMES = 4


def verified(weight: float) -> Fault:
    """Its checkpoints are verified again and again while it removes old ones: all are sound, or
    gone, and the run does not notice."""

    def strike(job: Job, random: Random) -> Struck:
        expected, attempt = job.newest_checkpoint(), job.start()
        problems, beside = [], 0
        STEPPING.wait(attempt, random)
        while beside < TIMES and not attempt.ended:
            problems += _wrong(run_forked("-m", "runner.checkpoint", "verify", job.workdir))
            beside += 1
        attempt.kill()
        return Struck(attempt, expected, beside > 0, (*problems, *of_early_end(attempt)))

    return Fault("verify beside a run that removes", weight, strike, checkpoints=1)


def replayed(weight: float) -> Fault:
    """A skipped update is made again beside the run: the same bits, and the run goes on."""

    def strike(job: Job, random: Random) -> Struck:
        expected, attempt = job.newest_checkpoint(), job.start()
        if not STEPPING.wait(attempt, random):
            return Struck(attempt, expected, happened=False)
        captures = [each for each in (job.workdir / "captures").iterdir() if each.name.isdecimal()]
        capture = random.choice(sorted(captures))
        replay = job.command("runner.replay", str(capture), "--trust_module=experiment")
        problems = [f"replay ended with {code}" for code in replay.exit_codes() if code != FINISHED]
        attempt.kill()
        problems += of_early_end(attempt)
        return Struck(attempt, expected, problems=tuple(problems))

    return Fault("replay beside the run", weight, strike, needs="run/captures")


def _wrong(verify: Ended) -> list[str]:
    """What is wrong with what a command found."""
    problems = [line for line in verify.stdout.splitlines() if "DAMAGED" in line]
    if verify.returncode != FINISHED and "is removed by now" not in verify.stderr:
        problems.append(f"verify ended with {verify.returncode}: {verify.stderr[-300:]!r}")
    return problems
