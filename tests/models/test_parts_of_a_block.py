"""Norms, mlps, rotary tables and the optional parts of attention and of a block, in float64.

Shapes: B batch, S sequence, E embed, H heads, K kv_heads, D head_dim.
"""

import functools
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sentinels import sentinels

from lmlib import Compute, make_mesh, single_document_context
from lmlib.models.block import Block
from lmlib.models.decoder import Decoder
from lmlib.models.matmul import matmul
from lmlib.models.part import NO_AUX
from lmlib.models.parts.attention import Attention
from lmlib.models.parts.layer_norm import LayerNorm
from lmlib.models.parts.mlp import GatedMLP, silu
from lmlib.models.parts.norms import RMSNorm
from lmlib.models.parts.rope import Rotary
from lmlib.models.parts.rope_scaling import LongRope, Yarn, document_lengths, long_rope_amplitude
from lmlib.models.parts.ungated_mlp import MLP, gelu, gelu_tanh, relu_squared

B, S, E, F, H, K, D = 2, 5, 8, 12, 4, 2, 6
key = jax.random.key(0)
x_BSE = jax.random.normal(jax.random.key(1), (B, S, E))
context = single_document_context(jnp.zeros((B, S), jnp.int32), Compute(dtype="float32"))


def moved(module):
    """Changes every array's initial values, so that none can be left out unnoticed."""
    leaves, structure = jax.tree.flatten(module)
    keys = jax.random.split(jax.random.key(2), len(leaves))
    return jax.tree.unflatten(
        structure,
        [x + 0.3 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)],
    )


def wide(tree):
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), tree)


def assert_close(found, expected):
    assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()


def rms(x, scale, axes=1, epsilon=1e-5, offset=0.0):
    last = tuple(range(-axes, 0))
    return x / np.sqrt((x**2).mean(last, keepdims=True) + epsilon) * (offset + scale)


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm(offset):
    norm = RMSNorm(epsilon=1e-3, offset=offset, embed=E, key=key)
    np.testing.assert_allclose(norm(x_BSE), rms(wide(x_BSE), 1.0, epsilon=1e-3), rtol=1e-5)
    norm = moved(norm)
    assert_close(norm(x_BSE), rms(wide(x_BSE), wide(norm.scale), epsilon=1e-3, offset=offset))


def test_a_small_scale_counts_beside_an_offset_in_bfloat16():
    norm = RMSNorm(offset=1.0, embed=E, key=key)
    small = eqx.tree_at(lambda norm: norm.scale, norm, jnp.full((E,), 3e-3, jnp.bfloat16))
    x_NE = jax.random.normal(key, (4_096, E), jnp.bfloat16)
    ratio = jnp.sum(wide(jnp.abs(small(x_NE)))) / jnp.sum(wide(jnp.abs(norm(x_NE))))
    assert ratio == pytest.approx(1.003, abs=5e-4)


@pytest.mark.parametrize("bias", [True, False])
def test_layer_norm(bias):
    norm = moved(LayerNorm(bias=bias, embed=E, key=key))
    assert (norm.bias is not None) == bias
    x = wide(x_BSE) + 3
    centred = x - x.mean(-1, keepdims=True)
    unit = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    expected = unit * wide(norm.scale) + (wide(norm.bias) if bias else 0)
    assert_close(norm(x_BSE + 3), expected)


ACTIVATIONS = {
    silu: lambda x: x / (1 + np.exp(-x)),
    gelu: lambda x: x * 0.5 * (1 + np.vectorize(math.erf)(x / 2**0.5)),
    gelu_tanh: lambda x: 0.5 * x * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3))),
    relu_squared: lambda x: np.maximum(x, 0) ** 2,
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_mlps(activation):
    definition, x = ACTIVATIONS[activation], wide(x_BSE)
    gated = moved(GatedMLP(E, F, activation, key=key))
    w = wide(gated)
    found, aux = gated(x_BSE, context)
    assert_close(found, (definition(x @ w.gate) * (x @ w.up)) @ w.down)
    assert aux == NO_AUX
    plain = moved(MLP(E, F, activation, key=key))
    w = wide(plain)
    expected = definition(x @ w.up + w.up_bias) @ w.down + w.down_bias
    assert_close(plain(x_BSE, context)[0], expected)
    unbiased = MLP(E, F, activation, bias=False, key=key)
    assert unbiased.up_bias is None is unbiased.down_bias
    w = wide(unbiased)
    assert_close(unbiased(x_BSE, context)[0], definition(x @ w.up) @ w.down)


