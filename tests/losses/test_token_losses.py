"""-log p of each token against float64 NumPy on the model's logits, on every mesh."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmlib.compute import Compute
from lmlib.data.synthetic import Synthetic
from lmlib.evaluate.scoring import Scorer
from lmlib.losses.token_losses import token_losses
from lmlib.models.families.llama import llama
from lmlib.models.protocol import Context
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
    context = Context(batch.positions, batch.segment_ids, FLOAT32)
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
