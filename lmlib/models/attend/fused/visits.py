"""Which tiles see each other, known when the documents of a batch are.

Shapes: B batch, S sequence (queries), T sequence (keys), N tiles of queries, M tiles of keys,
P pieces of the row that a device has, each of tokens that follow each other.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Int32

from lmlib.models.attend.context_split import Split, device


class Tiles(NamedTuple):
    """Tokens of a tile of queries, and of one of keys; both divide a piece."""

    queries: int
    keys: int


class Visits(NamedTuple):
    """Attributes:
    places_S: where in the row each query of this device stands; keys are those of the row.
    segments_BS, segments_BT: which document of its row each query and each key belongs to.
    keys_BN2: for each tile of queries the first tile of keys that it visits, and the one after the
      last.
    queries_BMP2: for each tile of keys the same of the queries' tiles, in each piece.
    """

    places_S: Int32[Array, "s"]
    segments_BS: Int32[Array, "b s"]
    segments_BT: Int32[Array, "b t"]
    keys_BN2: Int32[Array, "b n 2"]
    queries_BMP2: Int32[Array, "b m p 2"]


def visits(
    split: Split,
    segments_BS: Int32[Array, "b s"],
    segments_BT: Int32[Array, "b t"],
    tiles: Tiles,
    window: int | None,
) -> Visits:
    """Of this device's queries and all keys of a row, whose documents' tokens follow each other.

    Args:
      segments_BT: in the order of the row.
      window: as in `lmlib.models.attend.attend`.
    """
    B, T = segments_BT.shape
    places_S = jnp.asarray(split.places_CS)[device()]
    first_key_BT, last_query_BT = _seen(segments_BT, window)

    lowest_BN = first_key_BT[:, places_S].reshape(B, -1, tiles.queries).min(axis=2)
    highest_N = places_S[tiles.queries - 1 :: tiles.queries]
    keys_BN2 = jnp.stack(
        jnp.broadcast_arrays(lowest_BN // tiles.keys, highest_N // tiles.keys + 1), axis=-1
    )

    lowest_M1 = jnp.arange(0, T, tiles.keys)[:, None]
    highest_BM1 = last_query_BT.reshape(B, -1, tiles.keys, 1).max(axis=2)
    begins_P = places_S[:: split.piece]
    of_piece = split.piece // tiles.queries
    ranges = (lowest_M1 - begins_P) // tiles.queries, (highest_BM1 - begins_P) // tiles.queries + 1
    bounds_BMP2 = jnp.stack(jnp.broadcast_arrays(*ranges), axis=-1)
    earlier_P1 = of_piece * jnp.arange(len(begins_P))[:, None]
    queries_BMP2 = jnp.clip(bounds_BMP2, 0, of_piece) + earlier_P1
    return Visits(
        places_S,
        segments_BS,
        segments_BT,
        keys_BN2.astype(jnp.int32),
        queries_BMP2.astype(jnp.int32),
    )


def _seen(
    segments_BT: Int32[Array, "b t"], window: int | None
) -> tuple[Int[Array, "b t"], Int[Array, "b t"]]:
    """The first key that each token of a row sees, and the last query that sees it."""
    T = segments_BT.shape[1]
    places_T = jnp.arange(T, dtype=jnp.int32)
    differs_BT = segments_BT[:, 1:] != segments_BT[:, :-1]
    begins_BT = jnp.pad(differs_BT, ((0, 0), (1, 0)), constant_values=True)
    ends_BT = jnp.pad(differs_BT, ((0, 0), (0, 1)), constant_values=True)
    first_BT = jax.lax.cummax(jnp.where(begins_BT, places_T, 0), axis=1)
    last_BT = jax.lax.cummin(jnp.where(ends_BT, places_T, T - 1), axis=1, reverse=True)
    if window is None:
        return first_BT, last_BT
    return (
        jnp.maximum(first_BT, places_T - (window - 1)),
        jnp.minimum(last_BT, places_T + (window - 1)),
    )
