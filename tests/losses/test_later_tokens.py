"""The loss of several tokens with one distribution, against PyTorch and on meshes.

Shapes: B batch, S sequence, E embed, V vocab.
"""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmlib import Compute, llama, make_mesh
from lmlib.data.batch import place
from lmlib.data.synthetic import Synthetic
from lmlib.losses.features import features
from lmlib.losses.later_tokens import LaterTokens
from lmlib.losses.next_token import NextToken
from lmlib.parallel.layout import sharding

V, S, WEIGHTS = 64, 16, (0.5, 0.25)
FLOAT32 = Compute(dtype="float32")
SOURCE = Synthetic(vocab_size=V, batch_size=4, sequence_length=S)


def model():
    made = llama(V, 32, 2, 2, 48, logit_cap=2.0, key=jax.random.key(0))
    return eqx.tree_at(lambda model: model.unembedding, made, 20 * made.unembedding)


def batch():
    """Each row has documents of 5 and 11 tokens; the last target of each does not count."""
    made = SOURCE.batch(0)
    ids_BS = np.tile(1 + (np.arange(S) >= 5), (4, 1)).astype(np.int32)
    positions_BS = np.tile(np.r_[np.arange(5), np.arange(11)], (4, 1)).astype(np.int32)
    mask_BS = np.tile((np.arange(S) != 4) & (np.arange(S) != S - 1), (4, 1))
    return dataclasses.replace(made, segment_ids=ids_BS, positions=positions_BS, loss_mask=mask_BS)


@pytest.mark.slow
def test_loss_and_gradient_equal_pytorchs():
    """The sum over tokens of Σ weight · cross-entropy, of the same logits."""
    torch = pytest.importorskip("torch")
    given, made = batch(), model()
    h_BSE = np.asarray(features(made, given, FLOAT32).h_BSE)
    table = torch.tensor(np.asarray(made.unembedding), requires_grad=True)
    logits = 2.0 * torch.tanh(torch.tensor(h_BSE) @ table / 2.0)
    targets = torch.tensor(np.asarray(given.targets)).long()
    loss, own = 0.0, 0.0
    for start, end in ((0, 4), (5, 15)):  # the positions that count
        for depth, weight in enumerate((1.0, *WEIGHTS)):
            of_depth = torch.nn.functional.cross_entropy(
                logits[:, start : end - depth].reshape(-1, V),
                targets[:, start + depth : end].reshape(-1), reduction="sum",
            )  # fmt: skip
            loss = loss + weight * of_depth
            own += of_depth.item() if depth == 0 else 0.0
    loss.backward()

    def total(model):
        sums = LaterTokens(weights=WEIGHTS).sums(model, None, given, FLOAT32)
        return sums.loss_sum, sums.reported["loss"]

    (found, reported), gradient = jax.value_and_grad(total, has_aux=True)(made)
    assert float(found) == pytest.approx(loss.item(), rel=1e-5)
    assert float(reported) == pytest.approx(own, rel=1e-5)
    expected = table.grad.numpy()
    error = np.linalg.norm(gradient.unembedding - expected)
    assert error <= 1e-5 * np.linalg.norm(expected)


@pytest.mark.slow
@pytest.mark.several_devices
@pytest.mark.parametrize("sizes", [{"fsdp": 2, "tensor": 2}, {"context": 4}], ids=str)
def test_every_mesh_gives_the_loss_of_one_device(sizes):
    objective = LaterTokens(weights=WEIGHTS)

    def total(model, batch):
        return objective.sums(model, None, batch, FLOAT32).loss_sum

    expected, gradients = jax.value_and_grad(total)(model(), SOURCE.batch(0))
    mesh = make_mesh(**sizes, data=-1, devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        given = place(SOURCE, 0, sharding("batch seq", mesh), "zigzag")
        found, found_gradients = jax.jit(jax.value_and_grad(total))(model(), given)
    assert float(found) == pytest.approx(float(expected), rel=1e-5)
    error = np.linalg.norm(found_gradients.unembedding - gradients.unembedding)
    assert error <= 1e-4 * np.linalg.norm(gradients.unembedding)


def test_without_later_tokens_it_is_the_next_tokens_loss():
    sums = [
        objective.sums(model(), None, batch(), FLOAT32)
        for objective in (LaterTokens(weights=()), NextToken())
    ]
    assert float(sums[0].loss_sum) == float(sums[1].loss_sum)
    with pytest.raises(ValueError, match=r"weights must be numbers of at least 0, got \(-1"):
        LaterTokens(weights=(-1.0,))
    assert jnp.isfinite(sums[0].loss_sum)
