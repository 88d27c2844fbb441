"""Context parallelism: attention of rows that several devices share. Each device has some queries
of a row, and mixes values of the whole row.

    way     where      keys and values
    gather  gather.py  each device gathers all of them
    ring    ring.py    they go round, one device's at a time

Both visit the tiles of `lmlib.models.attend.tiles`, and compute the same. With "gather" a fused
kernel may take the place of the tiles (fused.py).

Shapes: B batch, S sequence of a device, H heads, K kv_heads, G = H / K query heads to each
key-value head, D head_dim of queries and keys, V that of values.
"""

import functools
from collections.abc import Callable
from typing import Any

from jaxtyping import Array, Float, Int32

from lmlib.models.attend.context_parallel import fused, gather, ring
from lmlib.models.attend.context_parallel.split import Split
from lmlib.models.attend.kernel import Kernel, Options, kernel_of
from lmlib.parallel.collectives import devices_along
from lmlib.parallel.layout import along
from lmlib.row_order import pieces_of_devices

_WAYS = {"gather": gather.attend, "ring": ring.attend}
# Gathered keys and values may take so many times the memory of a device's queries.
_SMALL = 4


def problem(kernel: Kernel, way: str, sinks: bool = False) -> str | None:
    """The reason why a fused kernel cannot compute split rows, or `None`."""
    if not kernel.takes_pieces:
        return "it computes whole rows only"
    if sinks and not kernel.has_normaliser:
        return "it has no sinks"
    if way == "ring":
        return "it computes rows whose keys are gathered, not context='ring'"
    return None


def length_of_piece(length: int, devices: int, order: str) -> int:
    """How many of a row's tokens follow each other at least on one of the devices that share it."""
    return length // pieces_of_devices(devices, order).size


def function_of(
    implementation: str, heads: int, kv_heads: int, order: str, way: str, sinks: bool
) -> Callable[..., Any]:
    """The function `(q_BSHD, k_BSKD, v_BSKV, segments_BS, options)` of a device.

    Args:
      order: which tokens of the row each device has; see `lmlib.row_order`.
      way: "gather", "ring" or "auto", which is "gather" while what is gathered is small beside
        queries.

    Raises:
      ValueError: if the implementation cannot compute that; see `problem`.
    """
    if implementation != "blockwise":
        kernel = kernel_of(implementation)
        if (reason := problem(kernel, way, sinks)) is not None:
            raise ValueError(f"{implementation}: {reason}; use attention='blockwise' or 'auto'")
        return functools.partial(fused.attend, kernel=kernel, order=order)
    if way == "auto":
        small = devices_along(along("seq")) * kv_heads <= _SMALL * heads
        way = "gather" if small else "ring"
    return functools.partial(attend, order=order, way=way)


def attend(
    q_BSHD: Float[Array, "b s h d"],
    k_BSKD: Float[Array, "b s k d"],
    v_BSKV: Float[Array, "b s k v"],
    segments_BS: Int32[Array, "b s"],
    options: Options,
    order: str,
    way: str,
) -> tuple[Float[Array, "b s h v"], Float[Array, "b s h"]]:
    """As `lmlib.models.attend.blockwise.attend`, of this device's queries over the keys of the
    whole row."""
    B, S, H, D = q_BSHD.shape
    k_BKSD, v_BKSV = k_BSKD.swapaxes(1, 2), v_BSKV.swapaxes(1, 2)
    q_BKGSD = q_BSHD.swapaxes(1, 2).reshape(B, k_BKSD.shape[1], -1, S, D)
    split = Split.of(order, S)
    mixed_BKGSV, log_normaliser_BKGS = _WAYS[way](
        split, options, q_BKGSD, k_BKSD, v_BKSV, segments_BS
    )
    mixed_BHSV = mixed_BKGSV.reshape(B, H, S, -1)
    return mixed_BHSV.swapaxes(1, 2), log_normaliser_BKGS.reshape(B, H, S).swapaxes(1, 2)
