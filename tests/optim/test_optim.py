"""AdamW against its equations in NumPy, and the shapes of the schedules."""

import functools
from collections import Counter

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import Array, Float

from lmlib.models.weights import fan_in, ones, weight
from lmlib.optim.adamw import adamw
from lmlib.optim.optimizer import as_declared
from lmlib.optim.schedules import warmup_constant, warmup_cosine, warmup_linear, warmup_stable_decay


class Model(eqx.Module):
    matrix: Float[Array, "embed mlp"] = weight(fan_in("embed"))
    scale: Float[Array, "embed"] = weight(ones)


SCHEDULES = {
    "cosine": warmup_cosine,
    "linear": warmup_linear,
    "stable": warmup_stable_decay,
    "constant": warmup_constant,
}


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


@settings(max_examples=60)
@given(
    st.sampled_from(sorted(SCHEDULES)),
    st.integers(1, 3_000),
    st.floats(0, 0.7),
    st.floats(1e-5, 1.0),
)
def test_schedules_rise_to_the_peak_once_and_never_again(name, steps, warmup, peak):
    schedule = functools.partial(SCHEDULES[name], warmup=warmup)(peak, steps)
    rates = np.array([float(schedule(step)) for step in range(0, steps + 5, max(1, steps // 50))])
    rising = round(warmup * steps)
    after = rates[np.arange(0, steps + 5, max(1, steps // 50)) >= rising]
    assert (np.diff(after) <= peak * 1e-6).all()
    assert 0 < float(schedule(0)) <= peak * (1 + 1e-6)
    assert rates.max() <= peak * (1 + 1e-6)
    assert float(schedule(rising)) == pytest.approx(peak, rel=1e-5)
    # After the end nothing moves.
    assert float(schedule(steps)) == float(schedule(steps + 1)) == float(schedule(10 * steps + 7))


def test_schedules_end_where_they_say():
    assert float(warmup_cosine(2.0, 100)(100)) == pytest.approx(0.2)
    assert float(warmup_cosine(2.0, 100)(55)) == pytest.approx(1.1)
    assert float(warmup_linear(2.0, 100, end=0.5)(100)) == pytest.approx(1.0)
    stable = warmup_stable_decay(2.0, 100, warmup=0.1, decay=0.2)
    assert float(stable(79)) == float(stable(10)) == 2.0
    assert float(stable(90)) == pytest.approx(1.0)
    assert float(stable(100)) == 0.0
    assert float(warmup_constant(2.0, 100)(10**6)) == 2.0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: adamw(0, 1e-3), "must be positive, got 0 and 0.001"),
        (lambda: adamw(10, -1.0), "must be positive, got 10 and -1.0"),
        (lambda: warmup_cosine(1.0, 10, warmup=20.0), "warmup is a fraction.* got 20"),
        (lambda: warmup_stable_decay(1.0, 10, 0.6, 0.6), "0.6 and decay = 0.6 together"),
    ],
)
def test_senseless_settings_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.several_devices
def test_moments_lie_as_their_weights():
    from jax.sharding import NamedSharding

    from lmlib.parallel.layout import STORED, partition
    from lmlib.parallel.mesh import make_mesh

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
