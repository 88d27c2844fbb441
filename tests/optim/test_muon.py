"""Muon against its equations in float64 NumPy, and the same bits on every mesh; Newton–Schulz
against a singular value decomposition."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jaxtyping import Array, Float
from laid_out import drawn, laid_out
from outsider_runs import EIGHT, SIZES, check_outsider, experiment
from refusals import refusals
from sentinels import sentinels

from lmlib.adapters.lora import lora
from lmlib.models.experts.mixture import Mixture
from lmlib.models.families.gpt2 import gpt2
from lmlib.models.families.llama import llama
from lmlib.models.weights import fan_in, ones, weight
from lmlib.optim.matrices.muon import CLASSIC, POLAR_EXPRESS, muon, orthogonalized
from lmlib.optim.matrices.whole_matrices import is_matrix, matrices_of
from lmlib.optim.schedules import warmup_constant
from lmlib.parallel.axes import map_weights
from lmlib.parallel.mesh import make_mesh


class Model(eqx.Module):
    wide: Float[Array, "embed mlp"] = weight(fan_in("embed"))
    tall: Float[Array, "mlp embed"] = weight(fan_in("mlp"))
    experts: Float[Array, "experts embed mlp"] = weight(fan_in("embed"), rules={"experts": None})
    router: Float[Array, "embed experts"] = weight(fan_in("embed"), rules={"experts": None})
    head: Float[Array, "embed vocab"] = weight(fan_in("embed"))
    scale: Float[Array, "embed"] = weight(ones)


SHAPES = {
    "wide": (6, 10),
    "tall": (2, 10, 6),  # of two layers
    "experts": (3, 6, 10),
    "router": (6, 3),
    "head": (6, 12),
    "scale": (6,),
}
MATRICES = ("wide", "tall", "experts")


def composed(s, polynomials):
    for a, b, c in polynomials:
        s = a * s + b * s**3 + c * s**5
    return s


def of_norm_one(x):
    """Orthogonalised matrices, [..., R, C], by a decomposition."""
    u, s, vt = np.linalg.svd(x, full_matrices=False)
    s = composed(s / (1.01 * np.linalg.norm(x, axis=(-2, -1))[..., None]), POLAR_EXPRESS)
    return (u * s[..., None, :]) @ vt


@pytest.mark.parametrize(
    "nesterov",
    [True, pytest.param(False, marks=pytest.mark.landing)],
    ids=["nesterov", "heavy_ball"],
)
@pytest.mark.parametrize("neuron_decay", [None, 0.9], ids=["muon", "normuon"])
@pytest.mark.parametrize("cautious", sentinels([False, True], bool), ids=["decay", "cautious"])
def test_updates_follow_the_equations(nesterov, neuron_decay, cautious):
    random = np.random.default_rng(0)
    weights = {name: random.normal(size=shape) for name, shape in SHAPES.items()}
    optimizer = muon(
        10, 0.1, warmup_constant, 0.8, nesterov, dtype="float32", weight_decay=0.2,
        clip_norm=None, cautious=cautious, neuron_decay=neuron_decay, adamw_learning_rate=0.5,
    )  # fmt: skip

    def as_model(of):
        return Model(**{name: jnp.asarray(x, jnp.float32) for name, x in of.items()})

    model = as_model(weights)
    state = optimizer.transformation.init(model)
    update = jax.jit(optimizer.transformation.update)
    average = {name: 0.0 for name in weights}
    square = {name: 0.0 for name in weights}
    for step in range(1, 4):
        gradients = {name: random.normal(size=shape) for name, shape in SHAPES.items()}
        learning_rate = float(optimizer.learning_rate(step - 1))
        for name, gradient in gradients.items():
            if name in MATRICES:
                average[name] = 0.8 * average[name] + 0.2 * gradient
                ahead = 0.8 * average[name] + 0.2 * gradient if nesterov else average[name]
                made, rate = of_norm_one(ahead), learning_rate
                if neuron_decay is not None:
                    columns = np.mean(made**2, axis=-2, keepdims=True)
                    square[name] = 0.9 * square[name] + 0.1 * columns
                    even = made / (np.sqrt(square[name]) + 1e-8)
                    norms = (np.linalg.norm(x, axis=(-2, -1), keepdims=True) for x in (made, even))
                    made = even * np.divide(*norms)
                direction = 0.2 * np.sqrt(10) * made
            else:
                average[name] = 0.9 * average[name] + 0.1 * gradient
                square[name] = 0.95 * square[name] + 0.05 * gradient**2
                direction = (average[name] / (1 - 0.9**step)) / (
                    np.sqrt(square[name] / (1 - 0.95**step)) + 1e-8
                )
                rate = 0.5 * learning_rate
            decay = 0.0 if name == "scale" else 0.2 * weights[name]
            decay = np.where(direction * weights[name] > 0, decay, 0) if cautious else decay
            weights[name] = weights[name] - rate * (direction + decay)
        updates, state = update(as_model(gradients), state, model)
        model = optax.apply_updates(model, updates)
        for name, expected in weights.items():
            np.testing.assert_allclose(
                getattr(model, name), expected, rtol=1e-4, atol=2e-4, err_msg=name
            )


def paths_of_matrices(model, apart=("experts",)):
    found = []
    map_weights(lambda one, _: found.append(one.path) if is_matrix(one, apart) else None, model)
    return {path.split(".", 4)[-1] for path in found}


def test_matrices_of_layers_are_found_by_the_names_of_their_axes():
    key = jax.random.key(0)
    model = jax.eval_shape(lambda: llama(**SIZES, layers=2, heads=4, mlp=16, key=key))
    of_layers = {f"attention.{name}" for name in ("query", "key", "value", "output")}
    assert paths_of_matrices(model) == of_layers | {"mlp.gate", "mlp.up", "mlp.down"}
    adapted = jax.eval_shape(
        lambda: lora(functools.partial(llama, **SIZES, layers=2, heads=4, mlp=16), 2, key=key)
    )
    pairs = {"attention.query.base", "attention.query.down", "attention.query.up"}
    assert paths_of_matrices(adapted) >= pairs
    # Its table of positions and its biases are none.
    of_gpt2 = jax.eval_shape(
        lambda: gpt2(**SIZES, layers=2, heads=4, mlp=16, positions=16, key=key)
    )
    assert paths_of_matrices(of_gpt2) == of_layers | {"mlp.up", "mlp.down"}
    assert paths_of_matrices(Model(**{n: np.zeros(s) for n, s in SHAPES.items()})) == {*MATRICES}


def test_heads_are_one_matrix_or_each_its_own():
    key = jax.random.key(0)
    model = jax.eval_shape(lambda: llama(**SIZES, layers=2, heads=4, mlp=16, key=key))
    whole, apart = {}, {}

    def note(one, array):  # [layer, embed, heads, head_dim] or [layer, heads, head_dim, embed]
        name = one.path.rsplit(".", 1)[-1]
        whole[name] = matrices_of(one, array.shape, ())
        apart[name] = matrices_of(one, array.shape, ("heads", "kv_heads"))

    map_weights(note, model)
    assert (whole["query"].apart, whole["query"].columns) == ((0,), (2, 3))
    assert (apart["query"].apart, apart["query"].rows, apart["query"].columns) == (
        (0, 2),
        (3,),
        (1,),
    )
    assert (apart["output"].apart, apart["output"].rows) == ((0, 1), (2,))
    assert apart["up"] == whole["up"]


def updated_twice(options, sizes):
    """The second updates, and the state after them, on a mesh of these `sizes`."""
    make = functools.partial(
        llama, vocab=64, embed=32, layers=3, heads=4, kv_heads=2, mlp=48,
        feed_forward=functools.partial(Mixture, experts=2, top=1, shared_mlp=48),
    )  # fmt: skip
    shapes = jax.eval_shape(make, key=jax.random.key(0))
    model, gradients = drawn(shapes), drawn(shapes, seed=1)
    # Without weight decay: how XLA fuses that may differ by a unit in the last place.
    optimizer = muon(
        10, 1e-2, warmup_constant, clip_norm=None, weight_decay=0.0, **options
    ).transformation

    mesh = make_mesh(**sizes)
    weights, first, second = (laid_out(each, mesh) for each in (model, gradients, model))
    with jax.set_mesh(mesh):

        @jax.jit
        def twice(weights, first, second):
            _, state = optimizer.update(first, optimizer.init(weights), weights)
            return optimizer.update(second, state, weights)

        updates, state = twice(weights, first, second)
    for given, new in zip(*map(jax.tree.leaves, (second, updates)), strict=True):
        assert new.sharding == given.sharding
    return jax.device_get((updates, state))


APART = {"neuron_decay": 0.9, "apart": ("heads", "kv_heads")}


@pytest.mark.slow
@pytest.mark.several_devices
@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        (APART, {"fsdp": 2, "tensor": 4}),  # two devices have the same key and value heads
        (APART, {"fsdp": 2, "expert": 2, "tensor": 2}),
        ({}, {"data": 2, "fsdp": 2, "tensor": 2}),
    ],
)
def test_a_mesh_makes_the_same_bits_as_one_device(options, sizes):
    alone, found = (jax.tree.leaves(updated_twice(options, each)) for each in ({}, sizes))
    for ours, theirs in zip(found, alone, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.slow
@pytest.mark.several_devices
def test_it_trains_as_on_one_device_and_resumes_bit_for_bit(tmp_path):
    optimizer = functools.partial(muon, peak_lr=1e-2, dtype="float32", neuron_decay=0.9)
    model = functools.partial(llama, **SIZES, layers=2, heads=4, mlp=16)
    run, alone = (
        experiment(lambda key: model(key=key), mesh, optimizer=optimizer, microbatches=parts)
        for mesh, parts in ((EIGHT, 2), ({}, 1))
    )
    check_outsider(run, alone, tmp_path, rtol=2e-3)


@pytest.mark.parametrize(("settings", "message"), refusals(__file__, "muon"))
def test_senseless_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        muon(10, 1e-3, **settings)


RANDOM = np.random.default_rng(0)
GIVEN = {
    "wide": RANDOM.normal(size=(24, 80)),
    "square": RANDOM.normal(size=(32, 32)),
    "a row": RANDOM.normal(size=(1, 7)),
    "nearly of rank 4": RANDOM.normal(size=(16, 4)) @ RANDOM.normal(size=(4, 40))
    + 1e-2 * RANDOM.normal(size=(16, 40)),
}


@pytest.mark.parametrize("polynomials", [CLASSIC, POLAR_EXPRESS], ids=["classic", "polar_express"])
@pytest.mark.parametrize("name", GIVEN)
def test_singular_values_go_through_the_polynomials(name, polynomials):
    matrix = GIVEN[name]
    u, s, vt = np.linalg.svd(matrix, full_matrices=False)
    expected = (u * composed(s / (1.01 * np.linalg.norm(matrix)), polynomials)) @ vt
    given = jnp.asarray(np.stack([matrix, 1e-3 * matrix]), jnp.float32)
    for made in orthogonalized(given, polynomials):
        np.testing.assert_allclose(made, expected, atol=3e-3 * np.abs(expected).max())


def test_bfloat16_is_near_enough():
    matrix = GIVEN["wide"]
    u, _, vt = np.linalg.svd(matrix, full_matrices=False)
    made = np.asarray(
        orthogonalized(jnp.asarray(matrix[None], jnp.bfloat16), POLAR_EXPRESS)[0], float
    )
    assert np.linalg.norm(made - u @ vt) < 0.13 * np.sqrt(24)


def test_they_end_near_one():
    s = np.geomspace(0.01, 1 / 1.01, 2_000)
    classic, polar = composed(s, CLASSIC), composed(s, POLAR_EXPRESS)
    assert (classic.min(), classic.max()) == pytest.approx((0.68, 1.14), abs=0.02)
    assert np.abs(polar - 1).max() < 0.13


def test_zeros_stay_zeros():
    assert not orthogonalized(jnp.zeros((2, 3, 5)), POLAR_EXPRESS).any()
