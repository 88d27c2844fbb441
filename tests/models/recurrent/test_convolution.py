"""The short causal convolution, against NumPy's sums over each token's document."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from lmlib.compute import Compute
from lmlib.models.forward_context import ForwardContext
from lmlib.models.recurrent.convolution import causal_convolution
from lmlib.parallel.layout import partition
from lmlib.parallel.mesh import make_mesh
from lmlib.row_order import places

B, S, C, W = 2, 32, 4, 4
SEGMENTS = np.array([[0] * 32, [0] * 15 + [1, 2] + [3] * 5 + [4] * 10], np.int32)
POSITIONS = np.broadcast_to(np.arange(S, dtype=np.int32), (B, S))


def arrays():
    random = np.random.default_rng(0)
    return random.normal(size=(B, S, C)), random.normal(size=(C, W)), random.normal(size=(B, S, C))


def by_definition(x, weights, segments):
    y = np.zeros_like(x)
    for b, t, j in np.ndindex(B, S, W):
        if t >= j and segments[b, t - j] == segments[b, t]:
            y[b, t] += x[b, t - j] * weights[:, W - 1 - j]
    return y


@functools.partial(jax.jit, static_argnames="order")
def found(x, weights, d_y, segments, order="plain"):
    """The output, and the gradients of the input and the filter."""
    context = ForwardContext(jnp.asarray(POSITIONS), segments, Compute(), order=order)
    y, pullback = jax.vjp(lambda *given: causal_convolution(*given, context)[0], x, weights)
    return y, *pullback(d_y)


def test_each_token_sees_the_tokens_before_it_in_its_document():
    x, weights, d_y = arrays()
    with jax.enable_x64(True):
        y, dx, d_weights = found(x, weights, d_y, SEGMENTS)
        np.testing.assert_allclose(y, by_definition(x, weights, SEGMENTS), atol=1e-12)
        np.testing.assert_array_equal(found(x, weights, d_y, None)[0][0], y[0])
    # It is linear in both, so derivatives are products with basis vectors.
    for at in ((0, 3, 1), (1, 14, 0), (1, 31, 2)):
        basis = np.zeros_like(x)
        basis[at] = 1
        np.testing.assert_allclose(dx[at], (by_definition(basis, weights, SEGMENTS) * d_y).sum())
    for at in np.ndindex(C, W):
        basis = np.zeros_like(weights)
        basis[at] = 1
        np.testing.assert_allclose(d_weights[at], (by_definition(x, basis, SEGMENTS) * d_y).sum())


def test_a_number_that_is_none_stays_in_its_document():
    x, weights, d_y = arrays()
    x[1, 15] = np.nan  # a document of one token
    d_y[1, 15] = 0
    y, dx, d_weights = found(x, weights, d_y, SEGMENTS)
    assert np.isnan(y[1, 15]).all() and np.isnan(y).sum() == C
    assert np.isfinite(dx).all() and np.isfinite(d_weights[:, : W - 1]).all()


def test_a_window_continues_a_row_behind_its_padding():
    x, weights, _ = arrays()
    whole, parts = by_definition(x, weights, SEGMENTS[:1].repeat(2, 0)), []
    with jax.enable_x64(True):
        window, weights = jnp.zeros((B, W - 1, C)), jnp.asarray(weights)
        for start, end in ((0, 2), (2, 3), (3, 10), (10, 32)):
            piece = np.pad(x[:, start:end], ((0, 0), (0, 2), (0, 0)), constant_values=99.0)
            positions = np.pad(POSITIONS[:, start:end], ((0, 0), (0, 2)), constant_values=-1)
            context = ForwardContext(jnp.asarray(positions), None, Compute())
            y, window = causal_convolution(jnp.asarray(piece), weights, context, window)
            parts.append(y[:, :-2])
        np.testing.assert_allclose(np.concatenate(parts, axis=1), whole, atol=1e-12)


@pytest.mark.several_devices
@pytest.mark.parametrize(
    ("order", "sizes", "axes"),
    [
        ("plain", {"context": 8}, "embed"),
        ("zigzag", {"context": 4, "tensor": 2}, "heads"),
        ("zigzag", {"fsdp": 2, "context": 2, "tensor": 2}, "embed"),
        ("plain", {"fsdp": 2, "tensor": 4}, "heads"),
    ],
)
def test_devices_that_share_rows_compute_the_same(order, sizes, axes):
    x, weights, d_y = arrays()
    with jax.enable_x64(True):
        one = jax.device_get(found(x, weights, d_y, SEGMENTS))
        with jax.set_mesh(mesh := make_mesh(**sizes)):
            order_S = places(S, mesh.shape["context"], order)
            layouts = f"batch seq {axes}", f"{axes} head_dim", f"batch seq {axes}", "batch seq"
            given = (x[:, order_S], weights, d_y[:, order_S], SEGMENTS[:, order_S])
            placed = (
                jax.device_put(array, NamedSharding(mesh, partition(layout)))
                for array, layout in zip(given, layouts, strict=True)
            )
            y, dx, d_weights = jax.device_get(found(*placed, order=order))
    back = np.argsort(order_S)
    for value, right in zip((y[:, back], dx[:, back], d_weights), one, strict=True):
        np.testing.assert_allclose(value, right, atol=1e-12)


@pytest.mark.several_devices
def test_pieces_that_are_too_short_are_refused():
    x, weights, d_y = arrays()
    message = "over 4 tokens needs pieces of at least 3, and context=8 cuts rows into pieces of 2"
    with jax.set_mesh(make_mesh(context=8)), pytest.raises(ValueError, match=message):
        found(x, weights, d_y, SEGMENTS, order="zigzag")
