"""Tile sizes and numbers of warps of the Triton kernels: measured, not derived.

    python benchmarks/kernels/attention.py --launches

measures others.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike

from lmlib.models.attend.fused.visits import Tiles


class Launch(NamedTuple):
    """Tile sizes of a kernel, warps per program, and iterations that are loaded ahead."""

    tiles: Tiles
    warps: int
    stages: int


class Launches(NamedTuple):
    """Launch settings of each kernel, and the tokens of a piece."""

    mixed: Launch
    query_gradients: Launch
    key_gradients: Launch
    piece: int


# Keys are the largest size of a head in bytes. Each entry was the fastest of about twenty on an
# H200 for rows of 1,024 tokens in bfloat16; a tile of 128 keys is 8 % faster for the gradients of
# keys in rows of 16,384 tokens. The last entry was not measured.
_LAUNCHES = {
    128: (Launch(Tiles(64, 64), 4, 2), Launch(Tiles(64, 64), 4, 3), Launch(Tiles(64, 64), 4, 3)),
    256: (Launch(Tiles(64, 64), 4, 3), Launch(Tiles(64, 64), 4, 2), Launch(Tiles(64, 64), 4, 2)),
    512: (Launch(Tiles(64, 32), 4, 2), Launch(Tiles(64, 64), 4, 2), Launch(Tiles(64, 32), 4, 2)),
    1024: (Launch(Tiles(32, 32), 4, 2), Launch(Tiles(32, 32), 4, 2), Launch(Tiles(32, 32), 4, 2)),
}


def launches_of(piece: int, head_dim: int, dtype: DTypeLike) -> Launches:
    """Returns the launches for pieces of `piece` tokens, which every tile divides."""
    size = head_dim * jnp.dtype(dtype).itemsize
    largest = next(each for limit, each in _LAUNCHES.items() if size <= limit)
    mixed, query_gradients, key_gradients = (
        launch._replace(tiles=Tiles(*(math.gcd(piece, size) for size in launch.tiles)))
        for launch in largest
    )
    return Launches(mixed, query_gradients, key_gradients, piece)
