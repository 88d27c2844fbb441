"""Results of a model for each token of a batch: its loss, and the likeliest ids.

Shapes: B batch, S sequence, E embed, V vocab, N tokens of a chunk, K likeliest.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from lmlib.compute import Compute
from lmlib.data.batch import Batch
from lmlib.losses.features import features, is_split
from lmlib.losses.fused import (
    ChunkLogits,
    chunk_logits,
    gathered,
    inputs,
    merge_chunks,
    scan_chunks,
    split_into_chunks,
    vocabulary_ids,
)
from lmlib.models.model import Model
from lmlib.parallel.collectives import all_gather, axis_index, pmax, psum, shard_map
from lmlib.parallel.layout import mesh_axes_for, partition


def of_each_token(
    function: Callable[..., Any], model: Model, batch: Batch, compute: Compute, h_BSE: Array
) -> Any:
    """Applies `function(logits, targets_N, loss_mask_N)` to every token of `batch`.

    It runs on each device, with its `ChunkLogits`, and returns a tree of arrays [n, …]. They are
    returned as [b, s, …] in the layout of the batch, without gradients. `h_BSE` are the features.
    """
    split = is_split(h_BSE)

    def local(h_BSE: Array, table_EV: Array, *tokens: Array) -> Any:
        h_BSE, table_EV = gathered(split, h_BSE, table_EV)

        def visit(nothing: None, chunk: tuple[Array, ...]) -> tuple[None, Any]:
            h_NE, *tokens = chunk
            dtype = compute.logits_dtype
            logits = chunk_logits(table_EV, h_NE, tokens[0], model.logit_cap, dtype)
            return None, function(logits, *tokens)

        parts = split_into_chunks(compute.loss_chunk, table_EV.shape[1], h_BSE, *tokens)
        found = scan_chunks(visit, None, parts)[1]
        return jax.tree.map(lambda x_CN: merge_chunks(x_CN, tokens[0].shape), found)

    tokens = partition("batch seq")
    on_devices = shard_map(local, (*inputs(split), tokens, tokens), tokens, tracked=False)
    of_batch = jnp.asarray(batch.targets), jnp.asarray(batch.loss_mask)
    return on_devices(h_BSE, model.unembedding_EV(), *of_batch)


def token_losses(
    model: Model, batch: Batch, compute: Compute, h_BSE: Float[Array, "b s embed"] | None = None
) -> tuple[Float[Array, "b s"], Bool[Array, "b s"]]:
    """Returns the loss of each token, and True where the target was the likeliest token.

    The loss is -log p(target) in nats, float32 or wider. Among equally likely tokens the lowest id
    counts. Both arrays have the layout of the batch, without gradients; positions that
    `batch.loss_mask` excludes get 0 and False.

    Args:
      h_BSE: the features of the batch, if they are already computed.
    """
    h_BSE = features(model, batch, compute).h_BSE if h_BSE is None else h_BSE
    nats_BS, is_likeliest_BS = of_each_token(_losses, model, batch, compute, h_BSE)
    return nats_BS, is_likeliest_BS


class TokenResults(NamedTuple):
    """`token_losses`, and the mean of each token's logits; 0 where there is no target."""

    nats_BS: Float[Array, "b s"]
    is_likeliest_BS: Array
    mean_logit_BS: Float[Array, "b s"]


def token_results(
    model: Model, batch: Batch, compute: Compute, h_BSE: Float[Array, "b s embed"]
) -> TokenResults:
    """Returns `token_losses` and mean logits of a batch with the features `h_BSE`."""

    def found(logits: ChunkLogits, targets_N: Array, loss_mask_N: Array) -> TokenResults:
        sum_N = psum(jnp.sum(logits.logits_NV, axis=-1), mesh_axes_for("vocab"))
        mean_N = jnp.where(loss_mask_N, sum_N / model.vocab, 0)
        return TokenResults(*_losses(logits, targets_N, loss_mask_N), mean_N)

    return of_each_token(found, model, batch, compute, h_BSE)


def _losses(logits: ChunkLogits, targets_N: Array, loss_mask_N: Array) -> tuple[Array, Array]:
    is_highest_NV = logits.logits_NV == logits.highest_N[:, None]
    none = jnp.iinfo(jnp.int32).max
    lowest_N = jnp.min(jnp.where(is_highest_NV, vocabulary_ids(logits.logits_NV), none), axis=-1)
    likeliest_N = -pmax(-lowest_N, mesh_axes_for("vocab"))
    nats_N = jnp.where(loss_mask_N, logits.cross_entropy_N, 0)
    return nats_N, loss_mask_N & (likeliest_N == targets_N)


def likeliest_tokens(
    model: Model, batch: Batch, compute: Compute, k: int
) -> tuple[Int32[Array, "b s k"], Float[Array, "b s k"]]:
    """Returns the `k` likeliest ids after each position, and their log-probabilities.

    The likeliest id is first; among equally likely ids the lowest is first. Log-probabilities are
    in nats, float32 or wider. Both arrays have the layout of the batch.

    Raises:
      ValueError: if the vocabulary has fewer than `k` ids.
    """
    if not 1 <= k <= model.vocab:
        raise ValueError(
            f"k is {k}: it must be at least 1, and at most the vocabulary's {model.vocab:,} ids"
        )

    def found(logits: ChunkLogits, *_: Array) -> tuple[Array, Array]:
        V = logits.logits_NV.shape[1]
        logits_NK, ids_NK = jax.lax.top_k(logits.logits_NV, min(k, V))
        ids_NK += V * axis_index(mesh_axes_for("vocab"))
        # The order of the devices keeps the lowest of equal ids first.
        logits_NK, ids_NK = (
            all_gather(x, mesh_axes_for("vocab"), axis=1) for x in (logits_NK, ids_NK)
        )
        logits_NK, places_NK = jax.lax.top_k(logits_NK, k)
        log_p_NK = (logits_NK - logits.highest_N[:, None]) - logits.log_normaliser_N[:, None]
        return jnp.take_along_axis(ids_NK, places_NK, axis=1), log_p_NK

    h_BSE = features(model, batch, compute).h_BSE
    ids_BSK, log_p_BSK = of_each_token(found, model, batch, compute, h_BSE)
    return ids_BSK, log_p_BSK
