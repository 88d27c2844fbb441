"""Optimizers that change each element by itself against published implementations: ten updates in
float32."""

import functools
import json

import equinox as eqx
import golden_updates as golden
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jaxtyping import Array, Float

from lmlib.models.weights import fan_in, weight
from lmlib.optim.adamw import adamw
from lmlib.optim.ademamix import ademamix
from lmlib.optim.eight_bit import eight_bit
from lmlib.optim.schedule_free import ScheduleFree
from lmlib.optim.schedules import warmup_constant


class Model(eqx.Module):
    matrix: Float[Array, "embed mlp"] = weight(fan_in("embed"))


EXPECTED = json.loads(golden.FILE.read_text())
SETTINGS = {
    "steps": golden.UPDATES,
    "peak_lr": golden.RATE,
    "weight_decay": golden.DECAY,
    "clip_norm": None,
}
CONSTANT = functools.partial(warmup_constant, warmup=0)
RISING = functools.partial(warmup_constant, warmup=golden.WARMUP - 1)


def updated(optimizer, shape):
    """The matrix and the optimizer's state after the updates."""
    weights, gradients = golden.drawn(shape)
    model = Model(jnp.asarray(weights))
    state = optimizer.transformation.init(model)
    update = jax.jit(optimizer.transformation.update)
    for gradient in gradients:
        updates, state = update(Model(jnp.asarray(gradient)), state, model)
        model = optax.apply_updates(model, updates)
    return np.asarray(model.matrix), state


def test_ademamix_has_the_weights_of_pytorch_optimizer():
    found, _ = updated(ademamix(schedule=CONSTANT, **SETTINGS), golden.SMALL)
    np.testing.assert_allclose(found, EXPECTED["ademamix"], rtol=0, atol=1e-6)


def test_schedule_free_adamw_has_both_weights_of_facebooks():
    base = adamw(schedule=RISING, b1=0.0, **SETTINGS)
    found, state = updated(ScheduleFree().added_to(base, golden.UPDATES), golden.SMALL)
    np.testing.assert_allclose(found, EXPECTED["schedule_free"], rtol=0, atol=1e-6)
    evaluated = EXPECTED["schedule_free_evaluated"]
    np.testing.assert_allclose(state.evaluated.matrix, evaluated, rtol=0, atol=1e-6)
    # The average takes the place of a first moment.
    kept = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim]
    assert len(kept) == 2


@pytest.mark.parametrize("bits", [8, pytest.param(32, marks=pytest.mark.landing)])
def test_adamw_in_eight_bits_has_the_weights_of_torchao(bits):
    settings = {name: value for name, value in SETTINGS.items() if name != "steps"}
    make = functools.partial(adamw, schedule=CONSTANT, **settings)
    found, _ = updated(eight_bit(10, make) if bits == 8 else make(10), golden.LARGE)
    off = np.abs(found.ravel()[:: golden.EVERY] - EXPECTED["adamw_in_eight_bits"])
    assert np.max(off) < 1e-6 if bits == 8 else np.max(off) > 1e-4
