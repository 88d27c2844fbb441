"""`python -m runner.sweep`: its points are ordinary runs, and it continues where it ended."""

import json
import re
import signal

import pytest
from compiled_programs import XLA_FLAGS
from forked_processes import run_forked, succeeded
from small_runs import EXPERIMENT, SmallRun

from lmlib.metrics.log import read_metrics
from lmlib.terminal.table import WIDTH
from runner.command_line.exit_status import FAILED, MISTAKE, STOPPED
from runner.processes.lock import wait_for_lock

AXES = ("--axis=optimizer.peak_lr=1e-3,1e-2", "--axis=seed=0,1")
ENVIRONMENT = {"XLA_FLAGS": XLA_FLAGS}


def sweep(workdir, *flags, steps=3, run=succeeded):
    given = (*EXPERIMENT, f"--fdl.steps={steps}", f"--workdir={workdir}", *flags)
    return run("-m", "runner.sweep", *given, environment=ENVIRONMENT)


def losses(workdir):
    return [line["loss"] for line in read_metrics(workdir)]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The folder of a sweep of four points, and the output of the command."""
    folder = tmp_path_factory.mktemp("sweeps") / "sweep"
    done = sweep(folder, *AXES)
    return folder, done


POINTS = [f"peak_lr={rate},seed={seed}" for rate in ("0.001", "0.01") for seed in (0, 1)]


@pytest.mark.slow
def test_each_point_is_an_ordinary_run_in_a_folder_of_its_own(made, tmp_path):
    folder, done = made
    assert sorted(file.parent.name for file in folder.glob("*/result.json")) == POINTS
    curves = [losses(folder / name) for name in POINTS]
    assert len({tuple(curve) for curve in curves}) == 4
    settings = ("--fdl.steps=3", "--fdl.optimizer.peak_lr=1e-2", "--fdl.seed=1")
    flags = (*EXPERIMENT, *settings, f"--workdir={tmp_path}")
    succeeded("-m", "runner", *flags, environment=ENVIRONMENT)
    assert losses(tmp_path) == curves[3]
    # One line for each point; the lines of its steps are in its folder.
    told = done.stderr.splitlines()
    assert [re.match(r"(./4)  (\S+) finished after .*: training loss ", x)[1] for x in told] == [
        f"{i}/4" for i in range(1, 5)
    ]
    assert [line.split()[1] for line in told] == POINTS
    assert all("step 3/3" in (folder / name / "run.log").read_text() for name in POINTS)
    assert f"-m runner.compare {folder}" in done.stdout
    # The best comes first: these runs have only training losses.
    shown = [line.split()[0] for line in done.stdout.splitlines() if line.startswith("peak_lr")]
    results = {name: json.loads((folder / name / "result.json").read_text()) for name in POINTS}
    assert shown == sorted(POINTS, key=lambda name: results[name]["training_loss"])


def test_a_dry_run_shows_the_cost(tmp_path):
    shown = sweep(tmp_path / "sweep", *AXES, "--dry_run")
    assert not (tmp_path / "sweep").exists()
    rows = [line.split() for line in shown.stdout.splitlines()]
    assert [row[:2] for row in rows[1:5]] == [[name, "3"] for name in POINTS]
    *_, last = shown.stdout.split("\n\n")
    assert last.startswith("4 points, ")
    assert last.index("The time here is measured in the first point.") < last.index("on an H100")
    assert max(map(len, shown.stdout.splitlines())) <= WIDTH


@pytest.mark.slow
def test_finished_points_are_skipped_and_points_can_be_added(made):
    folder, _ = made
    before = {file: file.read_bytes() for file in folder.glob("*/metrics.jsonl")}
    again = sweep(folder, *AXES)
    assert again.stderr == ""
    wider = (AXES[0], "--axis=seed=0,1,2")
    refused = sweep(folder, *wider, run=run_forked)
    assert refused.returncode == MISTAKE
    assert "has peak_lr=0.001,seed=2, peak_lr=0.01,seed=2: give the same points" in refused.stderr
    other = sweep(folder, *AXES, steps=4, run=run_forked)
    assert other.returncode == MISTAKE
    assert "differs in steps" in other.stderr
    added = sweep(folder, "--axis=optimizer.peak_lr=1e-3", "--axis=seed=2", "--add_points")
    assert "1/1  peak_lr=0.001,seed=2 finished after" in added.stderr
    assert all(file.read_bytes() == content for file, content in before.items())


@pytest.mark.slow
def test_a_point_that_fails_stops_no_other_and_is_listed_with_its_reason(tmp_path):
    done = sweep(tmp_path / "sweep", "--axis=microbatches=3,1", run=run_forked)
    assert done.returncode == FAILED
    assert "Traceback" not in done.stderr
    assert (tmp_path / "sweep" / "microbatches=1" / "result.json").exists()
    (failed,) = [line for line in done.stdout.splitlines() if line.startswith("microbatches=3")]
    assert "failed" in failed and "do not divide into 3 microbatches" in failed
    assert "1 of 2 finished" in done.stdout


@pytest.mark.slow
def test_a_signal_stops_it_with_a_checkpoint_and_the_same_command_goes_on(tmp_path):
    folder, steps = tmp_path / "sweep", 150
    begun = SmallRun(folder, f"steps={steps}", flags=("--axis=seed=0,1",), module="runner.sweep")
    begun.reach(lambda: len(losses(folder / "seed=0")) > 2, "three steps")
    begun.send(signal.SIGTERM)
    assert begun.exit_code() == STOPPED
    assert "Stopped on a signal. Give the same command to continue." in begun.output()
    stopped = losses(folder / "seed=0")
    assert 2 < len(stopped) < steps and not (folder / "seed=1").exists()
    sweep(folder, "--axis=seed=0,1", steps=steps)
    assert losses(folder / "seed=0")[: len(stopped)] == stopped
    assert [len(losses(folder / f"seed={seed}")) for seed in (0, 1)] == [steps, steps]


@pytest.mark.slow
def test_points_in_processes_of_their_own_go_side_by_side(tmp_path):
    flags = ("--axis=microbatches=1,2,3", "--max_parallel=2", "--", "--step_seconds=300")
    done = sweep(tmp_path / "sweep", *flags, run=run_forked)
    assert done.returncode == FAILED
    assert "microbatches=1 finished after" in done.stderr
    (failed,) = [line for line in done.stdout.splitlines() if line.startswith("microbatches=3")]
    assert "do not divide into 3 microbatches" in failed
    output = (tmp_path / "sweep" / "output" / "microbatches=2.txt").read_text()
    assert "step 3/3" in output


@pytest.mark.slow
def test_points_end_with_a_sweep_that_is_killed_also_below_a_shell(tmp_path):
    folder = tmp_path / "sweep"
    flags = ("--axis=seed=0,1", "--max_parallel=2", "--launcher=sh -c '{command}; true'")
    begun = SmallRun(folder, "steps=1_000_000", flags=flags, module="runner.sweep")
    points = [folder / f"seed={seed}" for seed in (0, 1)]
    begun.reach(lambda: all((p / "metrics.jsonl").exists() for p in points), "two runs")
    begun.kill()
    for point in points:
        wait_for_lock(point, seconds=30.0)  # raises if its run goes on
