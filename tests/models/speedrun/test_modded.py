"""The decoder of modded-nanogpt's record: its equations in float32 PyTorch, documents, caches.

Shapes: B batch, S sequence, E embed, H heads, D head_dim, V vocab.
"""

import functools
import math

import jax
import jax.numpy as jnp
import laid_out
import numpy as np
import pytest
from whole_decoders import FLOAT32, check_documents, check_generation, check_gradients

from lmlib import Compute, make_mesh
from lmlib.data.synthetic import Synthetic
from lmlib.models.speedrun.bigram import signs
from lmlib.models.speedrun.modded import Layout, modded

V, E, H, D, F, B, S, R = 64, 64, 4, 16, 96, 2, 14, 101
SHORT, LONG, COMPOSED, YARN = 4, 7, 3, (6, 9)
LAYOUT = Layout(
    pieces=(2, 2, 1, 1), long=(1, 5), paired=(0, 4), values=(1, 4, 5), exclusive=(1, 2),
    gated=(1, 5), composed=(5,), skip=3,
)  # fmt: skip
LAST = LAYOUT.layers - 1
SOURCE = Synthetic(vocab_size=V, batch_size=8, sequence_length=16)


def make(key=None, **settings):
    sizes = dict(
        vocab=V, embed=E, heads=H, mlp=F, layout=LAYOUT, short_window=SHORT, long_window=LONG,
        yarn_windows=YARN, bigram_rows=R, composed_window=COMPOSED,
    )  # fmt: skip
    return modded(**sizes | settings, key=jax.random.key(0) if key is None else key)


@functools.cache
def model(**settings):
    """No weight has its initial value."""
    return laid_out.drawn(jax.eval_shape(functools.partial(make, **settings)))


def tokens():
    return jnp.asarray(np.random.default_rng(2).integers(0, V, (B, S)), jnp.int32)


def gates_by_pytorch(weights, name, x, torch):
    first, second, bias = (weights[f"{name}.{each}"] for each in ("first", "second", "bias"))
    scale = weights.get(f"{name}.scale", torch.tensor(0.1))
    return (torch.nn.functional.gelu(x @ first) @ second + bias) * scale


