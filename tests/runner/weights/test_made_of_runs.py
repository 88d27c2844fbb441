"""Commands that make a workdir of runs: a mixture of experts, and the mean of checkpoints."""

import fiddle as fdl
import jax
import numpy as np
import pytest
from forked_processes import succeeded
from small_experiment import small
from small_folder import assert_same_weights
from states import cut_short

from lmlib.adapters.lora import lora, merged
from lmlib.metrics.log import read_metrics
from lmlib.optim.trainable import adapters
from runner import Options, fit
from runner.config import configs
from runner.inference.loaded import load

ON_ONE_DEVICE = ("mesh.fsdp=1", "validation=None", "compute.dtype='float32'", "data.batch_size=8")


def dense(*overrides):
    return configs.load("experiments/llama_84m", ["tiny"], (*ON_ONE_DEVICE, *overrides))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("dense")
    fit(dense("steps=2"), workdir)
    return workdir


def upcycle(model, to, *flags):
    return succeeded("-m", "runner.upcycle", f"--from={model}", f"--to={to}", *flags)


def weights(reference):
    return load(reference, trusted=["bigram"]).model


@pytest.mark.slow
@pytest.mark.several_devices
def test_an_upcycled_run_starts_with_the_dense_loss_and_resumes(trained, tmp_path):
    upcycled = tmp_path / "mixture"
    told = upcycle(trained, upcycled, "--experts=4", "--seed=5").stdout
    assert f"of {trained}@2; it took" in told
    fit(dense("steps=1"), tmp_path / "on", Options(init_from=str(trained)))
    settings = ("steps=4", "checkpoints.every=2", "mesh.fsdp=2", "mesh.expert=4")
    cfg = configs.load(str(upcycled), overrides=settings)
    assert cfg.init_from == str(upcycled)
    state = fit(cfg, tmp_path / "run").state
    found, of_dense = read_metrics(tmp_path / "run"), read_metrics(tmp_path / "on")
    assert found[0]["loss"] == pytest.approx(of_dense[0]["loss"], rel=1e-6)
    assert all(line["expert_dropped"] == 0 for line in found)
    gate = np.asarray(state.model.stack.patterns[0][0].mlp.experts.gate)
    assert not np.array_equal(gate[:, 0], gate[:, 1])  # copies grow apart

    again = fit(cfg, cut_short(tmp_path / "run", 2, tmp_path / "again")).state
    assert_same_weights(again.model, state.model)


@pytest.mark.slow
def test_upcycling_merges_adapters_and_trains_all_weights(trained, tmp_path):
    cfg = dense("steps=2", "frozen_dtype='float32'")
    cfg.model, cfg.trainable = fdl.Partial(lora, of=cfg.model, rank=2), fdl.Config(adapters)
    cfg.init_from = str(trained)
    fit(cfg, tmp_path / "lora")
    upcycle(tmp_path / "lora", tmp_path / "made", "--experts=2")
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


@pytest.mark.slow
def test_an_average_is_the_mean_and_usable_like_a_run(checkpoints, tmp_path):
    flags = (f"--from={checkpoints}", "--last=3", f"--to={tmp_path / 'mean'}")
    ended = succeeded("-m", "runner.average", *flags)
    assert "the mean of steps 2, 3, 4, 16.4 k parameters" in ended.stdout
    each, mean = [weights(f"{checkpoints}@{n}") for n in (2, 3, 4)], weights(tmp_path / "mean")
    exact = jax.tree.map(lambda *of: np.mean(of, axis=0, dtype=np.float64), *each)
    assert_same_weights(mean, jax.tree.map(np.float32, exact))
    begun = fit(
        small("steps=1", "optimizer.peak_lr=1e-9"),
        tmp_path / "begun",
        Options(init_from=str(tmp_path / "mean")),
    )
    assert_same_weights(begun.state.model, mean, atol=1e-7)
