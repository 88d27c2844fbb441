"""Gated DeltaNet against its definition, token by token in float64, and against itself."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import laid_out
import numpy as np
import pytest
from sentinels import sentinels

from lmlib import Compute, make_mesh
from lmlib.data.batch import place
from lmlib.data.synthetic import Synthetic
from lmlib.losses.next_token import batch_loss
from lmlib.models.families.hybrid.qwen3_next import qwen3_next
from lmlib.models.forward_context import ForwardContext
from lmlib.models.recurrent.gated_deltanet import GatedDeltaNet
from lmlib.parallel.layout import sharding

SIZES = {"embed": 12, "heads": 6, "kv_heads": 2, "key_dim": 4, "value_dim": 5, "width": 3}
SEGMENTS_BS = np.array([[1] * 5 + [2] + [3] * 7, [1] * 11 + [2] * 2])


def layer(**settings):
    made = GatedDeltaNet(**SIZES | settings, key=jax.random.key(1))
    return eqx.tree_at(lambda part: part.log_rate, made, jnp.log(jnp.linspace(0.3, 4.0, 6)))


def context(positions_BS, segments_BS=None):
    return ForwardContext(jnp.asarray(positions_BS), segments_BS, Compute())


def inputs(rows=2, length=13):
    x_BSE = np.random.default_rng(0).normal(size=(rows, length, SIZES["embed"]))
    return jnp.asarray(x_BSE, jnp.float32)


def expected(part, x_SE):
    """One document, by arXiv:2412.06464, eq. 10."""
    w = {
        name: np.asarray(array, np.float64) for name, array in vars(part).items()
        if hasattr(array, "shape")
    }  # fmt: skip
    x_SE = np.asarray(x_SE, np.float64)

    def silu(x):
        return x / (1 + np.exp(-x))

    def convolved(name):
        x = np.einsum("se,e...->s...", x_SE, w[name])
        taps = w[f"{name}_filter"]
        before = np.concatenate([np.zeros((part.width - 1, *x.shape[1:])), x])
        return silu(sum(before[j : j + len(x)] * taps[..., j] for j in range(part.width)))

    q, k, v = (convolved(name) for name in ("query", "key", "value"))
    q, k = (x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
    q = q / np.sqrt(q.shape[-1])
    beta = (2 if part.negative else 1) / (1 + np.exp(-x_SE @ w["rate"]))
    decay = np.exp(-np.exp(w["log_rate"]) * np.log1p(np.exp(x_SE @ w["time"] + w["time_bias"])))
    S, H, V = v.shape
    y = np.zeros((S, H, V))
    for h in range(H):
        group, state = h // (H // k.shape[1]), np.zeros((k.shape[-1], V))
        for t in range(S):
            key = k[t, group]
            kept = decay[t, h] * (np.eye(len(key)) - beta[t, h] * np.outer(key, key))
            state = kept @ state + beta[t, h] * np.outer(key, v[t, h])
            y[t, h] = q[t, group] @ state
    scale = np.asarray(part.norm.scale, np.float64)
    y = y / np.sqrt((y**2).mean(-1, keepdims=True) + part.norm.epsilon) * scale
    return np.einsum(
        "shv,hve->se", y * silu(np.einsum("se,ehv->shv", x_SE, w["gate"])), w["output"]
    )


@pytest.mark.parametrize("negative", [False, True])
def test_packed_rows_equal_the_definition_of_each_document(negative):
    part, x_BSE = layer(negative=negative), inputs()
    positions_BS = np.tile(np.arange(13), (2, 1))  # only segments say where documents start
    got_BSE, _ = part(x_BSE, context(positions_BS, jnp.asarray(SEGMENTS_BS)))
    for row in range(2):
        for segment in np.unique(SEGMENTS_BS[row]):
            inside = SEGMENTS_BS[row] == segment
            of_document = expected(part, x_BSE[row, inside])
            np.testing.assert_allclose(got_BSE[row, inside], of_document, rtol=2e-5, atol=2e-5)


def test_a_cache_in_uneven_pieces_with_padding_equals_the_whole():
    part, x_BSE = layer(), inputs()
    whole_BSE, _ = part(x_BSE, context(np.tile(np.arange(13), (2, 1))))
    cache, start, pieces = part.empty_cache(2, 13, "float32"), 0, []
    for length in (1, 2, 6, 1, 3):
        positions_BS = np.tile(start + np.arange(length + 2), (2, 1))
        positions_BS[:, length:] = -1
        padded_BSE = jnp.pad(x_BSE[:, start : start + length], ((0, 0), (0, 2), (0, 0)))
        y_BSE, cache = part(
            padded_BSE + (positions_BS < 0)[..., None], context(positions_BS), cache
        )
        pieces.append(y_BSE[:, :length])
        start += length
    np.testing.assert_allclose(jnp.concatenate(pieces, axis=1), whole_BSE, rtol=2e-5, atol=2e-5)


def test_flops_are_those_of_weights_filters_and_state():
    """Per head: k reads the state, k vᵀ is added to it, and q reads it; twice more backward."""
    products = 12 * (2 * 2 * 4 + 2 * 6 * 5 + 2 * 6) + 6 * 5 * 12
    filters = 3 * (2 * 2 * 4 + 6 * 5)
    state = 3 * 6 * 4 * 5
    assert layer().flops_per_token(100, causal=True) == 6 * (products + filters + state)


def test_heads_that_keys_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="heads = 6 must be a multiple of kv_heads = 4"):
        layer(kv_heads=4)


MODEL = functools.partial(
    qwen3_next, vocab=64, embed=32, layers=4, heads=4, mlp=24, kv_heads=2, head_dim=8,
    expert_mlp=8, experts=8, top=2, shared_mlp=16, attention_layers=(1, 3), rotary_fraction=0.5,
    linear_heads=8, linear_kv_heads=2, linear_key_dim=5, linear_value_dim=6, key=jax.random.key(0),
)  # fmt: skip
source = Synthetic(vocab_size=64, batch_size=8, sequence_length=32)


weights = functools.cache(MODEL)


@functools.cache
def loss_and_gradients(sizes, order="zigzag", **compute):
    compute = Compute(dtype="float32", recurrent_chunk=4, **compute)

    def mean(model, batch):
        return batch_loss(model, batch, compute)[0].loss_sum / batch.loss_mask.sum()

    mesh = make_mesh(**dict(sizes))
    model = laid_out.laid_out(weights(), mesh)
    with jax.set_mesh(mesh), jax.default_matmul_precision("highest"):
        batch = place(source, 0, sharding("batch seq", mesh), order)
        return jax.device_get(jax.jit(jax.value_and_grad(mean))(model, batch))


def sizes(**axes):
    return tuple(axes.items())


CASES = [
    (sizes(fsdp=8), {}),
    (sizes(data=2, tensor=4), {"sequence_parallel": True}),
    (sizes(context=4, fsdp=2), {}),
    (sizes(context=2, tensor=2), {"order": "plain", "sequence_parallel": True}),
    (sizes(expert=4, tensor=2), {"dispatch": "exchange"}),
    (sizes(expert=2, context=2, fsdp=2), {"order": "plain"}),
    (sizes(stage=2, tensor=2), {}),
    (sizes(stage=2, fsdp=2, context=2), {}),
    (sizes(stage=2, expert=2), {"order": "plain"}),
]


@pytest.mark.several_devices
@pytest.mark.parametrize(
    ("mesh", "how"), sentinels(CASES, landing=(CASES[1], CASES[7]).__contains__)
)
def test_a_hybrid_on_a_mesh_equals_one_device(mesh, how):
    loss, gradients = loss_and_gradients(mesh, **how)
    expected_loss, expected = loss_and_gradients(())
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    laid_out.assert_near(gradients, expected, 2e-5)
