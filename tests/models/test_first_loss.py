"""Before any training every token is about as likely as every other, in every family."""

import functools
import math

import jax
import jax.numpy as jnp
import pytest

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
from lmlib.models.families.llama import llama
from lmlib.models.families.mistral import mistral
from lmlib.models.families.olmo import olmo2
from lmlib.models.families.phi import phi3
from lmlib.models.families.qwen import qwen2, qwen3
from lmlib.models.families.smollm import smollm3
from lmlib.models.families.speedrun import speedrun
from lmlib.models.families.starcoder import starcoder2

DEEPSEEK = functools.partial(
    deepseek_v3, expert_mlp=32, experts=8, top=2, dense_layers=1, groups=1, top_groups=1,
    head_dim=12, rotary_dim=4, value_dim=8, latent=24, query_latent=32,
)  # fmt: skip
FAMILIES = (
    *(llama, mistral, qwen2, qwen3, phi3, gemma2, gemma3, olmo2),
    *(gpt2, starcoder2, smollm3, granite, gpt_neox, speedrun),
    *(mixtral, qwen3_moe, olmoe, DEEPSEEK, gpt_oss),
)
VOCAB = 512


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def first_loss(family, tied, embed, dtype):
    """The mean over tokens, each followed by itself or by another: what the table of a tied model
    makes of the token that it reads is a part of it."""
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
