"""Parts of modded-nanogpt's record 89 against its equations in float32 PyTorch.

Its `train_gpt.py` at commit f411b3d is the source. Shapes: B batch, S sequence, E embed, R rows.
"""

import itertools

import jax
import jax.numpy as jnp
import laid_out
import numpy as np
import pytest
from whole_decoders import FLOAT32, two_documents

from lmlib import make_mesh, single_document_context
from lmlib.models.forward_context import ForwardContext
from lmlib.models.parts.rope import Rotary
from lmlib.models.speedrun.bigram import BigramEmbedding, signs
from lmlib.models.speedrun.token_gates import Gate, TokenGates
from lmlib.models.speedrun.window_yarn import WindowYarn
from lmlib.parallel.layout import reshard

E, B, S, R, VOCAB = 32, 2, 14, 97, 50_304


def tokens():
    return jnp.asarray(np.random.default_rng(2).integers(0, VOCAB, (B, S)), jnp.int32)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def bigram():
    made = BigramEmbedding(R, E, key=jax.random.key(0))
    assert not np.any(made.table)
    return laid_out.drawn(made)


def bigrams_by_pytorch(table, row, torch):
    """`get_bigram_hash` and the sign trick for one text; its random signs are our function's."""
    out = row.to(torch.int32).clone()
    out[0] = R - 1
    first, second = 36_313 * row.to(torch.int32)[1:], 27_191 * row.to(torch.int32)[:-1]
    out[1:] = torch.bitwise_xor(first, second) % (R - 1)
    sign_table = torch.tensor(np.asarray(signs(jnp.arange(8_192), E)))
    index = torch.zeros_like(row)
    index[1:] = (row[:-1] ^ row[1:]) % 8_192
    return table[out.long()] * sign_table[index]


@pytest.mark.slow
@pytest.mark.parametrize("documents", [1, 2])
def test_bigrams_equal_pytorchs(documents):
    torch = pytest.importorskip("torch")
    part, weight_BSE = bigram(), normal(B, S, E)
    context = two_documents() if documents == 2 else single_document_context(tokens(), FLOAT32)
    table = torch.tensor(np.asarray(part.table), requires_grad=True)
    ends = [0, 5, S] if documents == 2 else [0, S]
    rows = [
        torch.cat([bigrams_by_pytorch(table, row[a:b], torch) for a, b in itertools.pairwise(ends)])
        for row in torch.tensor(np.asarray(tokens())).long()
    ]
    expected = torch.stack(rows)
    (expected * torch.tensor(weight_BSE)).sum().backward()

    def total(part):
        x_BSE, _ = part(tokens(), context)
        return jnp.sum(x_BSE * weight_BSE), x_BSE

    gradient, found = jax.grad(total, has_aux=True)(part)
    np.testing.assert_array_equal(found, expected.detach().numpy())
    np.testing.assert_allclose(gradient.table, table.grad.numpy(), rtol=1e-5, atol=1e-6)


def test_half_of_the_signs_are_negative_and_rows_differ():
    signs_RE = np.asarray(signs(jnp.arange(8_192), 768))
    assert {*np.unique(signs_RE)} == {-1, 1}
    # Means of n random signs have a standard deviation of n^-1/2.
    assert np.abs(signs_RE.mean(0)).max() < 5 * 8_192**-0.5
    assert np.abs(signs_RE.mean(1)).max() < 5 * 768**-0.5
    assert len(np.unique(signs_RE, axis=0)) == 8_192
    agreement = signs_RE[1:] * signs_RE[:-1]
    assert np.abs(agreement.mean(1)).max() < 5 * 768**-0.5


@pytest.mark.slow
def test_bigrams_of_a_cache_are_those_of_the_whole_text():
    """A first call with padding, then one token at a time."""
    part, whole = bigram(), single_document_context(tokens(), FLOAT32)
    expected, _ = part(tokens(), whole)
    cache, found, start = part.empty_cache(B, S, jnp.float32), [], 0
    for length, padding in ((5, 3), *((1, 0),) * 9):
        positions_BS = np.full((B, length + padding), -1, np.int32)
        positions_BS[:, :length] = np.arange(start, start + length)
        given_BS = np.full((B, length + padding), 7, np.int32)
        given_BS[:, :length] = tokens()[:, start : start + length]
        context = ForwardContext(jnp.asarray(positions_BS), None, FLOAT32)
        x_BSE, cache = part(jnp.asarray(given_BS), context, cache)
        found.append(x_BSE[:, :length])
        start += length
    np.testing.assert_array_equal(jnp.concatenate(found, axis=1), expected)


