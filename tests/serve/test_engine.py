"""Answers have the model's tokens and log-probabilities, and their settings act."""

import collections
import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from served import (
    FLOAT32,
    LENGTH,
    SLOTS,
    SYSTEM,
    Asked,
    V,
    answer_of,
    answers,
    engine_of,
    hybrid,
    made,
    mixture,
    small_llama,
    windowed,
)
from user_model import Learned

from lmlib import Compute
from lmlib.adapters.lora import merged, with_adapters
from lmlib.generate import GREEDY, Generator, Sampling, generate
from lmlib.generate.sampling import allowed, numbers_of, rules_of
from lmlib.models.families.phi import phi3
from lmlib.models.matrices.int8 import in_int8
from lmlib.models.parts.rope_scaling import LongRope
from lmlib.parallel.axes import map_weights
from lmlib.parallel.matrix import dense, is_matrix
from lmlib.serve import Engine, Request

PROMPTS = [(5,), (3, 1, 4, 1, 5, 9, 2, 6), SYSTEM[:128], SYSTEM[:129], SYSTEM]


def ids(tokens):
    return [each.id for each in tokens]


def greedy(prompt, count=12, **others):
    return Request(tuple(prompt), count, GREEDY, 0, **others)


def assert_greedy(engine, model, prompts=PROMPTS, count=12, **others):
    """Checks that answers computed at once equal `lmlib.generate`'s."""
    asked = [Asked(greedy(prompt, count, **others)) for prompt in prompts]
    generator = Generator(model, compute=FLOAT32, rows=1, length=engine.length)
    for prompt, heard in zip(prompts, answers(engine, asked), strict=True):
        ((expected,),) = generator([prompt], count, GREEDY)
        assert ids(heard.tokens) == expected.tokens and heard.ended == ["length"]
        logprobs = [each.logprob for each in heard.tokens]
        np.testing.assert_allclose(logprobs, expected.logprobs, atol=2e-5)


def test_greedy_answers_have_the_tokens_of_generate():
    assert_greedy(engine_of(small_llama), made(small_llama))


@pytest.mark.slow
@pytest.mark.parametrize("make", [windowed, mixture, hybrid])
def test_greedy_answers_of_other_models_have_the_tokens_of_generate(make):
    assert_greedy(engine_of(make), made(make))


@pytest.mark.slow
def test_a_model_without_a_cache_is_served():
    model = Learned(V, 16, 2, 2, LENGTH, key=jax.random.key(0))

    class Uncached(Learned):
        def empty_cache(self, rows, length, dtype):
            return None

    uncached = Uncached(V, 16, 2, 2, LENGTH, key=jax.random.key(0))
    assert_greedy(Engine(uncached, None, FLOAT32, slots=2, length=40), model, PROMPTS[:2])


@pytest.mark.landing
def test_samples_are_those_of_generate():
    sampling = Sampling(temperature=0.9, top_k=30, top_p=0.95, min_p=0.01, repetition_penalty=1.2)
    engine = engine_of(small_llama)
    ((first, second),) = generate(
        made(small_llama), [PROMPTS[1]], 30, sampling, samples=2, seed=3, compute=FLOAT32
    )
    requests = [Request(PROMPTS[1], 30, sampling, 3, sample) for sample in (0, 1)]
    heard = answers(engine, [Asked(request) for request in requests])
    assert [ids(each.tokens) for each in heard] == [first.tokens, second.tokens]
    assert first.tokens != second.tokens


def in_float64(model, text):
    """The logits of the tokens that follow each token of a text."""
    with jax.enable_x64():
        wide = map_weights(lambda _, w: jnp.asarray(w, jnp.float64), model)
        from lmlib import single_document_context

        tokens_BS = jnp.asarray([text], jnp.int32)
        context = single_document_context(tokens_BS, Compute(dtype="float64"))
        h_BSE = wide.features(wide.trunk(tokens_BS, context).x_BSE, context)
        return np.asarray(wide.logits(h_BSE, context.compute)[0])


