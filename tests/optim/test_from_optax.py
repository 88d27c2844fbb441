"""Optimizers of optax's: as optax makes them, their state split as the weights are."""

import functools
import inspect

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
from lmlib.optim.from_optax import from_optax, state_layout
from lmlib.optim.optimizer import as_declared
from lmlib.parallel.axes import LAYER, map_weights
from lmlib.parallel.layout import storage_spec
from lmlib.parallel.mesh import make_mesh
from runner import fit
from runner.errors import ConfigError

LAYERS = 3
# Arguments that an optimizer needs, or that make it look at arrays as small as these.
SETTINGS = {
    "adafactor": {"min_dim_size_to_factor": 2, "weight_decay_rate": 0.1},
    "dpsgd": {"l2_norm_clip": 1.0, "noise_multiplier": 1.0, "seed": 1},
    "lamb": {"weight_decay": 0.1},
    "lars": {"weight_decay": 0.1, "momentum": 0.9},
    "lion": {"b1": 0.8, "weight_decay": 0.1},
    "muon": {"adaptive": True, "weight_decay": 0.1},
    "noisy_sgd": {"key": 1},
    "schedule_free": {"base_optimizer": optax.sgd(0.1)},
    "sgd": {"momentum": 0.9, "nesterov": True},
}
REFUSED = {
    "dpsgd": "updates have other shapes than weights",
    "galore": "galore cannot be used here.* 'NoneType' object has no attribute",
    "lbfgs": "lbfgs cannot be used here, where updates follow from gradients, .* alone: .*value_fn",
    "momo": "momo cannot be used here.*'value'",
    "momo_adam": "momo_adam cannot be used here.*'value'",
    "optimistic_adam": "does not support learning rate schedules",
    "rprop": "rprop cannot be used here.*full_like",
    "sm3": "sm3 cannot be made of a schedule",
    "sophia": "sophia cannot be used here.*obj_fn",
}
RANDOM = {"noisy_sgd"}
MATRICES = {"matrix": (0, 1), "heads": (0, (1, 2)), "experts": (1, 2)}  # of Muon: summed and kept


def of_optax():
    """Every optimizer of optax's that takes a learning rate."""
    return {
        name: function
        for module in (optax, contrib)
        for name, function in vars(module).items()
        if inspect.isfunction(function)
        and not name.startswith(("_", "scale_by_"))
        and "learning_rate" in inspect.signature(function).parameters
    }


MAKERS = {
    name: functools.partial(make, **SETTINGS.get(name, {})) for name, make in of_optax().items()
}
TRAINING = sorted(MAKERS.keys() - REFUSED - RANDOM)


def remembering(learning_rate):
    """The mean of the last two gradients, which it keeps side by side."""

    def init(model):
        return jax.tree.map(lambda x: jnp.zeros((2, *x.shape)), model)

    def update(gradients, state, model=None):
        state = jax.tree.map(lambda old, new: jnp.stack([old[1], new]), state, gradients)
        return jax.tree.map(lambda x: -0.1 * x.mean(axis=0), state), state

    return optax.GradientTransformation(init, update)


ON_MESHES = {
    name: MAKERS[name] for name in ("adafactor", "adopt", "lamb", "lion", "muon", "prodigy")
} | {"remembering": remembering}


class Layer(eqx.Module):
    matrix: Float[Array, "embed mlp"] = weight(fan_in("embed"))
    heads: Float[Array, "embed heads head_dim"] = weight(fan_in("embed"))
    experts: Float[Array, "experts embed mlp"] = weight(fan_in("embed"))
    scale: Float[Array, "embed"] = weight(ones)


class Stacked(eqx.Module):
    """Weights shaped like a model's: three layers in one array each, and others."""

    layers: Layer
    scale: Float[Array, "embed"] = weight(ones)
    head: Float[Array, "embed vocab"] = weight(fan_in("embed"))
    absent: Float[Array, "embed"] | None = weight(ones)


SHAPES = Layer((16, 8), (16, 4, 2), (2, 16, 8), (16,))


def random_model(step):
    """Weights or gradients, much larger in the first layer."""
    random = np.random.default_rng(step)

    def layers(shape):
        factors = np.reshape([30.0, 1.0, 0.1], (LAYERS, *[1] * len(shape)))
        return (factors * random.normal(size=(LAYERS, *shape))).astype("f")

    stacked = jax.tree.map(layers, SHAPES, is_leaf=lambda x: isinstance(x, tuple))
    others = (random.normal(size=size).astype("f") for size in ((16,), (16, 8)))
    return Stacked(stacked, *others, None)


