"""Products in MXFP8 against NumPy: the formats bit for bit, and products of the rounded numbers."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from aot import absent
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from jax.sharding import NamedSharding, PartitionSpec
from outsider_runs import EIGHT, SIZES, compiled, experiment, trained
from sentinels import sentinels

from lmlib.compute import Compute
from lmlib.models.families.llama import llama
from lmlib.models.matmul import matmul
from lmlib.models.matrices.mxfp8 import check_devices, in_blocks
from lmlib.optim.adamw import adamw
from lmlib.parallel.mesh import make_mesh

# Sizes of the axes. Each product sums a whole number of blocks along some, and a part along others.
AXES = {"b": 8, "s": 12, "e": 64, "h": 8, "d": 16, "f": 80}
EQUATIONS = ("bse,ehd->bshd", "bshd,hde->bse", "bse,ef->bsf", "bsf,fe->bse")
SOME = ("bshd,hde->bse", "bsf,fe->bse")  # two axes summed, and a part of a block
FLOAT32 = 1e-6  # relative error of sums


def scales_and_elements(x_MK):
    """Blocks of 32 in float64: the least power of two that leaves no element above 448."""
    x_MGB = np.asarray(x_MK, np.float64).reshape(len(x_MK), -1, 32)
    mantissa, exponent = np.frexp(np.abs(x_MGB).max(axis=2))  # mantissas in [0.5, 1)
    exponent = exponent - 9 + (mantissa > 0.875)  # 448 is 0.875 · 2^9
    scale_MG = 2.0 ** np.where(mantissa == 0, -127, np.maximum(exponent, -127))
    elements = (x_MGB / scale_MG[..., None]).astype(ml_dtypes.float8_e4m3fn)
    return scale_MG, elements.reshape(x_MK.shape)


def rounded(x, axes, summed):
    """`x` in float64, rounded in blocks along `summed`, which are in the order of `axes`."""
    order = [axes.index(axis) for axis in axes if axis not in summed]
    order += [axes.index(axis) for axis in summed]
    moved = np.transpose(np.asarray(x, np.float64), order)
    x_MK = moved.reshape(-1, np.prod([x.shape[axes.index(axis)] for axis in summed]))
    x_MK, K = np.pad(x_MK, ((0, 0), (0, -x_MK.shape[1] % 32))), x_MK.shape[1]
    scale_MG, elements = scales_and_elements(x_MK)
    found = elements.astype(np.float64) * np.repeat(scale_MG, 32, axis=1)
    return np.transpose(found[:, :K].reshape(moved.shape), np.argsort(order))


def product(equation, a, b):
    """The product of the rounded operands in float64, and its size without cancellation."""
    a_axes, b_axes, y_axes = equation.replace("->", ",").split(",")
    summed = [axis for axis in a_axes if axis not in y_axes]
    a, b = rounded(a, a_axes, summed), rounded(b, b_axes, summed)
    return np.einsum(equation, a, b), np.einsum(equation, np.abs(a), np.abs(b))


def operands(equation):
    """Activations whose elements differ in size by far, weights, and an arriving gradient."""
    random = np.random.default_rng(0)
    shapes = [[AXES[axis] for axis in axes] for axes in equation.replace("->", ",").split(",")]
    x, w, dy = (random.normal(size=shape) for shape in shapes)
    x, dy = (each * 10 ** random.uniform(-4, 4, each.shape) for each in (x, dy))
    return tuple(jnp.asarray(each, jnp.float32) for each in (x, w, dy))


def with_gradients(equation, x, w, dy, out_sharding=None):
    y, backward = jax.vjp(lambda x, w: matmul(equation, x, w, "mxfp8", out_sharding), x, w)
    return y, *backward(dy)


@settings(max_examples=200)
@given(data=st.data())
def test_elements_and_scales_are_numpys_bit_for_bit(data):
    exponents = data.draw(arrays(np.int64, (2, 64), elements=st.integers(-125, 125)))
    floats = st.floats(-2, 2, width=32)
    some = st.sampled_from([0.0, 1.75, -1.75, np.nextafter(np.float32(1.75), 2), 1.0])
    numbers = data.draw(arrays(np.float32, (2, 64), elements=st.one_of(some, floats)))
    x = np.ldexp(numbers, exponents).astype(np.float32)
    x[np.abs(x) < np.finfo(np.float32).tiny] = 0  # XLA takes these for zero
    for dtype in (jnp.float32, jnp.bfloat16):
        x_MK = jnp.asarray(x, dtype)
        elements, scales = map(np.asarray, jax.jit(in_blocks)(x_MK))
        assert elements.dtype == ml_dtypes.float8_e4m3fn
        assert scales.dtype == ml_dtypes.float8_e8m0fnu
        expected_scales, expected = scales_and_elements(np.asarray(x_MK, np.float64))
        np.testing.assert_array_equal(scales.astype(np.float64), expected_scales)
        np.testing.assert_array_equal(elements.view(np.uint8), expected.view(np.uint8))


@pytest.mark.parametrize("equation", sentinels(EQUATIONS, lambda each: each in SOME))
def test_products_and_gradients_multiply_the_rounded_numbers(equation):
    x, w, dy = operands(equation)
    x_axes, w_axes, y_axes = equation.replace("->", ",").split(",")
    dx = f"{y_axes},{w_axes}->{x_axes}", dy, w
    dw = f"{x_axes},{y_axes}->{w_axes}", x, dy
    found = jax.jit(functools.partial(with_gradients, equation))(x, w, dy)
    for made, arguments in zip(found, ((equation, x, w), dx, dw), strict=True):
        expected, size = product(*arguments)
        assert np.all(np.abs(made - expected) <= FLOAT32 * size)


def test_results_have_the_dtype_of_the_activations():
    x, w, dy = (each.astype(jnp.bfloat16) for each in operands("bse,ef->bsf"))
    y, dx, dw = with_gradients("bse,ef->bsf", x, w, dy)
    assert y.dtype == dx.dtype == dw.dtype == jnp.bfloat16
    expected, size = product("bse,ef->bsf", x, w)
    assert np.all(np.abs(np.float64(y) - expected) <= FLOAT32 * size + 2**-8 * np.abs(expected))


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_non_finite_values_stay_in_their_rows(broken):
    x, w, _ = operands("bsf,fe->bse")
    sound = np.asarray(matmul("bsf,fe->bse", x, w, "mxfp8"))
    x, w = x.at[1, 2, 7].set(broken), w.at[3, 5].set(broken)
    found = np.asarray(matmul("bsf,fe->bse", x, w, "mxfp8"))
    spoiled = np.zeros(found.shape, bool)
    spoiled[1, 2, :] = spoiled[..., 5] = True
    assert not np.any(np.isfinite(found[spoiled]))
    np.testing.assert_array_equal(found[~spoiled], sound[~spoiled])


@pytest.mark.landing
@pytest.mark.several_devices
@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("equation", sentinels(EQUATIONS, lambda each: each in SOME))
def test_four_devices_compute_the_same_as_one(equation, scattered):
    # The parts of b · s, h · d and e along which blocks begin hold whole blocks, so all are equal.
    sizes = {"b": 16, "s": 16, "f": 128}
    random = np.random.default_rng(0)
    axes = x_axes, w_axes, y_axes = equation.replace("->", ",").split(",")
    arguments = [
        jnp.asarray(random.normal(size=[(AXES | sizes)[axis] for axis in each]), jnp.float32)
        for each in axes
    ]
    split = {"b": "fsdp", "h": "tensor", "f": "tensor"}
    mesh = make_mesh(fsdp=2, tensor=2, devices=jax.devices()[:4])

    def layout(axes):
        of_y = {"s": "tensor"} if scattered and axes is y_axes and axes[-1] == "e" else {}
        return PartitionSpec(*((split | of_y).get(axis) for axis in axes))

    alone = jax.jit(functools.partial(with_gradients, equation))(*arguments)
    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(each, NamedSharding(mesh, layout(one)))
            for each, one in zip(arguments, axes, strict=True)
        ]
        call = functools.partial(with_gradients, equation, out_sharding=layout(y_axes))
        together = jax.jit(call)(*placed)
    for found, expected, one in zip(together, alone, (y_axes, x_axes, w_axes), strict=True):
        assert found.sharding.is_equivalent_to(NamedSharding(mesh, layout(one)), found.ndim)
        np.testing.assert_allclose(found, expected, atol=FLOAT32 * 10 * np.abs(expected).max())


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [EIGHT, {"fsdp": 8}])
def test_a_model_learns_alike_on_any_mesh(mesh):
    model, losses = functools.partial(llama, **SIZES | {"embed": 64}, layers=2, heads=4, mlp=64), []
    both = {"projections": "mxfp8", "mlp": "mxfp8"}
    for each in ({}, mesh):
        compute = Compute(dtype="float32", quantized=both, sequence_parallel=bool(each))
        run = experiment(model, each, compute, functools.partial(adamw, peak_lr=1e-2))
        metrics, _ = trained(run, compiled(run), run.initial_state(), first=3)
        losses.append([of_step["loss"] for of_step in metrics])
    # A difference in the last bit rounds some numbers to the neighbouring value.
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-3)


@pytest.mark.parametrize("target", ["h100:1x1", "h200:1x1", "a100:1x1", "v5e:2x2", "v6e:2x2"])
def test_devices_without_products_of_blocks_are_refused(target):
    _, devices = absent(target)
    with pytest.raises(ValueError, match=r"needs NVIDIA GPUs of compute capability 10.*'float8'"):
        check_devices(make_mesh(devices=devices))


@pytest.mark.several_devices
def test_a_b200_and_cpus_multiply_blocks_but_pipelines_do_not():
    check_devices(make_mesh(devices=absent("b200:1x2")[1]))
    run = experiment(functools.partial(llama, **SIZES, layers=2, heads=4, mlp=64), {})
    run = dataclasses.replace(run, compute=Compute(quantized={"mlp": "mxfp8"}))
    run.check()
    with pytest.raises(ValueError, match=r"pipelines do not support.*stage=2: use stage=1"):
        dataclasses.replace(run, mesh=make_mesh(stage=2, fsdp=4)).check()
