"""What is minimised: sums over tokens, so that any split of a batch adds up to the same.

Shapes: B batch, S sequence, V vocab.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, PRNGKeyArray

from lmlib.data.batch import Batch
from lmlib.parallel.layout import spec


@runtime_checkable
class Decoder(Protocol):
    """What a loss asks of a model: tokens to residual stream, residual stream to logits.

    Random layers draw from `key`, and are off without one.
    """

    policy: Callable[..., bool]

    def trunk(
        self,
        tokens_BS: Array,
        positions_BS: Array,
        segment_ids_BS: Array,
        key: PRNGKeyArray | None = None,
    ) -> Array: ...

    def head(self, x_BSE: Array) -> Array: ...


class LossSums(NamedTuple):
    """Sums over the valid target tokens of a batch or of a part of one.

    cross_entropy: -log p(target), in nats.
    z: log²(Σ exp logits), which z-loss keeps near zero.
    """

    cross_entropy: Float[Array, ""]
    z: Float[Array, ""]


def loss_sums(
    logits_BSV: Float[Array, "b s vocab"],
    targets_BS: Int32[Array, "b s"],
    loss_mask_BS: Bool[Array, "b s"],
) -> LossSums:
    """Vocabulary-parallel: each `tensor` shard reduces its own logits, then (B, S) numbers travel.

    z-loss is that of PaLM (Chowdhery et al. 2022, arXiv:2204.02311, §5).
    """
    log_z_BS = jax.nn.logsumexp(logits_BSV, axis=-1)
    is_target_BSV = targets_BS[:, :, None] == jax.lax.broadcasted_iota(
        jnp.int32, logits_BSV.shape, 2, out_sharding=spec("batch seq vocab")
    )
    target_BS = jnp.sum(jnp.where(is_target_BSV, logits_BSV, 0), axis=-1)
    return LossSums(
        cross_entropy=jnp.sum(jnp.where(loss_mask_BS, log_z_BS - target_BS, 0)),
        z=jnp.sum(jnp.where(loss_mask_BS, jnp.square(log_z_BS), 0)),
    )


def batch_loss(model: Decoder, batch: Batch, key: PRNGKeyArray | None = None) -> LossSums:
    """Loss of the next token, summed over `batch.loss_mask`; `key` is for random layers.

    Logits are computed again in the backward pass unless the model saves "logits".
    """

    # Straight from a source, a batch is NumPy's.
    tokens_BS, positions_BS = jnp.asarray(batch.tokens), jnp.asarray(batch.positions)
    segment_ids_BS = jnp.asarray(batch.segment_ids)
    targets_BS, loss_mask_BS = jnp.asarray(batch.targets), jnp.asarray(batch.loss_mask)

    def tail(x_BSE: Array) -> LossSums:
        return loss_sums(model.head(x_BSE), targets_BS, loss_mask_BS)

    x_BSE = model.trunk(tokens_BS, positions_BS, segment_ids_BS, key)
    return jax.checkpoint(tail, policy=model.policy)(x_BSE)
