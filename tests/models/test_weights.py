"""Initial values: their distribution and bits, and the first loss of each family."""

import functools
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float
from linear import Linear
from sentinels import sentinels

from lmlib import Compute, single_document_context
from lmlib.models.families.experts.deepseek import deepseek_v3
from lmlib.models.families.experts.gpt_oss import gpt_oss
from lmlib.models.families.experts.mixtral import mixtral
from lmlib.models.families.experts.olmoe import olmoe
from lmlib.models.families.experts.qwen3_moe import qwen3_moe
from lmlib.models.families.gemma import gemma2, gemma3
from lmlib.models.families.gpt2 import gpt2
from lmlib.models.families.gpt_neox import gpt_neox
from lmlib.models.families.granite import granite
from lmlib.models.families.hybrid.llama_hybrid import llama_hybrid
from lmlib.models.families.hybrid.olmo_hybrid import olmo_hybrid
from lmlib.models.families.hybrid.qwen3_next import qwen3_next
from lmlib.models.families.llama import llama
from lmlib.models.families.mistral import mistral
from lmlib.models.families.olmo import olmo2
from lmlib.models.families.phi import phi3
from lmlib.models.families.qwen import qwen2, qwen3
from lmlib.models.families.smollm import smollm3
from lmlib.models.families.speedrun import speedrun
from lmlib.models.families.starcoder import starcoder2
from lmlib.models.parts.attention import Attention
from lmlib.models.parts.norms import RMSNorm
from lmlib.models.weights import approx_normal, fan_in, initial_values, normal, ones, weight, zeros
from lmlib.parallel.axes import axis_names, map_weights


def test_values_are_bell_shaped_with_the_deviation_asked_for():
    values = np.asarray(approx_normal(jax.random.key(0), (1_000_000,), 0.5), np.float64) / 0.5
    assert abs(values.mean()) < 0.005
    assert values.std() == pytest.approx(1.0, abs=0.005)
    assert np.abs(values).max() <= np.sqrt(12)
    # A sum of four uniforms has an excess kurtosis of -6 / (5 · 4) and a skew of 0.
    assert np.mean(values**4) == pytest.approx(3 - 0.3, abs=0.02)
    assert abs(np.mean(values**3)) < 0.01
    shares = np.mean(np.abs(values)[:, None] < [1.0, 2.0], axis=0)
    np.testing.assert_allclose(shares, [0.6694, 0.9575], atol=0.003)  # normal: 0.683, 0.954


