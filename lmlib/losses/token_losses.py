"""What a model says of each token of a batch, a chunk of tokens at a time.

Shapes: B batch, S sequence, E embed, V vocab, N tokens of a chunk, C chunks.
"""

import functools

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from lmlib.compute import Compute
from lmlib.data.batch import Batch
from lmlib.losses.features import features, is_split
from lmlib.losses.logit_chunks import (
    chunk_logits,
    chunks,
    gather_inputs,
    inputs,
    visited,
    vocabulary_ids,
)
from lmlib.models.model import Model
from lmlib.parallel.collectives import on_each_device, pmax
from lmlib.parallel.layout import along, partition


def token_losses(
    model: Model, batch: Batch, compute: Compute
) -> tuple[Float[Array, "b s"], Bool[Array, "b s"]]:
    """-log p(target) of each position in nats, float32 at least, and whether the target was the
    likeliest token there (of equals the lowest id).

    Both lie on the mesh as the batch does; positions that `batch.loss_mask` leaves out get 0 and
    False. Nothing has a gradient.
    """
    return losses_of_features(model, features(model, batch, compute).h_BSE, batch, compute)


def losses_of_features(
    model: Model, h_BSE: Float[Array, "b s embed"], batch: Batch, compute: Compute
) -> tuple[Float[Array, "b s"], Bool[Array, "b s"]]:
    """`token_losses` of the features that `model` makes of `batch`."""
    targets_BS, loss_mask_BS = jnp.asarray(batch.targets), jnp.asarray(batch.loss_mask)
    arguments = h_BSE, model.unembedding_EV(), targets_BS, loss_mask_BS
    split = is_split(h_BSE)
    local = functools.partial(_local_losses, compute, model.logit_cap, split)
    outputs = partition("batch seq"), partition("batch seq")
    return on_each_device(local, inputs(split), outputs, tracked=False)(*arguments)


def _local_losses(
    compute: Compute,
    cap: float | None,
    split: bool,
    h_BSE: Array,
    table_EV: Array,
    targets_BS: Array,
    loss_mask_BS: Array,
) -> tuple[Array, Array]:
    h_BSE, table_EV = gather_inputs(split, h_BSE, table_EV)

    def visit(nothing: None, chunk: tuple[Array, Array, Array]) -> tuple[None, tuple[Array, Array]]:
        h_NE, targets_N, loss_mask_N = chunk
        found = chunk_logits(table_EV, h_NE, targets_N, cap, compute.logits_dtype)
        ids_NV = vocabulary_ids(found.logits_NV)
        is_highest_NV = found.logits_NV == found.highest_N[:, None]
        none = jnp.iinfo(jnp.int32).max
        likeliest_N = -pmax(
            -jnp.min(jnp.where(is_highest_NV, ids_NV, none), axis=-1), along("vocab")
        )
        nats_N = jnp.where(loss_mask_N, found.cross_entropy_N, 0)
        return None, (nats_N, loss_mask_N & (likeliest_N == targets_N))

    parts = chunks(compute.loss_chunk, table_EV.shape[1], h_BSE, targets_BS, loss_mask_BS)
    _, (nats_CN, likeliest_CN) = visited(visit, None, parts)
    tokens, shape = targets_BS.size, targets_BS.shape
    nats_BS, likeliest_BS = (
        each.reshape(-1)[:tokens].reshape(shape) for each in (nats_CN, likeliest_CN)
    )
    return nats_BS, likeliest_BS
