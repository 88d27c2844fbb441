"""Saves that fail while a run goes on: really, on a disk that takes nothing."""

import shutil
import time
from pathlib import Path

import fiddle as fdl
import pytest

from lmlib.checkpoint import folders
from lmlib.data.batch import Batch
from lmlib.data.synthetic import Synthetic
from runner import fit
from runner.command_line.errors import TrainingStopped
from runner.config import configs

SMALL = ("model.layers=1", "model.embed=16", "model.mlp=16", "validation=None", "mesh.fsdp=1")


class Disturbing(Synthetic):
    """Batches, before some of which something is done to the run's folder of checkpoints.

    `do` maps a step to "away", "back" or "delete". First the newest save is waited for: what fails
    is then the next.
    """

    def __init__(self, checkpoints: str, do: dict[int, str], **settings: int):
        super().__init__(**settings)
        self._checkpoints, self._do = Path(checkpoints), do

    def batch(self, step: int, rows: slice = slice(None)) -> Batch:
        elsewhere = self._checkpoints.with_name("elsewhere")
        match self._do.get(step):
            case "away":
                self._until(lambda: saved_steps(self._checkpoints) == [5])
                self._checkpoints.rename(elsewhere)
            case "back":
                elsewhere.rename(self._checkpoints)
            case "delete":
                self._until(lambda: saved_steps(self._checkpoints) == [5])
                shutil.rmtree(self._checkpoints.parent)
        return super().batch(step, rows)

    def _until(self, condition) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline


def saved_steps(checkpoints: Path) -> list[int]:
    return folders.steps_in(checkpoints)


def disturbed(workdir: Path, do: dict[int, str], *overrides: str):
    cfg = configs.load(
        "experiments/llama_84m", ["tiny"], (*SMALL, "checkpoint_every=5", *overrides)
    )
    sizes = {"vocab_size": 512, "batch_size": 8, "sequence_length": 64}
    cfg.data = fdl.Config(Disturbing, str(workdir / "checkpoints"), do, **sizes)
    return cfg


def test_a_run_goes_on_after_a_save_that_failed(tmp_path, capsys):
    result = fit(disturbed(tmp_path, {8: "away", 13: "back"}), tmp_path)
    told = capsys.readouterr().err
    assert "WARNING: cannot save step 10 in" in told
    assert "was deleted or moved" in told
    assert "Training goes on without that checkpoint, and stops if 2 more fail" in told
    assert [line["step"] for line in result.metrics] == list(range(1, 21))
    assert saved_steps(tmp_path / "checkpoints") == [5, 15, 20]


@pytest.mark.slow
def test_too_many_failed_saves_stop_the_run(tmp_path):
    cfg = disturbed(tmp_path, {8: "away"}, "tolerated_failed_saves=1", "steps=40")
    with pytest.raises(TrainingStopped, match=r"^cannot save step 15 .*the last 2 failed"):
        fit(cfg, tmp_path)
    (tmp_path / "elsewhere").rename(tmp_path / "checkpoints")
    assert saved_steps(tmp_path / "checkpoints") == [5]
    again = fit(disturbed(tmp_path, {}, "steps=20"), tmp_path)
    assert [line["step"] for line in again.metrics] == list(range(1, 21))


@pytest.mark.slow
def test_a_run_whose_last_save_failed_is_not_finished(tmp_path):
    cfg = disturbed(tmp_path, {8: "away"}, "steps=10")
    with pytest.raises(TrainingStopped, match="the last checkpoint could not be saved"):
        fit(cfg, tmp_path)
    assert not (tmp_path / "result.json").exists()


def test_a_workdir_that_is_deleted_is_told(tmp_path):
    workdir = tmp_path / "run"
    cfg = disturbed(workdir, {8: "delete"}, "tolerated_failed_saves=0")
    with pytest.raises(TrainingStopped, match=r"^cannot save step 10 in .*was deleted or moved"):
        fit(cfg, workdir)
