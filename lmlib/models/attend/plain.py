"""Attention by its definition (Vaswani et al. 2017, arXiv:1706.03762, eq. 1): the reference.

Shapes: B batch, S sequence (queries), T sequence (keys), H heads, K kv_heads, G = H / K query heads
to each key-value head, D head_dim.
"""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int32

from lmlib.models.attend.options import Options


def attend(
    q_BSHD: Float[Array, "b s h d"],
    k_BTKD: Float[Array, "b s k d"],
    v_BTKD: Float[Array, "b s k d"],
    segment_ids_BS: Int32[Array, "b s"],
    options: Options,
) -> Float[Array, "b s h d"]:
    """See `lmlib.models.attend.attend`; on the part of one device."""
    B, S, H, D = q_BSHD.shape
    weights_BHST = weights(q_BSHD, k_BTKD, segment_ids_BS, options).astype(v_BTKD.dtype)
    weights_BKGST = weights_BHST.reshape(B, k_BTKD.shape[2], -1, S, S)
    mixed_BSKGD = jnp.einsum("bkgst,btkd->bskgd", weights_BKGST, v_BTKD)
    return checkpoint_name(mixed_BSKGD.reshape(B, S, H, D), "attention_kernel")


def weights(
    q_BSHD: Float[Array, "b s h d"],
    k_BTKD: Float[Array, "b s k d"],
    segment_ids_BS: Int32[Array, "b s"],
    options: Options,
) -> Float[Array, "b h s t"]:
    """See `lmlib.models.attend.attention_weights`; on the part of one device."""
    B, S, H, D = q_BSHD.shape
    q_BSKGD = q_BSHD.reshape(B, S, k_BTKD.shape[2], -1, D)
    wide = jnp.promote_types(q_BSHD.dtype, jnp.float32)
    scores_BKGST = jnp.einsum("bskgd,btkd->bkgst", q_BSKGD, k_BTKD, preferred_element_type=wide)
    distance_ST = jnp.arange(S)[:, None] - jnp.arange(S)
    near_ST = (distance_ST >= 0) & (distance_ST < (options.window or S))
    same_BST = segment_ids_BS[:, :, None] == segment_ids_BS[:, None, :]
    allowed_B11ST = (near_ST & same_BST)[:, None, None]
    scores_BKGST = jnp.where(allowed_B11ST, options.scores(scores_BKGST), -jnp.inf)
    return jax.nn.softmax(scores_BKGST, axis=-1).reshape(B, H, S, S)
