"""Speculative decoding: the tokens of ordinary decoding, from a draft's guesses."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from user_model import Learned

from lmlib import Compute, make_mesh, single_document_context
from lmlib.adapters.lora import lora
from lmlib.generate import GREEDY, Generator, Sampling, speculative
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
MODELS["adapters"] = functools.partial(lora, MODELS["heads"], rank=2)


REFUSED = [  # model, draft, settings, message
    ("full", None, {}, "Decoder has no multi-token heads: give a draft"),
    ("full", functools.partial(llama, **SIZES | {"vocab": 41}), {}, "41 tokens and the model 40"),
    ("full", functools.partial(Learned, V, 16, 1, 2, 9), {}, "the draft: .* 9 positions"),
    ("full", MODELS["full"], {"draft_tokens": 64}, r"draft_tokens must be in \[1, 64\), got 64"),
    ("long", MODELS["full"], {}, "rotary frequencies change after 16 tokens"),
]
SCALING = LongRope((1.0, 1.5), (4.0, 9.0), original=16, amplitude=1.2)


@functools.cache
def pair(kind):
    """A model, and a draft that guesses about half of its tokens."""
    model, other = (MODELS[kind](key=jax.random.key(seed)) for seed in (0, 1))
    model = jax.tree.map(lambda x: x + 0.1 * (x == 0), model)  # adapters begin at zero
    return model, jax.tree.map(lambda x, y: x + 0.2 * y, model, other)


def drafted(kind, guesses=3, **settings):
    model, draft = pair(kind)
    draft = None if kind in ("heads", "adapters") else draft
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


@jax.jit
def whole(model, tokens_BS, before_BSE=None):
    """Features and likeliest tokens, without a cache; with features before, of the first head."""
    context = single_document_context(tokens_BS, FLOAT32)
    if before_BSE is None:
        h_BSE = model.features(model.trunk(tokens_BS, context).x_BSE, context)
    else:
        h_BSE = model.ahead(1, before_BSE, tokens_BS, context).x_BSE
    return h_BSE, jnp.argmax(model.logits(h_BSE, FLOAT32)[0], axis=-1)


def guesses(kind, text, count):
    """The draft's greedy continuation, by whole passes."""
    model, draft = pair(kind)

    def read(model, tokens, *before):
        return whole(model, jnp.asarray([[*tokens, *[0] * (LENGTH - len(tokens))]]), *before)

    made = []
    h_BSE, _ = read(model, text)
    for n in range(len(text) - 1, len(text) - 1 + count):
        if kind == "heads":
            of_head, next_S = read(model, [*text, *made][1:], h_BSE)
            h_BSE = h_BSE.at[:, n].set(of_head[:, n - 1])
            made.append(int(next_S[n - 1]))
        else:
            _, next_S = read(draft, [*text, *made])
            made.append(int(next_S[n]))
    return made


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["windows", "recurrent", "heads"])
def test_the_guesses_are_those_of_the_draft_without_a_cache(kind):
    prompt, most, K = PROMPTS[0], 20, 3
    ((row,),) = drafted(kind, K)([prompt], most, GREEDY)
    n, drafts, accepted = 1, 0, 0
    while n < most:
        guessed = guesses(kind, [*prompt, *row.tokens[:n]], K)
        pairs = zip(guessed, row.tokens[n:], strict=False)
        right = sum(1 for _ in itertools.takewhile(lambda each: each[0] == each[1], pairs))
        drafts += K if n + right < most else right
        accepted, n = accepted + right, n + right + 1
    assert (row.drafted, row.accepted) == (drafts, accepted)


@pytest.mark.slow
def test_samples_have_the_distribution_of_the_model():
    """Chi-squared of 20,000 texts of three tokens against exact probabilities of all 125."""
    draws, temperature = 20_000, 0.7
    model, draft = (
        llama(5, 8, 1, 2, 16, key=jax.random.key(seed)) for seed in (0, 1)
    )  # other weights
    generator = SpeculativeGenerator(model, draft, 2, compute=FLOAT32, rows=draws, length=8)
    ((*rows,),) = generator([[1]], 3, Sampling(temperature), samples=draws, seed=5)
    assert 0.2 < sum(row.accepted for row in rows) / sum(row.drafted for row in rows) < 0.8
    texts = np.array([*itertools.product([1], *[range(5)] * 3)])
    logits_BSV = np.asarray(model(jnp.asarray(texts)), np.float64) / temperature
    p_BSV = np.exp(logits_BSV) / np.exp(logits_BSV).sum(-1, keepdims=True)
    expected = draws * np.prod([p_BSV[range(125), i, texts[:, i + 1]] for i in range(3)], axis=0)
    places = np.array([row.tokens for row in rows]) @ [25, 5, 1]
    found = np.bincount(places, minlength=125)
    enough = expected >= 5
    pairs = [(found[enough], expected[enough]), (found[~enough].sum(), expected[~enough].sum())]
    statistic = sum(np.sum((f - e) ** 2 / np.maximum(e, 1)) for f, e in pairs)
    assert scipy.stats.chi2.sf(statistic, enough.sum()) > 0.01


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["recurrent", "heads"])
@pytest.mark.parametrize("mesh", [{"tensor": 2, "fsdp": 2}, {"data": 2, "context": 2}], ids=str)
def test_the_tokens_are_the_same_on_every_mesh(kind, mesh):
    mesh = make_mesh(**mesh)
    make = functools.partial(MODELS[kind], key=jax.random.key(0))
    laid = shardings(abstract_model(make, mesh))
    model, draft = (jax.device_put(each, laid) for each in pair(kind))
    draft = None if kind == "heads" else draft
    settings = dict(rows=8, length=LENGTH, whole=False)
    generator = SpeculativeGenerator(model, draft, 3, mesh, FLOAT32, **settings)
    found = generator(PROMPTS, 12, DRAWN, samples=2)
    assert_same(found, ordinary(kind)(PROMPTS, 12, DRAWN, samples=2))


