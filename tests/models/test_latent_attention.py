"""Multi-head latent attention against its equations in float64, and on meshes.

Shapes: B batch, S sequence, E embed, L latent, H heads, D head_dim, R rotary_dim, V value_dim.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from laid_out import assert_near, laid_out

from lmlib import Compute, make_mesh
from lmlib.models.forward_context import ForwardContext
from lmlib.models.parts.latent_attention import LatentAttention
from lmlib.models.parts.rope import Rotary
from lmlib.models.weights import approx_normal
from lmlib.parallel.gathering import gather
from lmlib.parallel.layout import replicate_for_tp, sharding

FLOAT32 = Compute(dtype="float32")
B, S, E, H, D, R, V, L = 4, 24, 16, 4, 6, 4, 8, 10
FIRST = 9  # of the second document of each row


@functools.cache
def made(query_latent=12, interleaved=True):
    """No scale of a norm is 1, so that each has an effect."""
    rotary = Rotary(R, 500.0, interleaved=interleaved)
    part = LatentAttention(
        E, H, D, R, V, L, query_latent, rotary, scale=0.4, key=jax.random.key(0)
    )  # fmt: skip
    leaves, structure = jax.tree.flatten(part)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    moved = [w + approx_normal(key, w.shape, 0.3) for w, key in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(structure, moved)


def inputs():
    return np.random.default_rng(0).normal(size=(B, S, E)).astype(np.float32)


def context(positions_BS, segment_ids_BS, rotary, compute):
    made = ForwardContext(positions_BS, segment_ids_BS, compute)
    rotations = {rotary: rotary.rotations(positions_BS, "float32")}
    return made.sharing(rotations)


def two_documents():
    index_BS = np.broadcast_to(np.arange(S, dtype=np.int32), (B, S))
    segment_ids_BS = (index_BS >= FIRST).astype(np.int32)
    return index_BS - FIRST * segment_ids_BS, segment_ids_BS


@functools.partial(jax.jit, static_argnums=2)
def whole(part, x_BSE, compute=FLOAT32):
    positions_BS, segment_ids_BS = (jnp.asarray(x) for x in two_documents())
    given = context(positions_BS, segment_ids_BS, part.rotary, compute)
    return gather(part, "float32")(replicate_for_tp(x_BSE, "batch seq embed"), given)[0]


def normed(x, scale):
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-6) * scale


def turned(x_R, position, interleaved):
    """Pairs as complex numbers."""
    pairs = x_R.reshape(R // 2, 2) if interleaved else x_R.reshape(2, R // 2).T
    angles = position * 500.0 ** (-np.arange(R // 2) * 2 / R)
    turned = (pairs[:, 0] + 1j * pairs[:, 1]) * np.exp(1j * angles)
    return np.concatenate((turned.real, turned.imag))


def reference(part, x_BSE):
    """Position by position and head by head (arXiv:2412.19437, eq. 1 to 11)."""
    w = jax.tree.map(lambda w: np.asarray(w, np.float64), part)
    positions_BS, segment_ids_BS = two_documents()
    y_BSE = np.zeros((B, S, E))
    interleaved = part.rotary.interleaved
    for b in range(B):
        queries, keys, values = (np.zeros((S, H, size)) for size in (D + R, D + R, V))
        for s in range(S):
            x_E, position = x_BSE[b, s].astype(np.float64), positions_BS[b, s]
            latent_L = normed(x_E @ w.down, w.norm.scale)
            rotary_R = turned(x_E @ w.rotary_key, position, interleaved)
            for h in range(H):
                if w.query is None:
                    q_Q = normed(x_E @ w.query_down, w.query_norm.scale) @ w.query_up[:, h]
                else:
                    q_Q = x_E @ w.query[:, h]
                queries[s, h] = np.concatenate((q_Q[:D], turned(q_Q[D:], position, interleaved)))
                keys[s, h] = np.concatenate((latent_L @ w.key[:, h], rotary_R))
                values[s, h] = latent_L @ w.value[:, h]
        for s, h in np.ndindex(S, H):
            seen = [t for t in range(s + 1) if segment_ids_BS[b, t] == segment_ids_BS[b, s]]
            weights = np.exp([0.4 * queries[s, h] @ keys[t, h] for t in seen])
            mixed_V = weights / weights.sum() @ values[seen, h]
            y_BSE[b, s] += mixed_V @ w.output[h]
    return y_BSE


def assert_close(found, expected, tolerance):
    assert np.linalg.norm(found - expected) <= tolerance * np.linalg.norm(expected)


@pytest.mark.slow
@pytest.mark.parametrize(("query_latent", "interleaved"), [(12, True), (None, False)])
def test_it_computes_its_equations(query_latent, interleaved):
    part = made(query_latent, interleaved)
    assert_close(whole(part, inputs()), reference(part, inputs()), 1e-6)


@functools.partial(jax.jit, static_argnums=1)
def with_loss(part, compute, x_BSE, d_BSE):
    def loss(part, x_BSE):
        return jnp.sum(whole(part, x_BSE, compute) * d_BSE)

    return jax.value_and_grad(loss, (0, 1))(part, x_BSE)


@pytest.mark.slow
@pytest.mark.several_devices
@pytest.mark.parametrize("parallel", [False, True], ids=["", "sequence-parallel"])
@pytest.mark.parametrize(
    "mesh", [{"data": 2, "fsdp": 2, "tensor": 2}, {"expert": 2, "tensor": 4}, {"fsdp": 4}], ids=str
)
def test_a_mesh_changes_neither_outputs_nor_gradients(mesh, parallel):
    part, x_BSE = made(), inputs()
    d_BSE = np.random.default_rng(1).normal(size=x_BSE.shape).astype(np.float32)
    compute = Compute(dtype="float32", sequence_parallel=parallel)
    with jax.default_matmul_precision("highest"):
        expected = with_loss(part, FLOAT32, x_BSE, d_BSE)
        mesh = make_mesh(**mesh)
        lies = sharding(compute.residual, mesh)
        with jax.set_mesh(mesh):
            placed = (jax.device_put(x, lies) for x in (x_BSE, d_BSE))
            found = with_loss(laid_out(part, mesh), compute, *placed)
    assert_near(*jax.device_get((found, expected)))


def test_a_cache_holds_the_latent_and_the_rotary_key_alone():
    cache = jax.eval_shape(lambda: made().empty_cache(B, S, jnp.float32))
    assert sum(leaf.size for leaf in jax.tree.leaves(cache)) == B * S * (L + R)
