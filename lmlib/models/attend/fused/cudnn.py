"""cuDNN's fused attention, for NVIDIA GPUs.

Shapes: B batch, S sequence (queries), T sequence (keys), H heads, K kv_heads, D head_dim of queries
and keys, V head_dim of values.
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32

from lmlib.models.attend.kernel import Kernel, Options, Places


def problem(
    sequence_length: int, head_dim: int, dtype: DTypeLike, soft_cap: float | None = None
) -> str | None:
    """The reason why cuDNN does not support these sizes; `None` if it does."""
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        return f"cudnn computes in bfloat16 or float16, not in {jnp.dtype(dtype)}"
    if head_dim % 8 or head_dim > 128:
        return f"cudnn needs a head_dim that is a multiple of 8 and at most 128, not {head_dim}"
    if soft_cap is not None:
        return "cudnn has no soft cap"
    return None


def attend(
    q_BSHD: Float[Array, "b s h d"],
    k_BTKD: Float[Array, "b s k d"],
    v_BTKV: Float[Array, "b s k v"],
    segments_BS: Int32[Array, "b s"] | None,
    segments_BT: Int32[Array, "b s"] | None,
    places: Places,
    options: Options,
) -> tuple[Float[Array, "b s h v"], None]:
    """See `lmlib.models.attend.kernel.Kernel`; supports only whole rows.

    Rows that are one document, `segments_BS=None`, need no mask. Otherwise a mask (B, 1, S, T),
    shared by all heads, separates documents: JAX's interface to cuDNN supports neither segment ids
    nor borders within a row. It supports only one head_dim: the smaller of D and V is padded with
    zeros.
    """
    V = v_BTKV.shape[-1]
    D = max(q_BSHD.shape[-1], V)
    same_B1ST = None
    if segments_BS is not None:
        same_B1ST = (segments_BS[:, :, None] == segments_BS[:, None, :])[:, None]
    q_BSHD, k_BTKD, v_BTKD = (_filled(x, D) for x in (q_BSHD, k_BTKD, v_BTKV))
    mixed_BSHD = jax.nn.dot_product_attention(
        q_BSHD,
        k_BTKD,
        v_BTKD,
        mask=same_B1ST,
        scale=options.scale,
        is_causal=True,
        local_window_size=None if options.window is None else (options.window - 1, 0),
        implementation="cudnn",
    )
    return mixed_BSHD[..., :V], None


def _filled(x_BSHD: Array, head_dim: int) -> Array:
    missing = head_dim - x_BSHD.shape[-1]
    return jnp.pad(x_BSHD, ((0, 0), (0, 0), (0, 0), (0, missing))) if missing else x_BSHD


KERNEL = Kernel(attend, problem, has_normaliser=False)