@pytest.mark.slow
@pytest.mark.several_devices
@pytest.mark.parametrize("mesh", [{"fsdp": 4, "tensor": 2}, {"context": 2, "fsdp": 4}], ids=str)
def test_bigrams_on_a_mesh(mesh):
    mesh, part, context = make_mesh(**mesh), bigram(), two_documents()
    expected, _ = part(tokens(), context)
    with jax.set_mesh(mesh):
        positions_BS, segments_BS, given_BS = (
            reshard(jnp.tile(x, (4, 1)), "batch seq")
            for x in (context.positions_BS, context.segment_ids_BS, tokens())
        )
        context = ForwardContext(positions_BS, segments_BS, FLOAT32)
        found, _ = jax.jit(lambda part: part(given_BS, context))(laid_out.laid_out(part, mesh))
    np.testing.assert_array_equal(found, np.tile(expected, (4, 1, 1)))


def test_a_table_of_one_row_is_refused():
    with pytest.raises(ValueError, match="at least 2 rows, got 1"):
        BigramEmbedding(1, E, key=jax.random.key(0))


@pytest.mark.slow
def test_frequencies_of_growing_windows_equal_pytorchs():
    """`Yarn.apply` for each change of the long window, and its scale of attention."""
    torch = pytest.importorskip("torch")
    windows, head_dim = (384, 896, 1_408, 1_664), 128
    frequency = (1 / 1_024) ** torch.linspace(0, 1, head_dim // 4, dtype=torch.float64)
    scale = 0.1
    for old, new in itertools.pairwise(windows):
        rotations = old * frequency / (2 * torch.pi)
        weight = torch.clamp((rotations - 1) / (32 - 1), 0, 1)
        frequency = frequency * (old / new + weight * (1 - old / new))
        scale *= 0.2 * np.log(new / old) + 1
    scaling = WindowYarn(windows)
    rotary = Rotary(head_dim // 2, 1_024 ** (32 / 31), scaling, interleaved=True)
    cos_11D = rotary.rotations(jnp.ones((1, 1), jnp.int32), jnp.float32).cos_BS1D[0, 0]
    np.testing.assert_allclose(cos_11D[0], frequency.cos().numpy(), rtol=1e-5)
    assert 0.1 * scaling.sharper == pytest.approx(scale)
    assert WindowYarn((384,)).sharper == 1


@pytest.mark.slow
def test_gates_equal_pytorchs():
    torch = pytest.importorskip("torch")
    gates = [Gate("a", (0.0, 0.25)), Gate(("b", 1), (2.0,))]
    new = TokenGates(E, gates, hidden=8, key=jax.random.key(0))
    x_BSE, weight_BSG = normal(B, S, E), normal(B, S, 3, seed=1)
    context = single_document_context(tokens(), FLOAT32)
    begun = new(jnp.asarray(x_BSE), context)
    np.testing.assert_allclose(begun["a"], np.broadcast_to((0.0, 0.25), (B, S, 2)), rtol=1e-6)
    np.testing.assert_allclose(begun["b", 1], np.full((B, S, 1), 2.0), rtol=1e-6)
    part = laid_out.drawn(new)
    given = {
        name: torch.tensor(np.asarray(getattr(part, name)), requires_grad=True)
        for name in ("first", "second", "bias", "scale")
    }
    hidden = torch.nn.functional.gelu(torch.tensor(x_BSE) @ given["first"])
    expected = (hidden @ given["second"] + given["bias"]) * given["scale"]
    (expected * torch.tensor(weight_BSG)).sum().backward()

    def total(part):
        found = part(jnp.asarray(x_BSE), context)
        made_BSG = jnp.concatenate((found["a"], found["b", 1]), axis=-1)
        return jnp.sum(made_BSG * weight_BSG), made_BSG

    gradient, found = jax.grad(total, has_aux=True)(part)
    laid_out.assert_near(found, expected.detach().numpy(), 1e-5)
    for name, value in given.items():
        laid_out.assert_near(getattr(gradient, name), value.grad.numpy(), 1e-5)
