"""Attention along `context` by a fused kernel: each device gathers the keys and values of all, in
the order of the row, and the kernel mixes them with the device's queries.

What is sent is what `lmlib.models.attend.context_parallel.gather` sends.

Shapes: P what each device has of T, B batch, S sequence of a device, T that of the row, K kv_heads,
H heads, D head_dim of queries and keys, V that of values.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from lmlib.models.attend.context_parallel.split import Split
from lmlib.models.attend.kernel import Kernel, Options
from lmlib.parallel.collectives import all_gather, psum_scatter
from lmlib.parallel.layout import along


def attend(
    q_BSHD: Float[Array, "b s h d"],
    k_BSKD: Float[Array, "b s k d"],
    v_BSKV: Float[Array, "b s k v"],
    segments_BS: Int32[Array, "b s"],
    options: Options,
    kernel: Kernel,
    order: str,
) -> tuple[Float[Array, "b s h v"], Float[Array, "b s h"] | None]:
    """The kernel's result for this device's queries and the keys of the whole row.

    Args:
      order: which tokens of the row each device has; see `lmlib.row_order`.
    """
    split = Split.of(order, q_BSHD.shape[1])
    k_BTKD, v_BTKV = (split.in_row_order(_gathered(x)) for x in (k_BSKD, v_BSKV))
    segments_BT = split.in_row_order(all_gather(segments_BS, along("seq"), axis=1))
    return kernel.attend(
        q_BSHD, k_BTKD, v_BTKV, segments_BS, segments_BT, split.query_places, options
    )


@jax.custom_vjp
def _gathered(x_BP: Array) -> Array:
    return all_gather(x_BP, along("seq"), axis=1)


def _forward(x_BP: Array) -> tuple[Array, None]:
    return _gathered(x_BP), None


def _backward(_: None, d_BT: Array) -> tuple[Array]:
    """The sum over devices is in float32 at least."""
    wide = jnp.promote_types(d_BT.dtype, jnp.float32)
    return (psum_scatter(d_BT.astype(wide), along("seq"), axis=1).astype(d_BT.dtype),)


_gathered.defvjp(_forward, _backward)
