"""Magnitudes of adapters (DoRA): results, gradients, meshes. PEFT's are in tests/hf."""

import dataclasses
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from laid_out import drawn, laid_out
from linear import Linear
from outsider_runs import compiled, experiment, trained

from lmlib.adapters.lora import lora, merged, with_adapters
from lmlib.compute import Compute
from lmlib.data.synthetic import Synthetic
from lmlib.losses.next_token import batch_loss
from lmlib.models.experts.mixture import Mixture
from lmlib.models.families.llama import llama
from lmlib.models.matmul import matmul
from lmlib.models.matrices.lora import dropped
from lmlib.optim.trainable import adapters, grouped
from lmlib.parallel.mesh import make_mesh
from lmlib.parallel.selection import named_weights
from lmlib.state import abstract_batch, split_by_training

V, E, S = 64, 32, 16
BASE = functools.partial(llama, vocab=V, embed=E, layers=1, heads=4, kv_heads=2, mlp=64)
FLOAT32 = Compute(dtype="float32")
BATCH = Synthetic(V, batch_size=8, sequence_length=S).batch(0)


@functools.cache
def heads(**settings):
    """A matrix [4, 3, 8] that sums over its first two axes, with adapters that are not zero."""
    layer = Linear("heads head_dim", "embed", heads=4, head_dim=3, embed=8, key=jax.random.key(0))
    make = functools.partial(
        with_adapters, rank=2, alpha=6.0, paths=("matrix",), magnitude=True, **settings
    )
    return drawn(jax.eval_shape(make, layer, key=jax.random.key(1))).matrix


def normal(*shape):
    return jnp.asarray(np.random.default_rng(2).standard_normal(shape, np.float32))


def in_float64(one):
    """base, base + scale · down · up, and m, of `heads`."""
    base, down, up, change = (
        np.asarray(x, np.float64) for x in (one.base, one.down, one.up, one.magnitude_change)
    )
    norm = np.sqrt(np.sum(base**2, (0, 1)))
    return base, base + 3 * np.einsum("hdr,re->hde", down, up), norm + change[0]


def test_the_result_is_the_paper_s():
    one = heads()
    _, whole, m = in_float64(one)
    expected = m * whole / np.sqrt(np.sum(whole**2, (0, 1)))
    np.testing.assert_allclose(one.dense(), expected, atol=1e-5)
    np.testing.assert_allclose(one.magnitude()[0], m, atol=1e-5)
    x = normal(2, 5, 4, 3)
    found = matmul("bshd,hde->bse", x, one)
    np.testing.assert_allclose(found, np.einsum("bshd,hde->bse", x, expected), atol=1e-4)
    again = one.with_magnitude(jnp.asarray(m[None], jnp.float32))
    np.testing.assert_allclose(again.magnitude_change, one.magnitude_change, atol=1e-6)


def test_gradients_are_those_with_a_constant_norm():
    """Section 4.3 of the paper: dL/dV is m / |V| times that of the product's matrix."""
    one = heads()
    _, whole, m = in_float64(one)
    norm = np.sqrt(np.sum(whole**2, (0, 1)))
    x = normal(7, 4, 3)
    dy = normal(7, 8)
    for product in (
        lambda one: matmul("bhd,hde->be", x, one),
        lambda one: jnp.einsum("bhd,hde->be", x, one.dense()),
    ):
        found = jax.grad(lambda one, product=product: jnp.sum(product(one) * dy))(one)
        dw = np.einsum("bhd,be->hde", np.asarray(x, np.float64), dy)
        down, up = np.asarray(one.down, np.float64), np.asarray(one.up, np.float64)
        for name, wanted in {
            "down": 3 * np.einsum("hde,re->hdr", m / norm * dw, up),
            "up": 3 * np.einsum("hde,hdr->re", m / norm * dw, down),
            "magnitude_change": np.sum(dw * whole / norm, (0, 1))[None],
        }.items():
            np.testing.assert_allclose(
                getattr(found, name), wanted, atol=1e-5 * np.abs(wanted).max(), err_msg=name
            )


def test_dropout_leaves_the_product_of_the_base_whole():
    one = heads(dropout=0.5).with_key(jax.random.key(4))
    base, whole, m = in_float64(one)
    x = normal(7, 4, 3)
    inputs = np.asarray(dropped(x, one), np.float64)
    assert 0.2 < np.mean(inputs == 0) < 0.8
    factor = m / np.sqrt(np.sum(whole**2, (0, 1)))
    expected = np.einsum("bhd,hde->be", x, base)
    expected = expected + np.einsum("bhd,hde->be", inputs, factor * whole - base)
    np.testing.assert_allclose(matmul("bhd,hde->be", x, one), expected, atol=1e-4)


def test_outputs_without_weights_stay_finite_and_train():
    one = heads()
    one = dataclasses.replace(one, base=one.base.at[..., 2].set(0), up=jnp.zeros_like(one.up))
    gradient = jax.grad(lambda one: jnp.sum(matmul("bhd,hde->be", jnp.ones((2, 4, 3)), one)))(one)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))
    assert np.all(np.asarray(gradient.up)[:, 2])


@functools.cache
def adapted(**settings):
    make = functools.partial(lora, BASE, **{"rank": 4, "alpha": 8.0, "magnitude": True} | settings)
    return drawn(jax.eval_shape(make, key=jax.random.key(0)))