def apart(model):
    """Each layer's arrays by themselves, by name."""
    named = {"scale": model.scale, "head": model.head}
    for name in ("matrix", "heads", "experts", "scale"):
        stack = getattr(model.layers, name)
        named |= {f"{name}_of_{i}": stack[i] for i in range(LAYERS)}
    return named


def by_optax(make):
    """Three updates of layers that are apart, without anything of lmlib's."""
    known = inspect.signature(make).parameters
    first = apart(random_model(0))
    masks = {name: not name.startswith("scale") for name in first}
    numbers = {
        name: contrib.MuonDimensionNumbers(*MATRICES[kind]) if kind in MATRICES else None
        for name, kind in ((name, name.partition("_")[0]) for name in first)
    }
    given = {name: masks for name in ("mask", "weight_decay_mask") if name in known}
    if "muon_weight_dimension_numbers" in known:
        given["muon_weight_dimension_numbers"] = numbers
    made = optax.chain(
        optax.clip_by_global_norm(2.0), make(learning_rate=lambda n: 0.1 / (n + 1.0), **given)
    )

    @jax.jit
    def step(gradients, state, weights):
        updates, state = made.update(gradients, state, weights)
        return optax.apply_updates(weights, updates), state

    weights, state = first, jax.jit(made.init)(first)
    for number in range(3):
        weights, state = step(apart(random_model(number + 1)), state, weights)
    return weights


def ours(make, **settings):
    schedule = functools.partial(lambda peak_lr, steps: lambda step: peak_lr / (step + 1.0))
    return from_optax(9, 0.1, make, schedule, clip_norm=2.0, **settings)


def by_ours(make, lay_out=lambda model: model):
    """The same with lmlib: the weights and the state."""
    transformation = ours(make).transformation

    @jax.jit
    def step(gradients, state, model):
        updates, state = transformation.update(gradients, state, model)
        return optax.apply_updates(model, updates), state

    model = lay_out(random_model(0))
    state = jax.jit(transformation.init)(model)
    for number in range(3):
        model, state = step(lay_out(random_model(number + 1)), state, model)
    return model, state


def assert_same(model, expected):
    for name, found in apart(model).items():
        size = np.abs(expected[name]).max()
        np.testing.assert_allclose(found, expected[name], 2e-5, 2e-6 * size, err_msg=name)


@pytest.mark.parametrize(
    "name", sentinels(TRAINING, landing={"adafactor", "lamb", "muon", "prodigy"}.__contains__)
)
def test_updates_equal_those_of_separate_layers(name):
    model, _ = by_ours(MAKERS[name])
    assert_same(model, by_optax(MAKERS[name]))


def laid_out(mesh):
    def placed(model):
        layouts = map_weights(lambda weight, x: storage_spec(weight, x.shape, mesh), model)
        return jax.tree.map(
            lambda x, layout: jax.device_put(x, NamedSharding(mesh, layout)), model, layouts
        )

    return placed


@pytest.mark.landing
@pytest.mark.several_devices
@pytest.mark.parametrize("name", sentinels(ON_MESHES, "muon".__eq__))
def test_updates_on_a_mesh_equal_those_of_optax_on_one_device(name):
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    with jax.set_mesh(mesh):
        model, state = by_ours(ON_MESHES[name], laid_out(mesh))
    assert_same(model, by_optax(ON_MESHES[name]))
    expected = laid_out(mesh)(random_model(0))
    assert jax.tree.map(jax.typeof, model) == jax.tree.map(jax.typeof, expected)
    parts = {}
    for leaf in jax.tree.leaves(state):
        parts.setdefault(leaf.shape, set()).add(leaf.sharding.spec)
    if name == "adafactor":  # rows and columns of the matrices in each layer
        assert parts[LAYERS, 16] == {PartitionSpec(None, ("fsdp", "expert"))}
        assert parts[LAYERS, 8] == {PartitionSpec(None, "tensor")}
    elif name == "remembering":
        assert parts[LAYERS, 2, 16, 8] == {PartitionSpec(None, None, ("fsdp", "expert"), "tensor")}
        assert parts[LAYERS, 2, 2, 16, 8] == {PartitionSpec(None, None, "expert", "fsdp", "tensor")}
    else:
        assert parts[LAYERS, 16, 8] == {model.layers.matrix.sharding.spec}
        assert parts[LAYERS, 2, 16, 8] == {model.layers.experts.sharding.spec}