def test_products_have_the_bits_of_exact_integers():
    """A change here changes the initial weights of every experiment."""
    key, shape = jax.random.key(7), (5, 3)
    words = np.array([jax.random.bits(half, shape, jnp.uint32) for half in jax.random.split(key)])
    sums = (words.astype(object) % 2**16 + words.astype(object) // 2**16).sum(axis=0)
    exact = (2 * sums - 4 * (2**16 - 1)).astype(np.float32)
    expected = exact * np.float32(0.25 / np.sqrt(16 * (2**32 - 1) / 12))
    np.testing.assert_array_equal(approx_normal(key, shape, 0.25), expected)


@pytest.mark.parametrize("tied", sentinels([False, True], bool))
def test_initial_values_of_llama(tied):
    """Matrices are scaled by fan-in, and the two outputs of each of 3 layers also by 1 / √6."""
    sizes = {"vocab": 1_000, "embed": 64, "heads": 8, "head_dim": 16, "mlp": 256}
    make = functools.partial(llama, layers=3, tied=tied, key=jax.random.key(0), **sizes)
    model = jax.jit(make)()
    ((block,),) = model.stack.patterns
    expected = {
        64**-0.5: [block.attention.query, block.attention.key, block.mlp.gate, block.mlp.up],
        (128 * 6) ** -0.5: [block.attention.output],
        (256 * 6) ** -0.5: [block.mlp.down],
        0.5 if tied else 1.0: [model.embedding],
    }
    for deviation, weights in expected.items():
        for found in weights:
            assert float(jnp.std(found)) == pytest.approx(deviation, rel=0.03)
    np.testing.assert_array_equal(block.mlp_norm.scale, np.ones((3, 64)))
    # Logits of features of variance one are small, so that the first loss is ln(vocab).
    logits_EV = model.norm.scale[:, None] * model.unembedding_EV()
    deviation = 64**-0.5 if tied else 0.35
    assert float(jnp.std(logits_EV)) * 64**0.5 == pytest.approx(deviation, rel=0.03)
    assert float(jnp.std(model.norm.scale)) == 0


class Experts(eqx.Module):
    """Weights of a mixture of experts."""

    up: Float[Array, "experts embed mlp"] = weight(fan_in("embed"), rules={"experts": None})
    down: Float[Array, "experts mlp embed"] = weight(fan_in("mlp"), rules={"experts": None})
    bias: Float[Array, "experts mlp"] = weight(zeros, rules={"experts": None})
    gain: Float[Array, "embed"] = weight(normal(0.1), decays=False)


def test_experts_do_not_count_into_the_fan_in():
    sizes = {"experts": 8, "embed": 64, "mlp": 256}
    down = initial_values(Experts, "down", jax.random.key(0), **sizes)
    assert down.shape == (8, 256, 64)
    assert float(down.std()) == pytest.approx(256**-0.5, rel=0.01)


def declarations(module):
    found = {}
    map_weights(lambda weight, array: found.update({weight.path: weight.declaration}), module)
    return found


def test_decay_and_multiplication_of_every_kind_of_weight():
    make = functools.partial(
        initial_values, Experts, key=jax.random.key(0), experts=2, embed=4, mlp=6
    )
    experts = Experts(*(make(field=field) for field in ("up", "down", "bias", "gain")))
    attention = Attention(
        8, 2, 2, 4, bias=True, output_bias=True, key=jax.random.key(0),
        norm=functools.partial(RMSNorm, "heads head_dim"),
    )  # fmt: skip
    linear = Linear("embed", "heads head_dim", True, key=jax.random.key(0), **SIZES)
    gemma = RMSNorm(offset=1.0, embed=8, key=jax.random.key(0))
    matrices = {
        *("up", "down"),
        *("attention.query", "attention.key", "attention.value", "attention.output"),
        "linear.matrix",
    }
    found = declarations(experts)
    for name, module in {"attention": attention, "linear": linear, "gemma": gemma}.items():
        found |= {f"{name}.{path}": how for path, how in declarations(module).items()}
    assert {path for path, how in found.items() if how.multiplied} == matrices
    assert {path for path, how in found.items() if how.decays} == matrices
    # Biases and scales of two axes, a scale that starts at zero, random values that say so.
    assert found["bias"].initial == found["attention.query_bias"].initial == zeros
    assert found["attention.query_norm.scale"].initial == ones
    assert found["gemma.scale"].initial == zeros
    assert found["gain"].initial == normal(0.1)
    tables = declarations(jax.eval_shape(lambda: llama_of_one_layer()))
    assert tables["embedding"].decays and not tables["embedding"].multiplied


SIZES = {"embed": 8, "heads": 2, "head_dim": 4}


def llama_of_one_layer():
    return llama(vocab=16, embed=8, layers=1, heads=2, mlp=8, key=jax.random.key(0))


def test_an_instance_names_its_own_axes():
    linear = Linear("heads head_dim", "embed", key=jax.random.key(0), **SIZES)
    assert axis_names(linear, "matrix") == ("heads", "head_dim", "embed")
    assert float(linear.matrix.std()) == pytest.approx(8**-0.5, rel=0.2)
    x_BSHD = jax.random.normal(jax.random.key(1), (3, 5, 2, 4))
    expected = np.asarray(x_BSHD, np.float64).reshape(3, 5, 8) @ np.asarray(
        linear.matrix, np.float64
    ).reshape(8, 8)
    np.testing.assert_allclose(linear(x_BSHD), expected, rtol=1e-5, atol=1e-6)


DEEPSEEK = functools.partial(
    deepseek_v3, expert_mlp=32, experts=8, top=2, dense_layers=1, groups=1, top_groups=1,
    head_dim=12, rotary_dim=4, value_dim=8, latent=24, query_latent=32,
)  # fmt: skip
QWEN3_NEXT = functools.partial(
    qwen3_next, kv_heads=2, head_dim=16, expert_mlp=32, experts=8, top=2, shared_mlp=32,
    attention_layers=(1,), linear_heads=4, linear_kv_heads=2, linear_key_dim=16,
    linear_value_dim=16,
)  # fmt: skip
FAMILIES = (
    *(llama, mistral, qwen2, qwen3, phi3, gemma2, gemma3, olmo2),
    *(gpt2, starcoder2, smollm3, granite, gpt_neox, speedrun),
    *(mixtral, qwen3_moe, olmoe, DEEPSEEK, gpt_oss, QWEN3_NEXT, olmo_hybrid, llama_hybrid),
)
VOCAB = 512


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def first_loss(family, tied, embed, dtype):
    """Returns the mean loss over tokens.

    A token may follow itself, so the loss includes a tied table's logit of the token just read.
    """
    model = family(VOCAB, embed, 2, 4, mlp=2 * embed, tied=tied, key=jax.random.key(0))
    tokens_BS = jax.random.randint(jax.random.key(1), (8, 64), 0, VOCAB, jnp.int32)
    log_probabilities = jax.nn.log_softmax(
        model(tokens_BS, single_document_context(tokens_BS, Compute(dtype)))
    )
    own = -jnp.mean(jnp.take_along_axis(log_probabilities, tokens_BS[..., None], axis=-1))
    next_one = jnp.roll(tokens_BS, -1, axis=1)[..., None]
    return own, -jnp.mean(jnp.take_along_axis(log_probabilities, next_one, axis=-1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "tied", "embed"),
    [(family, tied, 64) for family in FAMILIES for tied in (False, True)]
    + [(llama, True, 1_024), (gemma2, True, 1_024), (gpt2, True, 1_024)],
)
def test_the_first_loss_is_the_logarithm_of_the_vocabulary(family, tied, embed):
    _, found = first_loss(family, tied, embed, "float32")
    assert float(found) == pytest.approx(math.log(VOCAB), abs=0.1)


@pytest.mark.slow
def test_a_tied_model_does_not_begin_with_the_token_that_it_reads():
    own, other = first_loss(llama, True, 1_024, "bfloat16")
    assert float(own) == pytest.approx(float(other), abs=1)
