"""-log p of each token against float64 NumPy on the model's logits, on every mesh."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmlib.compute import Compute
from lmlib.data.batch import packed_batch
from lmlib.data.synthetic import Synthetic
from lmlib.evaluate.scoring import Scorer
from lmlib.losses.token_losses import token_losses
from lmlib.models.families.llama import llama
from lmlib.models.forward_context import ForwardContext
from lmlib.parallel.layout import shardings
from lmlib.parallel.mesh import make_mesh
from lmlib.state import abstract_model

V = 32
FLOAT32 = Compute(dtype="float32")
BATCH = Synthetic(vocab_size=V, batch_size=8, sequence_length=16).batch(0)
make = functools.partial(llama, vocab=V, embed=16, layers=1, heads=4, mlp=16, key=jax.random.key(0))


@functools.cache
def initial():
    return jax.jit(make)()


@functools.cache
def expected():
    """Nats and likeliest of every valid target, from whole logits."""
    batch = jax.tree.map(jnp.asarray, BATCH)
    context = ForwardContext(batch.positions, batch.segment_ids, FLOAT32)
    logits_BSV = jax.jit(lambda model: model(batch.tokens, context))(initial())
    logits_BSV = np.asarray(logits_BSV, np.float64)
    log_z_BS = np.log(np.exp(logits_BSV).sum(-1))
    target_BS = np.take_along_axis(logits_BSV, BATCH.targets[..., None], -1)[..., 0]
    likeliest_BS = logits_BSV.argmax(-1) == BATCH.targets
    return np.where(BATCH.loss_mask, log_z_BS - target_BS, 0), likeliest_BS & BATCH.loss_mask


@pytest.mark.slow
@pytest.mark.several_devices
@pytest.mark.parametrize(
    ("mesh", "settings"),
    [
        (None, {"loss_chunk": 50}),
        ({}, {}),
        ({"fsdp": 8}, {"loss_chunk": 3}),
        ({"data": 2, "expert": 2, "tensor": 2}, {"loss_chunk": 5}),
        ({"data": 2, "fsdp": 2, "tensor": 2}, {"loss_chunk": 9, "sequence_parallel": True}),
    ],
)
def test_each_token_has_its_own_loss(mesh, settings):
    compute = Compute(dtype="float32", **settings)
    if mesh is None:
        nats_BS, likeliest_BS = jax.jit(functools.partial(token_losses, compute=compute))(
            initial(), BATCH
        )
    else:
        mesh = make_mesh(**mesh)
        model = jax.device_put(initial(), shardings(abstract_model(make, mesh)))
        nats_BS, likeliest_BS = Scorer(mesh, compute)(model, BATCH)
    right_BS, chosen_BS = expected()
    np.testing.assert_allclose(nats_BS, right_BS, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(likeliest_BS, chosen_BS)
    assert chosen_BS.any()


@pytest.mark.landing
def test_rows_known_to_be_whole_lose_what_their_segments_say():
    random = np.random.default_rng(0)
    tokens_BT = random.integers(V, size=(8, 17))
    starts_BT = random.random(tokens_BT.shape) < 0.2
    lengths_B = np.array([16, 0, 3, 16, 9, 1, 16, 12])  # padding follows
    batch = packed_batch(tokens_BT, starts_BT, lengths_B, attend_across_documents=True)
    compute = jax.jit(functools.partial(token_losses, compute=FLOAT32))
    known = compute(initial(), dataclasses.replace(batch, whole_rows=True))
    for one, other in zip(known, compute(initial(), batch), strict=True):
        np.testing.assert_array_equal(one, other)
    apart_BS, _ = compute(initial(), packed_batch(tokens_BT, starts_BT, lengths_B))
    assert np.abs(apart_BS - known[0]).max() > 1e-3