def test_log_probabilities_of_prompts_and_answers_are_the_model_s():
    engine, model = engine_of(small_llama), made(small_llama)
    prompt = SYSTEM[:150]
    request = Request(prompt, 5, Sampling(temperature=1.5), 1, top=6, score_prompt=True)
    heard = answer_of(engine, request)
    assert ids(heard.prompt) == [*prompt[1:]] and len(heard.tokens) == 5
    text = [*prompt, *ids(heard.tokens)]
    logits_SV = in_float64(model, text)
    expected_SV = logits_SV - np.log(np.sum(np.exp(logits_SV), axis=1, keepdims=True))
    for place, token in enumerate([*heard.prompt, *heard.tokens]):
        expected_V = expected_SV[place]
        assert token.logprob == pytest.approx(expected_V[token.id], abs=3e-5)
        likeliest = np.argsort(-expected_V)[:6]
        assert [id for id, _ in token.top] == likeliest.tolist()
        np.testing.assert_allclose([p for _, p in token.top], expected_V[likeliest], atol=3e-5)
    only = answer_of(engine, dataclasses.replace(request, max_tokens=0, top=0))
    assert only.ended == ["length"] and not only.tokens
    assert [each[:2] for each in only.prompt] == [each[:2] for each in heard.prompt]


@pytest.mark.landing
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.6, top_k=4),
        Sampling(temperature=1.4, top_p=0.7),
        Sampling(min_p=0.3, repetition_penalty=1.5),
    ],
)
def test_tokens_have_the_probabilities_of_their_settings(sampling):
    """A chi-squared test of the tokens that are not rare, over 600 seeds."""
    engine, prompt, count = engine_of(small_llama), (3, 1, 4), 600
    logits_1V = in_float64(made(small_llama), prompt)[-1:].astype(np.float32)
    seen_1V = np.isin(np.arange(V), prompt)[None]
    z_1V = allowed(
        jnp.asarray(logits_1V), jnp.asarray(seen_1V), numbers_of(sampling), rules_of(sampling)
    )
    expected_V = np.asarray(jax.nn.softmax(z_1V[0])) * count
    asked = [Asked(Request(prompt, 1, sampling, seed)) for seed in range(count)]
    found = collections.Counter(heard.tokens[0].id for heard in answers(engine, asked))
    assert all(expected_V[id] > 0 for id in found), "a token that is not allowed"
    common = [id for id in range(V) if expected_V[id] >= 5]
    pairs = [(found[id], expected_V[id]) for id in common]
    rest = count - sum(expected for _, expected in pairs)
    if rest > 5:
        pairs.append((count - sum(each for each, _ in pairs), rest))
    chi = sum((seen - expected) ** 2 / expected for seen, expected in pairs)
    free = len(pairs) - 1
    assert chi < free + 4.5 * math.sqrt(2 * free), "beyond 1 in 10,000"


def test_a_stop_id_ends_an_answer_and_is_its_last_token():
    engine = engine_of(small_llama)
    whole = ids(answer_of(engine, greedy(PROMPTS[1])).tokens)
    stop = whole[5]
    heard = answer_of(engine, greedy(PROMPTS[1], stop_ids=(stop, 0)))
    assert ids(heard.tokens) == whole[: whole.index(stop) + 1] and heard.ended == ["stop"]


def test_the_beginning_of_a_prompt_is_reused():
    engine = engine_of(small_llama)
    first = answer_of(engine, greedy(SYSTEM))
    again = answer_of(engine, greedy(SYSTEM))
    assert (first.reused, again.reused) == ([], [256]) and again.tokens == first.tokens
    # Later turns of a chat reuse the turns before; a prompt that shares a part stores that.
    longer = answer_of(engine, greedy((*SYSTEM, *range(40))))
    assert longer.reused == [256]
    other, another = (greedy((*SYSTEM[:200], *[token] * 60)) for token in (1, 2))
    assert [answer_of(engine, each).reused for each in (other, another)] == [[], [128]]


