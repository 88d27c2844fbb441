"""Signals: a run stops with a checkpoint, at once, or when the grace period is over; and kills."""

import os
import signal
import time
from random import Random

import pytest
from fault_injection import moments
from fault_injection.comparison import difference, difference_at_end
from fault_injection.job import Job
from fault_injection.kinds import EVERYTHING
from small_runs import SmallRun

from lmlib.checkpoint import Checkpoints
from lmlib.metrics.log import read_metrics
from runner.command_line.exit_status import SIGNALLED, STOPPED

REQUEUE = 75  # schedulers start runs again after this exit code
NEVER_ENDS = ("steps=1_000_000", "evaluation.every=1_000_000", "checkpoints.every=1_000_000")
LLAMA = ("--fdl_config=experiments/llama_84m", "--fiddler=tiny", "--fdl.validation=None")
# A source that gives four batches and then nothing more.
HANGING = """
import threading
import fiddle as fdl
import small_experiment
from lmlib.data.synthetic import Synthetic

class Hanging(Synthetic):
    def batch(self, step, rows=slice(None)):
        if step == 4:
            self.hang_here()
        return super().batch(step, rows)

    def hang_here(self):
        threading.Event().wait()

def config():
    cfg = small_experiment.small()
    cfg.data = fdl.Config(Hanging, vocab_size=512, batch_size=8, sequence_length=64)
    return cfg
"""


WITH_A_THREAD = """
import threading
import fiddle as fdl
import small_experiment
from lmlib.experiment import PeriodicCallback

class Starting:
    def __call__(self, now):
        threading.Thread(target=threading.Event().wait, name="of_the_callback").start()

def config():
    cfg = small_experiment.small("steps=1")
    cfg.actions = [fdl.Config(PeriodicCallback, 1, fdl.Config(Starting))]
    return cfg
"""


def hanging_run(tmp_path, *flags):
    file = tmp_path / "hanging_experiment.py"
    file.write_text(HANGING)
    experiment = (f"--fdl_config={file}",)
    return SmallRun(tmp_path / "run", experiment=experiment, flags=flags)


def test_schedulers_requeue_on_the_code_of_a_stopped_run():
    assert STOPPED == REQUEUE == os.EX_TEMPFAIL


@pytest.mark.landing
def test_sigterm_saves_and_the_run_goes_on_when_it_is_requeued(tmp_path):
    run = SmallRun(tmp_path / "run", *NEVER_ENDS, fresh=True)
    run.wait_for("step 3/")
    run.send(signal.SIGTERM)
    assert run.exit_code() == REQUEUE, run.output()
    (last,) = read_metrics(tmp_path / "run")[-1:]
    with Checkpoints(tmp_path / "run" / "checkpoints", read_only=True) as checkpoints:
        assert checkpoints.newest_sound() == last["step"]
    assert f"stopped after step {last['step']:,} of 1,000,000" in run.output()
    steps = last["step"] + 2
    again = SmallRun(tmp_path / "run", f"steps={steps}")
    assert again.exit_code() == 0, again.output()
    assert f"resuming after step {last['step']:,} of {steps:,}" in again.output()
    assert [line["step"] for line in read_metrics(tmp_path / "run")] == list(range(1, steps + 1))


def test_a_second_interrupt_ends_at_once_even_while_compiling(tmp_path):
    large = ("model.embed=16", "model.layers=24", "compute.unroll=24")
    run = SmallRun(tmp_path / "run", *large, *NEVER_ENDS, experiment=LLAMA)
    run.wait_for("saved activations")  # the step is compiled next
    run.send(signal.SIGINT)
    run.wait_for("SIGINT: ending after this step, with a checkpoint")
    run.send(signal.SIGINT)
    assert run.exit_code() == SIGNALLED + signal.SIGINT, run.output()
    assert "error: ended by SIGINT: it was interrupted twice" in run.output()
    assert "compiled the step" not in run.output()
    assert "Traceback" not in run.output()


