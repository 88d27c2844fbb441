"""nanochat's decoder: its equations in float32 PyTorch, documents, caches, meshes, initial values.

Shapes: B batch, S sequence, E embed, H heads, K kv_heads, D head_dim, V vocab.
"""

import functools

import jax
import jax.numpy as jnp
import laid_out
import numpy as np
import pytest
from whole_decoders import check_documents, check_generation, check_gradients, two_documents

from lmlib import Compute, make_mesh
from lmlib.data.synthetic import Synthetic
from lmlib.models.speedrun.nanochat import nanochat
from lmlib.models.speedrun.smear import Smear

V, E, L, H, D, F, B, S = 64, 64, 4, 4, 16, 96, 2, 14
WINDOW = 5
SOURCE = Synthetic(vocab_size=V, batch_size=8, sequence_length=16)


def make(key=None, **settings):
    sizes = dict(vocab=V, embed=E, layers=L, heads=H, mlp=F, window=WINDOW, long_every=2)
    return nanochat(**sizes | settings, key=jax.random.key(0) if key is None else key)


@functools.cache
def model():
    """No weight has its initial value."""
    return laid_out.drawn(jax.eval_shape(make))


def tokens():
    return jnp.asarray(np.random.default_rng(2).integers(0, V, (B, S)), jnp.int32)


