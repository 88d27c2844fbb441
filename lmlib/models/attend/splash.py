"""Splash attention: Pallas's fused attention for TPUs, which skips tiles that are all masked.

Shapes: B batch, S sequence (queries), T sequence (keys), H heads, K kv_heads, D head_dim of queries
and keys, V that of values.
"""

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as kernel,
)
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32

from lmlib.models.attend.options import Options
from lmlib.parallel.collectives import platform

_LANES = 128  # of a TPU's vector unit: tiles are multiples of it
_LARGEST_TILE = 512


def problem(
    sequence_length: int, head_dim: int, dtype: DTypeLike, soft_cap: float | None = None
) -> str | None:
    """Why splash attention cannot compute attention of these sizes, if it cannot."""
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float32):
        return f"splash computes in bfloat16 or float32, not in {jnp.dtype(dtype)}"
    if sequence_length % _LANES:
        return (
            f"splash needs a sequence length that is a multiple of {_LANES}, not {sequence_length}"
        )
    if head_dim % 64:
        return f"splash needs a head_dim that is a multiple of 64, not {head_dim}"
    return None


def attend(
    q_BSHD: Float[Array, "b s h d"],
    k_BTKD: Float[Array, "b s k d"],
    v_BTKV: Float[Array, "b s k v"],
    segment_ids_BS: Int32[Array, "b s"],
    options: Options,
) -> Float[Array, "b s h v"]:
    """See `lmlib.models.attend.attend`; on the part of one device. Where there is no TPU, Pallas
    interprets the kernel, which is for tests."""
    _, S, H, D = q_BSHD.shape
    for size in (D, v_BTKV.shape[-1]):
        if (reason := problem(S, size, q_BSHD.dtype, options.soft_cap)) is not None:
            raise ValueError(f"{reason}; use attention='blockwise' or 'auto'")
    window = options.window
    mask = (
        masks.CausalMask((S, S)) if window is None else masks.LocalMask((S, S), (window - 1, 0), 0)
    )
    tile = max(size for size in range(_LANES, _LARGEST_TILE + 1, _LANES) if S % size == 0)
    attend_HSD = kernel.make_splash_mha(
        masks.MultiHeadMask([mask] * H),
        block_sizes=kernel.BlockSizes(
            block_q=tile, block_kv=tile, block_kv_compute=tile,
            block_q_dkv=tile, block_kv_dkv=tile, block_kv_dkv_compute=tile,
            block_q_dq=tile, block_kv_dq=tile,
        ),
        head_shards=1,
        q_seq_shards=1,
        attn_logits_soft_cap=options.soft_cap,
        residual_checkpoint_name="attention_kernel",
        interpret=platform() != "tpu",
    )  # fmt: skip
    q_BSHD = q_BSHD * options.scale
    q_BHSD, k_BKTD, v_BKTV = (x.transpose(0, 2, 1, 3) for x in (q_BSHD, k_BTKD, v_BTKV))
    segments = kernel.SegmentIds(segment_ids_BS, segment_ids_BS)
    return jax.vmap(attend_HSD)(q_BHSD, k_BKTD, v_BKTV, segments).transpose(0, 2, 1, 3)
