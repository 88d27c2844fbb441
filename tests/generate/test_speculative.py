"""Speculative decoding: the tokens of ordinary decoding, from a draft's guesses."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from user_model import Learned

from lmlib import Compute, make_mesh, single_document_context
from lmlib.generate import GREEDY, Generator, Sampling
from lmlib.generate.speculative import SpeculativeGenerator
from lmlib.models.families.gemma import gemma2
from lmlib.models.families.llama import llama
from lmlib.models.families.phi import phi3
from lmlib.models.families.transformer import transformer
from lmlib.models.multi_token import multi_token
from lmlib.models.parts.attention import Attention
from lmlib.models.parts.latent_attention import LatentAttention
from lmlib.models.parts.rope import Rotary
from lmlib.models.parts.rope_scaling import LongRope
from lmlib.models.recurrent.gated_deltanet import GatedDeltaNet
from lmlib.parallel.layout import shardings
from lmlib.state import abstract_model

V, LENGTH = 40, 64
FLOAT32 = Compute(dtype="float32")
DRAWN = Sampling(temperature=0.9, top_k=30, top_p=0.95, min_p=0.01, repetition_penalty=1.2)
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [5], list(range(30)), [7, 7, 7]]
SIZES = dict(vocab=V, embed=16, layers=2, heads=2, mlp=24)


def delta_net(embed, heads, kv_heads, head_dim, *, rotary, window, residual_scale, key):
    return GatedDeltaNet(embed, 4, 2, 4, 6, residual_scale=residual_scale, key=key)


def latent(embed, heads, kv_heads, head_dim, *, rotary, window, residual_scale, key):
    return LatentAttention(embed, heads, 6, 4, 5, 8, None, Rotary(4), key=key)


MODELS = {
    "full": functools.partial(llama, **SIZES),
    "windows": functools.partial(gemma2, **SIZES, kv_heads=2, head_dim=8, window=6),
    "latent": functools.partial(transformer, **SIZES, attention=latent),
    "recurrent": functools.partial(transformer, **SIZES, attention=(delta_net, Attention)),
    "no cache": functools.partial(Learned, V, 16, 1, 2, LENGTH),
}
MODELS["heads"] = functools.partial(multi_token, of=MODELS["recurrent"])


@functools.cache
def pair(kind):
    """A model, and a draft that guesses about half of its tokens."""
    model, other = (MODELS[kind](key=jax.random.key(seed)) for seed in (0, 1))
    return model, jax.tree.map(lambda x, y: x + 0.2 * y, model, other)


def drafted(kind, guesses=3, **settings):
    model, draft = pair(kind)
    draft = None if kind == "heads" else draft
    settings = {"compute": FLOAT32, "rows": 8, "length": LENGTH, "chunk": 16} | settings
    return SpeculativeGenerator(model, draft, guesses, **settings)


def ordinary(kind, **settings):
    settings = {"compute": FLOAT32, "rows": 8, "length": LENGTH, "chunk": 16} | settings
    return Generator(pair(kind)[0], **settings)


def assert_same(found, expected):
    rows = zip(itertools.chain(*found), itertools.chain(*expected), strict=True)
    for row, other in rows:
        assert (row.tokens, row.stopped) == (other.tokens, other.stopped)
        np.testing.assert_allclose(row.logprobs, other.logprobs, atol=1e-5)
        assert other.drafted == other.accepted == 0 <= row.accepted <= row.drafted


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("kind", MODELS)
def test_the_tokens_are_those_of_ordinary_decoding(kind, sampling):
    """Also past windows, at the end of the length, and for rows that end before others."""
    settings = dict(samples=2, seed=3, stop_ids=[11])
    found = drafted(kind)(PROMPTS, LENGTH - 30, sampling, **settings)
    assert_same(found, ordinary(kind)(PROMPTS, LENGTH - 30, sampling, **settings))
    rows = [*itertools.chain(*found)]
    assert 0 < sum(row.accepted for row in rows) < sum(row.drafted for row in rows)