@pytest.mark.landing
@pytest.mark.parametrize("int8", [False, True])
def test_an_adapter_answers_as_the_merged_model(int8):
    model = made(small_llama)
    if int8:  # values that the engine rounds to themselves
        model = jax.tree.map(dense, map_weights(in_int8, model), is_leaf=is_matrix)

    def adapted(seed):
        one = with_adapters(model, rank=4, key=jax.random.key(seed))

        def changed(weight, array):
            own = weight.path.endswith((".up", ".down"))
            return (
                array + 0.1 * jax.random.normal(jax.random.key(seed), array.shape) if own else array
            )

        return map_weights(changed, one)

    adapters = {"one": adapted(1), "other": adapted(2)}
    engine = Engine(model, None, FLOAT32, SLOTS, LENGTH, 3, int8, adapters)
    names = [None, "one", "other", None, "one"]
    asked = [Asked(greedy(PROMPTS[1], adapter=name)) for name in names]
    heard = answers(engine, asked)
    for name, each in zip(names, heard, strict=True):
        merged_model = merged(adapters[name]) if name else model
        ((expected,),) = generate(merged_model, [PROMPTS[1]], 12, GREEDY, compute=FLOAT32)
        assert ids(each.tokens) == expected.tokens
    assert len({tuple(ids(each.tokens)) for each in heard}) == 3
    alone = [answer_of(engine, each.request) for each in asked]
    assert alone == heard
    base, one = ({*map(id, jax.tree.leaves(engine._weights[name]))} for name in (None, "one"))
    assert base <= one, "the base is not copied"


def test_an_adapter_of_another_base_is_refused():
    other = with_adapters(small_llama(jax.random.key(5)), rank=4, key=jax.random.key(1))
    with pytest.raises(ValueError, match="adapter 'other' must have the same base"):
        engine_of(small_llama, adapters={"other": other})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": ()}, "the prompt is empty"),
        ({"prompt": (1, V)}, f"the prompt has the token {V}, but the model's vocabulary ends at"),
        ({"max_tokens": -1}, "max_tokens must be at least 0, got -1"),
        ({"max_tokens": LENGTH}, f"{LENGTH} more are to follow, but the length is {LENGTH}"),
        ({"seed": 2**32}, "seed must be in"),
        ({"sample": -1}, "sample must be in"),
        ({"top": 21}, "top must be in"),
        ({"stop_ids": tuple(range(17))}, "at most 16 tokens may end an answer, got 17"),
        ({"adapter": "none"}, "there is no adapter 'none'"),
    ],
)
def test_a_request_that_cannot_be_answered_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        engine_of(small_llama).check(dataclasses.replace(greedy((1, 2)), **changes))


def test_a_cache_that_does_not_fit_is_refused_with_its_size():
    with pytest.raises(MemoryError, match=r"memory.*: lower slots, prefix_rows or length"):
        engine_of(small_llama, slots=2**20, length=2**16)


@pytest.mark.landing
def test_texts_stop_before_rotary_frequencies_change():
    scaling = LongRope((1.0, 1.5), (4.0, 9.0), original=16, amplitude=1.2)
    model = phi3(V, 16, 1, 4, 24, kv_heads=2, rope_scaling=scaling, key=jax.random.key(0))
    engine = Engine(model, None, FLOAT32, slots=1, length=64, prefix_rows=0)
    assert engine.length == 16


def test_a_long_prompt_does_not_stop_other_answers():
    """Between two of a row's tokens there is at most one chunk of another prompt."""
    engine = engine_of(small_llama, slots=4)
    short = Asked(greedy((1, 2), 60))
    long = [Asked(greedy(range_of(each, 390), 5), begins=3) for each in (1, 2, 3)]
    answers(engine, [short, *long])
    assert short.turns == [*range(short.turns[0], short.turns[-1] + 1)]
    assert len(short.turns) >= 12, "calls are short while prompts are computed"


def test_a_short_prompt_is_not_behind_long_ones():
    engine = engine_of(small_llama, slots=4)
    long = [Asked(greedy(range_of(each, 390), 5)) for each in (1, 2, 3)]
    short = Asked(greedy((1, 2, 3), 5), begins=1)
    answers(engine, [*long, short])
    assert short.turns[0] <= short.request.max_tokens  # turns, of twelve that the others take
    assert max(each.turns[0] for each in long) >= 10


def range_of(step, length):
    return [step * n % V for n in range(length)]
