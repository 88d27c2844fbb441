"""Continuations have the tokens of the whole forward pass, in any batch."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import refusals
from user_model import Learned

from lmlib import Compute, make_mesh, single_document_context
from lmlib.generate import GREEDY, Generator, Sampling, generate
from lmlib.models.families.gemma import gemma2, gemma3
from lmlib.models.families.phi import phi3
from lmlib.models.parts.rope_scaling import LongRope
from lmlib.parallel.axes import map_weights
from lmlib.parallel.layout import shardings
from lmlib.state import abstract_model

V = 40
FLOAT32 = Compute(dtype="float32")
DRAWN = Sampling(temperature=0.9, top_k=30, top_p=0.95, min_p=0.01, repetition_penalty=1.2)
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [5], list(range(30)), [7, 7, 7]]
MESH = {"data": 2, "fsdp": 2, "tensor": 2}


def small(key):
    return gemma2(V, 16, 2, 4, 24, kv_heads=2, head_dim=8, window=6, key=key)


@functools.cache
def model():
    return small(jax.random.key(0))


def on(mesh):
    return jax.device_put(model(), shardings(abstract_model(model, mesh)))


@functools.cache
def generator():
    return Generator(model(), compute=FLOAT32, rows=8, length=64, chunk=16)


@jax.jit
def log_probabilities(model, tokens_BS, lengths_B):
    context = dataclasses.replace(single_document_context(tokens_BS, FLOAT32), lengths_B=lengths_B)
    h_BSE = model.features(model.trunk(tokens_BS, context).x_BSE, context)
    return jax.nn.log_softmax(model.logits(h_BSE, FLOAT32))


def by_the_whole_pass(model, prompt, count):
    """Greedy tokens and their log-probabilities."""
    tokens_S = np.zeros(64, np.int32)
    tokens_S[: len(prompt)] = prompt
    logprobs = []
    for n in range(len(prompt), len(prompt) + count):
        tokens_BS, lengths_B = jnp.asarray(tokens_S[None]), jnp.array([n], jnp.int32)
        log_p_V = log_probabilities(model, tokens_BS, lengths_B)[0, n - 1]
        tokens_S[n] = jnp.argmax(log_p_V)
        logprobs.append(float(jnp.max(log_p_V)))
    return tokens_S[len(prompt) : len(prompt) + count].tolist(), logprobs


def assert_likeliest(generator, model, count):
    """That greedy tokens are each time the likeliest of the whole pass."""
    for prompt, (made,) in zip(PROMPTS, generator(PROMPTS, count, GREEDY), strict=True):
        tokens, logprobs = by_the_whole_pass(model, prompt, count)
        assert made.tokens == tokens and not made.stopped
        np.testing.assert_allclose(made.logprobs, logprobs, atol=1e-5)


@pytest.mark.landing
def test_greedy_takes_the_likeliest_token_of_the_whole_pass_each_time():
    assert_likeliest(generator(), model(), 20)


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 6])
def test_a_text_that_grows_beyond_the_original_length_is_computed_again(window):
    """Each row by itself, when it does; one prompt is longer at once."""
    scaling = LongRope((1.0, 1.5), (4.0, 9.0), original=16, amplitude=1.2)
    long_rope = phi3(
        V, 16, 2, 4, 24, kv_heads=2, rope_scaling=scaling, window=window, key=jax.random.key(0)
    )
    again = Generator(long_rope, compute=FLOAT32, rows=4, length=64, chunk=16)
    assert_likeliest(again, long_rope, 20)


@pytest.mark.slow
def test_a_sample_is_the_same_whatever_else_is_in_its_batch():
    together = generator()(PROMPTS, 20, DRAWN, samples=2, seed=3)
    for id, prompt in enumerate(PROMPTS):
        ((first, second),) = generator()([prompt], 20, DRAWN, samples=2, seed=3, ids=[id])
        assert [first.tokens, second.tokens] == [each.tokens for each in together[id]]
        ((alone,),) = generator()([prompt], 20, DRAWN, seed=3, ids=[id])
        assert alone.tokens == first.tokens != second.tokens
    several_batches = generator()([*PROMPTS, *PROMPTS[::-1], [2]], 20, DRAWN, seed=3)
    assert [made.tokens for (made,) in several_batches[:4]] == [rows[0].tokens for rows in together]
    other_seed = generator()(PROMPTS, 20, DRAWN, seed=4)
    assert all(
        one[0].tokens != other[0].tokens for one, other in zip(together, other_seed, strict=False)
    )


def test_each_token_is_drawn_with_noise_of_its_own():
    """At this temperature only the noise decides."""
    ((made,),) = generator()([[5]], 20, Sampling(temperature=1e6))
    assert len(set(made.tokens)) > 5


@pytest.mark.slow
def test_long_prompts_give_the_same_in_groups_as_alone():
    """A CPU takes two of these at a time, since more would not stay in its cache."""
    lengths = (600, 5, 520)
    prompts = [[n * n % V for n in range(length, 2 * length)] for length in lengths]
    long = Generator(model(), compute=FLOAT32, rows=4, length=640)
    for prompt, (made,) in zip(prompts, long(prompts, 6, GREEDY), strict=True):
        ((alone,),) = long([prompt], 6, GREEDY)
        assert made.tokens == alone.tokens
        np.testing.assert_allclose(made.logprobs, alone.logprobs, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "whole"),
    [
        ({"fsdp": 4}, True),
        ({"expert": 2, "tensor": 2}, False),
        (MESH, True),
        (MESH, False),
        ({"tensor": 4}, False),
    ],
)
def test_a_sample_is_the_same_on_every_mesh(mesh, whole):
    mesh = make_mesh(**mesh)
    other = Generator(on(mesh), mesh, FLOAT32, rows=6, length=64, whole=whole)
    found = other(PROMPTS[:3], 20, DRAWN, samples=2, stop_ids=[11])
    expected = generator()(PROMPTS[:3], 20, DRAWN, samples=2, stop_ids=[11])
    rows, others = itertools.chain(*found), itertools.chain(*expected)
    for row, other_row in zip(rows, others, strict=True):
        assert row.tokens == other_row.tokens and row.stopped == other_row.stopped
        np.testing.assert_allclose(row.logprobs, other_row.logprobs, atol=1e-5)


@pytest.mark.slow
def test_a_model_without_a_cache_gives_the_same():
    class Cacheless(Learned):
        def empty_cache(self, rows, length, dtype):
            return None

    sizes = dict(vocab=V, embed=16, layers=1, heads=2, positions=64, key=jax.random.key(1))
    expected = generate(Learned(**sizes), PROMPTS, 8, DRAWN, compute=FLOAT32)
    found = generate(Cacheless(**sizes), PROMPTS, 8, DRAWN, compute=FLOAT32)
    assert [rows[0].tokens for rows in found] == [rows[0].tokens for rows in expected]


@pytest.mark.slow
def test_a_stop_id_ends_a_row_and_no_other():
    free = generator()(PROMPTS, 20, DRAWN)
    end = free[0][0].tokens[7]
    for (made,), (whole,) in zip(
        generator()(PROMPTS, 20, DRAWN, stop_ids=[end]), free, strict=False
    ):
        stop = whole.tokens.index(end) + 1 if end in whole.tokens else 20
        assert made.tokens == whole.tokens[:stop]
        assert made.logprobs == whole.logprobs[:stop]
        assert made.stopped == (end in whole.tokens)


@pytest.mark.slow
def test_a_stream_equals_rounds_and_stops_on_request():
    expected = [made for (made,) in generator()(PROMPTS, 20, DRAWN)]
    stream = generator().stream(PROMPTS, 20, DRAWN, round=4)
    rounds = []
    for new in stream:
        rounds.append([len(each.tokens) for each in new])
        if len(rounds) == 3:
            stream.stop(1)
    assert [sum(counts) for counts in zip(*rounds, strict=False)] == [20, 7, 20, 20]
    assert rounds[0] == [1] * 4 and max(map(max, rounds)) == 4
    for row, (found, whole) in enumerate(zip(stream.so_far, expected, strict=False)):
        assert found.tokens == whole.tokens[: 7 if row == 1 else 20]
        assert found.stopped == (row == 1)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [None, MESH])
def test_matrices_in_8_bits_give_what_their_rounded_values_give(mesh):
    def round_as_defined(weight, array):
        if not weight.declaration.multiplied or "vocab" in weight.axes:
            return array
        summed = tuple(weight.axes.index(axis) for axis in weight.declaration.initial.summed)
        scale = np.abs(array).max(summed, keepdims=True) / 127
        return jnp.asarray(np.round(array / scale) * scale, jnp.float32)

    rounded_model = map_weights(round_as_defined, jax.tree.map(np.asarray, model()))
    expected = Generator(rounded_model, None, FLOAT32, rows=4, length=64)(PROMPTS, 12, GREEDY)
    on_mesh = mesh and make_mesh(**mesh)
    given = model() if mesh is None else on(on_mesh)
    generator_8 = Generator(given, on_mesh, FLOAT32, rows=4, length=64, int8=True)
    for (one,), (other,) in zip(generator_8(PROMPTS, 12, GREEDY), expected, strict=True):
        assert one.tokens == other.tokens
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)


@pytest.mark.parametrize(("prompts", "settings", "message"), refusals(__file__, "prompts"))
def test_invalid_prompts_are_refused(prompts, settings, message):
    with pytest.raises(ValueError, match=message):
        generator().stream(prompts, **{"max_tokens": 5, **settings})


def test_sizes_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match=r"rows must be in \[1, 2\^31\), got 0"):
        Generator(model(), rows=0)
    with pytest.raises(ValueError, match=r"length must be in \[1, 2\^31\), got 2147483648"):
        Generator(model(), length=2**31)


def test_a_cache_that_memory_has_no_room_for_is_refused():
    """8 bytes for each of a row's keys and values, on a CPU twice: it puts caches together."""
    with pytest.raises(
        MemoryError, match=r"a cache of 4 × 1,000,000,000 tokens would take .* [GT]B"
    ):
        Generator(model(), None, FLOAT32, rows=4, length=10**9)
    with pytest.raises(MemoryError, match=r"a cache of 1,000,000,000 × 64 tokens would take .* TB"):
        Generator(model(), None, FLOAT32, rows=10**9, length=64)


@pytest.mark.slow
def test_layers_with_other_rotary_tables_each_have_their_own():
    two = gemma3(V, 16, 2, 4, 24, kv_heads=2, head_dim=8, window=6, period=2, key=jax.random.key(1))
    assert_likeliest(Generator(two, compute=FLOAT32, rows=4, length=64), two, 6)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [32, 512])
def test_the_chunk_of_a_prompt_changes_no_sample(chunk):
    other = Generator(model(), compute=FLOAT32, rows=3, length=56, chunk=chunk)
    expected = generator()(PROMPTS, 20, DRAWN)
    found = other(PROMPTS, 20, DRAWN)
    assert [rows[0].tokens for rows in found] == [rows[0].tokens for rows in expected]
