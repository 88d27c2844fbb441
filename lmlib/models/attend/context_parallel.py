"""Context parallelism: attention over rows that several devices share.

    way     keys and values
    gather  each device gathers all of them (`lmlib.models.attend.blockwise.tiled`)
    ring    they are passed around, one device's at a time

Both visit the tiles of `lmlib.models.attend.tiles`. With "gather" a fused kernel may replace them.

Shapes: C devices along `context`, P each device's part of T, B batch, S sequence of a device, T
sequence of the row, H heads, K kv_heads, G = H / K query heads per key-value head, D head_dim of
queries and keys, V head_dim of values.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from lmlib.models.attend.blockwise import Split, heads_first
from lmlib.models.attend.kernel import Kernel, Options, kernel_of
from lmlib.parallel.collectives import all_gather, devices_along, psum_scatter
from lmlib.parallel.layout import mesh_axes_for
from lmlib.row_order import pieces_of_devices

# Gathered keys and values may take this multiple of the memory of a device's queries.
_SMALL = 4


def problem(kernel: Kernel, context_method: str) -> str | None:
    """The reason why a fused kernel does not support split rows; `None` if it does."""
    if not kernel.takes_pieces:
        return "it computes whole rows only"
    return (
        "it computes rows whose keys are gathered, not context_method='ring'"
        if context_method == "ring"
        else None
    )


def length_of_piece(length: int, devices: int, order: str) -> int:
    """The minimum number of a row's tokens that are adjacent on one of its devices."""
    return length // pieces_of_devices(devices, order).size


def function_of(
    implementation: str, heads: int, kv_heads: int, order: str, context_method: str
) -> Callable[..., Any]:
    """Returns the function `(q_BSHD, k_BSKD, v_BSKV, segments_BS, options)` for one device.

    "auto" gathers keys if they are small compared with the queries, else passes them around.
    """
    if implementation != "blockwise":
        return functools.partial(_fused, kernel=kernel_of(implementation), order=order)
    if context_method == "auto":
        small = devices_along(mesh_axes_for("seq")) * kv_heads <= _SMALL * heads
        context_method = "gather" if small else "ring"

    def attend(q_BSHD: Array, *others: Array, options: Options) -> tuple[Array, Array]:
        split = Split.of(order, q_BSHD.shape[1], context_method == "ring")
        return heads_first(split, options, q_BSHD, *others)

    return attend


def _fused(
    q_BSHD: Array, k_BSKD: Array, v_BSKV: Array, segments_BS: Array,
    options: Options, kernel: Kernel, order: str,
) -> tuple[Array, Array | None]:  # fmt: skip
    """The kernel's result for this device's queries and the keys of the whole row, in its order."""
    split = Split.of(order, q_BSHD.shape[1])
    k_BTKD, v_BTKV = (split.in_row_order(_all_of(x)) for x in (k_BSKD, v_BSKV))
    segments_BT = split.in_row_order(all_gather(segments_BS, mesh_axes_for("seq"), axis=1))
    return kernel.attend(
        q_BSHD, k_BTKD, v_BTKV, segments_BS, segments_BT, split.query_places, options
    )


@jax.custom_vjp
def _all_of(x_BP: Array) -> Array:
    return all_gather(x_BP, mesh_axes_for("seq"), axis=1)


def _all_of_backward(_: None, d_BT: Array) -> tuple[Array]:
    """Sums over devices in float32 or wider."""
    wide = jnp.promote_types(d_BT.dtype, jnp.float32)
    return (psum_scatter(d_BT.astype(wide), mesh_axes_for("seq"), axis=1).astype(d_BT.dtype),)


_all_of.defvjp(lambda x_BP: (_all_of(x_BP), None), _all_of_backward)
