"""Cross-entropy, z-loss and their gradients against float64 NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from aot import absent, needs_gpu_compiler
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from sentinels import sentinels

from lmlib.losses.fused import fused_loss
from lmlib.losses.next_token import CrossEntropy
from lmlib.parallel.layout import STORED, partition
from lmlib.parallel.mesh import make_mesh
from lmlib.plan.program import read_program
from lmlib.plan.traffic import kernels

B, S, E, V = 4, 6, 16, 32
THREE = {"data": 2, "fsdp": 2, "tensor": 2}


def inputs(seed=0, scale=5.0, share=0.7):
    random = np.random.default_rng(seed)
    h_BSE = random.normal(size=(B, S, E)).astype(np.float32)
    table_EV = (random.normal(size=(E, V)) * scale / E**0.5).astype(np.float32)
    targets_BS = random.integers(0, V, (B, S)).astype(np.int32)
    return [*map(jnp.asarray, (h_BSE, table_EV, targets_BS, random.random((B, S)) < share))]


def reference(h_BSE, table_EV, targets_BS, mask_BS, z_loss, cap=None):
    """Returns the minimised loss, the cross-entropy, and gradients of the loss."""
    h_BSE, table_EV = np.asarray(h_BSE, np.float64), np.asarray(table_EV, np.float64)
    minimised = cross_entropy = 0.0
    dh_BSE, dtable_EV = np.zeros_like(h_BSE), np.zeros_like(table_EV)
    for b, s in np.argwhere(mask_BS):
        logits_V, slope_V = h_BSE[b, s] @ table_EV, 1.0
        if cap is not None:
            slope_V = np.cosh(logits_V / cap) ** -2
            logits_V = cap * np.tanh(logits_V / cap)
        log_z = np.log(np.exp(logits_V - logits_V.max()).sum()) + logits_V.max()
        loss = log_z - logits_V[targets_BS[b, s]]
        cross_entropy += loss
        minimised += loss + z_loss * log_z**2
        dlogits_V = np.exp(logits_V - log_z) * (1 + 2 * z_loss * log_z)
        dlogits_V[targets_BS[b, s]] -= 1
        dlogits_V *= slope_V
        dh_BSE[b, s] = table_EV @ dlogits_V
        dtable_EV += np.outer(h_BSE[b, s], dlogits_V)
    return minimised, cross_entropy, dh_BSE, dtable_EV


def sums_of(h_BSE, table_EV, targets_BS, mask_BS, z_loss=0.0, cap=None, chunk=None):
    """Returns the minimised loss, and the cross-entropy."""
    given = h_BSE, table_EV, targets_BS, mask_BS
    sums = fused_loss(CrossEntropy(z_loss), *given, cap=cap, chunk=chunk)
    return sums.loss_sum, sums.reported["loss"]


def found(h_BSE, table_EV, targets_BS, mask_BS, arriving=1.0, **settings):
    def loss(h_BSE, table_EV):
        sums = sums_of(h_BSE, table_EV, targets_BS, mask_BS, **settings)
        return sums[0] * arriving, sums

    (_, sums), gradients = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(h_BSE, table_EV)
    return *sums, *gradients


def evaluated(*arrays, **settings):
    return jax.jit(functools.partial(sums_of, **settings))(*arrays)


def assert_close(values, expected):
    for value, right in zip(values, expected, strict=True):
        scale = np.abs(right).max(initial=1)
        np.testing.assert_allclose(value, right, rtol=1e-5, atol=1e-5 * scale)


def test_with_a_cap_and_z_loss_sums_and_gradients_match_float64():
    arrays, settings = inputs(), {"z_loss": 1e-2, "cap": 8.0}
    assert_close(found(*arrays, chunk=5, **settings), reference(*arrays, **settings))


@pytest.mark.landing
@settings(max_examples=10)
@given(
    st.integers(0, 2**32 - 1),
    st.floats(0.1, 40.0),
    st.floats(0, 1),
    st.sampled_from([None, 1, 5, 8, 23, 24, 100]),
    st.sampled_from([0.0, 1e-2]),
    st.sampled_from([None, 8.0]),
)
@example(seed=0, scale=5.0, share=0.7, chunk=5, z_loss=1e-2, cap=8.0)
def test_sums_and_gradients_match_float64_in_chunks_of_any_size(
    seed, scale, share, chunk, z_loss, cap
):
    arrays = inputs(seed, scale, share)
    expected = reference(*arrays, z_loss, cap)
    settings = {"z_loss": z_loss, "chunk": chunk, "cap": cap}
    assert_close(found(*arrays, **settings), expected)
    assert_close(evaluated(*arrays, **settings), expected[:2])


@pytest.mark.several_devices
@pytest.mark.parametrize(
    ("mesh", "features"),
    sentinels(
        [
            ({"tensor": 8}, "batch seq embed"),
            ({"fsdp": 2, "tensor": 4}, "batch seq embed"),
            (THREE, "batch seq embed"),
            (THREE, "batch seq_parallel embed"),
            ({"fsdp": 2, "expert": 2, "tensor": 2}, "batch seq embed"),
            ({"data": 4}, "batch seq embed"),
        ],
        (THREE, "batch seq embed").__eq__,
        landing=lambda case: "parallel" in case[1],
    ),
)
@pytest.mark.parametrize("chunk", [None, 5])
def test_no_split_vocabulary_batch_or_sequence_changes_anything(mesh, features, chunk):
    arrays = inputs()
    mesh = make_mesh(**mesh)
    layouts = [partition(features), partition("embed vocab", STORED)]
    layouts += [partition("batch seq")] * 2
    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(array, NamedSharding(mesh, layout))
            for array, layout in zip(arrays, layouts, strict=True)
        ]
        settings = {"z_loss": 1e-2, "chunk": chunk}
        values = found(*placed, **settings)
        sums = evaluated(*placed, **settings)
    expected = reference(*arrays, 1e-2)
    assert_close(values, expected)
    assert_close(sums, expected[:2])
    for gradient, array in zip(values[2:], placed[:2], strict=True):
        assert gradient.sharding.is_equivalent_to(array.sharding, gradient.ndim)


@pytest.mark.several_devices
@pytest.mark.parametrize(
    ("mesh", "cap"),
    [({}, None), ({"tensor": 4}, None), ({}, 2.0**40)],
    ids=["whole", "split", "capped"],
)
def test_large_logits_lose_no_digits(mesh, cap):
    """All are near 1e4, where neighbours in float32 are 1e-3 apart; each is exact, capped too."""
    _, _, targets_BS, mask_BS = inputs(share=1.0)
    h_BSE = jnp.zeros((B, S, E)).at[..., 0].set(1.0)
    steps_V = np.random.default_rng(1).integers(-2_000, 2_000, V)
    table_EV = jnp.zeros((E, V)).at[0].set(1e4 + steps_V / 2**10)
    layouts = [partition("batch seq embed"), partition("embed vocab", STORED)]
    layouts += [partition("batch seq")] * 2
    mesh = make_mesh(**mesh)
    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(array, NamedSharding(mesh, layout))
            for array, layout in zip((h_BSE, table_EV, targets_BS, mask_BS), layouts, strict=True)
        ]
        minimised, cross_entropy, _, found_EV = found(*placed, cap=cap)
        without_gradients, _ = evaluated(*placed, cap=cap)
    expected = reference(h_BSE, table_EV, targets_BS, mask_BS, 0.0)
    for value in (minimised, cross_entropy, without_gradients):
        assert abs(float(value) - expected[0]) / (B * S) < 1e-6
    assert_close([found_EV], expected[3:])


@pytest.mark.parametrize("chunk", [None, 5])
def test_tokens_have_weights_of_either_sign(chunk):
    h_BSE, table_EV, targets_BS, mask_BS = arrays = inputs()
    weights_BS = np.random.default_rng(1).normal(size=(B, S)).astype(np.float32) * mask_BS
    values = found(h_BSE, table_EV, targets_BS, jnp.asarray(weights_BS), chunk=chunk)
    alone = [
        [weight * np.asarray(each) for each in reference(*arrays[:3], here_BS, 0.0)]
        for weight, here_BS in zip(weights_BS.ravel(), np.eye(B * S).reshape(-1, B, S), strict=True)
    ]
    assert_close(values, map(sum, zip(*alone, strict=True)))


def test_incoming_gradients_scale_the_gradients():
    arrays = inputs()
    minimised, cross_entropy, dh_BSE, dtable_EV = reference(*arrays, 0.0)
    values = found(*arrays, arriving=-0.25)
    assert_close(values, (minimised, cross_entropy, -0.25 * dh_BSE, -0.25 * dtable_EV))


def test_masked_positions_have_no_gradient_even_with_infinite_logits():
    h_BSE, table_EV, targets_BS, mask_BS = inputs()
    mask_BS = mask_BS.at[0, 1].set(False)
    expected = reference(h_BSE, table_EV, targets_BS, mask_BS, 0.0)
    h_BSE = h_BSE.at[0, 1].set(3e38)
    assert not np.isfinite(h_BSE[0, 1] @ table_EV).any()
    assert_close(found(h_BSE, table_EV, targets_BS, mask_BS), expected)


@pytest.mark.landing
def test_the_cross_entropy_is_for_reporting():
    h_BSE, *rest = inputs()
    gradient = jax.grad(lambda h: sums_of(h, *rest)[1])(h_BSE)
    assert not np.any(gradient)


def products(jaxpr):
    """The operands' dtypes of every product in the program."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield tuple(operand.aval.dtype.name for operand in equation.invars)
        for parameter in equation.params.values():
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                yield from products(inner)


