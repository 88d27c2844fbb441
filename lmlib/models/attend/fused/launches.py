"""In which tiles, and by how many warps, Triton's kernels compute attention: measured, not derived.

    python benchmarks/kernels/attention.py --launches

times others.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike

from lmlib.models.attend.fused.visits import Tiles


class Launch(NamedTuple):
    """How a kernel is launched: a program for each tile, of so many warps, and how many turns of
    its loop are loaded ahead."""

    tiles: Tiles
    warps: int
    stages: int


class Launches(NamedTuple):
    """Of each kernel, and the tokens of a piece."""

    mixed: Launch
    query_gradients: Launch
    key_gradients: Launch
    piece: int


# For heads of up to so many bytes: of some twenty each, the quickest on an H200 at rows of 1,024
# tokens in bfloat16; a tile of 128 keys is 8 % quicker for their gradients at 16,384. The last was
# not tried.
_LAUNCHES = {
    128: (Launch(Tiles(64, 64), 4, 2), Launch(Tiles(64, 64), 4, 3), Launch(Tiles(64, 64), 4, 3)),
    256: (Launch(Tiles(64, 64), 4, 3), Launch(Tiles(64, 64), 4, 2), Launch(Tiles(64, 64), 4, 2)),
    512: (Launch(Tiles(64, 32), 4, 2), Launch(Tiles(64, 64), 4, 2), Launch(Tiles(64, 32), 4, 2)),
    1024: (Launch(Tiles(32, 32), 4, 2), Launch(Tiles(32, 32), 4, 2), Launch(Tiles(32, 32), 4, 2)),
}


def launches_of(piece: int, head_dim: int, dtype: DTypeLike) -> Launches:
    """For pieces of so many tokens, which every tile divides."""
    size = head_dim * jnp.dtype(dtype).itemsize
    largest = next(each for limit, each in _LAUNCHES.items() if size <= limit)
    mixed, query_gradients, key_gradients = (
        launch._replace(tiles=Tiles(*(math.gcd(piece, size) for size in launch.tiles)))
        for launch in largest
    )
    return Launches(mixed, query_gradients, key_gradients, piece)