def attention_reference(w, x, scale, cap, window, norm_axes, rotary):
    """Query, key and value with biases, then norms, then rotations, head by head."""
    q = np.einsum("bse,ehd->bshd", x, w.query) + w.query_bias
    k = np.einsum("bse,ekd->bskd", x, w.key) + w.key_bias
    v = np.einsum("bse,ekd->bskd", x, w.value) + w.value_bias
    q, k = rms(q, w.query_norm.scale, norm_axes), rms(k, w.key_norm.scale, norm_axes)
    if rotary is not None:
        pairs = np.arange(rotary.head_dim // 2)
        one, other = pairs, pairs + len(pairs)
        if rotary.interleaved:
            one, other = 2 * pairs, 2 * pairs + 1
        angles = np.arange(S)[:, None, None] * 10.0 ** (-2 * pairs / rotary.head_dim)

        def turn(y):
            z = (y[..., one] + 1j * y[..., other]) * np.exp(1j * angles)
            y = y.copy()
            y[..., one], y[..., other] = z.real, z.imag
            return y

        q, k = turn(q), turn(k)
    output = np.zeros((B, S, E))
    distance = np.arange(S)[:, None] - np.arange(S)
    seen = (distance >= 0) & (distance < window)
    for h in range(H):
        scores = q[:, :, h] @ k[:, :, h // (H // K)].swapaxes(-1, -2) * scale
        scores = np.where(seen, cap * np.tanh(scores / cap), -np.inf)
        mix = np.exp(scores)
        mix /= mix.sum(-1, keepdims=True) + np.exp(w.sinks[h])
        output += mix @ v[:, :, h // (H // K)] @ w.output[h]
    return output + w.output_bias


@pytest.mark.landing
@pytest.mark.parametrize(
    "rotary",
    [None, Rotary(D, 10.0), Rotary(D, 10.0, interleaved=True), Rotary(4, 10.0, interleaved=True)],
    ids=str,
)
@pytest.mark.parametrize("axes", sentinels(["head_dim", "heads head_dim"], "head_dim".__eq__))
def test_attention_with_every_option(axes, rotary):
    attention = moved(
        Attention(
            E, H, K, D, rotary, window=3, scale=0.7, soft_cap=1.5, bias=True, output_bias=True,
            sinks=True, norm=functools.partial(RMSNorm, axes),
            key_norm=functools.partial(RMSNorm, axes.replace("heads", "kv_heads")),
            key=key,
        )
    )  # fmt: skip
    given = context.sharing({} if rotary is None else {rotary: rotary(context)})
    found, cache = attention(x_BSE, given)
    assert cache is None
    count = len(axes.split())
    expected = attention_reference(wide(attention), wide(x_BSE), 0.7, 1.5, 3, count, rotary)
    assert_close(found, expected)


def test_block_outputs_are_multiplied():
    parts = Attention(E, H, K, D, key=key), GatedMLP(E, F, key=key)
    found, _, _ = Block(*parts, residual_multiplier=0.3)(x_BSE, context)
    middle = wide(x_BSE) + 0.3 * wide(parts[0](x_BSE, context)[0])
    added = wide(parts[1](jnp.asarray(middle, jnp.float32), context)[0])
    assert_close(found, middle + 0.3 * added)


def test_a_scale_of_logits_multiplies_them():
    tokens_BS = jnp.arange(B * S, dtype=jnp.int32).reshape(B, S)

    def made(**scales):
        return Decoder(B * S, E, [], norm=RMSNorm(embed=E, key=key), key=key, **scales)

    found = made(logits_scale=0.3)(tokens_BS, context)
    assert_close(found, 0.3 * wide(made()(tokens_BS, context)))


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
def test_the_gradient_of_a_weight_equals_that_of_einsum(equation, x_shape, w_shape):
    random = np.random.default_rng(0)
    x, w = random.normal(size=x_shape), random.normal(size=w_shape)
    dy = random.normal(size=np.einsum(equation, x, w).shape)
    x_axes, w_axes, y_axes = equation.replace("->", ",").split(",")
    expected = np.einsum(f"{x_axes},{y_axes}->{w_axes}", x, dy)

    _, back = jax.vjp(lambda w: matmul(equation, jnp.float32(x), w), jnp.float32(w))
    (found,) = back(jnp.float32(dy))

    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


SHORT, LONG = (1.0, 1.5, 2.0), (1.25, 4.0, 9.0)
SCALING = LongRope(SHORT, LONG, original=5, factor=4.0, amplitude=1.2)
ROTARY = Rotary(6, 100.0, SCALING)


def reference(positions, factors):
    """Computes the definition in float64."""
    frequency_D = 100.0 ** (-np.arange(0, 6, 2) / 6) / np.array(factors)
    angle_SD = np.asarray(positions)[:, None] * frequency_D
    return 1.2 * np.cos(angle_SD), 1.2 * np.sin(angle_SD)


def assert_rotations(rotations, row, positions, factors):
    for found, expected in zip(rotations, reference(positions, factors), strict=True):
        np.testing.assert_allclose(found[row, :, 0], expected, atol=1e-6)


def test_yarns_ramp_goes_from_one_whole_pair_to_another():
    """With 64 pairs, base 10,000 and 4,096 positions, pair 20.94 turns 32 times and pair 45.03
    once. Pairs up to 20 stay, and pairs from 46 on are divided."""
    rotary = Rotary(128, 10_000.0, Yarn(16.0, 10_000.0, 4_096))
    cos, sin = (
        table[0, 0, 0] for table in rotary.rotations(jnp.ones((1, 1), jnp.int32), "float32")
    )
    divided_D = np.clip((np.arange(64) - 20) / (46 - 20), 0, 1)
    expected_D = 10_000.0 ** (-np.arange(64) / 64) * (1 - divided_D + divided_D / 16)
    np.testing.assert_allclose(np.arctan2(sin, cos), expected_D, rtol=1e-5)


def test_a_document_is_turned_as_long_or_as_short_from_its_first_token_on():
    for length, factors in ((5, SHORT), (6, LONG)):
        positions_BS = jnp.arange(length, dtype=jnp.int32)[None]
        assert_rotations(ROTARY.rotations(positions_BS, "float32"), 0, range(length), factors)


@pytest.mark.parametrize(
    "mesh", [{}, pytest.param({"data": 2}, marks=pytest.mark.several_devices)], ids=str
)
def test_documents_of_a_row_are_turned_as_if_each_were_alone(mesh):
    lengths = [3, 7, 5, 6]
    row = np.concatenate([np.arange(length) for length in lengths]).astype(np.int32)
    rows = np.stack([row, np.arange(21, dtype=np.int32)])
    with jax.set_mesh(make_mesh(**mesh)):
        rotations = jax.jit(functools.partial(ROTARY.rotations, dtype="float32"))(rows)
        each = jax.jit(document_lengths)(rows)
    np.testing.assert_array_equal(each, [np.repeat(lengths, lengths), [21] * 21])
    ends = np.cumsum(lengths)
    for start, end in zip([0, *ends], ends, strict=False):
        alone = tuple(table[:, start:end] for table in rotations)
        assert_rotations(alone, 0, range(end - start), LONG if end - start > 5 else SHORT)


def test_the_length_of_a_partial_text_is_reported():
    positions_BS = jnp.broadcast_to(jnp.arange(3, 6, dtype=jnp.int32), (2, 3))
    rotations = ROTARY.rotations(positions_BS, "float32", jnp.array([5, 9], jnp.int32))
    assert_rotations(rotations, 0, [3, 4, 5], SHORT)
    assert_rotations(rotations, 1, [3, 4, 5], LONG)


def test_the_amplitude_equals_the_published_code():
    assert long_rope_amplitude(32.0, 4_096) == pytest.approx(1.1902380714238083)
    assert long_rope_amplitude(1.0, 4_096) == 1.0


def test_factors_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="LongRope has factors for 3 pairs, but 4 pairs"):
        Rotary(8, scaling=SCALING)
    with pytest.raises(ValueError, match="a factor for each pair, got 1 and 2"):
        LongRope((1.0,), (1.0, 2.0), 8)
    with pytest.raises(ValueError, match="short and long must be positive"):
        LongRope((0.0,), (1.0,), 8)
