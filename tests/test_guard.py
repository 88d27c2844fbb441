"""The guard's verdicts against NumPy, and that a skipped update leaves everything but its count."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lmlib import train
from lmlib.compute import Compute
from lmlib.data.synthetic import Synthetic
from lmlib.guard import Guard
from lmlib.models.families.llama import llama
from lmlib.optim import Optimizer, adamw
from lmlib.parallel.mesh import make_mesh


def verdicts(guard: Guard, losses: list[float], grad_norms: list[float]) -> list[bool]:
    state, made = guard.init(), []
    judge = jax.jit(guard.judge)
    for loss, grad_norm in zip(losses, grad_norms, strict=True):
        sound, state = judge(state, jnp.float32(loss), jnp.float32(grad_norm))
        made.append(bool(sound))
    assert int(state.skipped) == made.count(False)
    in_a_row = next((i for i, sound in enumerate(reversed(made)) if sound), len(made))
    assert int(state.skipped_in_a_row) == in_a_row
    return made


def test_what_is_not_finite_is_skipped():
    nan, infinity = float("nan"), float("inf")
    losses = [1.0, nan, 2.0, infinity, 2.0, 2.0, nan]
    grad_norms = [1.0, 1.0, nan, 1.0, 1.0, infinity, nan]
    assert verdicts(Guard(), losses, grad_norms) == [True, False, False, False, True, False, False]


@pytest.mark.parametrize("seed", range(3))
def test_spikes_are_those_beyond_the_median_and_its_deviation(seed):
    rng = np.random.default_rng(seed)
    losses = rng.normal(3, 0.1, 200).astype(np.float32)
    losses[rng.choice(200, 20, replace=False)] += rng.uniform(0, 2, 20).astype(np.float32)
    window, deviations = 16, 4.0
    recent, expected = [], []
    for loss in losses:
        sound = True
        if len(recent) == window:
            median = np.median(recent)
            deviation = 1.4826 * np.median(np.abs(np.array(recent) - median))
            sound = loss <= median + deviations * deviation
        if sound:
            recent = [*recent[-window + 1 :], loss]
        expected.append(bool(sound))
    found = verdicts(Guard(deviations, window), losses.tolist(), [1.0] * 200)
    assert found == expected
    assert 3 < expected.count(False) < 40


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"spike_deviations": 0.0}, "spike_deviations must be"), ({"window": 1}, "at least 2")],
)
def test_settings_that_make_no_sense(settings, message):
    with pytest.raises(ValueError, match=message):
        Guard(**settings)


def test_a_skipped_update_changes_nothing_but_its_count():
    mesh = make_mesh(fsdp=4, tensor=2)
    make = functools.partial(
        llama, vocab=64, embed=16, layers=2, heads=2, mlp=32, key=jax.random.key(0)
    )
    schedule = optax.linear_schedule(1e-2, 0.0, 10)
    adam = adamw(10, 1e-2, schedule=lambda peak_lr, steps: schedule)
    optimizer = Optimizer(adam.transformation, schedule, adam.decays)
    state = train.init(make, optimizer, mesh)
    batch = jax.tree.map(
        jax.device_put,
        Synthetic(64, 8, 16).batch(0),
        jax.tree.map(lambda leaf: leaf.sharding, train.abstract_batch(8, 16, mesh)),
    )
    compiled = train.trace_step(state, batch, optimizer, mesh, Compute()).lower().compile()
    state, metrics = compiled(state, batch)
    metrics = jax.device_get(metrics)
    assert (int(metrics["skipped_updates"]), int(metrics["skipped_in_a_row"])) == (0, 0)
    assert metrics["update_norm"] > 0

    broken = np.array(state.model.norm.scale)
    broken[3] = np.nan
    broken = jax.device_put(broken, state.model.norm.scale.sharding)
    state = eqx.tree_at(lambda tree: tree.model.norm.scale, state, broken)
    before = jax.device_get((state.model, state.optimizer))
    for skipped in (1, 2):
        state, metrics = compiled(state, batch)
        metrics = jax.device_get(metrics)
        assert not np.isfinite(metrics["loss"])
        assert int(metrics["skipped_updates"]) == int(metrics["skipped_in_a_row"]) == skipped
        assert metrics["update_norm"] == 0
        assert metrics["learning_rate"] == pytest.approx(1e-2 * 0.9)
    assert int(state.step) == 3
    after = jax.device_get((state.model, state.optimizer))
    jax.tree.map(np.testing.assert_array_equal, after, before)