def by_pytorch(weights, layers, tokens_BS, torch):
    """Logits, after `GPT.forward` of nanochat/gpt.py at commit 92d63d4, without its caches."""

    def norm(x):
        return torch.nn.functional.rms_norm(x, (x.shape[-1],))

    positions = torch.arange(tokens_BS.shape[1], dtype=torch.float32)
    angles = torch.outer(positions, 100_000.0 ** (-torch.arange(0, D, 2) / D))
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]

    def rotated(x):  # by minus the angle
        a, b = x[..., : D // 2], x[..., D // 2 :]
        return torch.cat((a * cos + b * sin, b * cos - a * sin), -1)

    x = norm(weights["embedding"][tokens_BS])
    gate = torch.sigmoid(x[:, 1:, :24] @ weights["smear.gate"][:, None])
    x = torch.cat((x[:, :1], x[:, 1:] + weights["smear.share"] * gate * x[:, :-1]), 1)
    x0, middle = x, None
    distance = positions[:, None] - positions
    for i, w in enumerate(layers):
        x = w["residual"] * x + w["first"] * x0
        h = norm(x)
        q, k, v = (
            torch.einsum("bse,ehd->bshd", h, w[f"layer.attention.{name}"])
            for name in ("query", "key", "value")
        )
        # Its rotation is by minus our angle, so its two halves of a head are ours exchanged.
        q, k = (torch.roll(each, D // 2, -1) for each in (q, k))
        values = "layer.attention.value_embedding."
        assert (values + "table" in w) == (i % 2 == (L - 1) % 2)
        if values + "table" in w:
            rows = w[values + "table"][tokens_BS].view(v.shape)
            v = v + 3 * torch.sigmoid(h[..., :12] @ w[values + "gate"])[..., None] * rows
        q, k = 1.2 * norm(rotated(q)), 1.2 * norm(rotated(k))
        before = S if i % 2 == 1 or i == L - 1 else WINDOW - 1
        seen = (distance >= 0) & (distance <= before)
        scores = torch.einsum("bshd,bthd->bhst", q, k) / D**0.5
        shares = torch.softmax(scores.masked_fill(~seen, -torch.inf), -1)
        y = torch.einsum("bhst,bthd->bshd", shares, v)
        x = x + torch.einsum("bshd,hde->bse", y, w["layer.attention.output"])
        h = torch.relu(norm(x) @ w["layer.mlp.up"]).square()
        x = x + h @ w["layer.mlp.down"]
        middle = x if i == L // 2 else middle
    logits = norm(x - weights["backout.share"] * middle) @ weights["unembedding"]
    return 15 * torch.tanh(logits / 15)


@pytest.mark.slow
def test_logits_and_every_gradient_equal_pytorchs():
    torch = pytest.importorskip("torch")

    def of_tokens(weights, layers, tokens_BS):
        assert len(layers) == L
        return by_pytorch(weights, layers, tokens_BS, torch)

    check_gradients(model(), tokens(), of_tokens, torch, 1e-5, 1e-4)


@pytest.mark.slow
def test_documents_of_a_row_are_apart():
    check_documents(model(), tokens(), 1e-4)


def test_a_smear_reads_the_token_before_and_none_of_another_document():
    smear = Smear(E, 4, key=jax.random.key(0))
    smear = jax.tree.map(lambda w: w + jnp.arange(1.0, 1 + w.size).reshape(w.shape), smear)
    x_BSE = np.random.default_rng(0).normal(size=(B, S, E)).astype(np.float32)
    gate_BS = 1 / (1 + np.exp(-(x_BSE[..., :4] @ np.arange(1.0, 5.0))))
    expected = x_BSE.copy()
    for s in range(1, S):
        if s != 5:
            expected[:, s] += gate_BS[:, s, None] * x_BSE[:, s - 1]
    found, _ = smear(jnp.asarray(x_BSE), two_documents())
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{}, {"fsdp": 2, "tensor": 4}], ids=str)
def test_generation_equals_the_full_pass(mesh):
    check_generation(model(), make_mesh(**mesh), tokens())


@functools.cache
def gradients(mesh, **compute):
    compute = Compute(dtype="float32", **compute)
    return laid_out.loss_and_gradients(model(), dict(mesh), compute, SOURCE)


@pytest.mark.slow
@pytest.mark.several_devices
@pytest.mark.parametrize(
    ("mesh", "sequence_parallel"),
    [
        ({"fsdp": 8}, False),
        ({"fsdp": 2, "tensor": 4}, True),
        ({"data": 2, "context": 4}, False),
        ({"fsdp": 2, "context": 2, "tensor": 2}, False),
    ],
    ids=str,
)
def test_every_mesh_gives_the_gradients_of_one_device(mesh, sequence_parallel):
    loss, found = gradients(tuple(mesh.items()), sequence_parallel=sequence_parallel)
    expected_loss, expected = gradients(())
    assert all(np.any(each) for each in jax.tree.leaves(expected))
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    laid_out.assert_near(
        found, expected, 2e-5, least=2e-6
    )  # scales of normed sums have nearly none


@pytest.mark.slow
def test_initial_values_are_the_published_ones():
    weights = laid_out.as_dict(make())
    assert np.std(weights["unembedding"]) == pytest.approx(0.001, rel=0.05)
    assert np.std(weights["embedding"]) == pytest.approx(0.8, rel=0.05)
    layers = [*laid_out.layers_of(weights, make())]
    for i, w in enumerate(layers):
        assert float(w["residual"]) == pytest.approx(1.15 - 0.1 * i / 3)
        assert float(w["first"]) == pytest.approx(0.2 - 0.15 * i / 3)
        assert np.std(w["layer.mlp.up"]) == pytest.approx(0.4 * E**-0.5, rel=0.05)
        assert not np.any(w["layer.mlp.down"]) and not np.any(w["layer.attention.output"])
    table = layers[-1]["layer.attention.value_embedding.table"]
    assert np.std(table) == pytest.approx(E**-0.5, rel=0.05)


@pytest.mark.slow
def test_each_part_can_be_left_out():
    sizes = []
    for part in ("value_embeddings", "residual_scales", "smear", "backout"):
        made = jax.eval_shape(functools.partial(make, **{part: False}))
        sizes.append(sum(x.size for x in jax.tree.leaves(made)))
    whole = sum(x.size for x in jax.tree.leaves(jax.eval_shape(make)))
    assert [whole - size for size in sizes] == [2 * (V * E + 12 * H), 2 * L, 24 + 1, 1]
    bare = make(**dict.fromkeys(("value_embeddings", "residual_scales", "smear", "backout"), False))
    assert jnp.all(jnp.isfinite(bare(tokens())))
    with pytest.raises(ValueError, match="embed = 64 must be an even multiple of heads = 3"):
        make(heads=3)
