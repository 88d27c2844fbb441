"""The heads of multi-token prediction against the equations, in float64, and their cache."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from llama_reference import reference_logits

from lmlib.compute import Compute
from lmlib.models.families.llama import llama
from lmlib.models.forward_context import ForwardContext
from lmlib.models.multi_token import multi_token

V, E, B, S, DEPTHS = 37, 16, 2, 12, 2
FLOAT32 = Compute(dtype="float32")
base = functools.partial(llama, vocab=V, embed=E, layers=2, heads=4, kv_heads=2, mlp=24)


@functools.cache
def model(tied=False):
    make = functools.partial(multi_token, functools.partial(base, tied=tied), DEPTHS)
    made = make(key=jax.random.key(0))
    random = np.random.default_rng(0)  # norms with a scale of one would hide which one is used
    return jax.tree.map(lambda x: x + 0.1 * random.normal(size=x.shape).astype(np.float32), made)


def rows():
    random = np.random.default_rng(1)
    tokens_BS = random.integers(0, V, (B, S + DEPTHS)).astype(np.int32)
    segments_BS, positions_BS = np.ones((B, S), np.int32), np.tile(np.arange(S, dtype=np.int32), 2)
    positions_BS = positions_BS.reshape(B, S)
    segments_BS[0, 5:], positions_BS[0, 5:] = 2, np.arange(S - 5)
    return tokens_BS, positions_BS, segments_BS


class OneLayer:
    """A head with the attributes that `reference_logits` reads. Its tokens are indices of x."""

    def __init__(self, head, table_EV, x_BSE):
        self.stack, self.norm, self.unembedding = head.stack, head.norm, table_EV
        self.embedding = x_BSE.reshape(-1, x_BSE.shape[-1])


def normed(norm, x_BSE):
    return x_BSE / np.sqrt((x_BSE**2).mean(-1, keepdims=True) + norm.epsilon) * norm.scale


@pytest.mark.parametrize("tied", [False, pytest.param(True, marks=pytest.mark.landing)])
def test_each_depth_computes_the_equations(tied):
    made, (tokens_BS, positions_BS, segments_BS) = model(tied), rows()
    whole = jax.tree.map(lambda x: np.asarray(x, np.float64), made)
    table_EV = whole.embedding.T if tied else whole.unembedding
    context = ForwardContext(jnp.asarray(positions_BS), jnp.asarray(segments_BS), FLOAT32)

    @jax.jit
    def found(made, tokens_BS):
        h_BSE = made.features(made.trunk(tokens_BS[:, :S], context).x_BSE, context)
        logits = []
        for depth in range(1, DEPTHS + 1):
            h_BSE = made.ahead(depth, h_BSE, tokens_BS[:, depth : depth + S], context).x_BSE
            logits.append(made.logits(h_BSE, FLOAT32))
        return logits

    places_BS = np.arange(B * S).reshape(B, S)

    def of(reference, tokens_BS, table_EV):
        reference.unembedding = table_EV
        packed = positions_BS, segments_BS
        return reference_logits(reference, tokens_BS, *packed, 10_000.0, whole.norm.epsilon)

    reference = OneLayer(whole, table_EV, whole.embedding)
    h_BSE = of(reference, tokens_BS[:, :S], np.eye(E))  # the features themselves
    for depth, logits in enumerate(found(made, jnp.asarray(tokens_BS)), 1):
        head = whole.predictors[depth - 1]
        part, e_BSE = head.combination, whole.embedding[tokens_BS[:, depth : depth + S]]
        both = normed(part.embedding_norm, e_BSE), normed(part.features_norm, h_BSE)
        reference = OneLayer(head, table_EV, np.concatenate(both, axis=-1) @ part.matrix)
        expected = of(reference, places_BS, table_EV)
        np.testing.assert_allclose(logits, expected, atol=1e-5 * np.abs(expected).max())
        h_BSE = of(reference, places_BS, np.eye(E))


def test_the_cache_of_a_head_in_uneven_pieces_equals_the_whole_row():
    made, (tokens_BS, positions_BS, _) = model(), rows()
    positions_BS = np.tile(np.arange(S, dtype=np.int32), (B, 1))

    def context(part):
        one = jnp.zeros_like(positions_BS[:, part])
        lengths_B = jnp.full(B, part.stop)
        given = jnp.asarray(positions_BS[:, part]), one, FLOAT32
        return ForwardContext(*given, lengths_B=lengths_B)

    h_BSE = jnp.asarray(np.random.default_rng(2).normal(size=(B, S, E)), jnp.float32)
    ahead_BS = jnp.asarray(tokens_BS[:, 1 : S + 1])
    plain = ForwardContext(jnp.asarray(positions_BS), None, FLOAT32)
    expected = made.ahead(1, h_BSE, ahead_BS, plain).x_BSE
    cache, pieces = made.predictors[0].empty_cache(B, S, jnp.float32), []
    for start, stop in ((0, 5), (5, 6), (6, 7), (7, S)):
        part = slice(start, stop)
        given = h_BSE[:, part], ahead_BS[:, part], context(part)
        found = made.ahead(1, *given, cache)
        cache = found.cache
        pieces.append(found.x_BSE)
    np.testing.assert_allclose(np.concatenate(pieces, 1), expected, atol=2e-5)


def test_all_else_is_the_decoders():
    plain = base(key=jax.random.key(0))
    own = multi_token(base, DEPTHS, key=jax.random.key(0))
    tokens_BS = jnp.asarray(rows()[0])
    np.testing.assert_array_equal(own(tokens_BS), plain(tokens_BS))
    assert own.flops_per_token(S, True) == plain.flops_per_token(S, True)
    with pytest.raises(ValueError, match="depths must not be negative, got -1"):
        multi_token(base, -1, key=jax.random.key(0))
