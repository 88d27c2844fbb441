"""Splash attention: Pallas's fused attention for TPUs, which skips tiles that are all masked.

Shapes: C devices along `context`, B batch, S sequence (queries), T sequence (keys), H heads,
K kv_heads, D head_dim of queries and keys, V that of values.
"""

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as kernel,
)
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32

from lmlib.models.attend.fused.splash_tiles import Visible, visited
from lmlib.models.attend.kernel import Kernel, Options, Places
from lmlib.models.attend.pairs import largest_tile
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
    k_BTKD: Float[Array, "b t k d"],
    v_BTKV: Float[Array, "b t k v"],
    segments_BS: Int32[Array, "b s"],
    segments_BT: Int32[Array, "b t"],
    places: Places,
    options: Options,
) -> tuple[Float[Array, "b s h v"], None]:
    """See `lmlib.models.attend.kernel.Kernel`. Where there is no TPU, Pallas interprets the kernel,
    which is for tests."""
    segments = kernel.SegmentIds(segments_BS, segments_BT)
    devices_CS, own, piece = places
    for size in (q_BSHD.shape[-1], v_BTKV.shape[-1]):
        if (reason := problem(piece, size, q_BSHD.dtype, options.soft_cap)) is not None:
            raise ValueError(f"{reason}; use attention='blockwise' or 'auto'")
    tile = _LANES * largest_tile(piece // _LANES, _LARGEST_TILE // _LANES)
    of_devices = visited(devices_CS, k_BTKD.shape[1], tile, options.window)
    to_keys, to_queries = jax.tree.map(lambda x_C: jnp.asarray(x_C)[own], of_devices)
    attend_HSD = kernel.SplashAttentionKernel(
        to_keys,
        to_keys,
        to_queries,
        block_sizes=kernel.BlockSizes(
            block_q=tile, block_kv=tile, block_kv_compute=tile,
            block_q_dkv=tile, block_kv_dkv=tile, block_kv_dkv_compute=tile,
            block_q_dq=tile, block_kv_dq=tile,
        ),
        is_mqa=False,
        save_residuals=False,
        mask_value=kernel.DEFAULT_MASK_VALUE,
        attn_logits_soft_cap=options.soft_cap,
        residual_checkpoint_name="attention_kernel",
        mask_function=Visible(options.window),
        interpret=platform() != "tpu",
    )  # fmt: skip
    q_BSHD = q_BSHD * options.scale
    q_BHSD, k_BKTD, v_BKTV = (x.transpose(0, 2, 1, 3) for x in (q_BSHD, k_BTKD, v_BTKV))
    mixed_BHSV = jnp.asarray(jax.vmap(attend_HSD)(q_BHSD, k_BKTD, v_BKTV, segments))
    return mixed_BHSV.transpose(0, 2, 1, 3), None


KERNEL = Kernel(attend, problem, has_normaliser=False, takes_pieces=True)
