"""Optimizers of optax's: as optax makes them, their state split as the weights are."""

import functools

import equinox as eqx
import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float
from optax import contrib
from sentinels import sentinels
from small_experiment import small

from lmlib.models.weights import fan_in, ones, weight
from lmlib.optim.from_optax import from_optax
from lmlib.optim.optimizer import as_declared
from lmlib.parallel.layout import STORED, partition
from lmlib.parallel.mesh import make_mesh
from runner import Options, fit
from runner.errors import ConfigError, StoppedEarly

MAKERS = {
    "lion": functools.partial(optax.lion, b1=0.8, weight_decay=0.1),
    "momentum": functools.partial(optax.sgd, momentum=0.9, nesterov=True),
    "adafactor": functools.partial(
        optax.adafactor, min_dim_size_to_factor=16, weight_decay_rate=0.1
    ),
    "adopt": contrib.adopt,
    "lamb": functools.partial(optax.lamb, weight_decay=0.1),
}


class Model(eqx.Module):
    matrix: Float[Array, "embed mlp"] = weight(fan_in("embed"))
    scale: Float[Array, "embed"] = weight(ones)


def gradients_of(step):
    random = np.random.default_rng(step)
    return random.normal(size=(64, 48)).astype("f"), random.normal(size=64).astype("f")


def by_optax(make):
    """Three updates on one device, without anything of lmlib's."""
    masks = {name: {"matrix": True, "scale": False} for name in ("mask", "weight_decay_mask")}
    known = make.func if isinstance(make, functools.partial) else make
    masks = {name: mask for name, mask in masks.items() if name in known.__code__.co_varnames}
    made = optax.chain(
        optax.clip_by_global_norm(2.0), make(learning_rate=lambda n: 0.1 / (n + 1.0), **masks)
    )
    weights = dict(zip(("matrix", "scale"), gradients_of(0), strict=True))
    state = made.init(weights)
    for step in range(3):
        gradients = dict(zip(("matrix", "scale"), gradients_of(step + 1), strict=True))
        updates, state = made.update(gradients, state, weights)
        weights = optax.apply_updates(weights, updates)
    return weights


def ours(make, **settings):
    schedule = functools.partial(lambda peak_lr, steps: lambda step: peak_lr / (step + 1.0))
    return from_optax(9, 0.1, make, schedule, clip_norm=2.0, **settings)


def laid_out(mesh, arrays):
    layouts = [partition(axes, STORED) for axes in ("embed mlp", "embed")]
    return Model(
        *(
            jax.device_put(array, NamedSharding(mesh, layout))
            for array, layout in zip(arrays, layouts, strict=True)
        )
    )


@pytest.mark.landing
@pytest.mark.several_devices
@pytest.mark.parametrize("name", sentinels(MAKERS, "adafactor".__eq__))
def test_updates_on_a_mesh_are_those_of_optax_on_one_device(name):
    expected = by_optax(MAKERS[name])
    optimizer, mesh = ours(MAKERS[name]), make_mesh(data=2, fsdp=2, tensor=2)
    with jax.set_mesh(mesh):
        model = laid_out(mesh, gradients_of(0))
        state = jax.jit(optimizer.transformation.init)(model)
        update = jax.jit(optimizer.transformation.update)
        for step in range(3):
            updates, state = update(laid_out(mesh, gradients_of(step + 1)), state, model)
            model = optax.apply_updates(model, updates)
    for found, of_optax in zip((model.matrix, model.scale), expected.values(), strict=True):
        np.testing.assert_allclose(found, of_optax, rtol=2e-5, atol=2e-6)
    parts = {leaf.shape: leaf.sharding.spec for leaf in jax.tree.leaves(state) if leaf.size > 8}
    assert parts.get((64, 48), model.matrix.sharding.spec) == model.matrix.sharding.spec
    assert parts.get((64,), model.scale.sharding.spec) == model.scale.sharding.spec
    if name == "adafactor":
        assert set(parts) == {(64,), (48,)}
        assert parts[(48,)] == PartitionSpec("tensor")


def test_decay_follows_what_is_declared_where_optax_takes_a_mask():
    assert ours(optax.lion).decays is as_declared
    assert not ours(optax.novograd).decays(None)
    model = Model(jnp.ones((2, 3)), jnp.ones(2))
    still = jax.tree.map(jnp.zeros_like, model)
    optimizer = ours(MAKERS["lion"], decays=lambda weight: weight.axes == ("embed",))
    state = optimizer.transformation.init(model)
    updates, _ = optimizer.transformation.update(still, state, model)
    np.testing.assert_allclose(updates.scale, -0.1 * 0.1)
    np.testing.assert_array_equal(updates.matrix, 0.0)


def growing(learning_rate):
    """Keeps all gradients side by side, in one array that is no weight's."""

    def init(model):
        return jnp.zeros(20_000)

    return optax.GradientTransformation(init, lambda g, state, model=None: (g, state))


def longer(learning_rate):
    return optax.GradientTransformation(
        lambda model: jnp.zeros(1), lambda g, state, model=None: (g, jnp.zeros(state.size + 1))
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (optax.clip, "clip takes no learning_rate"),
        (optax.sm3, "sm3 cannot be made of a schedule"),
        (
            optax.lbfgs,
            r"lbfgs cannot be used here: to update by .* fails: .*value_fn",
        ),
        (contrib.galore, "galore cannot be used here: to make its state fails"),
        (longer, "longer cannot be used here: an update changes the shapes or dtypes"),
    ],
)
def test_what_cannot_train_here_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        ours(make).transformation.init(Model(jnp.ones((2, 3)), None))


@pytest.mark.several_devices
def test_a_state_that_would_be_whole_on_every_device_is_refused(tmp_path):
    cfg = small("mesh.fsdp=4")
    cfg.optimizer = fdl.Partial(from_optax, make=growing, peak_lr=1e-3)
    with pytest.raises(ValueError, match=r"\[20000\].* whole on each of 4 devices"):
        fdl.build(cfg).abstract_state()
    with pytest.raises(ConfigError, match="whole on each of 4 devices"):
        fit(cfg, tmp_path)


def adafactor(*overrides):
    cfg = small("steps=4", "checkpoints.every=1", "mesh.fsdp=2")
    make = fdl.Partial(optax.adafactor, min_dim_size_to_factor=8)
    cfg.optimizer = fdl.Partial(from_optax, make=make, peak_lr=1e-2)
    return cfg


@pytest.mark.slow
@pytest.mark.several_devices
def test_a_run_resumes_to_the_same_bits(tmp_path):
    whole = fit(adafactor(), tmp_path / "whole")
    with pytest.raises(StoppedEarly):
        fit(adafactor(), tmp_path / "cut", Options(stop=lambda step: step == 2))
    resumed = fit(adafactor(), tmp_path / "cut")
    for one, other in zip(
        *(jax.tree.leaves((x.state.model, x.state.optimizer)) for x in (resumed, whole)),
        strict=True,
    ):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
    assert resumed.metrics[-1]["learning_rate"] == whole.metrics[-1]["learning_rate"] > 0


def test_another_rate_is_the_same_program_and_another_setting_is_not():
    def program(**settings):
        cfg = small()
        make = fdl.Partial(optax.lion, b1=settings.pop("b1", 0.9))
        cfg.optimizer = fdl.Partial(from_optax, make=make, **{"peak_lr": 1.0} | settings)
        return fdl.build(cfg).trace_step().lower().as_text()

    assert program() == program(peak_lr=0.1) != program(b1=0.8)
