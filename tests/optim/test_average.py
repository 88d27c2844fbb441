"""The average of the weights: its recursion, its layout, its readers."""

import functools

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_experiment import small

from lmlib.experiment import PeriodicCallback
from lmlib.optim.average import WeightAverage
from lmlib.optim.optimizer import Optimizer, as_declared
from lmlib.optim.trainable import Group
from runner import Options, fit
from runner.errors import ConfigError, StoppedEarly
from runner.inference.loaded import load


@settings(max_examples=20)
@given(st.sampled_from([0.01, 0.5, 0.9, 0.999, 0.99999]), st.integers(1, 30))
def test_it_is_the_mean_of_the_weights_so_far_in_float64(decay, updates):
    random = np.random.default_rng(updates)
    plain = Optimizer(optax.sgd(0.1), optax.constant_schedule(0.1), as_declared)
    optimizer = WeightAverage(0.7).added_to(plain, 30)
    numbers = WeightAverage(decay).added_to(plain, 30).hyperparameters
    weights = {"w": jnp.asarray(random.normal(size=5), jnp.float32)}
    state = optimizer.transformation.init(weights)
    np.testing.assert_array_equal(state.average["w"], weights["w"])
    total, weight = np.zeros(5), 0.0
    for _ in range(updates):
        gradients = {"w": jnp.asarray(random.normal(size=5), jnp.float32)}
        change, state = optimizer.transformation.update(gradients, state, weights, **numbers)
        weights = optax.apply_updates(weights, change)
        total = decay * total + (1 - decay) * np.asarray(weights["w"], np.float64)
        weight = decay * weight + (1 - decay)
    np.testing.assert_allclose(state.average["w"], total / weight, rtol=1e-5, atol=1e-6)
    assert state.updates == updates


@pytest.mark.parametrize("decay", [0.7, 1.0], ids=["ema", "mean"])
@pytest.mark.parametrize("share", [1.0, 0.6])
def test_it_begins_late_and_is_a_part_of_the_weights_if_told_so(decay, share):
    random = np.random.default_rng(0)
    plain = Optimizer(optax.sgd(0.1), optax.constant_schedule(0.1), as_declared)
    average = WeightAverage(decay, start=0.4, share=share, evaluated=True)
    transformation = average.added_to(plain, 10).transformation
    weights, seen = {"w": jnp.ones(3)}, []
    state = transformation.init(weights)
    for _ in range(9):
        gradients = {"w": jnp.asarray(random.normal(size=3), jnp.float32)}
        change, state = transformation.update(gradients, state, weights)
        weights = optax.apply_updates(weights, change)
        seen.append(np.asarray(weights["w"], np.float64))
        of = seen[4:] or seen[-1:]
        factors = decay ** np.arange(len(of))[::-1]
        mean = np.average(of, axis=0, weights=factors)
        expected = share * mean + (1 - share) * seen[-1]
        np.testing.assert_allclose(state.evaluated["w"], expected, rtol=1e-5, atol=1e-6)
    assert state.average is None


@pytest.mark.parametrize("decay", [0.0, -0.1, 2.0, float("nan")])
def test_a_decay_that_is_none_is_refused(decay):
    with pytest.raises(ValueError, match="above 0, at most 1"):
        WeightAverage(decay)


def averaged(*overrides):
    cfg = small("checkpoints.every=2", "checkpoints.keep=9", *overrides)
    cfg.average = fdl.Config(WeightAverage, decay=0.8)
    return cfg


same = functools.partial(jax.tree.map, np.testing.assert_array_equal)


@pytest.mark.slow
@pytest.mark.several_devices
def test_a_run_keeps_it_on_its_mesh_over_stops_and_commands_read_it(tmp_path):
    seen = []

    def record(now):
        seen.append([np.asarray(each, np.float64) for each in jax.tree.leaves(now.state.model)])

    cfg = averaged("steps=5", "mesh.fsdp=4")
    result = fit(cfg, tmp_path / "whole", Options(actions=[PeriodicCallback(1, record)]))
    share = [0.2 * 0.8 ** (4 - step) / (1 - 0.8**5) for step in range(5)]
    average = result.state.optimizer.average
    for index, found in enumerate(jax.tree.leaves(average)):
        expected = sum(part * each[index] for part, each in zip(share, seen, strict=True))
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    for mean, weight in zip(*map(jax.tree.leaves, (average, result.state.model)), strict=True):
        assert (mean.dtype, mean.sharding) == (np.float32, weight.sharding)

    with pytest.raises(StoppedEarly):
        fit(cfg, tmp_path / "cut", Options(stop=lambda step: step == 3))
    same(fit(cfg, tmp_path / "cut").state.optimizer, result.state.optimizer)

    loaded = load(tmp_path / "whole", average=True, trusted=["bigram"])
    same(loaded.model, average)
    assert loaded.name.endswith("whole@5, the average")
    same(load(tmp_path / "whole", trusted=["bigram"]).model, result.state.model)
    plain = fit(small("steps=1"), tmp_path / "plain")
    same(fit(averaged("steps=1"), tmp_path / "one").state.model, plain.state.model)
    with pytest.raises(ConfigError, match="keeps no average of its weights"):
        load(tmp_path / "plain", average=True, trusted=["bigram"])


def test_an_update_that_is_not_made_moves_no_average_and_what_is_frozen_has_none():
    cfg = averaged("frozen_dtype='bfloat16'")
    cfg.trainable = {"out": fdl.Config(Group, paths=("head*",))}
    experiment = fdl.build(cfg)
    step = experiment.trace_step().lower().compile()
    state, numbers = experiment.initial_state(), experiment.training.hyperparameters
    assert [leaf.shape for leaf in jax.tree.leaves(state.optimizer.average)] == [(16, 512)]
    batch = jax.tree.map(jnp.asarray, experiment.data.batch(0))
    empty = fdl.build(cfg).data.batch(0)
    empty.loss_mask[:] = False
    state, _ = step(state, batch, numbers)
    before = jax.tree.map(np.asarray, state.optimizer)
    state, metrics = step(state, jax.tree.map(jnp.asarray, empty), numbers)
    assert metrics["empty_batches"] == 1
    same(state.optimizer, before)
    assert state.optimizer.updates == 1