def test_decay_follows_what_is_declared_where_optax_takes_a_mask():
    assert ours(optax.lion).decays is as_declared
    assert not ours(optax.sgd).decays(None)
    model, name = random_model(0), LAYER + " embed"
    still = jax.tree.map(jnp.zeros_like, model)
    optimizer = ours(MAKERS["lion"], decays=lambda weight: " ".join(weight.axes) == name)
    state = jax.jit(optimizer.transformation.init)(model)
    updates, _ = jax.jit(optimizer.transformation.update)(still, state, model)
    np.testing.assert_allclose(updates.layers.scale, -0.1 * 0.1 * model.layers.scale, 1e-6)
    np.testing.assert_array_equal(updates.scale, 0.0)
    np.testing.assert_array_equal(updates.layers.matrix, 0.0)


@pytest.mark.landing
def test_noise_of_layers_is_independent():
    """By itself each layer would have the noise of the others."""
    model, _ = by_ours(functools.partial(optax.noisy_sgd, eta=1e4, gamma=0.0, key=1))
    moved = (model.layers.experts - random_model(0).layers.experts).reshape(LAYERS, -1)
    expected = 1e2 * np.linalg.norm([0.1, 0.1 / 2, 0.1 / 3])
    np.testing.assert_allclose(moved.std(axis=1), expected, rtol=0.2)
    assert np.abs(np.corrcoef(moved) - np.eye(LAYERS)).max() < 0.25


def growing(learning_rate):
    """Keeps all gradients side by side, in one array with no weight's shape."""

    def init(model):
        return jnp.zeros(20_000)

    return optax.GradientTransformation(init, lambda g, state, model=None: (g, state))


def longer(learning_rate):
    return optax.GradientTransformation(
        lambda model: jnp.zeros(1), lambda g, state, model=None: (g, jnp.zeros(state.size + 1))
    )


def hidden(learning_rate):
    return optax.chain(optax.clip(1.0), contrib.muon(learning_rate))


def clipped_lamb(learning_rate):
    return optax.chain(optax.clip_by_global_norm(1.0), optax.lamb(learning_rate))


OWN = [
    (optax.clip, "clip takes no learning_rate"),
    (longer, "longer cannot be used here.* updates .* change the state's"),
    pytest.param(
        hidden,
        "hidden has Muon in it, .* take muon_weight_dimension_numbers and give it",
        marks=pytest.mark.landing,
    ),
    pytest.param(
        clipped_lamb,
        "clipped_lamb cannot be used here.* not those of layers apart.* leave one of them out",
        marks=pytest.mark.landing,
    ),
]


@pytest.mark.parametrize(
    ("make", "message"), [*((MAKERS[name], REFUSED[name]) for name in sorted(REFUSED)), *OWN]
)
def test_unsuitable_optimizers_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        ours(make).transformation.init(random_model(0))


@pytest.mark.several_devices
def test_a_state_that_would_be_whole_on_every_device_is_refused(tmp_path):
    cfg = small("mesh.fsdp=4")
    cfg.optimizer = fdl.Partial(from_optax, make=growing, peak_lr=1e-3)
    with pytest.raises(ValueError, match=r"\[20000\].* whole on each of 4 devices"):
        fdl.build(cfg).abstract_state()
    with pytest.raises(ConfigError, match="whole on each of 4 devices"):
        fit(cfg, tmp_path)


@pytest.mark.several_devices
def test_an_array_of_a_state_lies_as_the_weight_of_the_longest_path_in_its_own():
    mesh, table = make_mesh(fsdp=2), jnp.zeros((8, 8))
    layouts = PartitionSpec("fsdp", None), PartitionSpec(None, "fsdp")
    outer, inner = (jax.device_put(table, NamedSharding(mesh, each)) for each in layouts)
    model = {"table": outer, "layer": {"table": inner}}
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), model)
    found = state_layout({"moments": shapes}, model, mesh.abstract_mesh)
    assert found == {"moments": {"table": layouts[0], "layer": {"table": layouts[1]}}}


def test_another_rate_is_the_same_program_and_another_setting_is_not():
    def program(**settings):
        cfg = small()
        make = fdl.Partial(optax.sgd, momentum=settings.pop("momentum", 0.9))
        cfg.optimizer = fdl.Partial(from_optax, make=make, **{"peak_lr": 1.0} | settings)
        return fdl.build(cfg).trace_step().lower().as_text()

    assert program() == program(peak_lr=0.1) != program(momentum=0.8)
