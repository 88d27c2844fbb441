"""Fused attention for NVIDIA GPUs with documents, in Pallas for Triton.

A tile of queries visits the tiles of keys that its documents and the window allow, and masks the
ones at their borders. A packed row therefore costs as much as its documents, and a device may have
any pieces of a row. cuDNN, as JAX calls it, supports neither, nor soft caps or sinks: docs/gpus.md.

Shapes: B batch, S sequence (queries), T sequence (keys), H heads, K kv_heads, D head_dim of queries
and keys, V head_dim of values.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from lmlib.models.attend.fused import triton_kernels
from lmlib.models.attend.fused.triton_kernels import Launches, launches_of
from lmlib.models.attend.fused.visits import Sight, sight
from lmlib.models.attend.kernel import Kernel, Options, Places, Shapes

_SMALLEST_TILE = 16  # the minimum for a GPU's tensor cores
_LARGEST_HEAD = 256


def problem(shapes: Shapes) -> str | None:
    """The reason why this kernel does not support these shapes; `None` if it does."""
    if jnp.dtype(shapes.dtype) not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"triton computes in bfloat16, float16 or float32, not in {jnp.dtype(shapes.dtype)}"
    if shapes.sequence_length % _SMALLEST_TILE:
        length = shapes.sequence_length
        return f"triton needs sequences of a multiple of {_SMALLEST_TILE} tokens, not {length}"
    if shapes.head_dim > _LARGEST_HEAD:
        return f"triton needs a head_dim of at most {_LARGEST_HEAD}, not {shapes.head_dim}"
    return None


def attend(
    q_BSHD: Array, k_BTKD: Array, v_BTKV: Array, segments_BS: Any, segments_BT: Any,
    places: Places, options: Options,
) -> tuple[Array, Array]:  # fmt: skip
    """See `lmlib.models.attend.kernel.Kernel`. Without a GPU, Pallas interprets the kernel."""
    V = v_BTKV.shape[-1]
    q_BSHD, k_BTKD, v_BTKV = map(_filled, (q_BSHD, k_BTKD, v_BTKV))
    head_dim = max(q_BSHD.shape[-1], v_BTKV.shape[-1])
    launches = launches_of(places.piece, head_dim, q_BSHD.dtype)
    seen = sight(places.own_S, segments_BS, segments_BT, options.window)
    mixed_BSHV, log_normaliser_BHS = _mixed(launches, options, q_BSHD, k_BTKD, v_BTKV, seen)
    return mixed_BSHV[..., :V], log_normaliser_BHS.swapaxes(1, 2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _mixed(
    launches: Launches, options: Options, q_BSHD: Array, k_BTKD: Array, v_BTKV: Array, seen: Sight
) -> tuple[Array, Array]:
    return _forward(launches, options, q_BSHD, k_BTKD, v_BTKV, seen)[0]


_Saved = tuple[Array, Array, Array, Sight, Array, Array]


def _forward(
    launches: Launches, options: Options, q_BSHD: Array, k_BTKD: Array, v_BTKV: Array, seen: Sight
) -> tuple[tuple[Array, Array], _Saved]:
    mixed = triton_kernels.mixed(launches.mixed, options, q_BSHD, k_BTKD, v_BTKV, seen)
    mixed_BSHV, log_normaliser_BHS = (checkpoint_name(x, "attention_kernel") for x in mixed)
    saved = q_BSHD, k_BTKD, v_BTKV, seen, mixed_BSHV, log_normaliser_BHS
    return (mixed_BSHV, log_normaliser_BHS), saved


def _backward(
    launches: Launches, options: Options, saved: _Saved, given: tuple[Array, Array]
) -> tuple[Array, Array, Array, None]:
    q_BSHD, k_BTKD, v_BTKV, seen, mixed_BSHV, log_normaliser_BHS = saved
    d_mixed_BSHV, d_log_normaliser_BHS = given
    # Subtracted from the gradient of each weight: see `lmlib.models.attend.tiles.arriving`.
    products_BSHV = mixed_BSHV.astype(jnp.float32) * d_mixed_BSHV.astype(jnp.float32)
    towards_BHS = jnp.sum(products_BSHV, axis=-1).swapaxes(1, 2) - d_log_normaliser_BHS
    arriving = d_mixed_BSHV, log_normaliser_BHS, towards_BHS
    dq_BSHD = triton_kernels.query_gradients(
        launches.query_gradients, options, q_BSHD, k_BTKD, v_BTKV, seen, *arriving
    )
    dk_BTKD, dv_BTKV = triton_kernels.key_gradients(
        launches.key_gradients, launches.piece, options, q_BSHD, k_BTKD, v_BTKV, seen, *arriving
    )
    return dq_BSHD, dk_BTKD, dv_BTKV, None


_mixed.defvjp(_forward, _backward)


def _filled(x_BSHD: Array) -> Array:
    """Pads head_dim with zeros to a power of two, the only sizes of Triton's tiles."""
    size = x_BSHD.shape[-1]
    missing = max(_SMALLEST_TILE, 1 << (size - 1).bit_length()) - size
    return jnp.pad(x_BSHD, ((0, 0), (0, 0), (0, 0), (0, missing))) if missing else x_BSHD


KERNEL = Kernel(attend, problem, takes_pieces=True)
