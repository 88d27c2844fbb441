"""Schedule-free runs are validated, sampled, read and averaged at the average of their weights."""

import functools

import fiddle as fdl
import jax
import numpy as np
import pytest
from forked_processes import succeeded
from small_experiment import small

from experiments.base.pretraining import schedule_free
from lmlib.evaluate.validation import Evaluator
from lmlib.optim.schedule_free import ScheduleFree
from runner import Options, fit
from runner.errors import StoppedEarly
from runner.inference.loaded import load

same = functools.partial(jax.tree.map, np.testing.assert_array_equal)


def free(*overrides):
    cfg = small("steps=4", "checkpoints.every=2", "checkpoints.keep=9", *overrides)
    schedule_free(cfg)
    return cfg


@pytest.mark.slow
@pytest.mark.several_devices
def test_a_run_is_evaluated_and_read_at_the_average_and_goes_on_bit_for_bit(tmp_path):
    cfg = free("mesh.fsdp=4")
    cfg.validation = fdl.deepcopy_with(cfg.data, seed=1)
    cfg.evaluation.batches = 1
    result = fit(cfg, tmp_path / "whole")
    state, found = result.state, load(tmp_path / "whole", trusted=["bigram"])
    same(found.model, state.optimizer.evaluated)
    same(load(tmp_path / "whole", average=True, trusted=["bigram"]).model, found.model)
    same(load(tmp_path / "whole", average=False, trusted=["bigram"]).model, state.model)
    pairs = zip(*map(jax.tree.leaves, jax.device_get((found.model, state.model))), strict=True)
    assert min(np.max(np.abs(x - y)) for x, y in pairs) > 1e-4

    experiment = fdl.build(cfg)
    evaluator = Evaluator(experiment.mesh, experiment.compute, experiment.objective)
    losses = [
        evaluator(model, experiment.validation, 1).metrics["loss"]
        for model in (state.optimizer.evaluated, state.model)
    ]
    assert result.metrics[-1]["evaluation_loss"] == losses[0] != losses[1]

    with pytest.raises(StoppedEarly):
        fit(cfg, tmp_path / "cut", Options(stop=lambda step: step == 2))
    same(fit(cfg, tmp_path / "cut").state.optimizer, state.optimizer)

    begun = free("steps=1", f"init_from={str(tmp_path / 'whole')!r}", "optimizer.peak_lr=1e-30")
    same(fit(begun, tmp_path / "begun").state.model, jax.device_get(found.model))
    flags = f"--from={tmp_path / 'whole'}", "--last=2", f"--to={tmp_path / 'mean'}"
    succeeded("-m", "runner.average", *flags)
    parts = [load(f"{tmp_path / 'whole'}@{step}", trusted=["bigram"]).model for step in (2, 4)]
    mean = jax.tree.map(lambda x, y: (x + y) / 2, *parts)
    merged = load(tmp_path / "mean", trusted=["bigram"]).model
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7), merged, mean)


@pytest.mark.parametrize("setting", [{"b1": 1.0}, {"power": -1.0}, {"rate_power": float("inf")}])
def test_senseless_settings_are_refused(setting):
    with pytest.raises(ValueError, match=next(iter(setting))):
        ScheduleFree(**setting)