@pytest.mark.slow
def test_the_grace_period_ends_a_run_that_cannot_stop(tmp_path):
    run = hanging_run(tmp_path, "--grace_seconds=1")
    run.reach(lambda: len(read_metrics(tmp_path / "run")) == 3, "three steps")
    run.send(signal.SIGTERM)
    assert run.exit_code() == SIGNALLED + signal.SIGTERM, run.output()
    assert "error: ended by SIGTERM: its checkpoint was not complete 1 s after" in run.output()


@pytest.mark.slow
def test_stacks_are_shown_on_request_and_beyond_a_limit(tmp_path):
    run = hanging_run(tmp_path, "--data_seconds=5")
    stacks = tmp_path / "run" / "stacks" / "process_00000.txt"
    run.reach(lambda: len(read_metrics(tmp_path / "run")) == 3, "three steps")
    assert "hang_here" not in stacks.read_text()
    run.send(signal.SIGUSR1)
    run.reach(lambda: "hang_here" in stacks.read_text(), "stacks")
    assert run.exit_code() == 1, run.output()
    assert "error: process 0 has been waiting for its data source for 5 s" in run.output()
    assert str(stacks) in run.output()
    asked_for, at_the_limit = stacks.read_text().split("for its data source for 5 s, its limit")
    for shown in (asked_for, at_the_limit):
        assert "in hang_here" in shown and "runner/training/loop.py" in shown


@pytest.mark.slow
def test_a_thread_that_a_callback_has_left_keeps_no_finished_run(tmp_path):
    file = tmp_path / "experiment_with_a_thread.py"
    file.write_text(WITH_A_THREAD)
    run = SmallRun(tmp_path / "run", experiment=(f"--fdl_config={file}",), fresh=True)
    assert run.exit_code() == 0, run.output()
    assert "threads still run: 'of_the_callback'; the code that started" in run.output()


@pytest.mark.slow
def test_a_run_that_was_held_beyond_a_limit_goes_on(tmp_path):
    run = SmallRun(tmp_path / "run", *NEVER_ENDS, flags=("--step_seconds=5", "--data_seconds=5"))
    run.wait_for("step 3/")
    run.send(signal.SIGSTOP)
    end = time.monotonic() + 8
    run.reach(lambda: time.monotonic() > end, "8 seconds")
    made = len(read_metrics(tmp_path / "run"))
    run.send(signal.SIGCONT)
    run.reach(lambda: len(read_metrics(tmp_path / "run")) > made + 20, "twenty steps")
    run.send(signal.SIGTERM)
    assert run.exit_code() == REQUEUE, run.output()


SEED = 0
STEPS = "steps=40"
TRIES = 4  # on a busy machine a kill may come late
# The first two leave a checkpoint, so that there is one to restore.
MOMENTS = (
    *(moments.SAVING, moments.STEPPING, moments.EVALUATING, moments.RESTORING, moments.SAVING),
    *(moments.LOADING, moments.EVALUATING, moments.SAVING, moments.STARTING, moments.RESTORING),
)


@pytest.mark.slow
def test_killed_ten_times_it_ends_with_the_bits_of_an_undisturbed_run(tmp_path):
    EVERYTHING.prepare(tmp_path)
    undisturbed = Job(tmp_path, "undisturbed", (STEPS, "checkpoints.keep=1000"))
    attempt = undisturbed.start()
    assert attempt.exit_codes() == [0], attempt.output()
    undisturbed.keep_programs()
    # The run has all parts that a resumed run could get wrong.
    assert read_metrics(undisturbed.workdir)[-1]["skipped_updates"] > 0

    job = Job(tmp_path, "killed", (STEPS,))
    random = Random(SEED)
    for moment in MOMENTS:
        tries = (kill(job, undisturbed, moment, random) for _ in range(TRIES))
        assert any(tries), f"never killed while {moment.name}"
    attempt = job.start()
    assert attempt.exit_codes() == [0], attempt.output()
    assert difference_at_end(job, undisturbed) == ""


def kill(job: Job, undisturbed: Job, moment: moments.Moment, random: Random) -> bool:
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
