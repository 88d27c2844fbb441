"""The tiles that attend to each other, computed from the documents of a batch.

Shapes: B batch, S sequence (queries), T sequence (keys), N tiles of queries, M tiles of keys, P
pieces of the row on a device, each of adjacent tokens.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Int32


class Tiles(NamedTuple):
    """Tokens in a tile of queries, and in a tile of keys; both divide a piece."""

    queries: int
    keys: int


class Sight(NamedTuple):
    """The visible keys of each query."""

    places_S: Int[Array, "s"]  # position in the row of each query of this device
    segments_BS: Int32[Array, "b s"]  # the document of each query in its row
    segments_BT: Int32[Array, "b t"]  # and of each key; keys cover the row
    first_key_BT: Int[Array, "b t"]  # the first key that each token attends to
    last_query_BT: Int[Array, "b t"]  # the last token that attends to it


def sight(
    places_S: Int[Array, "s"],
    segments_BS: Int32[Array, "b s"],
    segments_BT: Int32[Array, "b t"],
    window: int | None,
) -> Sight:
    """Computes the visible keys for this device's queries and all keys of a row.

    The tokens of a document must be adjacent.
    """
    T = segments_BT.shape[1]
    places_T = jnp.arange(T, dtype=jnp.int32)
    differs_BT = segments_BT[:, 1:] != segments_BT[:, :-1]
    begins_BT = jnp.pad(differs_BT, ((0, 0), (1, 0)), constant_values=True)
    ends_BT = jnp.pad(differs_BT, ((0, 0), (0, 1)), constant_values=True)
    first_BT = jax.lax.cummax(jnp.where(begins_BT, places_T, 0), axis=1)
    last_BT = jax.lax.cummin(jnp.where(ends_BT, places_T, T - 1), axis=1, reverse=True)
    if window is not None:
        first_BT = jnp.maximum(first_BT, places_T - (window - 1))
        last_BT = jnp.minimum(last_BT, places_T + (window - 1))
    return Sight(places_S, segments_BS, segments_BT, first_BT, last_BT)


def keys_visited(sight: Sight, tiles: Tiles) -> Int32[Array, "b n 4"]:
    """Ranges of key tiles for each tile of queries: first, first_whole, after_whole, after.

    Visited tiles are [first, after); of these, [first_whole, after_whole) need no mask.
    """
    B = sight.segments_BT.shape[0]
    first_key_BNQ = sight.first_key_BT[:, sight.places_S].reshape(B, -1, tiles.queries)
    lowest_N, highest_N = (sight.places_S[at :: tiles.queries] for at in (0, tiles.queries - 1))
    return _ranges(
        first_key_BNQ.min(axis=2) // tiles.keys,
        -(-first_key_BNQ.max(axis=2) // tiles.keys),
        (lowest_N + 1) // tiles.keys,
        highest_N // tiles.keys + 1,
    )


def queries_visited(sight: Sight, tiles: Tiles, piece: int) -> Int32[Array, "b m p 4"]:
    """Ranges of query tiles, as in `keys_visited`, for each tile of keys and piece of `piece`
    tokens.
    """
    B, T = sight.segments_BT.shape
    last_query_BM1R = sight.last_query_BT.reshape(B, -1, 1, tiles.keys)
    lowest_M1 = jnp.arange(0, T, tiles.keys)[:, None]
    begins_P = sight.places_S[::piece]
    in_piece_BMP4 = _ranges(
        (lowest_M1 - begins_P) // tiles.queries,
        -(-(lowest_M1 + tiles.keys - 1 - begins_P) // tiles.queries),
        (last_query_BM1R.min(axis=3) + 1 - begins_P) // tiles.queries,
        (last_query_BM1R.max(axis=3) - begins_P) // tiles.queries + 1,
    )
    of_piece = piece // tiles.queries
    earlier_P1 = of_piece * jnp.arange(len(begins_P), dtype=jnp.int32)[:, None]
    return jnp.clip(in_piece_BMP4, 0, of_piece) + earlier_P1


def _ranges(first: Array, first_whole: Array, after_whole: Array, after: Array) -> Array:
    first, first_whole, after_whole, after = jnp.broadcast_arrays(
        first, first_whole, after_whole, after
    )
    first_whole = jnp.clip(first_whole, first, after)
    after_whole = jnp.clip(after_whole, first_whole, after)
    return jnp.stack([first, first_whole, after_whole, after], axis=-1).astype(jnp.int32)
