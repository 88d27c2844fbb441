"""Which pairs of tiles splash attention computes, for each device along `context`.

JAX's own `process_mask` compares all pairs of tokens, which takes minutes from rows of 65,536 on. A
tile's tokens follow each other, so its first and its last say what the tile sees.

Shapes: C devices, S queries of a device, N tiles of them, M tiles of keys, W the most tiles that
any tile of the other side has to visit.
"""

from typing import NamedTuple

import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo
from jaxtyping import Array, Bool, Int


class Visible(NamedTuple):
    """Whether a query sees a key, by their places in the row; computed in the kernel."""

    window: int | None

    def __call__(self, query: Array, key: Array) -> Array:
        seen = query >= key
        return seen if self.window is None else seen & (query - key < self.window)


def visited(
    places_CS: Int[np.ndarray, "c s"], keys: int, tile: int, window: int | None
) -> tuple[MaskInfo, MaskInfo]:
    """For each tile of queries the tiles of keys that it visits, and the other way round; the
    arrays have an axis of devices before those that the kernel knows.

    Args:
      places_CS: where in the row each query of each device stands; those of a tile follow each
        other.
      keys: tokens of the row.
      tile: tokens of one, of queries and of keys.
      window: as in `lmlib.models.attend.attend`.
    """
    first_CN1 = places_CS[:, ::tile, None]
    last_CN1, first_M = first_CN1 + tile - 1, np.arange(0, keys, tile)
    visible_CNM = last_CN1 >= first_M
    if window is not None:
        visible_CNM &= first_CN1 - (first_M + tile - 1) < window
    places_CS = places_CS.astype(np.int32)
    keys_CNW, computed_CNW = _in_order(visible_CNM)
    queries_CMW, computed_CMW = _in_order(visible_CNM.swapaxes(1, 2))
    return (
        _info(keys_CNW, computed_CNW, places_CS),
        _info(queries_CMW.swapaxes(1, 2), computed_CMW.swapaxes(1, 2), places_CS),
    )


def _in_order(
    visible_CNM: Bool[np.ndarray, "c n m"],
) -> tuple[Int[np.ndarray, "c n w"], Int[np.ndarray, "c n w"]]:
    """Of each of N tiles those of M that it visits, then the last of them again, of which nothing
    is fetched or computed; and 1 for each that is computed."""
    visits_CN1 = visible_CNM.sum(axis=2, keepdims=True)
    steps_W = np.arange(visits_CN1.max())
    ordered_CNM = np.argsort(~visible_CNM, axis=2, kind="stable")
    tiles_CNW = np.take_along_axis(
        ordered_CNM, np.minimum(steps_W, np.maximum(visits_CN1 - 1, 0)), axis=2
    )
    return tiles_CNW, (steps_W < visits_CN1).astype(np.int8)


def _info(
    tiles: Int[np.ndarray, "c x y"],
    computed: Int[np.ndarray, "c x y"],
    places_CS: Int[np.ndarray, "c s"],
) -> MaskInfo:
    smallest = next(
        each for each in (np.int8, np.int16, np.int32) if tiles.max() <= np.iinfo(each).max
    )
    return MaskInfo(
        data_next=tiles[:, None].astype(smallest),  # one list for all heads
        mask_next=None,
        block_mask=computed[:, None],
        partial_mask_blocks=None,
        q_sequence=places_CS,
    )
