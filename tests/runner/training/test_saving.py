"""Failing saves on a disk that takes nothing, and states that are never saved."""

import os
import shutil
import time
from pathlib import Path

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from sentinels import sentinels
from small_experiment import small

from lmlib.checkpoint import Checkpoints
from lmlib.checkpoint.folders import steps_in
from lmlib.checkpoint.manifest import read_manifest
from lmlib.data.batch import Batch
from lmlib.data.synthetic import Synthetic
from lmlib.metrics.log import read_metrics
from lmlib.optim.adamw import adamw
from lmlib.optim.optimizer import Optimizer
from runner import fit
from runner.command_line.command import exit_code
from runner.command_line.exit_status import FAILED
from runner.errors import TrainingStopped, WorkdirLost
from runner.training.saving import not_finite


class Disturbing(Synthetic):
    """Batches that disturb the run's folder of checkpoints before some steps.

    `do` maps a step to "away", "back" or "delete". First waits for the save of step 10, which ends
    with the removal of step 5, so that the next save fails.
    """

    def __init__(self, checkpoints: str, do: dict[int, str], **settings: int):
        super().__init__(**settings)
        self._checkpoints, self._do = Path(checkpoints), do

    def batch(self, step: int, rows: slice = slice(None)) -> Batch:
        elsewhere = self._checkpoints.with_name("elsewhere")
        match self._do.get(step):
            case "away":
                self._until(lambda: steps_in(self._checkpoints) == [10])
                self._checkpoints.rename(elsewhere)
            case "back":
                elsewhere.rename(self._checkpoints)
            case "delete":
                self._until(lambda: steps_in(self._checkpoints) == [10])
                gone = self._checkpoints.parent.with_name("gone")  # all files go at once
                self._checkpoints.parent.rename(gone)
                shutil.rmtree(gone)
        return super().batch(step, rows)

    def _until(self, condition) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline


def disturbed(workdir: Path, do: dict[int, str], *overrides: str):
    cfg = small("checkpoints.every=5", "checkpoints.keep=1", *overrides)
    sizes = {"vocab_size": 512, "batch_size": 8, "sequence_length": 64}
    cfg.data = fdl.Config(Disturbing, str(workdir / "checkpoints"), do, **sizes)
    return cfg


@pytest.mark.slow
def test_a_run_goes_on_after_a_save_that_failed(tmp_path, capsys):
    result = fit(disturbed(tmp_path, {13: "away", 18: "back"}), tmp_path)
    told = capsys.readouterr().err
    assert "WARNING: cannot save step 15 in" in told
    assert "was deleted or moved" in told
    assert "Training continues without that checkpoint, and stops if 2 more fail" in told
    assert [line["step"] for line in result.metrics] == list(range(1, 21))
    assert steps_in(tmp_path / "checkpoints") == [20]  # what came back was counted again


@pytest.mark.slow
def test_too_many_failed_saves_stop_the_run(tmp_path):
    cfg = disturbed(tmp_path, {13: "away"}, "checkpoints.tolerated_failures=1", "steps=40")
    with pytest.raises(TrainingStopped, match=r"^cannot save step 20 .*The last 2 saves failed"):
        fit(cfg, tmp_path)
    (tmp_path / "elsewhere").rename(tmp_path / "checkpoints")
    assert steps_in(tmp_path / "checkpoints") == [10]
    again = fit(disturbed(tmp_path, {}, "steps=20"), tmp_path)
    assert [line["step"] for line in again.metrics] == list(range(1, 21))


@pytest.mark.slow
def test_a_deleted_workdir_is_reported(tmp_path):
    workdir = tmp_path / "run"
    cfg = disturbed(workdir, {13: "delete"})
    with pytest.raises(WorkdirLost, match=f"^{workdir} was deleted or moved during") as told:
        fit(cfg, workdir)
    assert exit_code(told.value) == FAILED
    assert not workdir.exists()


@pytest.mark.slow
def test_a_save_in_whose_course_the_lock_is_lost_gives_no_checkpoint(tmp_path, monkeypatch):
    """The lock goes when the lines of the step are on the disk, right before its checkpoint is."""
    fsync, lost = os.fsync, []

    def lose(descriptor: int) -> None:
        fsync(descriptor)
        if os.readlink(f"/proc/self/fd/{descriptor}") == str(tmp_path / "metrics.jsonl"):
            (tmp_path / "lock").unlink(missing_ok=True)
            lost.append(descriptor)

    monkeypatch.setattr(os, "fsync", lose)
    with pytest.raises(WorkdirLost, match="lock was deleted"):
        fit(small("steps=4", "checkpoints.every=2"), tmp_path)
    assert lost
    assert steps_in(tmp_path / "checkpoints") == []
    assert not (tmp_path / "result.json").exists()


