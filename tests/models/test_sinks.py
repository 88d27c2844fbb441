"""Attention with sinks against its equations in float64, and on meshes.

Shapes: B batch, S sequence, E embed, H heads, K kv_heads, D head_dim.
"""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from laid_out import laid_out

from lmlib import Compute, make_mesh
from lmlib.models.context import Context
from lmlib.models.parts.attention import Attention
from lmlib.models.weights import bell
from lmlib.parallel.gathering import gather
from lmlib.parallel.layout import sharding, share

FLOAT32 = Compute(dtype="float32")
B, S, E, H, K, D, WINDOW = 4, 24, 16, 4, 2, 6, 7
FIRST = 9  # of the second document of each row


@functools.cache
def made():
    """With weights that leave nothing out: no bias and no sink at zero."""
    part = Attention(
        E, H, K, D, window=WINDOW, bias=True, output_bias=True, sinks=True, key=jax.random.key(0)
    )
    leaves, structure = jax.tree.flatten(part)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    moved = [w + bell(key, w.shape, 0.5) for w, key in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(structure, moved)


def inputs():
    """x, what arrives for the gradient, and the documents."""
    x_BSE, d_BSE = np.random.default_rng(0).normal(size=(2, B, S, E)).astype(np.float32)
    index_BS = np.broadcast_to(np.arange(S, dtype=np.int32), (B, S))
    return x_BSE, d_BSE, (index_BS >= FIRST).astype(np.int32)


@functools.partial(jax.jit, static_argnums=1)
def with_gradients(part, compute, x_BSE, d_BSE, segment_ids_BS):
    """What attention makes, and the gradients of its weights and of x."""

    def output(part, x_BSE):
        context = Context(jnp.zeros_like(segment_ids_BS), segment_ids_BS, compute)
        return gather(part, "float32")(share(x_BSE, "batch seq embed"), context)[0]

    y_BSE, pullback = jax.vjp(output, part, x_BSE)
    return y_BSE, *pullback(d_BSE)


def reference(part, x_BSE, segment_ids_BS):
    """Position by position and head by head."""
    w, y_BSE = jax.tree.map(lambda w: np.asarray(w, np.float64), part), np.zeros((B, S, E))
    for b in range(B):
        x_SE = x_BSE[b].astype(np.float64)
        for h in range(H):
            k = h // (H // K)
            q_SD = x_SE @ w.query[:, h] + w.query_bias[h]
            k_SD = x_SE @ w.key[:, k] + w.key_bias[k]
            v_SD = x_SE @ w.value[:, k] + w.value_bias[k]
            for s in range(S):
                near = range(max(0, s - WINDOW + 1), s + 1)
                seen = [t for t in near if segment_ids_BS[b, t] == segment_ids_BS[b, s]]
                weights = np.exp([q_SD[s] @ k_SD[t] / D**0.5 for t in seen])
                weights /= weights.sum() + np.exp(w.sinks[h])
                y_BSE[b, s] += weights @ v_SD[seen] @ w.output[h]
        y_BSE[b] += w.output_bias
    return y_BSE


def assert_close(found, expected, tolerance):
    assert np.linalg.norm(found - expected) <= tolerance * np.linalg.norm(expected)


@pytest.mark.slow
def test_it_computes_its_equations_in_packed_rows():
    x_BSE, d_BSE, segment_ids_BS = inputs()
    found, _, _ = with_gradients(made(), FLOAT32, x_BSE, d_BSE, segment_ids_BS)
    assert_close(found, reference(made(), x_BSE, segment_ids_BS), 1e-6)


@pytest.mark.slow
def test_the_gradient_of_a_sink_is_the_slope_of_the_equations():
    x_BSE, d_BSE, segment_ids_BS = inputs()
    _, gradients, _ = with_gradients(made(), FLOAT32, x_BSE, d_BSE, segment_ids_BS)
    sinks_H = np.asarray(made().sinks, np.float64)

    def loss(sinks_H):
        moved = eqx.tree_at(lambda part: part.sinks, made(), sinks_H)
        return (reference(moved, x_BSE, segment_ids_BS) * d_BSE).sum()

    slopes_H = [(loss(sinks_H + e_H) - loss(sinks_H - e_H)) / 2e-4 for e_H in 1e-4 * np.eye(H)]
    assert_close(np.asarray(gradients.sinks), np.array(slopes_H), 1e-5)


@pytest.mark.slow
@pytest.mark.several_devices
@pytest.mark.parametrize("parallel", [False, True], ids=["", "sequence-parallel"])
@pytest.mark.parametrize(
    "mesh",
    [{"data": 2, "fsdp": 2, "tensor": 2}, {"expert": 2, "tensor": 4}, {"fsdp": 4}],
    ids=str,
)
def test_a_mesh_changes_neither_outputs_nor_gradients(mesh, parallel):
    *arrays, segment_ids_BS = inputs()
    compute, mesh = Compute(dtype="float32", sequence_parallel=parallel), make_mesh(**mesh)
    residual, tokens = (sharding(axes, mesh) for axes in (compute.residual, "batch seq"))
    with jax.default_matmul_precision("highest"):
        expected = with_gradients(made(), FLOAT32, *arrays, segment_ids_BS)
        part = laid_out(made(), mesh)
        with jax.set_mesh(mesh):
            placed = [jax.device_put(x, residual) for x in arrays]
            segments = jax.device_put(segment_ids_BS, tokens)
            found = with_gradients(part, compute, *placed, segments)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert_close(np.asarray(one), np.asarray(other), 1e-5)


@pytest.mark.slow
def test_what_mixes_values_is_what_is_shown():
    x_BSE, d_BSE, segment_ids_BS = (jnp.asarray(x) for x in inputs())
    part = made()
    context = Context(jnp.zeros_like(segment_ids_BS), segment_ids_BS, FLOAT32)
    weights_BHST = part.attention_weights(x_BSE, context)
    v_BTKD = jnp.einsum("bte,ekd->btkd", x_BSE, part.value) + part.value_bias
    v_BTHD = jnp.repeat(v_BTKD, H // K, axis=2)
    y_BSE = jnp.einsum("bhst,bthd,hde->bse", weights_BHST, v_BTHD, part.output) + part.output_bias
    found, _, _ = with_gradients(part, FLOAT32, x_BSE, d_BSE, segment_ids_BS)
    assert_close(np.asarray(y_BSE), np.asarray(found), 1e-5)
