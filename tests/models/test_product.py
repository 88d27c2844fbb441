"""The gradient of a weight: the same however it is computed, and without a copy of what is large.

Shapes: B batch, S sequence, F mlp, E embed.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmlib.models.product import product


@pytest.mark.parametrize(
    ("equation", "x_shape", "w_shape"),
    [
        ("bsf,fe->bse", (2, 16, 48), (48, 8)),
        ("bse,ef->bsf", (2, 16, 8), (8, 48)),
        ("bshd,hde->bse", (2, 16, 4, 12), (4, 12, 8)),
        ("bse,ehd->bshd", (2, 16, 8), (8, 4, 12)),
        ("xnf,xfe->xne", (3, 16, 48), (3, 48, 8)),
    ],
)
def test_the_gradient_of_a_weight_is_that_of_einsum(equation, x_shape, w_shape):
    random = np.random.default_rng(0)
    x, w = random.normal(size=x_shape), random.normal(size=w_shape)
    dy = random.normal(size=np.einsum(equation, x, w).shape)
    x_axes, w_axes, y_axes = equation.replace("->", ",").split(",")
    expected = np.einsum(f"{x_axes},{y_axes}->{w_axes}", x, dy)

    _, back = jax.vjp(lambda w: product(equation, jnp.float32(x), w), jnp.float32(w))
    (found,) = back(jnp.float32(dy))

    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


def test_a_cpu_copies_the_smaller_operand_of_a_gradient():
    B, S, F, E = 4, 128, 1_024, 256
    x_BSF, w_FE = (
        jax.ShapeDtypeStruct((B, S, F), "float32"),
        jax.ShapeDtypeStruct((F, E), "float32"),
    )

    def loss(w_FE, x_BSF):
        return jnp.sum(jnp.square(product("bsf,fe->bse", x_BSF, w_FE)))

    text = jax.jit(jax.grad(loss)).lower(w_FE, x_BSF).compile().as_text()
    assert f"f32[{E},{B * S}]" in text  # dy, transposed
    assert f"f32[{F},{B * S}]" not in text and f"f32[{F},{B},{S}]" not in text
