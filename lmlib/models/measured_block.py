"""A block that reports the largest attention logit of each head, for `lmlib.optim.qk_clip`.

Shapes: B batch, S sequence (queries), T sequence (keys), Q queries of a tile, E embed, H heads,
K kv_heads, G = H / K, D head_dim.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int32, PRNGKeyArray

from lmlib.models.attend import one_document
from lmlib.models.attend.kernel import Options
from lmlib.models.block import Block
from lmlib.models.forward_context import ForwardContext
from lmlib.models.part import AuxOutputs, class_name
from lmlib.models.parts.attention import Attention
from lmlib.parallel.axes import PartError
from lmlib.parallel.collectives import in_a_stage, shard_map
from lmlib.parallel.layout import partition

_TILE = 256  # queries whose logits are in memory at a time


class Largest(NamedTuple):
    """A tally whose microbatches are combined by their maximum, not their sum."""

    value: Array

    def combined(self) -> "Largest":
        """Returns the maximum over the first axis."""
        return Largest(jnp.max(self.value, axis=0))


class MeasuredBlock(Block):
    """A `Block` with its MLP's tallies, and `Largest` of its heads' logits.

    Logits are scale · q · k of queries and keys that attend to each other, in the whole batch. They
    are computed once more in the forward pass, whatever kernel attention has, which takes a sixth
    of attention's FLOPs. The weights and their paths are the block's.
    """

    rows_may_be_split = False

    attention: Attention

    def __call__(
        self, x_BSE: Float[Array, "b s embed"], context: ForwardContext, cache: Any = None
    ) -> tuple[Float[Array, "b s embed"], AuxOutputs, Any]:
        """A layer's call; see `Part`."""
        if in_a_stage():
            raise PartError("largest attention logits are not measured in stages: take stage=1")
        y_BSE, aux, new_cache = super().__call__(x_BSE, context, cache)
        if cache is not None:
            return y_BSE, aux, new_cache
        attention, x_BSE = jax.lax.stop_gradient((self.attention, self.attention_input(x_BSE)))
        q_BSHD, k_BTKD, _ = attention._projected(x_BSE, context)
        with jax.named_scope("attention"):
            largest_H = largest_logits(
                q_BSHD, k_BTKD, context.segment_ids_BS, attention.window, attention.scale
            )
        return y_BSE, aux._replace(tallies=(aux.tallies, Largest(largest_H))), new_cache

    def updated(self, tallies: Any) -> Any:
        return super().updated(tallies[0])

    def measured(self, tallies: Any) -> dict[str, Array]:
        """The MLP's metrics, and the largest attention logit of the layer."""
        largest = {"largest_attention_logit": jnp.max(tallies[1].value)}
        return super().measured(tallies[0]) | largest

    def flops_per_token(self, sequence_length: int, causal: bool) -> float:
        whole = super().flops_per_token(sequence_length, causal)
        _, heads, head_dim = self.attention.query.shape
        keys = float(min(self.attention.window or sequence_length, sequence_length))
        if causal:
            keys -= keys**2 / (2 * sequence_length)
        return whole + 2 * heads * head_dim * keys


def measured_block(block: Block, *, key: PRNGKeyArray) -> MeasuredBlock:
    """Returns `block` as a `MeasuredBlock`, for the argument `layer` of a family.

    Raises ValueError for layers whose logits it cannot measure, or the clipping not change: latent
    attention, whose rotary keys the heads share, and normed queries or keys.
    """
    if type(block) is not Block or not isinstance(block.attention, Attention):
        of = class_name(block if type(block) is not Block else block.attention)
        raise ValueError(f"attention logits of {of} cannot be clipped: leave out measured_block")
    if block.attention.query_norm is not None or block.attention.key_norm is not None:
        raise ValueError(
            "queries or keys are normed, so their logits are bounded, and do not depend on the "
            "size of the weights that qk_clip scales: leave out measured_block and qk_clip"
        )
    return MeasuredBlock(
        attention=block.attention,
        mlp=block.mlp,
        attention_norm=block.attention_norm,
        mlp_norm=block.mlp_norm,
        attention_after_norm=block.attention_after_norm,
        mlp_after_norm=block.mlp_after_norm,
        residual_multiplier=block.residual_multiplier,
    )


def largest_logits(
    q_BSHD: Float[Array, "b s heads head_dim"],
    k_BTKD: Float[Array, "b s kv_heads head_dim"],
    segment_ids_BS: Int32[Array, "b s"] | None,
    window: int | None = None,
    scale: float | None = None,
) -> Float[Array, "heads"]:
    """Returns each head's largest scale · q · k of the batch, float32 or wider, on every device.

    Only keys that the query attends to count, and no padding.
    """
    if segment_ids_BS is None:
        segment_ids_BS = one_document(q_BSHD)
    of_rows_BH = shard_map(
        functools.partial(_of_rows, options=Options.of(window, scale, None, q_BSHD.shape[-1])),
        inputs=(
            partition("batch seq heads head_dim"),
            partition("batch seq kv_heads head_dim"),
            partition("batch seq"),
        ),
        outputs=partition("batch heads"),
        tracked=False,
    )(q_BSHD, k_BTKD, segment_ids_BS)
    largest_H = jnp.max(of_rows_BH, axis=0)
    if jax.sharding.get_abstract_mesh().empty:
        return largest_H
    return jax.sharding.reshard(largest_H, PartitionSpec())


def _of_rows(q_BSHD: Array, k_BTKD: Array, segments_BS: Array, options: Options) -> Array:
    B, S, H, D = q_BSHD.shape
    K, Q = k_BTKD.shape[2], math.gcd(S, _TILE)
    wide = jnp.promote_types(q_BSHD.dtype, jnp.float32)

    def of_tile(first: Array) -> Array:
        tile = functools.partial(jax.lax.dynamic_slice_in_dim, start_index=first, slice_size=Q)
        q_BQKGD = jnp.reshape(tile(q_BSHD, axis=1), (B, Q, K, H // K, D))
        logits_BKGQT = jnp.einsum("bqkgd,btkd->bkgqt", q_BQKGD, k_BTKD, preferred_element_type=wide)
        distance_QT = (first + jnp.arange(Q))[:, None] - jnp.arange(S)
        near_QT = (distance_QT >= 0) & (distance_QT < (options.window or S))
        segments_BQ1 = tile(segments_BS, axis=1)[:, :, None]
        seen_BQT = near_QT & (segments_BQ1 == segments_BS[:, None]) & (segments_BQ1 > 0)
        logits_BKGQT = jnp.where(seen_BQT[:, None, None], options.scores(logits_BKGQT), -jnp.inf)
        return jnp.max(logits_BKGQT, axis=(-2, -1)).reshape(B, H)

    return jnp.max(jax.lax.map(of_tile, jnp.arange(0, S, Q)), axis=0)
