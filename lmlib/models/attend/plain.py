"""Attention by its definition (Vaswani et al. 2017, arXiv:1706.03762, eq. 1): the reference.

Shapes: B batch, S sequence (queries), T sequence (keys), H heads, K kv_heads, G = H / K query heads
per key-value head, D head_dim of queries and keys, V head_dim of values.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int32

from lmlib.models.attend import one_document
from lmlib.models.attend.kernel import Kernel, Options, Places, left_by_sinks
from lmlib.parallel.collectives import shard_map
from lmlib.parallel.layout import partition


def attend(
    q_BSHD: Array, k_BTKD: Array, v_BTKV: Array, segments_BS: Any, segments_BT: Any,
    places: Places, options: Options,
) -> tuple[Array, Array]:  # fmt: skip
    """See `lmlib.models.attend.kernel.Kernel`; supports only whole rows."""
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
    """`attention_weights` on one device's part, and the logarithms of the normalisers."""
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


def attention_weights(
    q_BSHD: Float[Array, "b s heads head_dim"],
    k_BTKD: Float[Array, "b s kv_heads head_dim"],
    segment_ids_BS: Int32[Array, "b s"] | None,
    *,
    window: int | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks_H: Float[Array, "heads"] | None = None,
) -> Float[Array, "b heads s t"]:
    """The weight of each key (t) for each query (s) in `lmlib.models.attend.attend`, with its
    arguments.

    Each row sums to 1, minus the weight of a sink. float32 or wider.
    """
    options = Options.of(window, scale, soft_cap, q_BSHD.shape[-1])
    if segment_ids_BS is None:
        segment_ids_BS = one_document(q_BSHD)
    weights_BHST, log_normaliser_BHS = shard_map(
        functools.partial(weights, options=options),
        inputs=(
            partition("batch seq heads head_dim"),
            partition("batch seq kv_heads head_dim"),
            partition("batch seq"),
        ),
        outputs=(partition(("batch", "heads", None, None)), partition("batch heads seq")),
        tracked=False,
    )(q_BSHD, k_BTKD, segment_ids_BS)
    if sinks_H is None:
        return weights_BHST
    return weights_BHST * left_by_sinks(log_normaliser_BHS, sinks_H[:, None])[..., None]


KERNEL = Kernel(attend)
