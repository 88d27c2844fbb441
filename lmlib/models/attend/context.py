"""Attention of rows that `context` splits: each device has some of a row's queries, and mixes
values of the whole row.

    way     where                   what
    gather  keys_gathered.py        each device gathers all keys and values
    ring    keys_in_a_ring.py       they go round, one device's at a time

Both visit the tiles of `lmlib.models.attend.tiles`, and compute the same. With "gather" a fused
kernel may take their place (gathered_kernel.py).

Shapes: B batch, S sequence of a device, H heads, K kv_heads, G = H / K query heads to each
key-value head, D head_dim of queries and keys, V that of values.
"""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from jaxtyping import Array, Float, Int32

from lmlib.models.attend import gathered_kernel, keys_gathered, keys_in_a_ring
from lmlib.models.attend.context_split import Split
from lmlib.models.attend.options import Options
from lmlib.parallel.collectives import devices_along
from lmlib.parallel.layout import along
from lmlib.row_order import pieces_of_devices

WAYS = {"gather": keys_gathered.attend, "ring": keys_in_a_ring.attend}
# Gathered keys and values may take so many times the memory of a device's queries.
_SMALL = 4


def sharing() -> int:
    """How many devices of the mesh that is set share each row."""
    return devices_along(along("seq"))


def is_split() -> bool:
    """Whether several devices of the mesh that is set share each row."""
    return sharing() > 1


def check_way(way: str) -> None:
    """Raises ValueError if there is no such way."""
    if way not in (known := ("auto", *WAYS)):
        raise ValueError(f"context must be one of {', '.join(known)}, got {way!r}")


def problem(kernel: ModuleType, way: str, sinks: bool = False) -> str | None:
    """Why a fused kernel, one of `lmlib.models.attend.IMPLEMENTATIONS`, cannot compute split rows,
    if it cannot."""
    if not hasattr(kernel, "attend_gathered"):
        return "it computes whole rows only"
    if sinks and not hasattr(kernel, "attend_and_normalise_gathered"):
        return "it has no sinks"
    if way == "ring":
        return "it computes rows whose keys are gathered, not context='ring'"
    return None


def length_of_piece(length: int, devices: int, order: str) -> int:
    """How many of a row's tokens follow each other at least on one of the devices that share it."""
    return length // pieces_of_devices(devices, order).size


def of_kernel(kernel: ModuleType, order: str, way: str, sinks: bool) -> Callable[..., Any]:
    """The kernel's `attend`, of this device's queries over the keys of the whole row; with `sinks`
    its `attend_and_normalise`.

    Raises:
      ValueError: if it cannot compute that; see `problem`.
    """
    if (reason := problem(kernel, way, sinks)) is not None:
        name = kernel.__name__.split(".")[-1]
        raise ValueError(f"{name}: {reason}; use attention='blockwise' or 'auto'")
    mix = kernel.attend_and_normalise_gathered if sinks else kernel.attend_gathered
    return functools.partial(gathered_kernel.attend, mix=mix, order=order)


def of_tiles(heads: int, kv_heads: int, order: str, way: str, sinks: bool) -> Callable[..., Any]:
    """As `of_kernel`, tile by tile in plain JAX. The way "auto" is "gather" while what is gathered
    is small beside queries."""
    if way == "auto":
        small = sharing() * kv_heads <= _SMALL * heads
        way = "gather" if small else "ring"
    return functools.partial(attend_and_normalise if sinks else _attend, order=order, way=way)


def _attend(
    q_BSHD: Array, k_BSKD: Array, v_BSKV: Array, segment_ids_BS: Array, *,
    options: Options, order: str, way: str,
) -> Array:  # fmt: skip
    return attend_and_normalise(
        q_BSHD, k_BSKD, v_BSKV, segment_ids_BS, options=options, order=order, way=way
    )[0]


def attend_and_normalise(
    q_BSHD: Float[Array, "b s h d"],
    k_BSKD: Float[Array, "b s k d"],
    v_BSKV: Float[Array, "b s k v"],
    segment_ids_BS: Int32[Array, "b s"],
    options: Options,
    order: str,
    way: str,
) -> tuple[Float[Array, "b s h v"], Float[Array, "b s h"]]:
    """As `lmlib.models.attend.blockwise.attend_and_normalise`, of this device's queries over the
    keys of the whole row.

    Args:
      order: which tokens of the row each device has; see `lmlib.row_order`.
      way: one of `WAYS`.
    """
    B, S, H, D = q_BSHD.shape
    k_BKSD, v_BKSV = k_BSKD.swapaxes(1, 2), v_BSKV.swapaxes(1, 2)
    q_BKGSD = q_BSHD.swapaxes(1, 2).reshape(B, k_BKSD.shape[1], -1, S, D)
    split = Split.of(order, S)
    mixed_BKGSV, log_normaliser_BKGS = WAYS[way](
        split, options, q_BKGSD, k_BKSD, v_BKSV, segment_ids_BS
    )
    mixed_BHSV = mixed_BKGSV.reshape(B, H, S, -1)
    return mixed_BHSV.swapaxes(1, 2), log_normaliser_BKGS.reshape(B, H, S).swapaxes(1, 2)
