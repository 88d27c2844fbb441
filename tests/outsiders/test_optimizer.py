"""An optimizer with a metric of its own: updates by sign of the momentum (Lion: Chen et al. 2023,
arXiv:2302.06675), of which it tells how many signs changed. Nothing of lmlib is edited."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest
from outsider_runs import EIGHT, SIZES, check_outsider, experiment

from lmlib.models.families.llama import llama
from lmlib.optim.optimizer import Optimizer, as_declared

pytestmark = pytest.mark.several_devices
RATE = 1e-3


class Momentum(NamedTuple):
    average: Any
    flipped: jax.Array  # share of the signs that differ from those of the step before


def signs(steps):
    def init(model):
        return Momentum(jax.tree.map(jnp.zeros_like, model), jnp.zeros((), jnp.float32))

    def update(gradients, state, model=None):
        average = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state.average, gradients)
        # A soft sign, so that rounding on another mesh does not decide where a gradient is zero.
        updates = jax.tree.map(lambda m: -RATE * jnp.tanh(100 * m), average)
        differ = jax.tree.map(
            lambda new, old: jnp.sum(jnp.abs(jnp.tanh(100 * new) - jnp.tanh(100 * old))),
            average,
            state.average,
        )
        size = sum(leaf.size for leaf in jax.tree.leaves(average))
        flipped = sum(jax.tree.leaves(differ)) / (2 * size)
        return updates, Momentum(average, flipped.astype(jnp.float32))

    return Optimizer(
        optax.GradientTransformation(init, update),
        optax.constant_schedule(RATE),
        as_declared,
        metrics=lambda state: {"flipped_signs": state.flipped},
    )


def model(key):
    return llama(**SIZES, layers=2, heads=4, mlp=16, key=key)


@pytest.mark.slow
def test_it_trains_as_on_one_device_and_resumes_bit_for_bit(tmp_path):
    run, alone = (experiment(model, mesh, optimizer=signs) for mesh in (EIGHT, {}))
    metrics, _ = check_outsider(run, alone, tmp_path, rtol=2e-4)
    assert all(0 < each["flipped_signs"] < 1 for each in metrics)
