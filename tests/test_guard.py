"""The guard's verdicts against NumPy, and that a skipped update leaves everything but its count."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from bigram import Bigram

from lmlib import train
from lmlib.data.synthetic import Synthetic
from lmlib.guard import Guard
from lmlib.optim.adamw import adamw
from lmlib.optim.optimizer import Optimizer
from lmlib.parallel.mesh import make_mesh
from lmlib.state import Training, abstract_batch, new_state
from runner.training.saving import not_finite


def verdicts(
    guard: Guard, losses: list[float], grad_norms: list[float], update_norms: list[float]
) -> list[bool]:
    state, made = guard.init(), []
    judge = jax.jit(guard.judge)
    for numbers in zip(losses, grad_norms, update_norms, strict=True):
        sound, state = judge(state, *map(jnp.float32, numbers), jnp.int32(8))
        made.append(bool(sound))
    assert int(state.skipped) == made.count(False) and int(state.empty_batches) == 0
    in_a_row = next((i for i, sound in enumerate(reversed(made)) if sound), len(made))
    assert int(state.skipped_in_a_row) == in_a_row
    return made


def test_non_finite_updates_are_skipped():
    nan, infinity = float("nan"), float("inf")
    losses = [1.0, nan, 2.0, infinity, 2.0, 2.0, nan, 1.0, 1.0]
    grad_norms = [1.0, 1.0, nan, 1.0, 1.0, infinity, nan, 1.0, 1.0]
    update_norms = [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, infinity, nan]
    sound = [i in (0, 4) for i in range(9)]
    assert verdicts(Guard(), losses, grad_norms, update_norms) == sound


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
    found = verdicts(Guard(deviations, window), losses.tolist(), [1.0] * 200, [1.0] * 200)
    assert found == expected
    assert 3 < expected.count(False) < 40


def test_a_batch_without_a_target_is_counted_and_forgotten():
    judge = jax.jit(Guard(spike_deviations=4.0, window=2).judge)
    one, state = jnp.float32(1), Guard(4.0, 2).init()
    nothing = jnp.float32(0), jnp.float32(0), one, jnp.int32(0)  # but weights decay
    made, before = judge(state, jnp.float32(jnp.nan), one, one, jnp.int32(8))
    assert not made and int(before.skipped_in_a_row) == 1
    made, after = judge(before, *nothing)
    assert not made
    assert int(after.empty_batches) == 1
    assert (int(after.skipped), int(after.skipped_in_a_row)) == (1, 1)
    np.testing.assert_array_equal(after.recent_losses_W, before.recent_losses_W)
    made, after = judge(after, one, one, one, jnp.int32(8))
    assert made and int(after.skipped_in_a_row) == 0


def test_arrays_that_are_not_finite_are_named():
    model = {"norm": jnp.ones(3), "scale": jnp.float32(jnp.nan)}
    optimizer = {"best": jnp.float32(jnp.inf), "count": jnp.int32(3), "mu": jnp.ones(2)}
    assert not_finite({"norm": jnp.ones(3)}, optimizer) == []
    broken = {**optimizer, "mu": jnp.array([1.0, -jnp.inf])}
    assert not_finite(model, broken) == ["model.scale", "optimizer.mu"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"spike_deviations": 0.0}, "spike_deviations must be"), ({"window": 1}, "at least 2")],
)
def test_settings_that_make_no_sense(settings, message):
    with pytest.raises(ValueError, match=message):
        Guard(**settings)


def infinite_at(step: int) -> optax.GradientTransformation:
    """Makes a part of one update infinite."""

    def update(updates, count, parameters=None):
        wrong = jnp.where(count == step, jnp.inf, updates.head_EV)
        return eqx.tree_at(lambda tree: tree.head_EV, updates, wrong), count + 1

    return optax.GradientTransformation(lambda parameters: jnp.zeros((), jnp.int32), update)


def tiny_step(optimizer: Optimizer):
    """A compiled step on one device, and its first state."""
    mesh = make_mesh()
    make = functools.partial(Bigram, vocab=64, embed=16, key=jax.random.key(0))
    training = Training(optimizer, mesh)
    state, blank = new_state(make, training), abstract_batch(4, 8, mesh)
    compiled = train.trace_step(state, blank, training).lower().compile()
    rows = jax.tree.map(lambda leaf: leaf.sharding, blank)

    def step(state, batch):
        state, metrics = compiled(
            state, jax.tree.map(jax.device_put, batch, rows), training.hyperparameters
        )
        return state, jax.device_get(metrics)

    return step, state


def test_neither_an_infinite_update_nor_a_batch_without_targets_moves_anything():
    adam = adamw(10, 1e-2)
    transformation = optax.chain(adam.transformation, infinite_at(1))
    step, state = tiny_step(Optimizer(transformation, adam.learning_rate, adam.decays))
    batch = Synthetic(64, 4, 8).batch(0)
    masked = eqx.tree_at(lambda tree: tree.loss_mask, batch, np.zeros((4, 8), bool))
    state, metrics = step(state, batch)
    assert metrics["update_norm"] > 0
    before = jax.device_get((state.model, state.optimizer))
    for skipped, empty, batch_ in ((1, 0, batch), (1, 1, masked), (2, 1, batch)):
        state, metrics = step(state, batch_)
        assert np.isfinite([metrics["loss"], metrics["grad_norm"]]).all()
        assert metrics["update_norm"] == 0
        assert int(metrics["skipped_updates"]) == int(metrics["skipped_in_a_row"]) == skipped
        assert int(metrics["empty_batches"]) == empty
        assert metrics["learning_rate"] == np.float32(adam.learning_rate(1))
        after = jax.device_get((state.model, state.optimizer))
        jax.tree.map(np.testing.assert_array_equal, after, before)
    assert int(state.step) == 4