@pytest.mark.slow
def test_matrices_in_8_bits_give_the_same_as_without_a_draft():
    found = drafted("full", int8=True)(PROMPTS, 12, DRAWN)
    assert_same(found, ordinary("full", int8=True)(PROMPTS, 12, DRAWN))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["windows", "heads"])
def test_rows_in_bfloat16_part_only_where_two_tokens_are_about_as_likely(kind):
    settings = dict(compute=Compute(dtype="bfloat16"))
    found = drafted(kind, **settings)(PROMPTS, 30, GREEDY)
    expected = ordinary(kind, **settings)(PROMPTS, 30, GREEDY)
    for (row,), (other,) in zip(found, expected, strict=True):
        same = [mine == its for mine, its in zip(row.tokens, other.tokens, strict=True)]
        until = [*same, False].index(False) + 1  # the first other token counts too
        np.testing.assert_allclose(row.logprobs[:until], other.logprobs[:until], atol=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "K"), [("windows", 7), ("recurrent", 3)])
def test_rows_end_at_each_of_the_guesses(kind, K):
    """The draft is the model, so all guesses are right."""
    model, prompt, settings = pair(kind)[0], PROMPTS[0], dict(seed=2)
    sizes = dict(compute=FLOAT32, rows=1, length=LENGTH, chunk=16)
    generator = SpeculativeGenerator(model, model, K, **sizes)
    ((whole,),) = ordinary(kind)([prompt], 12, DRAWN, **settings)
    for n in range(1, 12):
        ((row,),) = generator([prompt], n, DRAWN, **settings)
        calls, rest = divmod(n - 1, K + 1)
        assert (row.tokens, row.stopped) == (whole.tokens[:n], False)
        assert row.drafted == row.accepted == calls * K + rest
        stop = whole.tokens[n - 1]
        ((row,),) = generator([prompt], 12, DRAWN, stop_ids=[stop], **settings)
        assert (row.tokens, row.stopped) == (whole.tokens[: whole.tokens.index(stop) + 1], True)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "rows"), [("full", 1), ("windows", 4), ("heads", 4)])
def test_a_call_copies_no_cache(kind, rows, monkeypatch):
    programs, step = [], speculative._next_tokens

    def spied(weights, draft, state, *rest):
        program = step.lower(weights, draft, state, *rest).compile()
        arrays = [x.nbytes for x in jax.tree.leaves(state)]
        programs.append((program.memory_analysis(), arrays))
        return program(weights, draft, state, *rest[:-1])

    monkeypatch.setattr(speculative, "_next_tokens", spied)
    stream = drafted(kind, 1, rows=rows, length=4_096).stream(PROMPTS[:rows], 3, GREEDY)
    next(stream), next(stream)
    ((memory, arrays),) = programs
    assert memory.temp_size_in_bytes < max(arrays)
    assert memory.alias_size_in_bytes >= sum(arrays)


@pytest.mark.landing
def test_a_stream_stops_on_request_and_at_the_last_token():
    expected = ordinary("windows")(PROMPTS, 20, DRAWN)
    stream = drafted("windows").stream(PROMPTS, 20, DRAWN, round=4)
    for number, _ in enumerate(stream):
        if number == 1:
            stream.stop(1)
    for row, (found, (whole,)) in enumerate(zip(stream.so_far, expected, strict=True)):
        assert found.tokens == whole.tokens[: len(found.tokens)]
        assert (len(found.tokens) < 20) == found.stopped == (row == 1)


@pytest.mark.parametrize(("kind", "draft", "settings", "message"), REFUSED)
def test_drafts_that_do_not_fit_are_refused(kind, draft, settings, message):
    key = jax.random.key(0)
    model = (
        phi3(**SIZES | {"heads": 4}, rope_scaling=SCALING, key=key)
        if kind == "long"
        else pair(kind)[0]
    )
    draft = draft and draft(key=key)
    with pytest.raises(ValueError, match=message):
        SpeculativeGenerator(model, draft, **{"compute": FLOAT32, "length": LENGTH} | settings)
