"""cuDNN's fused attention, for NVIDIA GPUs.

Shapes: B batch, S sequence (queries), T sequence (keys), H heads, K kv_heads, D head_dim of queries
and keys, V head_dim of values.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from lmlib.models.attend.kernel import Kernel, Options, Places, Shapes


def problem(shapes: Shapes) -> str | None:
    """The reason why cuDNN does not support these shapes; `None` if it does."""
    if jnp.dtype(shapes.dtype) not in (jnp.bfloat16, jnp.float16):
        return f"cudnn computes in bfloat16 or float16, not in {jnp.dtype(shapes.dtype)}"
    if shapes.head_dim % 8 or shapes.head_dim > 128:
        return (
            f"cudnn needs a head_dim that is a multiple of 8 and at most 128, not {shapes.head_dim}"
        )
    if shapes.soft_cap is not None:
        return "cudnn has no soft cap"
    return None


def attend(
    q_BSHD: Array, k_BTKD: Array, v_BTKV: Array, segments_BS: Any, segments_BT: Any,
    places: Places, options: Options,
) -> tuple[Array, None]:  # fmt: skip
    """See `lmlib.models.attend.kernel.Kernel`; supports only whole rows.

    Rows of one document, `segments_BS=None`, need no mask; otherwise a mask (B, 1, S, T) separates
    documents. JAX's interface to cuDNN supports one head_dim, so the smaller of D and V is padded.
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
