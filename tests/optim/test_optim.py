"""AdamW against its equations in NumPy; and which numbers of a run are arguments of its compiled
step, and which make another program."""

import dataclasses
import functools
from collections import Counter

import equinox as eqx
import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jaxtyping import Array, Float
from outsider_runs import experiment
from small_experiment import small

from lmlib.models.families.llama import llama
from lmlib.models.weights import fan_in, ones, weight
from lmlib.optim.adamw import adamw
from lmlib.optim.optimizer import Optimizer, arrays_of, as_declared
from lmlib.optim.schedules import warmup_constant, warmup_linear
from lmlib.parallel.layout import STORED, partition
from lmlib.parallel.mesh import make_mesh


class Model(eqx.Module):
    matrix: Float[Array, "embed mlp"] = weight(fan_in("embed"))
    scale: Float[Array, "embed"] = weight(ones)


def test_updates_follow_the_equations():
    random = np.random.default_rng(0)
    weights = {"matrix": random.normal(size=(4, 3)), "scale": random.normal(size=4)}
    optimizer = adamw(10, 0.1, warmup_constant, 0.9, 0.95, 1e-8, weight_decay=0.2, clip_norm=1.5)
    model = Model(**{name: jnp.asarray(w, jnp.float32) for name, w in weights.items()})
    state = optimizer.transformation.init(model)
    first = {name: 0.0 for name in weights}
    second = {name: 0.0 for name in weights}
    for step in range(1, 6):
        gradients = {name: random.normal(size=w.shape) * step for name, w in weights.items()}
        norm = np.sqrt(sum((g**2).sum() for g in gradients.values()))
        clip = min(1.0, 1.5 / norm)
        learning_rate = float(optimizer.learning_rate(step - 1))
        for name, gradient in gradients.items():
            gradient = gradient * clip
            first[name] = 0.9 * first[name] + 0.1 * gradient
            second[name] = 0.95 * second[name] + 0.05 * gradient**2
            update = (first[name] / (1 - 0.9**step)) / (
                np.sqrt(second[name] / (1 - 0.95**step)) + 1e-8
            )
            decay = 0.2 * weights[name] if name == "matrix" else 0.0
            weights[name] = weights[name] - learning_rate * (update + decay)
        given_gradients = Model(**{n: jnp.asarray(g, jnp.float32) for n, g in gradients.items()})
        updates, state = optimizer.transformation.update(given_gradients, state, model)
        model = optax.apply_updates(model, updates)
        np.testing.assert_allclose(model.matrix, weights["matrix"], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(model.scale, weights["scale"], rtol=1e-5, atol=1e-6)


def test_decay_follows_the_rule_given():
    model = Model(jnp.ones((2, 3)), jnp.ones(2))
    still, constant = jax.tree.map(jnp.zeros_like, model), lambda peak_lr, steps: lambda step: 0.5
    rules = {(-0.1, 0.0): as_declared, (0.0, -0.1): lambda weight: weight.axes == ("embed",)}
    for (matrix, scale), decays in rules.items():
        made = adamw(9, 1.0, constant, weight_decay=0.2, decays=decays).transformation
        updates, _ = made.update(still, made.init(model), model)
        np.testing.assert_allclose(updates.matrix, matrix)
        np.testing.assert_allclose(updates.scale, scale)


@pytest.mark.several_devices
def test_moments_have_the_layout_of_their_weights():
    mesh = make_mesh(fsdp=4, tensor=2)
    layout = NamedSharding(mesh, partition("embed mlp", STORED))
    with jax.set_mesh(mesh):
        model = Model(jax.device_put(jnp.ones((8, 6)), layout), jnp.ones(8))
        state = jax.jit(adamw(10, 1e-3).transformation.init)(model)
    moments = [leaf for leaf in jax.tree.leaves(state) if leaf.shape == (8, 6)]
    assert len(moments) == 2
    assert all(moment.sharding == layout for moment in moments)


def test_a_narrow_first_moment_takes_two_bytes_and_follows_within_its_rounding():
    random = np.random.default_rng(0)
    model = Model(jnp.asarray(random.normal(size=(4, 3)), jnp.float32), jnp.ones(4))
    gradients = jax.tree.map(jnp.ones_like, model)

    def advanced(**settings):
        optimizer = adamw(10, 0.1, warmup_constant, **settings)
        state, weights = optimizer.transformation.init(model), model
        for _ in range(5):
            updates, state = optimizer.transformation.update(gradients, state, weights)
            weights = optax.apply_updates(weights, updates)
        return weights, Counter(leaf.dtype.name for leaf in jax.tree.leaves(state) if leaf.ndim)

    wide, wide_dtypes = advanced()
    narrow, narrow_dtypes = advanced(first_moment_dtype="bfloat16")
    assert wide_dtypes == {"float32": 4}
    assert narrow_dtypes == {"float32": 2, "bfloat16": 2}
    # Each update is off by no more than bfloat16's half unit in the last place, 2⁻⁹.
    np.testing.assert_allclose(narrow.matrix, wide.matrix, atol=5 * 0.1 * 2**-8)
    assert np.any(narrow.matrix != wide.matrix)


def program(*overrides):
    return fdl.build(small(*overrides)).trace_step().lower().as_text()


@functools.cache
def shipped():
    return program()


@pytest.mark.parametrize(
    "overrides",
    [
        ("optimizer.peak_lr=1.0", "optimizer.weight_decay=0.0", "steps=1_000_000"),
        ("optimizer.schedule.warmup=0.5", "optimizer.schedule.end=0.3", "seed=3"),
    ],
)
def test_a_sweep_and_a_longer_run_need_no_other_program(overrides):
    assert program(*overrides) == shipped()


def test_another_optimizer_is_another_program():
    assert program("optimizer.b1=0.8") != shipped()


def rate_of(optimizer, of=None):
    """The learning rate in the metrics of a first step of `optimizer`, by a program for `of`."""
    model = functools.partial(llama, vocab=64, embed=16, layers=1, heads=2, mlp=16)
    run = experiment(model, {"devices": jax.devices()[:1]}, optimizer=optimizer)
    for_program = run if of is None else dataclasses.replace(run, optimizer=of)
    step = for_program.trace_step().lower().compile()
    batch = jax.tree.map(jnp.asarray, run.data.batch(0))
    _, metrics = step(run.initial_state(), batch, run.training.hyperparameters)
    return float(metrics["learning_rate"])


@pytest.mark.slow
def test_a_step_computes_with_the_numbers_that_it_is_given():
    warm = functools.partial(warmup_linear, warmup=0.5)
    optimizer = functools.partial(adamw, peak_lr=0.4, schedule=warm)
    of = functools.partial(adamw, peak_lr=7.0, weight_decay=0.0)
    with pytest.raises(TypeError, match="pytree"):
        rate_of(optimizer, of)  # whose fall has another shape
    assert rate_of(optimizer, functools.partial(of, schedule=warm)) == pytest.approx(0.1)


@pytest.mark.slow
def test_an_optimizer_of_ones_own_is_given_its_numbers_by_name():
    def descent(steps, rate):
        def update(gradients, state, model=None, *, rate):
            return jax.tree.map(lambda g: -rate * g, gradients), state

        return Optimizer(
            optax.GradientTransformationExtraArgs(lambda model: optax.EmptyState(), update),
            lambda step, rate: rate,
            as_declared,
            hyperparameters={"rate": rate},
        )

    make = functools.partial(functools.partial, descent)
    assert rate_of(make(rate=0.5), make(rate=0.1)) == pytest.approx(0.5)


def test_numbers_are_of_one_dtype_each_and_everything_else_is_left_out():
    arrays = arrays_of({"rate": 1e-3, "steps": 3, "name": "x", "schedule": abs}, make_mesh(fsdp=1))
    assert arrays["name"] is None and arrays["schedule"] is None
    assert (arrays["rate"].dtype, arrays["steps"].dtype) == (np.float32, np.int32)
    with pytest.raises(OverflowError):
        arrays_of({"steps": 2**31}, make_mesh(fsdp=1))
