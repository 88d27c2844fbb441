"""Logits a chunk of tokens at a time, so that they are never whole.

Each device makes the logits of its own tokens and its own share of the vocabulary; a few numbers
for each token travel over `tensor`. These are the parts of functions that run on each device.

Shapes: B batch, S sequence, E embed, V vocab, N tokens of a chunk, C chunks.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int32

from lmlib.models.parts.head import capped
from lmlib.parallel.collectives import all_gather, axis_index, platform, pmax, psum
from lmlib.parallel.layout import STORED, along, partition

# Logits of a chunk in float32: what a CPU core's cache can about hold, and what a device's memory
# does not notice.
_CHUNK_BYTES = {"cpu": 2**24}
_CHUNK_BYTES_ELSEWHERE = 2**30


class ChunkLogits(NamedTuple):
    """This device's share of the logits of a chunk of tokens, and what its devices know together.

    Attributes:
      logits_NV: capped, float32 at least.
      is_target_NV: one in each row is true, on the device whose share has the target.
      highest_N: the largest logit.
      log_normaliser_N: log Σ exp(logits - highest) over the whole vocabulary.
      log_p_NV: the log-probability of each token id, nats.
      p_NV: its probability, which is also d log_z / d logit.
      cross_entropy_N: -log p(target), nats.
    """

    logits_NV: Float[Array, "n v"]
    is_target_NV: Bool[Array, "n v"]
    highest_N: Float[Array, "n"]
    log_normaliser_N: Float[Array, "n"]
    log_p_NV: Float[Array, "n v"]
    p_NV: Float[Array, "n v"]
    cross_entropy_N: Float[Array, "n"]

    @property
    def log_z_N(self) -> Float[Array, "n"]:
        """log Σ exp logits over the whole vocabulary."""
        return self.highest_N + self.log_normaliser_N


def inputs(split: bool) -> tuple[PartitionSpec, ...]:
    """The layouts of features, table, targets and mask; `split`: of the features' sequence too."""
    features = partition("batch seq_parallel embed" if split else "batch seq embed")
    tokens = partition("batch seq")
    return features, partition("embed vocab", STORED), tokens, tokens


def gather_inputs(split: bool, h_BSE: Array, table_EV: Array) -> tuple[Array, Array]:
    """The features over the whole sequence, and the table over the whole of embed in their dtype
    (all-gathers over `tensor`, if `split`, and over `fsdp`)."""
    h_BSE = all_gather(h_BSE, along("vocab"), axis=1) if split else h_BSE
    return h_BSE, all_gather(table_EV.astype(h_BSE.dtype), along("embed", STORED), axis=0)


def chunk_logits(
    table_EV: Array, h_NE: Array, targets_N: Array, cap: float | None, logits_dtype: str
) -> ChunkLogits:
    """The logits of a chunk as `logits_alone` makes them; softmax is in float32 at least."""
    logits_NV = logits_alone(table_EV, h_NE, cap, logits_dtype)
    highest_N = pmax(jnp.max(logits_NV, axis=-1), along("vocab"))
    shifted_NV = logits_NV - highest_N[:, None]
    exponentials_NV = jnp.exp(shifted_NV)
    normaliser_N = psum(jnp.sum(exponentials_NV, axis=-1), along("vocab"))
    log_normaliser_N = jnp.log(normaliser_N)
    is_target_NV = targets_N[:, None] == vocabulary_ids(logits_NV)
    target_N = psum(jnp.sum(jnp.where(is_target_NV, logits_NV, 0), axis=-1), along("vocab"))
    log_p_NV = shifted_NV - log_normaliser_N[:, None]
    # The exponentials that were summed would be written to memory, float32, for the gradient. A CPU
    # takes long to compute others, and has these in its cache.
    is_cpu = platform() == "cpu"
    p_NV = exponentials_NV / normaliser_N[:, None] if is_cpu else jnp.exp(log_p_NV)
    # Large logits cancel before anything is rounded, which log_z - target would be.
    cross_entropy_N = (highest_N - target_N) + log_normaliser_N
    return ChunkLogits(
        logits_NV, is_target_NV, highest_N, log_normaliser_N, log_p_NV, p_NV, cross_entropy_N
    )


def logits_alone(
    table_EV: Array, h_NE: Array, cap: float | None, logits_dtype: str
) -> Float[Array, "n v"]:
    """The logits h · table of a chunk, made in `logits_dtype` or h's dtype if it is wider, float32
    at least from then on. `cap`: as `Model.logit_cap`."""
    wide = jnp.promote_types(h_NE.dtype, jnp.float32)
    logits_NV = jnp.einsum(
        "ne,ev->nv",
        h_NE,
        table_EV,
        preferred_element_type=jnp.promote_types(logits_dtype, h_NE.dtype),
    )
    return capped(logits_NV.astype(wide), cap)


def vocabulary_ids(logits_NV: Array) -> Int32[Array, "n v"]:
    """The token id of each logit in this device's share."""
    N, V = logits_NV.shape
    return jax.lax.broadcasted_iota(jnp.int32, (N, V), 1) + V * axis_index(along("vocab"))


def chunks(limit: int | None, vocab: int, *tokens: Array) -> tuple[Array, ...]:
    """Arrays (b, s, …) as (C, N, …): as few chunks as `limit` allows, all alike; the last is filled
    up with zeros, tokens that do not count.

    Args:
      limit: tokens whose logits a device holds at a time; `None`: 1 GiB of them in float32, on CPUs
        16 MiB.
      vocab: the share of this device.
    """
    held_bytes = _CHUNK_BYTES.get(platform(), _CHUNK_BYTES_ELSEWHERE)
    limit = limit or max(1, held_bytes // (4 * vocab))
    B, S = tokens[0].shape[:2]
    count = -(-B * S // limit)
    missing = -(B * S) % count

    def part(x: Array) -> Array:
        rest = x.shape[2:]
        flat = jnp.pad(x.reshape(B * S, *rest), ((0, missing), *((0, 0) for _ in rest)))
        return flat.reshape(count, -1, *rest)

    return tuple(map(part, tokens))


def visited(visit: Callable[..., Any], start: Any, parts: Any) -> Any:
    """`jax.lax.scan`, but no loop for one chunk: XLA's TPU compiler would run its body twice."""
    if jax.tree.leaves(parts)[0].shape[0] > 1:
        return jax.lax.scan(visit, start, parts)
    carry, y = visit(start, jax.tree.map(lambda x: x[0], parts))
    return carry, jax.tree.map(lambda y: y[None], y)
