"""Mamba-2 against its definition, token by token in float64, and on meshes against one device."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from laid_out import assert_near, drawn, loss_and_gradients
from sentinels import sentinels

from lmlib import Compute
from lmlib.data.synthetic import Synthetic
from lmlib.models.families.hybrid.granite_hybrid import granite_hybrid
from lmlib.models.forward_context import ForwardContext
from lmlib.models.recurrent.mamba2 import Mamba2

SIZES = {"embed": 12, "heads": 6, "kv_heads": 2, "key_dim": 4, "value_dim": 5, "width": 3}
SEGMENTS_BS = np.array([[1] * 5 + [2] + [3] * 7, [1] * 11 + [2] * 2])
ALL_BIASES, NO_BIASES = {"bias": True}, {"filter_bias": False}


def layer(**settings):
    return drawn(Mamba2(**SIZES | settings, key=jax.random.key(1)))


def context(positions_BS, segments_BS=None):
    return ForwardContext(jnp.asarray(positions_BS), segments_BS, Compute())


def inputs(rows=2, length=13):
    x_BSE = np.random.default_rng(0).normal(size=(rows, length, SIZES["embed"]))
    return jnp.asarray(x_BSE, jnp.float32)


def silu(x):
    return x / (1 + np.exp(-x))


def expected(part, x_SE):
    """One document, by arXiv:2405.21060, eq. 1 and §7.1."""
    weights = {name: each for name, each in vars(part).items() if hasattr(each, "shape")}
    w = {name: np.asarray(each, np.float64) for name, each in weights.items()}
    x_SE = np.asarray(x_SE, np.float64)

    def projected(name, bias=None):
        y, bias = np.einsum("se,e...->s...", x_SE, w[name]), w.get(bias or f"{name}_bias")
        return y if bias is None else y + bias

    def convolved(name):
        x, taps, bias = projected(name), w[f"{name}_filter"], w.get(f"{name}_filter_bias")
        before = np.concatenate([np.zeros((part.width - 1, *x.shape[1:])), x])
        y = sum(before[j : j + len(x)] * taps[..., j] for j in range(part.width))
        return silu(y if bias is None else y + bias)

    x, B, C = (convolved(name) for name in ("input", "key", "query"))
    dt = np.log1p(np.exp(projected("time", "time_projection_bias") + w["time_bias"]))
    dt = dt if part.time_limits is None else np.clip(dt, *part.time_limits)
    S, H, V = x.shape
    y, per = np.zeros((S, H, V)), H // part.kv_heads
    for h in range(H):
        state = np.zeros((B.shape[-1], V))
        for t in range(S):
            decay = np.exp(-np.exp(w["log_rate"][h]) * dt[t, h])
            state = decay * state + dt[t, h] * np.outer(B[t, h // per], x[t, h])
            y[t, h] = C[t, h // per] @ state + w["skip"][h] * x[t, h]
    y = (y * silu(projected("gate"))).reshape(S, part.kv_heads, per * V)
    y = y / np.sqrt((y**2).mean(-1, keepdims=True) + part.epsilon)
    y = np.einsum("shv,hve->se", y.reshape(S, H, V) * w["norm_scale"], w["output"])
    return y + w.get("output_bias", 0)


@pytest.mark.parametrize("settings", [ALL_BIASES, {**NO_BIASES, "time_limits": (0.6, 0.8)}])
def test_packed_rows_equal_the_definition_of_each_document(settings):
    part, x_BSE = layer(**settings), inputs()
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
    """Per head: B xᵀ is added to the state, and C reads it; twice more backward."""
    products = 12 * (2 * 2 * 4 + 2 * 6 * 5 + 6) + 6 * 5 * 12
    filters = 3 * (2 * 2 * 4 + 6 * 5)
    state = 2 * 6 * 4 * 5
    assert layer().flops_per_token(100, causal=True) == 6 * (products + filters + state)


def test_initial_time_steps_and_rates_are_those_of_the_paper():
    part = Mamba2(**SIZES | {"heads": 2_000}, key=jax.random.key(0))
    steps, rates = np.log1p(np.exp(part.time_bias)), np.exp(part.log_rate)
    assert steps.min() >= 0.99e-3 and steps.max() <= 0.101
    assert np.log(steps).mean() == pytest.approx(math.log(1e-2), abs=0.1)
    assert rates.min() >= 0.999 and rates.max() <= 16.001
    assert rates.mean() == pytest.approx(8.5, abs=0.3)
    np.testing.assert_array_equal(part.skip, 1)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"kv_heads": 4}, "heads = 6 must be a multiple of kv_heads = 4"),
        ({"time_limits": (2.0, 1.0)}, r"time_limits must be two rising .* got \(2.0, 1.0\)"),
    ],
)
def test_wrong_settings_are_refused(settings, told):
    with pytest.raises(ValueError, match=told):
        layer(**settings)


SOURCE = Synthetic(vocab_size=64, batch_size=8, sequence_length=24)


@functools.cache
def on(sizes, groups, experts, order="zigzag", **compute):
    make = functools.partial(
        granite_hybrid, vocab=64, embed=16, layers=4, heads=4, kv_heads=2, mlp=24,
        attention_layers=(1, 3), mamba_heads=8, mamba_head_dim=6, mamba_groups=groups,
        mamba_state=5, width=3, projection_bias=True, rotary=True, experts=experts,
        expert_mlp=8, tied=False, key=jax.random.key(0),
    )  # fmt: skip
    model = drawn(jax.eval_shape(make))
    compute = Compute(dtype="float32", **compute)
    return loss_and_gradients(model, dict(sizes), compute, SOURCE, order)


CASES = [
    ({"fsdp": 8}, 2, 0, {}),
    ({"data": 2, "tensor": 4}, 1, 0, {}),
    ({"fsdp": 2, "tensor": 4}, 2, 0, {"sequence_parallel": True}),
    ({"context": 4}, 2, 0, {"order": "plain"}),
    ({"context": 4, "fsdp": 2}, 2, 0, {}),
    ({"context": 2, "tensor": 4}, 1, 0, {"sequence_parallel": True}),
    ({"stage": 2, "fsdp": 2}, 2, 0, {}),
    ({"stage": 2, "context": 2, "tensor": 2}, 1, 0, {}),
    ({"expert": 4, "tensor": 2}, 2, 4, {}),
    ({"expert": 2, "context": 2, "fsdp": 2}, 2, 4, {}),
    ({"stage": 2, "expert": 2, "tensor": 2}, 1, 4, {}),
]


@pytest.mark.several_devices
@pytest.mark.parametrize(
    ("sizes", "groups", "experts", "how"),
    sentinels(CASES, CASES[5].__eq__, landing=CASES[-1].__eq__),
)
def test_loss_and_gradients_on_meshes_equal_those_of_one_device(sizes, groups, experts, how):
    loss, gradients = on(tuple(sizes.items()), groups, experts, **how)
    expected_loss, expected_gradients = on((), groups, experts)
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert_near(gradients, expected_gradients, 2e-5)
    assert all(np.abs(each).max() > 0 for each in jax.tree.leaves(gradients))