def test_no_product_is_wider_than_the_features_and_none_is_made_twice():
    h_BSE, table_EV, *rest = inputs()

    def loss(h_BSE, table_EV):
        return sums_of(h_BSE, table_EV, *rest)[0]

    narrow = h_BSE.astype(jnp.bfloat16)
    trained = jax.make_jaxpr(jax.grad(loss, (0, 1)))(narrow, table_EV)
    assert list(products(trained.jaxpr)) == [("bfloat16", "bfloat16")] * 3
    evaluated = jax.make_jaxpr(loss)(narrow, table_EV)
    assert set(products(evaluated.jaxpr)) == {("bfloat16", "bfloat16")}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_are_never_whole(dtype):
    h_BSE, table_EV, *rest = inputs()

    def text(chunk):
        def loss(h_BSE, table_EV):
            return sums_of(h_BSE, table_EV, *rest, chunk=chunk)[0]

        arguments = h_BSE.astype(dtype), table_EV
        return jax.jit(jax.grad(loss, (0, 1))).lower(*arguments).compile().as_text()

    assert f"[{B * S},{V}]" in text(chunk=B * S)
    assert f"[{B * S},{V}]" not in text(chunk=8)
    assert f"[{B},{S},{V}]" not in text(chunk=8)


@needs_gpu_compiler
@pytest.mark.slow
@pytest.mark.parametrize("gpu", ["h200:1x1", "b200:1x1"])
def test_gpus_read_logits_three_times_and_write_them_once_more(gpu):
    """For the largest, for the sum, and for the gradient, which is written; each in bfloat16."""
    _, devices = absent(gpu)
    mesh, (N, E, V) = make_mesh(devices=devices), (8_192, 256, 32_768)
    how = {"chunk": N, "dtype": "bfloat16"}

    def total(h_BSE, table_EV, targets_BS):
        sums = fused_loss(CrossEntropy(1e-4), h_BSE, table_EV, targets_BS, targets_BS >= 0, **how)
        return sums.loss_sum

    shapes = [((1, N, E), jnp.bfloat16), ((E, V), jnp.bfloat16), ((1, N), jnp.int32)]
    whole = NamedSharding(mesh, partition(()))
    arguments = [jax.ShapeDtypeStruct(*each, sharding=whole) for each in shapes]
    with jax.set_mesh(mesh):
        compiled = jax.jit(jax.grad(total, argnums=(0, 1))).lower(*arguments).compile()
    moved = kernels(read_program(compiled.as_text()))
    logits = 2 * N * V
    assert 4 * logits <= moved.bytes - moved.product_bytes < 4.3 * logits
