"""A run that is killed ten times leaves the same bits as one that is not."""

from random import Random

import pytest
from fault_injection.comparison import difference, difference_at_end
from fault_injection.job import Job
from fault_injection.kinds import EVERYTHING
from fault_injection.moments import (
    EVALUATING,
    LOADING,
    RESTORING,
    SAVING,
    STARTING,
    STEPPING,
    Moment,
)

from lmlib.metrics.log import read_metrics

SEED = 0
STEPS = "steps=40"
TRIES = 4  # on a busy machine a kill may come late
# The first two leave a checkpoint, so that there is one to restore.
MOMENTS = (
    SAVING,
    STEPPING,
    EVALUATING,
    RESTORING,
    SAVING,
    LOADING,
    EVALUATING,
    SAVING,
    STARTING,
    RESTORING,
)


@pytest.mark.slow
def test_killed_ten_times_it_ends_with_the_bits_of_an_undisturbed_run(tmp_path):
    EVERYTHING.prepare(tmp_path)
    undisturbed = Job(tmp_path, "undisturbed", (STEPS, "checkpoints.keep=1000"))
    attempt = undisturbed.start()
    assert attempt.exit_codes() == [0], attempt.output()
    undisturbed.keep_programs()
    # What a resumed run could get wrong is there to be got wrong.
    assert read_metrics(undisturbed.workdir)[-1]["skipped_updates"] > 0

    job = Job(tmp_path, "killed", (STEPS,))
    random = Random(SEED)
    for moment in MOMENTS:
        tries = (kill(job, undisturbed, moment, random) for _ in range(TRIES))
        assert any(tries), f"never killed while {moment.name}"
    attempt = job.start()
    assert attempt.exit_codes() == [0], attempt.output()
    assert difference_at_end(job, undisturbed) == ""


def kill(job: Job, undisturbed: Job, moment: Moment, random: Random) -> bool:
    """Starts the run and kills it; whether it was killed at that moment, and not just after."""
    newest = job.newest_checkpoint()
    attempt = job.start(fresh=moment.fresh)
    came = moment.wait(attempt, random)
    attempt.kill()
    assert came, f"ended before it was {moment.name}: {attempt.output()}"
    assert "Traceback" not in attempt.output()
    if attempt.trains:
        assert attempt.resumed_step == newest
    assert difference(job, undisturbed) == ""
    return moment.caught(attempt)
