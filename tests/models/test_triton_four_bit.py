"""The kernel of products in 4 bits, interpreted, and compiled for GPUs that are absent."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from aot import absent

from lmlib.models.families.llama import llama
from lmlib.models.matmul import matmul
from lmlib.models.matrices import mxfp4, nf4
from lmlib.models.matrices.triton_four_bit import product
from lmlib.parallel.axes import map_weights
from lmlib.parallel.layout import sharding
from lmlib.parallel.mesh import make_mesh

KINDS = {"nf4": nf4, "mxfp4": mxfp4}


def arrays(kind, E=128, F=96):
    """Codes and scales, and the dense matrix, of random numbers."""
    w_EF = np.random.default_rng(0).standard_normal((E, F)).astype(np.float32)
    module = KINDS[kind]
    quantize = mxfp4.quantized if kind == "mxfp4" else nf4.codes_of
    codes, scales = quantize(jnp.asarray(w_EF), 0)
    if kind == "mxfp4":
        scales = jnp.exp2(scales.astype(jnp.float32) - 127)
    low, high = np.asarray(codes) & 15, np.asarray(codes) >> 4
    pair = (low, high) if kind == "mxfp4" else (high, low)
    values = np.asarray(module.VALUES, np.float32)[np.stack(pair, 1).reshape(E, F)]
    return codes, scales, values * np.repeat(scales, module.BLOCK, 0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("N", [1, 40])
def test_products_and_gradients_equal_the_dense_matrix(kind, dtype, N):
    codes, scales, w_EF = arrays(kind)
    x_NE, dy_NF = (
        jax.random.normal(jax.random.key(i), (N, n), jnp.dtype(dtype))
        for i, n in ((1, 128), (2, 96))
    )
    settings = KINDS[kind].VALUES, kind == "mxfp4"
    y_NF, back = jax.vjp(lambda x: product(x, codes, scales, *settings), x_NE)
    rounded = np.asarray(jnp.asarray(w_EF).astype(dtype), np.float64)
    wide = [np.asarray(x, np.float64) for x in (x_NE, dy_NF)]
    for found, expected in ((y_NF, wide[0] @ rounded), (back(dy_NF)[0], wide[1] @ rounded.T)):
        assert found.dtype == dtype
        limit = (1e-5 if dtype == "float32" else 1e-2) * np.abs(expected).max()
        np.testing.assert_allclose(np.asarray(found, np.float64), expected, atol=limit)


@pytest.mark.aot
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_on_an_h100_never_has_the_matrix_in_16_bits(kind):
    _, devices = absent("h100:1x1")
    mesh = make_mesh(devices=devices)
    make = functools.partial(llama, vocab=64, embed=1024, layers=1, heads=8, mlp=4096)
    convert = getattr(KINDS[kind], f"in_{kind}")
    shapes = jax.eval_shape(lambda: map_weights(convert, make(key=jax.random.key(0))))
    matrix = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype, sharding=sharding("", mesh)),
        shapes.stack.patterns[0][0].mlp.up,
    )
    x = jax.ShapeDtypeStruct(
        (4, 2048, 1024), jnp.bfloat16, sharding=sharding(("batch", "seq", None), mesh)
    )

    def passes(matrix, x_BSE):
        y_BSF, back = jax.vjp(lambda x_BSE: matmul("bse,ef->bsf", x_BSE, matrix), x_BSE)
        return back(jnp.tanh(y_BSF))

    with jax.set_mesh(mesh):
        text = jax.jit(passes).lower(matrix, x).compile().as_text()
    assert "four_bit_product" in text and "four_bit_gradient" in text
    assert "bf16[1024,4096]" not in text and "f32[1024,4096]" not in text