def by_pytorch(weights, layers, row, torch):
    """Logits of one text, after `GPT.forward` of `train_gpt.py` at commit f411b3d.

    Its logits have another cap. In paired layers its head a · H / 2 + b is ours 2 b + a.
    """

    def norm(x):
        return torch.nn.functional.rms_norm(x, (x.shape[-1],))

    frequency = (1 / 1_024) ** torch.linspace(0, 1, D // 4)
    rotations = YARN[0] * frequency / (2 * torch.pi)
    ramp = torch.clamp((rotations - 1) / (32 - 1), 0, 1)
    frequency = frequency * (YARN[0] / YARN[1] + ramp * (1 - YARN[0] / YARN[1]))
    frequency = torch.cat([frequency.repeat_interleave(2), torch.zeros(D // 2)])
    scale = 0.1 * (0.2 * math.log(YARN[1] / YARN[0]) + 1)
    # Its rotation is by minus our angle, so the two coordinates of a pair are ours exchanged.
    exchanged = [*(i ^ 1 for i in range(D // 2)), *range(D // 2, D)]
    in_pairs = [2 * b + a for a in range(2) for b in range(H // 2)]
    T = len(row)

    def rotated(x, position):  # x: T, heads, D; position: T or T, heads
        theta = position.float().view(T, -1, 1) * frequency
        cos, sin = theta.cos(), theta.sin().clone()
        sin[..., 1::2] *= -1
        flipped = x.view(*x.shape[:-1], -1, 2).flip(-1).view(x.shape)
        return cos * x + sin * flipped

    def probabilities(q, k, before, scale):
        distance = torch.arange(len(q))[:, None] - torch.arange(len(q))
        scores = scale * torch.einsum("shd,thd->hst", q, k)
        seen = (distance >= 0) & (distance <= before)
        return torch.softmax(scores.masked_fill(~seen, -torch.inf), -1)

    # Embeddings
    x = weights["embedding"][row]
    mod = R - 1
    bigrams = torch.full_like(row, mod)
    bigrams[1:] = torch.bitwise_xor(36_313 * row[1:], 27_191 * row[:-1]) % mod
    sign_index = torch.zeros_like(row)
    sign_index[1:] = (row[:-1] ^ row[1:]) % 8_192
    sign_table = torch.tensor(np.asarray(signs(jnp.arange(8_192), E)))
    x0_bigram = weights["bigram.table"][bigrams] * sign_table[sign_index]
    smear = weights["smear.share"] * torch.sigmoid(x[1:, :12] @ weights["smear.gate"][:, None])
    x = torch.cat([x[:1], x[1:] + smear * x[:-1]])
    x = x0 = norm(x)
    pre = gates_by_pytorch(weights, "gates.0", x0, torch)
    # Layer 0 has 2; layer 1 has its exclusive attention, gates of heads, and 2.
    assert pre.shape[-1] == 2 + H + H + 2
    xsa, head_gates = {1: pre[:, 2 : 2 + H]}, {1: pre[:, 2 + H : 2 + 2 * H]}
    x0_gates = {0: pre[:, 0:1], 1: pre[:, -2:-1]}
    bigram_gates = {0: pre[:, 1:2], 1: pre[:, -1:]}
    x = x + x0_bigram * bigram_gates[0]
    cache = {0: x}
    values = {}
    for i, w in enumerate(layers):
        mu = None
        if i == 2:
            post = gates_by_pytorch(weights, "gates.1", x, torch)
            sizes = [H, 1, 1, 1, 1, 1, H, H, H]
            xsa[2], x0_gates[2], bigram_gates[2], skip, x0_gates[4], bigram_gates[4], *rest = (
                post.split(sizes, -1)
            )
            head_gates[5], w1, w2 = rest
        resid = [w.get(name, torch.tensor(1.0)) for name in "abcd"]
        if i == LAYOUT.skip:
            x = x + torch.sigmoid(w["attention.share"]) * skip * cache["skipped"]
        else:
            attn_in = norm(cache.get("attended", x))
            paired = i in LAYOUT.paired
            order = in_pairs if paired else list(range(H))
            q, k, v = (
                torch.einsum("te,ehd->thd", w["attention.value_scale"] * attn_in, each[:, order])
                for each in (w["attention.query"], w["attention.key"], w["attention.value"])
            )
            q, k = norm(q)[..., exchanged], norm(k)[..., exchanged]
            aux_v = None
            if i in LAYOUT.values:
                ve = w["attention.value_embedding.table"][row]
                values[i] = ve
                ve_heads = ve.view(T, H, D)[:, order]
            if i == LAST:
                cache["last"] = x
                mu = gates_by_pytorch(weights, "mudd.0", x, torch)
                mu = mu.split(1, -1)
                v_mudd = mu[0] * cache[0] + mu[1] * cache["attended"] + mu[2] * x
                x = (1 + mu[5]) * x + mu[3] * cache[0] + mu[4] * cache["attended"]
                ve_gate = torch.cat([mu[6], mu[7]], -1).repeat_interleave(H // 2, -1)
                aux_v = ve_gate[..., None] * ve_heads + v_mudd.view(T, H, D)
            elif i in LAYOUT.values:
                logits = attn_in[:, :6] @ w["attention.value_embedding.gate"]
                logits = logits + ve[:, :6] @ w["attention.value_embedding.row_gate"]
                aux_v = 2 * torch.sigmoid(logits[:, order])[..., None] * ve_heads
            v = v if aux_v is None else v + aux_v
            position = torch.arange(T)
            before = LONG if i in LAYOUT.long else SHORT
            if not paired:
                q, k = rotated(q, position), rotated(k, position)
                if i in LAYOUT.long:
                    k = k.clone()
                    k[1:, :, D // 2 :] = k.clone()[:-1, :, D // 2 :]
                p = probabilities(q, k, before, scale)
                y = torch.einsum("hst,thd->shd", p, v)
            else:
                # factor1 of `Yarn(paired=True)` has 2 t for even heads and 2 t + 1 for odd ones.
                turn = 2 * position[:, None] + torch.arange(H) % 2
                q, k = rotated(q, turn), rotated(k, turn)
                q, k, v = (each.reshape(2 * T, H // 2, D) for each in (q, k, v))
                p = probabilities(q, k, before, scale)
                y = torch.einsum("hst,thd->shd", p, v).reshape(T, H, D)
            if i in LAYOUT.composed:
                within = probabilities(q, k, COMPOSED - 1, scale)
                post_w1 = torch.nn.functional.rms_norm(w1, (H,), eps=1e-6)
                composed = torch.einsum("hst,sh->st", within, post_w1)
                y = y + w2[..., None] * torch.einsum("st,thd->shd", composed, v)
            if i in xsa:
                dot = (y * v).sum(-1, keepdim=True)
                denom = v.square().sum(-1, keepdim=True).clamp_min(1e-8)
                y = y - torch.tanh(xsa[i])[..., None] * (dot / denom) * v
            if i in head_gates:
                y = y * head_gates[i][..., None]
            out = w["attention.output_scale"] * w["attention.output"][order]
            attn_out = torch.einsum("thd,hde->te", y, out)
            if mu is not None:
                x = mu[8] * x + mu[9] * attn_out + mu[12] * cache[0] + mu[13] * x0_bigram
            else:
                x = resid[0] * x + resid[1] * attn_out + x0 * x0_gates[i]
                if i != 0:
                    x = x + x0_bigram * bigram_gates[i]
        hidden = torch.relu(norm(x) @ w["mlp.up"]).square() @ w["mlp.down"]
        x = mu[10] * x + mu[11] * hidden if mu is not None else resid[2] * x + resid[3] * hidden
        cache |= {"skipped": x} if i == 1 else {"attended": x} if i == 3 else {}
    mu = gates_by_pytorch(weights, "mudd.1", x, torch).split(1, -1)
    x = x + mu[0] * cache[0] + mu[1] * cache["attended"] + mu[2] * cache["last"]
    x = x + mu[3] * cache["skipped"] + mu[4] * values[1]
    logits = (norm(x) * 23 / 30) @ weights["unembedding"]
    return 11.5 * torch.tanh(logits / 11.5)


@pytest.mark.slow
def test_logits_and_every_gradient_equal_pytorchs():
    torch = pytest.importorskip("torch")

    def of_rows(weights, layers, rows):
        assert len(layers) == LAYOUT.layers
        return torch.stack([by_pytorch(weights, layers, row, torch) for row in rows])

    check_gradients(model(), tokens(), of_rows, torch, 2e-5, 2e-4)


@pytest.mark.slow
def test_documents_of_a_row_are_apart():
    check_documents(model(), tokens(), 2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{}, {"fsdp": 2, "tensor": 2}], ids=str)
def test_generation_equals_the_full_pass(mesh):
    check_generation(model(), make_mesh(**mesh, data=-1), tokens())


# Composed heads, which rows that devices share do not support, are left out on some meshes.
WITHOUT = (("composed_heads", False),)


@functools.cache
def gradients(mesh, settings, **compute):
    compute = Compute(dtype="float32", **compute)
    return laid_out.loss_and_gradients(model(**dict(settings)), dict(mesh), compute, SOURCE)


@pytest.mark.slow
@pytest.mark.several_devices
@pytest.mark.parametrize(
    ("mesh", "settings", "sequence_parallel"),
    [({"fsdp": 4, "tensor": 2}, (), True), ({"fsdp": 2, "context": 4}, WITHOUT, False)],
    ids=str,
)
def test_every_mesh_gives_the_gradients_of_one_device(mesh, settings, sequence_parallel):
    loss, found = gradients(tuple(mesh.items()), settings, sequence_parallel=sequence_parallel)
    expected_loss, expected = gradients((), settings)
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    laid_out.assert_near(found, expected, 2e-4, least=1e-4)  # sums of many terms cancel


@pytest.mark.slow
@pytest.mark.several_devices
def test_composed_heads_refuse_rows_that_devices_share():
    with pytest.raises(ValueError, match=r"context=2 splits rows.*ComposedHeads must say"):
        laid_out.loss_and_gradients(model(), {"context": 2, "data": 4}, FLOAT32, SOURCE)


def test_paired_heads_need_whole_pairs():
    with pytest.raises(ValueError, match="at least 8: a quarter"):
        make(heads=16)
    with pytest.raises(ValueError, match="an even number: 1, 1"):
        jax.eval_shape(functools.partial(make, heads=1))


@pytest.mark.slow
def test_each_part_can_be_left_out():
    def size(**settings):
        return sum(
            x.size for x in jax.tree.leaves(jax.eval_shape(functools.partial(make, **settings)))
        )

    coefficient = 64 + 1  # of a network of gates
    expected = {
        "smear": 12 + 1,
        "value_embeddings": 3 * V * E + 2 * 12 * H + coefficient,
        "exclusive": 2 * H * coefficient,
        "head_gates": 2 * H * coefficient,
        "composed_heads": 2 * H * coefficient,
        "first_shares": 4 * coefficient,
        "scales": 4 * 4 + 2 + 5 * 2,
        "skip": -(4 * E * E + 2 + 2 + 2 * coefficient) + 1 + coefficient,
        "mudd": 2 * 64 * E + (14 + 5) * coefficient - 4 - 2 * coefficient - 12 * H,
        "paired_heads": 0,
        "key_offset": 0,
        "one_input": 0,
    }
    whole = size()
    assert {name: whole - size(**{name: False}) for name in expected} == expected
    assert whole - size(bigram_rows=0) == R * E + 4 * coefficient
    bare = make(bigram_rows=0, **dict.fromkeys(expected, False))
    plain = make(mudd=False, backout=True, skip=False)
    assert len(bare.gates) == 2 and not any(bare.gates)
    for each in (bare, plain):
        assert jnp.all(jnp.isfinite(each(tokens())))
