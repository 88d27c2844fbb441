"""Kimi Delta Attention against its definition in float64, and Kimi Linear on every mesh."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from laid_out import assert_near, drawn, laid_out
from sentinels import sentinels

from lmlib import Compute
from lmlib.data.batch import place
from lmlib.data.synthetic import Synthetic
from lmlib.losses.next_token import batch_loss
from lmlib.models.families.hybrid.kimi_linear import kimi_linear
from lmlib.models.forward_context import ForwardContext
from lmlib.models.recurrent.kimi_delta import KimiDelta
from lmlib.parallel.layout import sharding
from lmlib.parallel.mesh import make_mesh

SIZES = {"embed": 12, "heads": 2, "key_dim": 4, "value_dim": 5, "latent": 3, "width": 3}
SEGMENTS_BS = np.array([[1] * 5 + [2] + [3] * 7, [1] * 11 + [2] * 2])


@functools.cache
def layer():
    return drawn(jax.eval_shape(lambda: KimiDelta(**SIZES, key=jax.random.key(1))))


@functools.partial(jax.jit, static_argnames="chunk")
def run(part, x_BSE, positions_BS, segments_BS=None, cache=None, chunk=4):
    context = ForwardContext(positions_BS, segments_BS, Compute(recurrent_chunk=chunk))
    return part(x_BSE, context, cache)


def inputs():
    x_BSE = np.random.default_rng(0).normal(size=(2, 13, SIZES["embed"]))
    return jnp.asarray(x_BSE, jnp.float32)


def at(start, length):
    return np.tile(np.arange(start, start + length, dtype=np.int32), (2, 1))


def expected(part, x_SE):
    """One document, by arXiv:2510.26692, eq. 1 and §4."""
    w = {
        name: np.asarray(array, np.float64) for name, array in vars(part).items()
        if hasattr(array, "shape")
    }  # fmt: skip
    x_SE = np.asarray(x_SE, np.float64)

    def sigmoid(x):
        return 1 / (1 + np.exp(-x))

    def convolved(name):
        x = np.einsum("se,e...->s...", x_SE, w[name])
        before = np.concatenate([np.zeros((part.width - 1, *x.shape[1:])), x])
        taps = w[f"{name}_filter"]
        x = sum(before[j : j + len(x)] * taps[..., j] for j in range(part.width))
        return x * sigmoid(x)

    def unit(x):
        return x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6)

    q, k, v = (convolved(name) for name in ("query", "key", "value"))
    q, k = unit(q) / np.sqrt(q.shape[-1]), unit(k)
    beta = sigmoid(x_SE @ w["rate"])
    time = np.einsum("se,el,lhk->shk", x_SE, w["time_down"], w["time_up"]) + w["time_bias"]
    decay = np.exp(-np.exp(w["log_rate"])[:, None] * np.log1p(np.exp(time)))
    gate = np.einsum("se,el,lhv->shv", x_SE, w["gate_down"], w["gate_up"])
    y = np.zeros(v.shape)
    for h in range(v.shape[1]):
        state = np.zeros((k.shape[-1], v.shape[-1]))
        for t in range(len(x_SE)):
            forgets = np.eye(k.shape[-1]) - beta[t, h] * np.outer(k[t, h], k[t, h])
            state = forgets @ np.diag(decay[t, h]) @ state
            state += beta[t, h] * np.outer(k[t, h], v[t, h])
            y[t, h] = q[t, h] @ state
    scale = np.asarray(part.norm.scale, np.float64)
    y = y / np.sqrt((y**2).mean(-1, keepdims=True) + part.norm.epsilon) * scale
    return np.einsum("shv,hve->se", y * sigmoid(gate), w["output"])


@pytest.mark.parametrize("chunk", [4, 16])
def test_packed_rows_equal_the_definition_of_each_document(chunk):
    x_BSE = inputs()  # only segments say where documents start
    got_BSE, _ = run(layer(), x_BSE, at(0, 13), jnp.asarray(SEGMENTS_BS), chunk=chunk)
    for row in range(2):
        for segment in np.unique(SEGMENTS_BS[row]):
            inside = SEGMENTS_BS[row] == segment
            of_document = expected(layer(), x_BSE[row, inside])
            np.testing.assert_allclose(got_BSE[row, inside], of_document, rtol=2e-5, atol=2e-5)


def test_a_cache_in_uneven_pieces_with_padding_equals_the_whole():
    whole_BSE, _ = run(layer(), inputs(), at(0, 13))
    cache, start = layer().empty_cache(2, 13, "float32"), 0
    assert sum(leaf.size for leaf in jax.tree.leaves(cache)) == 2 * 2 * (4 * 5 + 2 * (4 + 4 + 5))
    for length in (1, 2, 6, 1, 3):
        positions_BS = np.pad(at(start, length), ((0, 0), (0, 2)), constant_values=-1)
        x_BSE = jnp.pad(inputs()[:, start : start + length], ((0, 0), (0, 2), (0, 0)))
        y_BSE, cache = run(
            layer(), x_BSE + (positions_BS < 0)[..., None], positions_BS, None, cache
        )
        there = slice(start, start + length)
        np.testing.assert_allclose(y_BSE[:, :length], whole_BSE[:, there], rtol=2e-5, atol=2e-5)
        start += length


def test_flops_are_those_of_weights_filters_and_state():
    """Per head: k reads the state, k vᵀ is added to it, and q reads it; twice more backward."""
    heads = 2 * 4 + 5 + 5  # queries, keys, values, output
    products = 12 * (2 * heads + 2 + 3 + 3) + 3 * 2 * (4 + 5)
    filters, state = 3 * 2 * (4 + 4 + 5), 3 * 2 * 4 * 5
    assert layer().flops_per_token(100, causal=True) == 6 * (products + filters + state)


MODEL = functools.partial(
    kimi_linear, vocab=64, embed=16, layers=4, heads=4, mlp=24, expert_mlp=8, experts=4, top=2,
    dense_layers=0, attention_layers=(1, 3), linear_heads=4,
    linear_head_dim=6, width=3, head_dim=9, shared_dim=3, value_dim=5, latent=10,
)  # fmt: skip
SOURCE = Synthetic(vocab_size=64, batch_size=8, sequence_length=32)
MESHES = [
    *({"tensor": 4}, {"expert": 4}, {"context": 4}, {"fsdp": 2, "context": 2, "tensor": 2}),
    *({"fsdp": 2, "expert": 2, "tensor": 2}, {"expert": 2, "context": 2}),
    *({"stage": 2, "fsdp": 2, "tensor": 2}, {"fsdp": 8}, {"stage": 2}),
    {"stage": 2, "context": 2, "expert": 2},
]


@functools.cache
def model():
    return drawn(jax.eval_shape(lambda: MODEL(key=jax.random.key(0))))


def loss_and_gradients(order, **sizes):
    """Computes in float64: float32 rounding changes some gradients by more than 2e-5 on meshes."""
    mesh = make_mesh(**sizes)

    def mean(model, batch):
        compute = Compute(dtype="float64", recurrent_chunk=4)
        return batch_loss(model, batch, compute)[0].loss_sum / batch.loss_mask.sum()

    with jax.enable_x64(True), jax.set_mesh(mesh):
        wide = jax.tree.map(lambda x: jnp.asarray(np.asarray(x), jnp.float64), model())
        batch = place(SOURCE, 0, sharding("batch seq", mesh), order)
        return jax.device_get(jax.jit(jax.value_and_grad(mean))(laid_out(wide, mesh), batch))


@functools.cache
def on_one_device():
    return loss_and_gradients("plain")


@pytest.mark.several_devices
@pytest.mark.parametrize("order", ["zigzag", pytest.param("plain", marks=pytest.mark.slow)])
@pytest.mark.parametrize("mesh", sentinels(MESHES, landing=MESHES[3].__eq__), ids=str)
def test_meshes_compute_the_loss_and_gradients_of_one_device(mesh, order):
    """Documents cross the borders of devices. Devices choose the same experts."""
    loss, gradients = loss_and_gradients(order, **mesh)
    expected_loss, expected_gradients = on_one_device()
    # Routers compute in float32, which rounds differently on some processors.
    assert loss == pytest.approx(expected_loss, rel=1e-8)
    assert_near(gradients, expected_gradients, 1e-5)
