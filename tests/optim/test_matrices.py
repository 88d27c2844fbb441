"""Optimizers of matrices against published implementations over ten updates, and the same bits on a
mesh as on one device."""

import functools
import json
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jaxtyping import Array, Float
from laid_out import drawn, laid_out
from sentinels import sentinels

from lmlib.models.families.llama import llama
from lmlib.models.weights import fan_in, weight
from lmlib.optim.matrices.dion import dion
from lmlib.optim.matrices.shampoo import shampoo
from lmlib.optim.matrices.soap import soap
from lmlib.optim.matrices.soap_muon import soap_muon
from lmlib.optim.schedules import warmup_constant
from lmlib.parallel.mesh import make_mesh

GOLDEN = json.loads((Path(__file__).parent / "golden" / "matrices.json").read_text())
PLAIN = {"clip_norm": None, "weight_decay": 0.0}


class Model(eqx.Module):
    matrix: Float[Array, "embed mlp"] = weight(fan_in("embed"))


CASES = {
    "soap": functools.partial(soap, every=3),
    "soap, one side": functools.partial(soap, every=3, largest_side=8),
    "shampoo": functools.partial(shampoo, every=3, ridge=1e-9),
    "shampoo, one side": functools.partial(shampoo, every=3, ridge=1e-9, largest_side=8),
    "soap_muon": functools.partial(soap_muon, polynomials=[(2.0, -1.5, 0.5)] * 12, dtype="float32"),
    "dion": functools.partial(dion, rank=0.5),
}


@pytest.mark.parametrize("name", CASES)
def test_ten_updates_are_those_of_a_published_implementation(name):
    expected = np.asarray(GOLDEN[name])
    begun, *gradients = (
        np.random.default_rng(0).normal(size=(11, *expected.shape)).astype(np.float32)
    )
    schedule = functools.partial(warmup_constant, warmup=0)
    made = CASES[name](100, 0.1, schedule, **PLAIN).transformation
    model = Model(jnp.asarray(begun))
    state, update = made.init(model), jax.jit(made.update)
    if name == "dion":  # which begins with random numbers
        right = np.random.default_rng(1).normal(size=(expected.shape[1], 3))
        state[1].matrices["right"] = Model(jnp.asarray(right, jnp.float32))
    for gradient in gradients:
        updates, state = update(Model(jnp.asarray(gradient)), state, model)
        model = optax.apply_updates(model, updates)
    np.testing.assert_allclose(model.matrix, expected, atol=2e-5)


@pytest.mark.parametrize("name", sentinels(CASES, "dion".__eq__))
def test_a_gradient_of_zeros_changes_nothing_and_the_next_one_counts(name):
    made = CASES[name](100, 0.1, warmup_constant, **PLAIN).transformation
    gradient = np.random.default_rng(0).normal(size=(6, 10)).astype(np.float32)
    model, update = Model(jnp.asarray(gradient)), jax.jit(made.update)
    before = made.init(model)
    nothing, state = update(jax.tree.map(jnp.zeros_like, model), before, model)
    assert not np.any(nothing.matrix)
    if name == "dion":  # Q, from which the next direction begins
        kept, first = (optax.tree.get(each, "right") for each in (state, before))
        jax.tree.map(np.testing.assert_array_equal, kept, first)
    for _ in range(2):
        updates, state = update(model, state, model)
    assert np.all(np.isfinite(updates.matrix)) and np.linalg.matrix_rank(updates.matrix) >= 3


def updated(make_optimizer, sizes):
    make = functools.partial(llama, vocab=64, embed=32, layers=4, heads=4, kv_heads=2, mlp=48)
    shapes = jax.eval_shape(make, key=jax.random.key(0))
    mesh = make_mesh(**sizes)
    weights, gradients = (laid_out(drawn(shapes, seed=i), mesh) for i in range(2))
    made = make_optimizer(10, 1e-2, warmup_constant, **PLAIN).transformation
    with jax.set_mesh(mesh):
        state, update = jax.jit(made.init)(weights), jax.jit(made.update)
        for each in (gradients, weights, gradients):
            updates, state = update(each, state, weights)
    return jax.device_get((updates, state))


@pytest.mark.slow
@pytest.mark.several_devices
@pytest.mark.parametrize(
    "make",
    [
        functools.partial(soap, every=1),
        functools.partial(shampoo, every=1),
        soap_muon,
        dion,
    ],
    ids=["soap", "shampoo", "soap_muon", "dion"],
)
def test_a_mesh_makes_the_same_bits_as_one_device(make):
    alone = jax.tree.leaves(updated(make, {}))
    for sizes in ({"fsdp": 8}, {"fsdp": 4, "tensor": 2}, {"stage": 2, "fsdp": 2, "tensor": 2}):
        for ours, theirs in zip(jax.tree.leaves(updated(make, sizes)), alone, strict=True):
            np.testing.assert_array_equal(ours, theirs, err_msg=str(sizes))


@pytest.mark.parametrize(
    ("make", "setting"),
    [
        (soap, {"every": 0}),
        (shampoo, {"largest_side": 0}),
        (shampoo, {"ridge": 0.0}),
        (dion, {"rank": 0.0}),
    ],
)
def test_senseless_settings_are_refused(make, setting):
    with pytest.raises(ValueError, match=f"{next(iter(setting))} must be .*, got 0"):
        make(10, 1e-3, **setting)
