"""A skipped update is captured, and made again to the bit."""

import json
import re
import shutil
from pathlib import Path

import fiddle as fdl
import numpy as np
import pytest
from forked_processes import run_forked, succeeded

from lmlib.metrics.log import read_metrics
from runner import convert, fit
from runner.config import configs
from runner.errors import TrainingStopped
from runner.training.captures import read_batch, read_capture

ROOT = Path(configs.__file__).parents[2]


def config(*overrides):
    """The learning rate is far too high, and a loss just above the median is a spike."""
    cfg = configs.load(
        "experiments/llama_84m",
        ["tiny"],
        (
            *("model.layers=2", "model.embed=16", "model.mlp=16", "mesh.fsdp=2"),
            *("optimizer.peak_lr=0.05", "checkpoints.every=4", "validation=None", *overrides),
        ),
    )
    cfg.guard.spike_deviations, cfg.guard.window = 0.01, 2
    return cfg


@pytest.fixture(scope="module")
def captured(tmp_path_factory):
    """The workdir of a run that skipped some updates, and the captures in it, in order."""
    workdir = tmp_path_factory.mktemp("captured")
    (workdir / "captures" / ".1.unfinished").mkdir(parents=True)  # a killed process left it
    fit(config("guard.captures=1"), workdir)
    folders = [folder for folder in (workdir / "captures").iterdir() if folder.name.isdecimal()]
    return workdir, folders


@pytest.mark.slow
@pytest.mark.several_devices
def test_the_first_of_each_row_of_skipped_updates_is_captured(captured):
    workdir, folders = captured
    lines = read_metrics(workdir)
    begun = [line["step"] for line in lines if line["skipped_in_a_row"] == 1]
    assert len(begun) > 1  # or this test shows nothing
    assert [int(folder.name) for folder in folders] == begun[:1]
    for folder in folders:
        capture = read_capture(folder)
        line = lines[capture.step - 1]
        assert {name: line[name] for name in capture.line if name != "goodput"} == capture.line
        (checkpoint,) = (folder / "checkpoints").iterdir()
        assert int(checkpoint.name) == (capture.step - 1) // 4 * 4
        experiment = fdl.build(config())
        wanted = experiment.data.batch(capture.step - 1)
        batch = read_batch(folder, experiment.abstract_batch())
        for name in ("tokens", "targets", "segment_ids", "positions", "loss_mask"):
            np.testing.assert_array_equal(getattr(batch, name), getattr(wanted, name))


@pytest.mark.slow
@pytest.mark.several_devices
def test_a_captured_step_is_made_again_to_the_bit(captured, tmp_path):
    """Also when the run is gone."""
    _, folders = captured
    copy = shutil.copytree(folders[-1], tmp_path / folders[-1].name)
    done = succeeded("-m", "runner.replay", copy)
    assert len(re.findall("same bits$", done.stdout, re.MULTILINE)) == 5
    loss = read_capture(folders[-1]).line["loss"]
    assert re.search(rf"^loss +{re.escape(f'{loss:.9g}')} ", done.stdout, re.MULTILINE)
    for part in ("embedding", "layer 0", "layer 1", "norm", "unembedding"):
        assert re.search(rf"^{part} ", done.stdout, re.MULTILINE)


@pytest.mark.slow
def test_a_step_with_another_result_is_reported(captured, tmp_path):
    _, folders = captured
    copy = shutil.copytree(folders[0], tmp_path / folders[0].name)
    facts = json.loads((copy / "capture.json").read_text())
    facts["line"]["loss"] += 0.25
    facts["jax_settings"]["JAX_THREEFRY_PARTITIONABLE"] = "false"
    (copy / "capture.json").write_text(json.dumps(facts))
    done = run_forked("-m", "runner.replay", copy)
    assert done.returncode == 1, done.stderr
    assert re.search(r"^loss .* differs$", done.stdout, re.MULTILINE)
    settings = "JAX_THREEFRY_PARTITIONABLE was false and is true"
    assert f"the run had other settings of JAX: {settings}" in done.stdout


@pytest.mark.slow
def test_numbers_that_are_not_finite_are_captured_too(tmp_path):
    cfg = config("optimizer.peak_lr=1e15", "guard.stop_after=2")
    cfg.guard.spike_deviations, cfg.guard.window = None, 128
    with pytest.raises(TrainingStopped):
        fit(cfg, tmp_path)
    (folder,) = (tmp_path / "captures").iterdir()
    line = read_capture(folder).line
    assert not np.isfinite([line["loss"], line["grad_norm"]]).all()
    assert not (folder / "checkpoints").exists()  # there was none yet
    done = succeeded("-m", "runner.replay", folder)
    assert "the first number that is not finite is in " in done.stdout


@pytest.mark.slow
def test_a_step_after_weights_that_were_brought_in_is_made_again(tmp_path):
    folder, workdir = ROOT / "tests/hf/golden/llama", tmp_path / "run"
    convert.bring_in(str(folder), workdir)
    overrides = ["optimizer.peak_lr=1e15", "guard.stop_after=2", "mesh.fsdp=1"]
    cfg = configs.load("experiments/from_hf", ["tiny"], [f"folder={folder}", *overrides])
    with pytest.raises(TrainingStopped):
        fit(cfg, workdir)
    (capture,) = (workdir / "captures").iterdir()
    assert [each.name for each in (capture / "checkpoints").iterdir()] == ["0"]
    copy = shutil.move(capture, tmp_path / capture.name)
    shutil.rmtree(workdir)
    succeeded("-m", "runner.replay", copy)
