"""Commands that make a workdir of runs: a mixture of experts, and the mean of checkpoints."""

import json
import shutil
from pathlib import Path

import fiddle as fdl
import jax
import numpy as np
import pytest
from forked_processes import run_forked
from small_experiment import small

from lmlib.adapters.lora import lora, merged
from lmlib.optim.trainable import adapters
from runner import Options, convert, fit
from runner.config import configs
from runner.inference.loaded import load

GOLDEN = Path(__file__).parents[2] / "hf" / "golden"
ON_ONE_DEVICE = ("mesh.fsdp=1", "validation=None", "compute.dtype='float32'", "data.batch_size=8")


def dense(*overrides):
    return configs.load("experiments/llama_84m", ["tiny"], (*ON_ONE_DEVICE, *overrides))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("dense")
    fit(dense("steps=2"), workdir)
    return workdir


@pytest.fixture(scope="module")
def upcycled(trained, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("made") / "mixture"
    ended = upcycle(trained, workdir, "--experts=4", "--seed=5")
    assert ended.returncode == 0, ended.stderr
    assert f"of {trained}@2; it took" in ended.stdout
    return workdir


def upcycle(model, to, *flags):
    return run_forked("-m", "runner.upcycle", f"--from={model}", f"--to={to}", *flags)


def metrics(workdir):
    lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line for line in lines if "loss" in line}


@pytest.mark.slow
@pytest.mark.several_devices
def test_an_upcycled_run_starts_with_the_dense_loss_and_resumes(trained, upcycled, tmp_path):
    fit(dense("steps=1"), tmp_path / "on", Options(init_from=str(trained)))
    settings = ("steps=4", "checkpoints.every=2", "mesh.fsdp=2", "mesh.expert=4")
    cfg = configs.load(str(upcycled), overrides=settings)
    assert cfg.init_from == str(upcycled)
    state = fit(cfg, tmp_path / "run").state
    found, of_dense = metrics(tmp_path / "run"), metrics(tmp_path / "on")
    assert found[1]["loss"] == pytest.approx(of_dense[1]["loss"], rel=1e-6)
    assert all(of_step["expert_dropped"] == 0 for of_step in found.values())
    gate = np.asarray(state.model.stack.patterns[0][0].mlp.experts.gate)
    assert not np.array_equal(gate[:, 0], gate[:, 1])  # copies grow apart

    shutil.copytree(tmp_path / "run", tmp_path / "again")
    shutil.rmtree(tmp_path / "again" / "checkpoints" / "4")
    again = fit(cfg, tmp_path / "again").state
    for one, other in zip(*map(jax.tree.leaves, (again.model, state.model)), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_an_upcycled_model_is_exported_as_mixtral_and_imported(upcycled, tmp_path):
    convert.bring_out(str(upcycled), tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "mixtral"
    one, other = (load(str(folder)).model for folder in (upcycled, tmp_path / "out"))
    for a, b in zip(*map(jax.tree.leaves, (one, other)), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_upcycling_merges_adapters_and_trains_all_weights(trained, tmp_path):
    cfg = dense("steps=2", "frozen_dtype='float32'")
    cfg.model, cfg.trainable = fdl.Partial(lora, of=cfg.model, rank=2), fdl.Config(adapters)
    cfg.init_from = str(trained)
    fit(cfg, tmp_path / "lora")
    ended = upcycle(tmp_path / "lora", tmp_path / "made", "--experts=2")
    assert ended.returncode == 0, ended.stderr
    made = configs.load(str(tmp_path / "made"))
    assert made.trainable is None and made.model.of == cfg.model.of
    from_merged, of_dense = (load(str(tmp_path / name)).model for name in ("made", "lora"))
    expected = np.asarray(merged(of_dense).stack.patterns[0][0].mlp.up)
    found = np.asarray(from_merged.stack.patterns[0][0].mlp.experts.up)
    np.testing.assert_allclose(found, np.stack([expected, expected], axis=1), rtol=1e-6)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("checkpoints")
    fit(small("steps=4", "checkpoints.every=1", "checkpoints.keep=9"), workdir)
    return workdir


def weights(reference):
    return [np.asarray(each, np.float64) for each in jax.tree.leaves(model(reference))]


def model(reference):
    return load(reference, trusted=["bigram"]).model


def average(*flags):
    return run_forked("-m", "runner.average", *flags)


@pytest.mark.slow
def test_an_average_is_the_mean_and_usable_like_a_run(checkpoints, tmp_path):
    ended = average(f"--from={checkpoints}", "--last=3", f"--to={tmp_path / 'mean'}")
    assert ended.returncode == 0, ended.stderr
    assert "the mean of steps 2, 3, 4, 16.4 k parameters" in ended.stdout
    each = [weights(f"{checkpoints}@{step}") for step in (2, 3, 4)]
    for found, *of in zip(weights(tmp_path / "mean"), *each, strict=True):
        np.testing.assert_array_equal(found, np.mean(of, axis=0).astype(np.float32))
    begun = fit(
        small("steps=1", "optimizer.peak_lr=1e-9"),
        tmp_path / "begun",
        Options(init_from=str(tmp_path / "mean")),
    )
    for found, of in zip(
        jax.tree.leaves(begun.state.model), weights(tmp_path / "mean"), strict=True
    ):
        np.testing.assert_allclose(found, of, atol=1e-7)
