"""Products in 8 bits against NumPy's float64, within what their formats allow."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from jax.sharding import NamedSharding, PartitionSpec
from outsider_runs import EIGHT, SIZES, compiled, experiment, trained
from sentinels import sentinels

from lmlib.adapters.lora import with_adapters
from lmlib.compute import Compute
from lmlib.models.families.llama import llama
from lmlib.models.forward_context import single_document_context
from lmlib.models.matmul import matmul
from lmlib.models.matrices.int8 import in_int8
from lmlib.models.matrices.quantized import FORMATS, rounded
from lmlib.optim.adamw import adamw
from lmlib.parallel.axes import map_weights
from lmlib.parallel.matrix import dense
from lmlib.parallel.mesh import make_mesh
from lmlib.parallel.selection import named_weights

# Everything that a block multiplies, and a result whose axes are in another order.
EQUATIONS = {
    "bse,ehd->bshd": ((4, 6, 16), (16, 4, 8)),
    "bshd,hde->bse": ((4, 6, 4, 8), (4, 8, 16)),
    "bsf,fe->bse": ((4, 6, 32), (32, 16)),
    "bse,ev->vsb": ((4, 6, 16), (16, 40)),
}

SOME = ("bshd,hde->bse", "bse,ev->vsb")  # two axes summed, axes in another order

# Largest value, relative error of a rounding, and absolute error where values are small, both of
# x / scale. From the formats' definitions: 3 or 2 bits after the point and the least exponent, -6
# or -14, of normal numbers; integers are half a unit off at most.
LIMITS = {
    jnp.int8: (127.0, 0.0, 2**-1),
    jnp.float8_e4m3fn: (448.0, 2**-4, 2**-6 * 2**-4),
    jnp.float8_e5m2: (57_344.0, 2**-3, 2**-14 * 2**-3),
}
FLOAT32 = 1e-5  # error of divisions, scales and sums in float32


def rounding_error(x, summed, dtype):
    """The most by which each element of x may be off, in float64."""
    largest, relative, absolute = LIMITS[dtype]
    least = np.finfo(np.float32).tiny
    scale = np.abs(x).max(axis=summed, keepdims=True) / largest
    if relative:  # the next power of two
        scale = 2 ** np.ceil(np.log2(np.maximum(scale, least)))
    scale = np.maximum(scale, least)
    return (1 + FLOAT32) * np.maximum(relative * np.abs(x), absolute * scale) + FLOAT32 * np.abs(x)


def product_and_error(equation, a, b, formats):
    """The product in float64, and the most by which rounding both operands may change it."""
    operands, y_axes = equation.split("->")
    a_axes, b_axes = operands.split(",")
    a_summed = tuple(place for place, axis in enumerate(a_axes) if axis not in y_axes)
    b_summed = tuple(place for place, axis in enumerate(b_axes) if axis not in y_axes)
    a_error = rounding_error(a, a_summed, formats[0])
    b_error = rounding_error(b, b_summed, formats[1])
    size = functools.partial(np.einsum, equation)
    error = size(a_error, np.abs(b)) + size(np.abs(a), b_error) + size(a_error, b_error)
    return size(a, b), error + FLOAT32 * size(np.abs(a), np.abs(b))


def operands(equation, decades=6):
    """Activations whose rows differ in size by far, weights, and an arriving gradient."""
    random = np.random.default_rng(0)
    x_shape, w_shape = EQUATIONS[equation]
    x, w = random.normal(size=x_shape), random.normal(size=w_shape)
    x *= 10.0 ** random.uniform(-decades, decades, (*x_shape[:2], *[1] * (len(x_shape) - 2)))
    dy = random.normal(size=np.einsum(equation, x, w).shape)
    return tuple(jnp.asarray(each, jnp.float32) for each in (x, w, dy))


def wide(*each):
    return tuple(np.asarray(x, np.float64) for x in each)


@pytest.mark.parametrize("equation", sentinels(EQUATIONS, lambda each: each in SOME))
@pytest.mark.parametrize("precision", FORMATS)
def test_products_are_as_close_as_their_formats_allow(precision, equation):
    x, w, _ = operands(equation)
    found = np.asarray(matmul(equation, x, w, precision=precision), np.float64)
    forward, _ = FORMATS[precision]
    expected, error = product_and_error(equation, *wide(x, w), (forward, forward))
    assert np.all(np.abs(found - expected) <= error)
    # They are in 8 bits: in 16 the relative error would be below 2^-8.
    assert np.linalg.norm(found - expected) > 2**-8 * np.linalg.norm(error)


@pytest.mark.parametrize("equation", sentinels(EQUATIONS, lambda each: each in SOME))
@pytest.mark.parametrize("precision", FORMATS)
def test_gradients_are_straight_through(precision, equation):
    x, w, dy = operands(equation)
    _, backward = jax.vjp(lambda x, w: matmul(equation, x, w, precision=precision), x, w)
    dx, dw = wide(*backward(dy))
    x_axes, w_axes, y_axes = equation.replace("->", ",").split(",")
    forward_format, backward_format = FORMATS[precision]
    expected, error = product_and_error(
        f"{y_axes},{w_axes}->{x_axes}", *wide(dy, w), (backward_format, forward_format)
    )
    assert np.all(np.abs(dx - expected) <= error)
    # Computed from x and dy before rounding.
    expected = np.einsum(f"{x_axes},{y_axes}->{w_axes}", *wide(x, dy))
    size = np.einsum(f"{x_axes},{y_axes}->{w_axes}", *wide(np.abs(x), np.abs(dy)))
    assert np.all(np.abs(dw - expected) <= FLOAT32 * size)


@pytest.mark.parametrize("precision", FORMATS)
def test_forward_product_and_input_gradient_multiply_8_bits(precision):
    def loss(x, w):
        return jnp.sum(matmul("bse,ef->bsf", x, w, precision=precision))

    x, w = jnp.ones((2, 3, 16), jnp.bfloat16), jnp.ones((16, 32), jnp.bfloat16)
    found = []

    def visit(jaxpr):
        for equation in jaxpr.eqns:
            if equation.primitive.name == "dot_general":
                found.append(tuple(str(variable.aval.dtype) for variable in equation.invars))
            for parameter in equation.params.values():
                if hasattr(parameter, "eqns") or hasattr(parameter, "jaxpr"):
                    visit(getattr(parameter, "jaxpr", parameter))

    visit(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(x, w).jaxpr)
    arriving = {"int8": "int8", "float8": "float8_e5m2"}[precision]
    narrow = {"int8": "int8", "float8": "float8_e4m3fn"}[precision]
    assert sorted(found) == sorted([(narrow, narrow), (arriving, narrow), ("bfloat16", "bfloat16")])


@pytest.mark.landing
@pytest.mark.several_devices
@pytest.mark.parametrize("equation", sentinels(list(EQUATIONS)[:3], lambda each: each in SOME))
@pytest.mark.parametrize("precision", FORMATS)
def test_eight_devices_compute_the_same_as_one(precision, equation):
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    split = {"b": ("data", "fsdp"), "h": "tensor", "f": "tensor", "v": "tensor"}
    x_axes, w_axes, y_axes = equation.replace("->", ",").split(",")

    def layout(axes):
        return PartitionSpec(*(split.get(axis) for axis in axes))

    def both(x, w, dy, out_sharding=None):
        y, backward = jax.vjp(lambda x, w: matmul(equation, x, w, precision, out_sharding), x, w)
        return y, *backward(dy)

    arguments = operands(equation, decades=0)
    alone = jax.jit(both)(*arguments)
    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(each, NamedSharding(mesh, layout(axes)))
            for each, axes in zip(arguments, (x_axes, w_axes, y_axes), strict=True)
        ]
        together = jax.jit(functools.partial(both, out_sharding=layout(y_axes)))(*placed)
    for found, expected, axes in zip(together, alone, (y_axes, x_axes, w_axes), strict=True):
        assert found.sharding.is_equivalent_to(NamedSharding(mesh, layout(axes)), found.ndim)
        np.testing.assert_allclose(found, expected, atol=FLOAT32 * np.abs(expected).max())
    if precision == "int8":  # sums of integers are exact
        np.testing.assert_array_equal(together[0], alone[0])


@pytest.mark.slow
def test_a_model_learns_alike_on_any_mesh():
    model = functools.partial(llama, **SIZES, layers=2, heads=4, mlp=64)
    both, losses = {"projections": "int8", "mlp": "float8"}, []
    for mesh in ({}, EIGHT):
        compute = Compute(dtype="float32", quantized=both, sequence_parallel=bool(mesh))
        run = experiment(model, mesh, compute, functools.partial(adamw, peak_lr=1e-2))
        metrics, _ = trained(run, compiled(run), run.initial_state(), first=3)
        losses.append([of_step["loss"] for of_step in metrics])
    # A difference in the last bit rounds some numbers to the neighbouring value.
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-3)


@pytest.mark.slow
def test_each_kind_of_layer_has_its_own_precision():
    model = llama(vocab=64, embed=32, layers=1, heads=4, mlp=48, key=jax.random.key(0))
    tokens_BS = jnp.zeros((1, 8), jnp.int32)

    def multiplied(quantized):
        context = single_document_context(tokens_BS, Compute(dtype="float32", quantized=quantized))
        text = str(jax.make_jaxpr(lambda tokens_BS: model.trunk(tokens_BS, context))(tokens_BS))
        # A query and a gate, by their shapes.
        weights = ("i8[32,4,8]", "i8[32,48]", "f8_e4m3fn[32,4,8]", "f8_e4m3fn[32,48]")
        return {weight for weight in weights if weight in text}

    assert multiplied(None) == set()
    assert multiplied({"projections": "int8"}) == {"i8[32,4,8]"}
    assert multiplied({"mlp": "float8"}) == {"f8_e4m3fn[32,48]"}


@pytest.mark.parametrize("dtype", LIMITS)
@settings(max_examples=50)
@given(data=st.data())
def test_rounding_is_within_its_limits_at_any_size(dtype, data):
    exponents = data.draw(arrays(np.int64, (3, 1), elements=st.integers(-120, 120)))
    numbers = data.draw(arrays(np.float32, (3, 5), elements=st.floats(-1, 1, width=32)))
    x = np.ldexp(numbers, exponents).astype(np.float32)
    # XLA takes numbers below the least normal one for zero.
    x[np.abs(x) < np.finfo(np.float32).tiny] = 0
    values, scale = rounded(jnp.asarray(x), (1,), dtype)
    assert values.dtype == dtype and scale.shape == (3, 1)
    values, scale = wide(values, scale)
    assert np.all(np.isfinite(values)) and np.all(scale >= np.finfo(np.float32).tiny)
    assert np.all(np.abs(values) <= LIMITS[dtype][0])
    assert np.all(np.abs(values * scale - x) <= rounding_error(np.float64(x), 1, dtype))
    assert np.all(values[x == 0] == 0)


def test_a_stacked_matrix_has_the_scales_of_each_layer_alone():
    model = llama(vocab=64, embed=16, layers=3, heads=2, mlp=32, key=jax.random.key(0))
    matrices = {"mlp.up": (0,), "attention.query": (0,), "attention.output": (0, 1)}
    weights = list(named_weights(model).values())
    for weight, array_LIO in zip(weights, jax.tree.leaves(model), strict=True):
        summed = next((each for end, each in matrices.items() if weight.path.endswith(end)), None)
        if summed is not None:
            found = in_int8(weight, array_LIO)
            for layer in range(3):
                values, scale = rounded(array_LIO[layer], summed, jnp.int8)
                np.testing.assert_array_equal(found.values[layer], values)
                np.testing.assert_array_equal(found.scale[layer], scale)


def test_adapters_stay_as_they_are_beside_a_rounded_base():
    one = llama(vocab=64, embed=16, layers=1, heads=2, mlp=32, key=jax.random.key(0))
    one = with_adapters(one, paths=("*mlp.up",), rank=2, key=jax.random.key(1))
    found, given = (model.stack.patterns[0][0].mlp.up for model in (map_weights(in_int8, one), one))
    assert found.down is given.down and found.up is given.up
    np.testing.assert_allclose(dense(found), dense(given), atol=1e-2)
    assert found.base.values.dtype == jnp.int8


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("precision", FORMATS)
def test_non_finite_values_stay_in_their_rows(precision, broken):
    x, w, _ = operands("bsf,fe->bse")
    sound = np.asarray(matmul("bsf,fe->bse", x, w, precision=precision))
    x, w = x.at[1, 2, 7].set(broken), w.at[3, 5].set(broken)
    found = np.asarray(matmul("bsf,fe->bse", x, w, precision=precision))
    spoiled = np.zeros(found.shape, bool)
    spoiled[1, 2, :] = spoiled[..., 5] = True
    assert not np.any(np.isfinite(found[spoiled]))
    np.testing.assert_array_equal(found[~spoiled], sound[~spoiled])
