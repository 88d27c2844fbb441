"""The likeliest next tokens at each position of a batch, a chunk of positions at a time.

Shapes: B batch, S sequence, E embed, V vocab, N tokens of a chunk, C chunks, K likeliest.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from lmlib.compute import Compute
from lmlib.data.batch import Batch
from lmlib.losses.features import features, is_split
from lmlib.losses.logit_chunks import chunk_logits, chunks, gather_inputs, inputs, visited
from lmlib.models.model import Model
from lmlib.parallel.collectives import all_gather, axis_index, on_each_device
from lmlib.parallel.layout import along, partition


def likeliest_tokens(
    model: Model, batch: Batch, compute: Compute, k: int
) -> tuple[Int32[Array, "b s k"], Float[Array, "b s k"]]:
    """The `k` likeliest ids after each position, the likeliest first and of equals the lowest, and
    their log-probabilities in nats, float32 at least. Both lie on the mesh as the batch does.

    Raises:
      ValueError: if the vocabulary has fewer than `k` ids.
    """
    if not 1 <= k <= model.vocab:
        raise ValueError(
            f"k is {k}: it must be at least 1, and at most the vocabulary's {model.vocab:,} ids"
        )
    h_BSE = features(model, batch, compute).h_BSE
    split = is_split(h_BSE)
    local = functools.partial(_local_likeliest, compute, model.logit_cap, k, split)
    outputs = partition("batch seq"), partition("batch seq")
    on_devices = on_each_device(local, inputs(split)[:3], outputs, tracked=False)
    return on_devices(h_BSE, model.unembedding_EV(), jnp.asarray(batch.targets))


def _local_likeliest(
    compute: Compute,
    cap: float | None,
    k: int,
    split: bool,
    h_BSE: Array,
    table_EV: Array,
    targets_BS: Array,
) -> tuple[Array, Array]:
    h_BSE, table_EV = gather_inputs(split, h_BSE, table_EV)
    V = table_EV.shape[1]

    def visit(nothing: None, chunk: tuple[Array, Array]) -> tuple[None, tuple[Array, Array]]:
        h_NE, targets_N = chunk
        found = chunk_logits(table_EV, h_NE, targets_N, cap, compute.logits_dtype)
        logits_NK, ids_NK = jax.lax.top_k(found.logits_NV, min(k, V))
        ids_NK += V * axis_index(along("vocab"))
        # In the order of the devices, so that of equals the lowest id stays first.
        logits_NK, ids_NK = (
            all_gather(each, along("vocab"), axis=1) for each in (logits_NK, ids_NK)
        )
        logits_NK, places_NK = jax.lax.top_k(logits_NK, k)
        log_p_NK = (logits_NK - found.highest_N[:, None]) - found.log_normaliser_N[:, None]
        return None, (jnp.take_along_axis(ids_NK, places_NK, axis=1), log_p_NK)

    _, found = visited(visit, None, chunks(compute.loss_chunk, V, h_BSE, targets_BS))
    B, S = targets_BS.shape
    ids_BSK, log_p_BSK = (each.reshape(-1, k)[: B * S].reshape(B, S, k) for each in found)
    return ids_BSK, log_p_BSK