def test_adapters_train_the_magnitudes_without_decay():
    model = jax.eval_shape(functools.partial(lora, BASE, magnitude=True), key=jax.random.key(0))
    weights = {path: each for path, each in named_weights(model).items() if "magnitude" in path}
    assert len(weights) == 7
    assert weights.keys() < grouped(model, adapters()).keys()
    assert grouped(model, adapters(16.0))["stack.patterns.0.0.mlp.up.magnitude_change"] == "up"
    assert not any(each.declaration.decays for each in weights.values())


def test_experts_have_no_magnitude():
    make = functools.partial(
        lora, functools.partial(BASE, feed_forward=functools.partial(Mixture, experts=4, top=2)),
        paths=("*.experts.*",), magnitude=True,
    )  # fmt: skip
    with pytest.raises(ValueError, match="adapters of experts have no magnitude"):
        jax.eval_shape(make, key=jax.random.key(0))


@pytest.mark.slow
def test_new_magnitudes_change_nothing():
    new, base = (
        lora(BASE, axes=("vocab",), magnitude=True, key=jax.random.key(0)),
        BASE(key=jax.random.key(0)),
    )
    for one, other in zip(*map(jax.tree.leaves, (jax.jit(merged)(new), base)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def loss(trained, frozen, batch, compute=FLOAT32):
    key = jax.random.key(3)
    return batch_loss(eqx.combine(trained, frozen), batch, compute, key=key)[0].loss_sum


def parts(model):
    trained, _, frozen = split_by_training(model, grouped(model, adapters()).keys())
    return trained, frozen


@functools.cache
def on_one_device(dropout):
    model = adapted(axes=("vocab",), dropout=dropout)
    return jax.jit(jax.grad(loss))(*parts(model), BATCH), jax.jit(merged)(model)


@pytest.mark.slow
@pytest.mark.several_devices
@pytest.mark.parametrize(
    ("mesh", "sequence_parallel", "dropout"),
    [
        ({"fsdp": 2, "tensor": 2}, False, 0.0),
        ({"fsdp": 2, "tensor": 4}, False, 0.2),
        ({"data": 2, "fsdp": 2, "tensor": 2}, True, 0.2),
        ({"fsdp": 4, "expert": 2}, False, 0.0),
    ],
)
def test_every_mesh_gives_the_gradients_of_one_device(mesh, sequence_parallel, dropout):
    expected = on_one_device(dropout)
    mesh = make_mesh(**mesh, devices=jax.devices()[: int(np.prod([*mesh.values()]))])
    compute = Compute(dtype="float32", sequence_parallel=sequence_parallel)
    with jax.set_mesh(mesh):
        rows = jax.tree.map(lambda leaf: leaf.sharding, abstract_batch(8, S, mesh))

        @jax.jit
        def both(model, batch):
            gradient = jax.grad(functools.partial(loss, compute=compute))
            return gradient(*parts(model), batch), merged(model)

        model = laid_out(adapted(axes=("vocab",), dropout=dropout), mesh)
        found = both(model, jax.device_put(BATCH, rows))
    for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5 * np.max(np.abs(other)))


@pytest.mark.slow
@pytest.mark.several_devices
@pytest.mark.parametrize("frozen_dtype", ["float32", "int8", "nf4"])
def test_a_run_trains_magnitudes_on_a_mesh_as_on_one_device(frozen_dtype):
    make = functools.partial(BASE, embed=128, mlp=128)  # two blocks of NF4
    run_of = functools.partial(
        experiment, functools.partial(lora, make, rank=4, alpha=8.0, magnitude=True),
        trainable=adapters(), frozen_dtype=frozen_dtype,
    )  # fmt: skip
    found = {}
    for mesh in ({}, {"fsdp": 2, "tensor": 2}):
        run = run_of(mesh, FLOAT32)
        begun = run.initial_state()
        before = jax.device_get(begun.frozen)
        found[len(mesh)], state = trained(run, compiled(run), begun)
        for one, other in zip(*map(jax.tree.leaves, (state.frozen, before)), strict=True):
            np.testing.assert_array_equal(one, other)
        assert np.any(np.asarray(state.model.stack.patterns[0][0].mlp.up.magnitude_change))
    for ours, theirs in zip(*found.values(), strict=True):
        np.testing.assert_allclose(ours["loss"], theirs["loss"], rtol=1e-4)
        np.testing.assert_allclose(ours["grad_norm"], theirs["grad_norm"], rtol=1e-3)


@pytest.mark.slow
@pytest.mark.several_devices
@pytest.mark.parametrize("mesh", [{"stage": 2, "fsdp": 2}, {"context": 2, "tensor": 2}])
def test_stages_and_pieces_of_texts_train_magnitudes_as_one_device(mesh):
    base = functools.partial(BASE, layers=2)
    make = functools.partial(lora, base, rank=4, alpha=8.0, magnitude=True)
    run_of = functools.partial(
        experiment, make,
        compute=FLOAT32, trainable=adapters(), microbatches=2, steps=2,
    )  # fmt: skip
    found = []
    for sizes in ({}, mesh):
        run = run_of(sizes)
        model = drawn(run.recipe.abstract_model)
        found.append(trained(run, compiled(run), run.initial_state(laid_out(model, run.mesh)))[0])
    for ours, theirs in zip(*found, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
