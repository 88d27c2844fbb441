"""Attention with an output gate per head or element, against its definition in float64.

Shapes: B batch, S sequence, E embed, H heads, K kv_heads, D head_dim.
"""

import functools

import jax
import jax.numpy as jnp
import laid_out
import numpy as np
import pytest

from lmlib import Compute
from lmlib.data.synthetic import Synthetic
from lmlib.models.families.transformer import transformer
from lmlib.models.forward_context import ForwardContext
from lmlib.models.parts.gated_attention import GatedAttention
from lmlib.optim.matrices.whole_matrices import APART, is_matrix
from lmlib.parallel.axes import map_weights

B, S, E, H, K, D = 2, 9, 8, 4, 2, 6
SEGMENTS_BS = np.array([[1] * 4 + [2] * 5, [1] * 9])
FLOAT32 = Compute(dtype="float32")
of_each_gate = pytest.mark.parametrize("per_head", [True, False], ids=["head", "element"])


def layer(per_head):
    make = functools.partial(GatedAttention, E, H, K, D, per_head=per_head)
    return laid_out.drawn(jax.eval_shape(lambda: make(key=jax.random.key(0))))


def inputs():
    return jnp.asarray(np.random.default_rng(0).normal(size=(B, S, E)), jnp.float32)


def context(positions_BS, segments_BS=None):
    return ForwardContext(jnp.asarray(positions_BS), segments_BS, FLOAT32)


def loss(part, x_BSE):
    """The outputs of packed rows, weighed by random numbers."""
    positions_BS = np.concatenate([np.arange(4), np.arange(5), np.arange(9)]).reshape(B, S)
    y_BSE, _ = part(x_BSE, context(positions_BS, jnp.asarray(SEGMENTS_BS)))
    return jnp.sum(y_BSE * np.random.default_rng(1).normal(size=y_BSE.shape)), y_BSE


def defined(part, x_BSE):
    """Same as `loss`, head by head."""
    seen_BST = (SEGMENTS_BS[:, :, None] == SEGMENTS_BS[:, None]) & np.tri(S, dtype=bool)
    y_BSE = jnp.zeros((B, S, E))
    for h in range(H):
        q_BSD = x_BSE @ part.query[:, h]
        k_BTD, v_BTD = (x_BSE @ each[:, h // (H // K)] for each in (part.key, part.value))
        scores_BST = jnp.where(seen_BST, q_BSD @ k_BTD.mT / D**0.5, -jnp.inf)
        gate = x_BSE @ (part.gate[:, h : h + 1] if part.per_head else part.gate[:, h])
        mixed_BSD = jax.nn.softmax(scores_BST, axis=-1) @ v_BTD / (1 + jnp.exp(-gate))
        y_BSE += mixed_BSD @ part.output[h]
    return jnp.sum(y_BSE * np.random.default_rng(1).normal(size=y_BSE.shape)), y_BSE


@pytest.mark.landing
@of_each_gate
def test_outputs_and_every_gradient_equal_the_definition(per_head):
    part, x_BSE = layer(per_head), inputs()
    assert part.gate.shape == ((E, H) if per_head else (E, H, D))

    def of(function, *given):
        whole = jax.jit(jax.value_and_grad(function, (0, 1), has_aux=True))
        (_, y_BSE), gradients = whole(*given)
        return jax.device_get((y_BSE, gradients))

    with jax.enable_x64(True):
        wide = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), (part, x_BSE))
        expected = of(defined, *wide)
    laid_out.assert_near(of(loss, part, x_BSE), expected, 1e-6)


@of_each_gate
def test_a_cache_in_uneven_pieces_equals_the_whole(per_head):
    part, x_BSE, positions_BS = layer(per_head), inputs(), np.tile(np.arange(S), (B, 1))
    whole_BSE, _ = part(x_BSE, context(positions_BS))
    cache, pieces = part.empty_cache(B, S, "float32"), []
    for start, end in ((0, 4), (4, 5), (5, 9)):
        y_BSE, cache = part(x_BSE[:, start:end], context(positions_BS[:, start:end]), cache)
        pieces.append(y_BSE)
    np.testing.assert_allclose(jnp.concatenate(pieces, axis=1), whole_BSE, rtol=1e-5, atol=1e-5)


@of_each_gate
def test_muon_takes_gates_of_elements_and_flops_count_both(per_head):
    part, found = layer(per_head), set()
    map_weights(lambda w, _: is_matrix(w, APART) and found.add(w.path), part)
    assert found == {"query", "key", "value", "output"} | (set() if per_head else {"gate"})
    of_attention = 12 * H * D * (S - S / 2)
    weights = E * D * (2 * H + 2 * K) + E * H * (1 if per_head else D)
    assert part.flops_per_token(S, causal=True) == 6 * weights + of_attention


SOURCE = Synthetic(vocab_size=64, batch_size=8, sequence_length=16)


@functools.cache
def gradients(sizes, parallel=False, order="plain"):
    attention = functools.partial(GatedAttention, per_head=True)
    make = functools.partial(transformer, 64, 16, 2, 8, 24, 4, attention=attention)
    model = laid_out.drawn(jax.eval_shape(lambda: make(key=jax.random.key(0))))
    compute = Compute(dtype="float32", sequence_parallel=parallel)
    return laid_out.loss_and_gradients(model, dict(sizes), compute, SOURCE, order)


@pytest.mark.slow
@pytest.mark.several_devices
@pytest.mark.parametrize(
    ("sizes", "parallel", "order"),
    [
        ({"tensor": 8}, True, "plain"),
        ({"fsdp": 2, "tensor": 4}, False, "plain"),
        ({"fsdp": 2, "context": 2, "tensor": 2}, False, "zigzag"),
    ],
    ids=str,
)
def test_gates_of_heads_on_a_mesh_equal_one_device(sizes, parallel, order):
    expected, of_one = gradients(())
    found, of_several = gradients(tuple(sizes.items()), parallel, order)
    assert found == pytest.approx(expected, rel=1e-6)
    laid_out.assert_near(of_several, of_one, 2e-5)
