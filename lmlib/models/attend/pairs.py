"""Which pairs of a tile of queries and a tile of keys attention has to visit.

A row is cut into pieces, and each piece into tiles. Which tiles of two pieces see each other
depends on how far apart the pieces are. So pairs of pieces are grouped by what they visit, and each
device has a list of them: of the same length on all devices, as they run one program.

Shapes: C devices, M pieces of queries of a device, L pieces of keys, P pairs of tiles, N pairs of
pieces.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Int

_Tiles = tuple[tuple[int, int], ...]


class Group(NamedTuple):
    """Pairs of pieces that visit the same pairs of tiles.

    Attributes:
      tile: tokens of one.
      tiles_of_piece: how many there are.
      tiles_P2: a tile of the piece of queries, and one of the piece of keys.
      pieces_CN3: for each device a piece of its queries, one of its keys, and 1; or 0 where the
        device has fewer pairs than others.
    """

    tile: int
    tiles_of_piece: int
    tiles_P2: Int[np.ndarray, "p 2"]
    pieces_CN3: Int[np.ndarray, "c n 3"]


def grouped_pairs(
    queries_CM: Int[np.ndarray, "c m"],
    keys_CL: Int[np.ndarray, "c l"],
    piece: int,
    tile: int,
    window: int | None,
) -> list[Group]:
    """All pairs in which a query sees a key.

    Args:
      queries_CM, keys_CL: which pieces of the row each device has.
      piece, tile: tokens of each; `tile` divides `piece`.
      window: as in `lmlib.models.attend.attend`.
    """
    tiles = piece // tile
    by_distance: dict[int, _Tiles] = {}
    found: dict[_Tiles, list[list[tuple[int, int]]]] = {}
    for device, (own, theirs) in enumerate(zip(queries_CM, keys_CL, strict=True)):
        for i, query in enumerate(own):
            for j, key in enumerate(theirs):
                distance = int(query - key)
                if distance < 0:
                    continue
                if distance not in by_distance:
                    by_distance[distance] = _visited(distance, tiles, tile, window)
                if by_distance[distance]:
                    nothing: list[list[tuple[int, int]]] = [[] for _ in queries_CM]
                    of_devices = found.setdefault(by_distance[distance], nothing)
                    of_devices[device].append((i, j))
    return [
        Group(tile, tiles, np.array(visited, np.int32), _padded(of_devices))
        for visited, of_devices in found.items()
    ]


def largest_tile(piece: int, most: int) -> int:
    """The largest divisor of `piece` that is at most `most`."""
    return next(size for size in range(min(piece, most), 0, -1) if piece % size == 0)


def _visited(distance: int, tiles: int, tile: int, window: int | None) -> _Tiles:
    """Of two pieces so many pieces apart, every tile of queries with each tile of keys that any of
    them sees."""
    return tuple(
        (i, j)
        for i in range(tiles)
        for j in range(tiles)
        if (apart := distance * tiles + i - j) >= 0
        # The nearest two positions of different tiles.
        and (window is None or apart == 0 or (apart - 1) * tile + 1 < window)
    )


def _padded(of_devices: list[list[tuple[int, int]]]) -> Int[np.ndarray, "c n 3"]:
    pairs_CN3 = np.zeros((len(of_devices), max(map(len, of_devices)), 3), np.int32)
    for device, pairs in enumerate(of_devices):
        for n, (i, j) in enumerate(pairs):
            pairs_CN3[device, n] = i, j, 1
    return pairs_CN3