def breaks_down(steps: int, of_the_state: bool) -> Optimizer:
    """Adam; from step 6 on its update is infinite, or only its own state."""
    adam = adamw(steps, 1e-3)

    def init(model):
        return jnp.zeros((), jnp.int32), jnp.zeros(3)

    def update(updates, state, model=None):
        count, moment_3 = state
        wrong = jnp.where(count >= 5, jnp.inf, 0.0)
        if of_the_state:
            return updates, (count + 1, moment_3 + wrong)
        return jax.tree.map(lambda leaf: leaf + wrong, updates), (count + 1, moment_3)

    transformation = optax.chain(adam.transformation, optax.GradientTransformation(init, update))
    return Optimizer(transformation, adam.learning_rate, adam.decays)


def breaking_down(of_the_state: bool, *overrides: str):
    cfg = small(*overrides)
    cfg.optimizer = fdl.Partial(breaks_down, of_the_state=of_the_state)
    return cfg


@pytest.mark.slow
def test_after_an_infinite_update_every_checkpoint_is_finite_and_the_one_before_stays(tmp_path):
    settings = ("checkpoints.every=2", "checkpoints.keep=1", "guard.captures=0")
    cfg = breaking_down(False, *settings, "guard.stop_after=3")
    with pytest.raises(TrainingStopped) as stopped:
        fit(cfg, tmp_path)
    assert "3 updates in a row were skipped, up to step 8" in str(stopped.value)
    assert "not finite is in the optimizer's update" in str(stopped.value)
    assert "The newest checkpoint from before them is step 4:" in str(stopped.value)
    assert [line["update_norm"] > 0 for line in read_metrics(tmp_path)] == [True] * 5 + [False] * 3
    with Checkpoints(tmp_path / "checkpoints", read_only=True) as checkpoints:
        assert checkpoints.steps() == [4, 6]
        for step in (4, 6):
            state, _ = checkpoints.restore(step, fdl.build(cfg).abstract_state())
            assert not_finite(state.model, state.optimizer) == []


def test_a_restart_keeps_the_checkpoint_from_before_skipped_updates(tmp_path):
    settings = ("checkpoints.every=2", "checkpoints.keep=1", "guard.captures=0")
    fit(breaking_down(False, *settings, "steps=8"), tmp_path)
    assert steps_in(tmp_path / "checkpoints") == [4, 8]
    with pytest.raises(TrainingStopped, match="from before them is step 4: continue from it"):
        fit(breaking_down(False, *settings), tmp_path)
    assert steps_in(tmp_path / "checkpoints") == [4, 14]


@pytest.mark.slow
def test_a_state_that_is_not_finite_is_not_saved(tmp_path, capsys):
    cfg = breaking_down(True, "steps=10", "checkpoints.every=5")
    told = r"step 10 is not saved: optimizer\.1\.1 holds numbers that are not finite"
    with pytest.raises(TrainingStopped, match=f"the last checkpoint could not be saved: {told}"):
        fit(cfg, tmp_path)
    assert steps_in(tmp_path / "checkpoints") == [5]
    assert "WARNING: step 10 is not saved: optimizer.1.1 holds" in capsys.readouterr().err


class FailingOnce(Synthetic):
    """Fails in one evaluation, when it is read for the `fails`-th time."""

    def __init__(self, fails: int, **settings: int):
        super().__init__(**settings)
        self._fails, self._evaluations = fails, 0

    def batch(self, step: int, rows: slice = slice(None)) -> Batch:
        is_whole = len(range(self.batch_size)[rows]) == self.batch_size
        if step == 0 and is_whole:  # else its first rows are checked
            self._evaluations += 1
            if self._evaluations == self._fails:
                raise RuntimeError("out of memory, say")
        return super().batch(step, rows)


@pytest.mark.parametrize("fails", sentinels([1, 2], lambda fails: fails == 1))
def test_an_evaluation_that_fails_costs_no_step_and_is_made_by_the_next_start(tmp_path, fails):
    cfg = small("steps=4")
    cfg.evaluation.every = cfg.checkpoints.every = 2
    cfg.evaluation.batches = 1
    sizes = {"vocab_size": 512, "batch_size": 8, "sequence_length": 64}
    cfg.validation = fdl.Config(FailingOnce, fails, **sizes)
    with pytest.raises(RuntimeError, match="out of memory, say"):
        fit(cfg, tmp_path)
    evaluated = 2 * fails  # the step
    assert steps_in(tmp_path / "checkpoints")[-1] == evaluated
    (line,) = read_metrics(tmp_path)[evaluated - 1 :]
    assert line["step"] == evaluated and "evaluation_loss" not in line

    cfg.validation.fails = 0
    lines = fit(cfg, tmp_path).metrics
    assert lines[evaluated - 1].items() >= line.items()
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert ["evaluation_loss" in line for line in lines] == [False, True, False, True]
    for step in (2, 4):
        manifest = read_manifest(tmp_path / "checkpoints" / str(step))
        assert (
            np.isfinite(manifest.metric) and manifest.metric == lines[step - 1]["evaluation_loss"]
        )
