"""Attention by its definition (Vaswani et al. 2017, arXiv:1706.03762, eq. 1): the reference.

Shapes: B batch, S sequence (queries), T sequence (keys), H heads, K kv_heads, G = H / K query heads
to each key-value head, D head_dim of queries and keys, V that of values.
"""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int32

from lmlib.models.attend.kernel import Kernel, Options, Places


def attend(
    q_BSHD: Float[Array, "b s h d"],
    k_BTKD: Float[Array, "b s k d"],
    v_BTKV: Float[Array, "b s k v"],
    segments_BS: Int32[Array, "b s"],
    segments_BT: Int32[Array, "b s"],
    places: Places,
    options: Options,
) -> tuple[Float[Array, "b s h v"], Float[Array, "b s h"]]:
    """See `lmlib.models.attend.kernel.Kernel`; of whole rows."""
    B, S, H, _ = q_BSHD.shape
    weights_BHST, log_normaliser_BHS = weights(q_BSHD, k_BTKD, segments_BS, options)
    weights_BKGST = weights_BHST.astype(v_BTKV.dtype).reshape(B, k_BTKD.shape[2], -1, S, S)
    mixed_BSKGV = jnp.einsum("bkgst,btkv->bskgv", weights_BKGST, v_BTKV)
    mixed_BSHV = checkpoint_name(mixed_BSKGV.reshape(B, S, H, -1), "attention_kernel")
    log_normaliser_BSH = jnp.swapaxes(log_normaliser_BHS, 1, 2)
    return mixed_BSHV, checkpoint_name(log_normaliser_BSH, "attention_kernel")


def weights(
    q_BSHD: Float[Array, "b s h d"],
    k_BTKD: Float[Array, "b s k d"],
    segment_ids_BS: Int32[Array, "b s"],
    options: Options,
) -> tuple[Float[Array, "b h s t"], Float[Array, "b h s"]]:
    """See `lmlib.models.attend.attention_weights`, and the logarithms of their normalisers; on the
    part of one device."""
    B, S, H, D = q_BSHD.shape
    q_BSKGD = q_BSHD.reshape(B, S, k_BTKD.shape[2], -1, D)
    wide = jnp.promote_types(q_BSHD.dtype, jnp.float32)
    scores_BKGST = jnp.einsum("bskgd,btkd->bkgst", q_BSKGD, k_BTKD, preferred_element_type=wide)
    distance_ST = jnp.arange(S)[:, None] - jnp.arange(S)
    near_ST = (distance_ST >= 0) & (distance_ST < (options.window or S))
    same_BST = segment_ids_BS[:, :, None] == segment_ids_BS[:, None, :]
    allowed_B11ST = (near_ST & same_BST)[:, None, None]
    scores_BKGST = jnp.where(allowed_B11ST, options.scores(scores_BKGST), -jnp.inf)
    weights_BKGST = jax.nn.softmax(scores_BKGST, axis=-1)
    log_normaliser_BKGS = jax.nn.logsumexp(scores_BKGST, axis=-1)
    return weights_BKGST.reshape(B, H, S, S), log_normaliser_BKGS.reshape(B, H, S)


KERNEL = Kernel(attend)
