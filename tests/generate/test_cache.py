"""Cached logits equal the whole forward pass at every position."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hugging_face_families import GOLDEN
from sentinels import sentinels

from lmlib import Compute, hf, llama, make_mesh, single_document_context
from lmlib.generate import GREEDY
from lmlib.generate.sampling import numbers_of, rules_of
from lmlib.generate.steps import NOTHING, Chooser, first_token, next_tokens, prefill
from lmlib.generate.weights import ready, unstacked
from lmlib.models.attend.kernel import Options
from lmlib.models.families.phi import phi3
from lmlib.models.forward_context import ForwardContext
from lmlib.models.parts.cache import KeysAndValues, attend_cached, empty_cache, extended
from lmlib.models.parts.rope_scaling import LongRope
from lmlib.models.weights import creator
from lmlib.parallel.layout import reshard

FLOAT32 = Compute(dtype="float32")
ROWS, LENGTH = 4, 40  # windows in these families are 9, so a ring wraps four times
LENGTHS = np.array([[40], [31], [9], [1]])
LENGTHS_B = np.array([40, 31, 9, 1], np.int32)
MESH, ROWS_ALONE = {"data": 2, "fsdp": 2, "tensor": 2}, {"data": 2, "fsdp": 2}
# On one device layers are separate, on a mesh stacked. Models with special caches (rings, one head,
# patterns, tables by length) are tested both ways.
BOTH_WAYS = ("mistral", "llama_tied_one_head", "gemma3", "phi3_long_rope")
APART = (
    *(*BOTH_WAYS, "llama", "qwen2_yarn", "qwen3", "phi3", "phi4_mini", "gpt2", "gemma2"),
    *("qwen3_moe", "deepseek_v3", "deepseek_v3_direct_queries", "gpt_oss", "qwen3_next"),
    *("bamba", "granite_hybrid_dense", "lfm2", "kimi_linear", "olmo_hybrid"),
)
ON_A_MESH = (
    *(*BOTH_WAYS, "llama_3_1", "llama_linear", "qwen2", "qwen2_sliding", "olmo2", "starcoder2"),
    *("mixtral", "olmoe", "deepseek_v3", "gpt_oss", "qwen3_next_some_dense"),
    *("bamba", "granite_hybrid", "lfm2_biases", "kimi_linear_query_latent"),
    "olmo_hybrid_tied_rope",
)


@jax.jit
def part(model, tokens_BS, positions_BS, cache):
    """Logits of some tokens, and the new cache."""
    lengths_B = jnp.zeros_like(positions_BS[:, 0]) + LENGTHS_B
    context = ForwardContext(positions_BS, jnp.zeros_like(tokens_BS), FLOAT32, lengths_B=lengths_B)
    trunk = model.trunk(tokens_BS, context, cache)
    h_BSE = reshard(model.features(trunk.x_BSE, context), "batch seq embed")
    return model.logits(h_BSE, FLOAT32), trunk.cache


@jax.jit
def whole(model, tokens_BS):
    lengths_B = jnp.zeros_like(tokens_BS[:, 0]) + LENGTHS_B
    context = dataclasses.replace(single_document_context(tokens_BS, FLOAT32), lengths_B=lengths_B)
    return model(tokens_BS, context)


def in_parts(model, tokens_BS, sizes):
    """Logits of each position, the tokens given in parts; rows end where `LENGTHS` says."""
    cache = jax.jit(lambda model: model.empty_cache(ROWS, LENGTH, jnp.float32))(model)
    found, start = [], 0
    for size in sizes:
        positions_BS = np.broadcast_to(np.arange(start, start + size), (ROWS, size))
        positions_BS = np.where(positions_BS < LENGTHS, positions_BS, -1).astype(np.int32)
        made_BSV, cache = part(model, tokens_BS[:, start : start + size], positions_BS, cache)
        found.append(np.asarray(made_BSV))
        start += size
    return np.concatenate(found, axis=1)


@pytest.mark.parametrize(
    ("name", "mesh", "apart"),
    sentinels(
        [
            *((name, {}, True) for name in APART),
            *((name, MESH, False) for name in ON_A_MESH),
            ("llama_dynamic_one_layer", ROWS_ALONE, False),  # its vocabulary is odd
        ],
        ("mistral", {}, True).__eq__,
    ),
)
def test_cached_logits_equal_the_full_pass_at_every_position(name, mesh, apart):
    model = hf.load(GOLDEN / name, make_mesh(**mesh))
    tokens_BS = np.random.default_rng(1).integers(0, model.vocab, (ROWS, LENGTH), np.int32)
    with jax.set_mesh(make_mesh(**mesh)):
        expected_BSV = np.asarray(whole(model, tokens_BS))
        ready = jax.jit(unstacked)(model) if apart else model
        # A part may be shorter or longer than a window, from an empty cache or a full one, or go
        # over its border; then one by one.
        short = [3] * (name in BOTH_WAYS)  # a program more to compile
        for sizes in ([*short, 1, 1, 20, *[1] * (18 - sum(short))], [20, 20], [1] * 40):
            found_BSV = in_parts(ready, tokens_BS, sizes)
            there_BS = np.arange(LENGTH) < LENGTHS
            error = np.abs(found_BSV - expected_BSV)[there_BS].max()
            assert error <= 2e-5 * np.abs(expected_BSV).max()


@pytest.mark.parametrize(("window", "longest"), [(None, 257), (150, 300)])
def test_rows_of_a_shared_cache_are_read_up_to_each_texts_newest_token(window, longest):
    """The second row is the first of the call. CPUs read 128 slots at a time, of 300."""
    N, H, K, D, lengths_B = 300, 4, 2, 8, np.array([1, 128, 129, longest])
    rng, B, newest_B1 = np.random.default_rng(3), len(lengths_B), lengths_B[:, None] - 1
    q_BHD = rng.normal(size=(B, H, D)).astype(np.float32)
    k_BNKD, v_BNKD = rng.normal(size=(2, B, N, K, D)).astype(np.float32)
    before_BN = np.where(np.arange(N) < newest_B1, np.arange(N), -1).astype(np.int32)

    @jax.jit
    def mixed(q_BHD, k_BNKD, v_BNKD, before_BN, newest_B1):
        empty = empty_cache(B + 2, N, K, D, jnp.float32)
        shared = KeysAndValues(empty.keys, empty.values, first=jnp.int32(1))
        cache = extended(shared, k_BNKD, v_BNKD, before_BN)
        k_B1KD, v_B1KD = (
            jnp.take_along_axis(x, newest_B1[..., None, None], axis=1) for x in (k_BNKD, v_BNKD)
        )
        options = Options.of(window, None, None, D)
        given = q_BHD[:, None], k_B1KD, v_B1KD, newest_B1, cache, options
        return attend_cached(*given)[0][:, 0]

    found_BHD = mixed(q_BHD, k_BNKD, v_BNKD, before_BN, newest_B1.astype(np.int32))
    for row, length in enumerate(lengths_B):
        seen = slice(max(0, length - (window or N)), length)
        for head in range(H):
            k_TD, v_TD = (x[row, seen, head // 2].astype(np.float64) for x in (k_BNKD, v_BNKD))
            weights_T = np.exp(k_TD @ q_BHD[row, head] / D**0.5)
            wanted_D = weights_T @ v_TD / weights_T.sum()
            np.testing.assert_allclose(found_BHD[row, head], wanted_D, rtol=1e-5, atol=1e-6)


SIZES = dict(vocab=64, embed=16, layers=2, heads=4, mlp=24, key=jax.random.key(0))
LONG_ROPE = LongRope((1.0, 1.5), (4.0, 9.0), original=16, amplitude=1.2)


# By default tests/generate/test_generator.py goes beyond the original length.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "mesh"),
    [
        *((functools.partial(phi3, kv_heads=2, rope_scaling=LONG_ROPE), m) for m in ({}, MESH)),
        *((functools.partial(llama, kv_heads=n), {"fsdp": 2, "tensor": 4}) for n in (1, 2)),
    ],
    ids=["long and short rows", "on a mesh", "one head that tensor repeats", "two"],
)
def test_rows_of_their_lengths_and_repeated_heads_are_cached(make, mesh):
    with jax.set_mesh(make_mesh(**mesh)):
        model = creator(lambda: make(**SIZES), make_mesh(**mesh))()
        tokens_BS = np.random.default_rng(2).integers(0, 64, (ROWS, LENGTH), np.int32)
        expected_BSV = np.asarray(whole(model, tokens_BS))
        found_BSV = in_parts(model, tokens_BS, [12, 12, *[1] * 16])
    error = np.abs(found_BSV - expected_BSV)[np.arange(LENGTH) < LENGTHS].max()
    assert error <= 2e-5 * np.abs(expected_BSV).max()


@pytest.mark.slow
def test_the_cache_is_updated_in_place():
    sizes = dict(vocab=64, embed=16, layers=2, heads=2, mlp=32)
    model = ready(llama(**sizes, key=jax.random.key(0)), "float32", None, whole=True, int8=False)
    tokens_BC = jnp.ones((ROWS, 16), jnp.int32)
    lengths_B = jnp.array([16, 9, 3, 1], jnp.int32)
    chooser = Chooser(
        jnp.zeros((ROWS, 2), jnp.uint32), numbers_of(GREEDY), jnp.full(8, NOTHING, jnp.int32)
    )
    runs = jnp.zeros(ROWS, bool)

    def places(cache):
        return [array.unsafe_buffer_pointer() for array in jax.tree.leaves(cache)]

    start = jnp.int32(0)
    cache, h_BE = prefill(model, None, None, tokens_BC, start, lengths_B, LENGTH, FLOAT32)
    first = places(cache)
    rules = rules_of(GREEDY)
    state, _ = first_token(model, cache, h_BE, lengths_B, runs, None, chooser, FLOAT32, rules)
    assert places(state.cache) == first
    state, _ = next_tokens(model, state, jnp.int32(4), chooser, FLOAT32, rules, 4)
    assert places(state.cache) == first


@pytest.mark.parametrize("count", [1, 3, 6])
def test_a_row_without_new_tokens_keeps_its_cache(count):
    """A ring of four slots with two rows; only the first row goes on, at position 4.

    More tokens than slots are written by another method than a few.
    """
    k_BSKD = jax.random.normal(jax.random.key(0), (2, 4 + count, 1, 2))
    places = np.arange(4 + count, dtype=np.int32)
    cache = empty_cache(2, 4, 1, 2, jnp.float32)
    cache = extended(cache, k_BSKD[:, :4], -k_BSKD[:, :4], jnp.asarray(np.stack([places[:4]] * 2)))
    later = np.stack([places[4:], np.full(count, -1, np.int32)])
    cache = extended(cache, k_BSKD[:, 4:], -k_BSKD[:, 4:], jnp.asarray(later))
    expected_BND = np.array(k_BSKD[:, :4, 0])
    for place in places[4:]:
        expected_BND[0, place % 4] = k_BSKD[0, place, 0]
    np.testing.assert_array_equal(cache.values[:, 0], -expected_BND)
    np.testing.assert_array_equal(np.swapaxes(cache.keys[:, 0], 1, 2), expected_BND)
