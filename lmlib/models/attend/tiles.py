"""Attention by pairs of query tiles and key tiles: the pairs to visit, and their computation.

Source: FlashAttention-2 (Dao 2023, arXiv:2307.08691). Pairs may be computed in any order.

A row is cut into pieces, and each piece into tiles. The distance of two pieces determines which of
their tiles attend to each other, so pairs of pieces are grouped by the tiles that they visit. All
devices run one program, so their lists of pairs have the same length.

Shapes: B batch, S sequence (queries), T sequence (keys), H heads, K kv_heads, G = H / K query heads
per key-value head, D head_dim of queries and keys, V head_dim of values, Q queries per tile, R keys
per tile, P pairs of tiles; C devices, M pieces of queries per device, L pieces of keys, N pairs of
pieces.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int, Int32

from lmlib.models.attend.kernel import Options

_Tiles = tuple[tuple[int, int], ...]


class Group(NamedTuple):
    """Pairs of pieces that visit the same pairs of tiles."""

    tile: int  # tokens
    tiles_of_piece: int
    tiles_P2: Int[np.ndarray, "p 2"]  # a tile of the piece of queries, and one of the keys'
    # For each device the index of a piece of queries, of a piece of keys, and 1; or 0 as padding.
    pieces_CN3: Int[np.ndarray, "c n 3"]


def grouped_pairs(
    queries_CM: Int[np.ndarray, "c m"],
    keys_CL: Int[np.ndarray, "c l"],
    piece: int,
    tile: int,
    window: int | None,
) -> list[Group]:
    """Returns all pairs in which a query attends to a key, from each device's pieces of the row."""
    tiles = piece // tile
    tiles_seen = functools.cache(functools.partial(_tiles_seen, tiles, tile, window))
    found: dict[_Tiles, list[list[tuple[int, int, int]]]] = {}
    for device, (own, theirs) in enumerate(zip(queries_CM, keys_CL, strict=True)):
        for (i, query), (j, key) in itertools.product(enumerate(own), enumerate(theirs)):
            if query >= key and (visited := tiles_seen(int(query - key))):
                of_devices = found.setdefault(visited, [[] for _ in queries_CM])
                of_devices[device].append((i, j, 1))

    def padded(of_devices: list[list[tuple[int, int, int]]]) -> Int[np.ndarray, "c n 3"]:
        most = max(map(len, of_devices))
        nothing = [(0, 0, 0)]
        return np.array([pairs + nothing * (most - len(pairs)) for pairs in of_devices], np.int32)

    return [
        Group(tile, tiles, np.array(visited, np.int32), padded(of_devices))
        for visited, of_devices in found.items()
    ]


def largest_tile(piece: int, most: int) -> int:
    """The largest divisor of `piece` that is at most `most`."""
    return next(size for size in range(min(piece, most), 0, -1) if piece % size == 0)


def _tiles_seen(tiles: int, tile: int, window: int | None, distance: int) -> _Tiles:
    """The pairs of tiles that attend to each other, for two pieces that are `distance` apart."""
    return tuple(
        (i, j)
        for i in range(tiles)
        for j in range(tiles)
        if (apart := distance * tiles + i - j) >= 0
        # The closest two positions of different tiles.
        and (window is None or apart == 0 or (apart - 1) * tile + 1 < window)
    )


# The mean of each query's values, [B, K, G, S, V], and the logarithm of its normaliser, [B, K, G,
# S]; or the gradients of both.
Mixed = tuple[Array, Array]
# The residuals of the backward pass: queries, keys, values and segments of a device, and its
# result.
Saved = tuple[tuple[Array, Array, Array, Array], Mixed]

_FAR = -1e30  # negligible in any sum, and still finite


class Queries(NamedTuple):
    """Queries of a device, the document of each, and its position in the row."""

    q_BKGSD: Float[Array, "b k g s d"]
    segments_BS: Int32[Array, "b s"]
    places_S: Int[Array, "s"]


class Keys(NamedTuple):
    """Keys and their values; the other attributes are the same as in `Queries`."""

    k_BKTD: Float[Array, "b k t d"]
    v_BKTV: Float[Array, "b k t v"]
    segments_BT: Int32[Array, "b t"]
    places_T: Int[Array, "t"]


class Sums(NamedTuple):
    """Running sums over pairs for each query (the paper's algorithm 1).

    The sum of values, each times its exponential; the sum of the exponentials; and the largest
    score, to which every exponential is relative.
    """

    mixed_BKGSV: Float[Array, "b k g s v"]
    normaliser_BKGS: Float[Array, "b k g s"]
    highest_BKGS: Float[Array, "b k g s"]

    def weighted(self, dtype: jnp.dtype) -> Mixed:
        """The result in `dtype`; it may be saved for the backward pass."""
        mixed_BKGSV = (self.mixed_BKGSV / self.normaliser_BKGS[..., None]).astype(dtype)
        log_normaliser_BKGS = self.highest_BKGS + jnp.log(self.normaliser_BKGS)
        return (
            checkpoint_name(mixed_BKGSV, "attention_kernel"),
            checkpoint_name(log_normaliser_BKGS, "attention_kernel"),
        )


class Gradients(NamedTuple):
    """Running sums of gradients, in float32 or wider."""

    dq_BKGSD: Float[Array, "b k g s d"]
    dk_BKTD: Float[Array, "b k t d"]
    dv_BKTV: Float[Array, "b k t v"]


class Arriving(NamedTuple):
    """The inputs of the backward pass for each query.

    The log-normaliser of the forward pass, the gradient of the mixed values, and the number that is
    subtracted from the gradient of each of the query's weights.
    """

    log_normaliser_BKGS: Float[Array, "b k g s"]
    d_mixed_BKGSV: Float[Array, "b k g s v"]
    towards_BKGS: Float[Array, "b k g s"]


Added = TypeVar("Added", Sums, Gradients)  # the type that pairs are added to


def nothing_mixed(q_BKGSD: Array, value_dim: int) -> Sums:
    """The initial sums, before any pair is added."""
    wide = jnp.promote_types(q_BKGSD.dtype, jnp.float32)
    nothing_BKGS = jnp.zeros(q_BKGSD.shape[:-1], wide)
    mixed_BKGSV = jnp.zeros((*nothing_BKGS.shape, value_dim), wide)
    return Sums(mixed_BKGSV, nothing_BKGS, nothing_BKGS + _FAR)


def no_gradients(q_BKGSD: Array, k_BKTD: Array, v_BKTV: Array) -> Gradients:
    """The initial gradients, before any pair is added."""
    wide = jnp.promote_types(q_BKGSD.dtype, jnp.float32)
    return Gradients(*(jnp.zeros(x.shape, wide) for x in (q_BKGSD, k_BKTD, v_BKTV)))


def arriving(mixed: Mixed, gradients: Mixed) -> Arriving:
    """Returns the inputs of the backward pass from the gradients of the results.

    The derivative of a log-normaliser is the weights, so its gradient is added to their gradients.
    """
    (mixed_BKGSV, log_normaliser_BKGS), (d_mixed_BKGSV, d_log_normaliser_BKGS) = mixed, gradients
    wide = log_normaliser_BKGS.dtype
    towards_BKGS = jnp.sum(mixed_BKGSV.astype(wide) * d_mixed_BKGSV.astype(wide), axis=-1)
    return Arriving(log_normaliser_BKGS, d_mixed_BKGSV, towards_BKGS - d_log_normaliser_BKGS)


def mixed_with(
    sums: Sums,
    queries: Queries,
    keys: Keys,
    groups: Sequence[Group],
    device: Array | int,
    options: Options,
) -> Sums:
    """Adds the pairs of `groups` on this device to the sums."""
    queries, keys = _known_together(queries, keys)

    def visit(sums: Sums, i: Array, j: Array, counts: Array) -> Sums:
        tile = groups[0].tile
        scores_BKGQR, allowed_BQR = _scores(queries, keys, i, j, tile, options)
        allowed_BQR &= counts
        scores_BKGQR = jnp.where(allowed_BQR[:, None, None], scores_BKGQR, _FAR)
        before_BKGQ = _tile(sums.highest_BKGS, i, tile, 3)
        highest_BKGQ = jnp.maximum(before_BKGQ, jnp.max(scores_BKGQR, axis=-1))
        weights_BKGQR = jnp.exp(scores_BKGQR - highest_BKGQ[..., None])
        shrink_BKGQ = jnp.exp(before_BKGQ - highest_BKGQ)
        mixed_BKGQV = jnp.einsum(
            "bkgqr,bkrv->bkgqv",
            weights_BKGQR.astype(keys.v_BKTV.dtype),
            _tile(keys.v_BKTV, j, tile, 2),
            preferred_element_type=sums.mixed_BKGSV.dtype,
        )
        mixed_BKGQV += _tile(sums.mixed_BKGSV, i, tile, 3) * shrink_BKGQ[..., None]
        normaliser_BKGQ = _tile(sums.normaliser_BKGS, i, tile, 3) * shrink_BKGQ
        normaliser_BKGQ += jnp.sum(weights_BKGQR, axis=-1)
        return Sums(
            _put(sums.mixed_BKGSV, mixed_BKGQV, i, tile, 3),
            _put(sums.normaliser_BKGS, normaliser_BKGQ, i, tile, 3),
            _put(sums.highest_BKGS, highest_BKGQ, i, tile, 3),
        )

    return _visited(visit, sums, groups, device)


def with_gradients(
    gradients: Gradients,
    queries: Queries,
    keys: Keys,
    given: Arriving,
    groups: Sequence[Group],
    device: Array | int,
    options: Options,
) -> Gradients:
    """Adds the gradients of the pairs of `groups` (the paper's algorithm 2)."""
    queries, keys = _known_together(queries, keys)
    product = functools.partial(jnp.einsum, preferred_element_type=given.log_normaliser_BKGS.dtype)

    def visit(sums: Gradients, i: Array, j: Array, counts: Array) -> Gradients:
        tile = groups[0].tile
        scores_BKGQR, allowed_BQR = _scores(queries, keys, i, j, tile, options)
        allowed_BQR &= counts
        shifted_BKGQR = scores_BKGQR - _tile(given.log_normaliser_BKGS, i, tile, 3)[..., None]
        weights_BKGQR = jnp.where(allowed_BQR[:, None, None], jnp.exp(shifted_BKGQR), 0)
        d_mixed_BKGQV = _tile(given.d_mixed_BKGSV, i, tile, 3)
        v_BKRV, k_BKRD = _tile(keys.v_BKTV, j, tile, 2), _tile(keys.k_BKTD, j, tile, 2)
        d_weights_BKGQR = product("bkgqv,bkrv->bkgqr", d_mixed_BKGQV, v_BKRV)
        d_scores_BKGQR = d_weights_BKGQR - _tile(given.towards_BKGS, i, tile, 3)[..., None]
        d_products_BKGQR = weights_BKGQR * d_scores_BKGQR * options.slope(scores_BKGQR)
        d_products_BKGQR = d_products_BKGQR.astype(queries.q_BKGSD.dtype)
        weights_BKGQR = weights_BKGQR.astype(keys.v_BKTV.dtype)
        q_BKGQD = _tile(queries.q_BKGSD, i, tile, 3)
        dq_BKGQD = product("bkgqr,bkrd->bkgqd", d_products_BKGQR, k_BKRD)
        dk_BKRD = product("bkgqr,bkgqd->bkrd", d_products_BKGQR, q_BKGQD)
        dv_BKRV = product("bkgqr,bkgqv->bkrv", weights_BKGQR, d_mixed_BKGQV)
        return Gradients(
            _put(sums.dq_BKGSD, _tile(sums.dq_BKGSD, i, tile, 3) + dq_BKGQD, i, tile, 3),
            _put(sums.dk_BKTD, _tile(sums.dk_BKTD, j, tile, 2) + dk_BKRD, j, tile, 2),
            _put(sums.dv_BKTV, _tile(sums.dv_BKTV, j, tile, 2) + dv_BKRV, j, tile, 2),
        )

    return _visited(visit, gradients, groups, device)


def _known_together(queries: Queries, keys: Keys) -> tuple[Queries, Keys]:
    """Makes all arrays available at the same time.

    Segments and positions are the same in all layers. Without this barrier JAX would compute the
    masks of all tiles before the scan over layers, and store them.
    """
    return jax.lax.optimization_barrier((queries, keys))


def _visited(
    visit: Callable[[Added, Array, Array, Array], Added],
    sums: Added,
    groups: Sequence[Group],
    device: Array | int,
) -> Added:
    """Visits all pairs of tiles of the device's pairs of pieces."""

    def of_pieces(group: Group, sums: Added, pair_3: Array) -> tuple[Added, None]:
        first_2, counts = pair_3[:2] * group.tiles_of_piece, pair_3[2] > 0

        def one(sums: Added, tiles_2: Array) -> tuple[Added, None]:
            i, j = first_2 + tiles_2
            return visit(sums, i, j, counts), None

        return jax.lax.scan(one, sums, jnp.asarray(group.tiles_P2))[0], None

    for group in groups:
        pairs_N3 = jnp.asarray(group.pieces_CN3)[device]
        if len(pairs_N3) == 1:
            sums, _ = of_pieces(group, sums, pairs_N3[0])
        else:
            sums, _ = jax.lax.scan(functools.partial(of_pieces, group), sums, pairs_N3)
    return sums


def _scores(
    queries: Queries, keys: Keys, i: Array, j: Array, tile: int, options: Options
) -> tuple[Float[Array, "b k g q r"], Bool[Array, "b q r"]]:
    """The scores of query tile i and key tile j, and a mask of the ones that count."""
    q_BKGQD, k_BKRD = _tile(queries.q_BKGSD, i, tile, 3), _tile(keys.k_BKTD, j, tile, 2)
    wide = jnp.promote_types(q_BKGQD.dtype, jnp.float32)
    scores_BKGQR = jnp.einsum("bkgqd,bkrd->bkgqr", q_BKGQD, k_BKRD, preferred_element_type=wide)
    places_Q, places_R = _tile(queries.places_S, i, tile, 0), _tile(keys.places_T, j, tile, 0)
    distance_QR = places_Q[:, None] - places_R
    near_QR = distance_QR >= 0
    if options.window is not None:
        near_QR &= distance_QR < options.window
    segments_BQ = _tile(queries.segments_BS, i, tile, 1)
    segments_BR = _tile(keys.segments_BT, j, tile, 1)
    same_BQR = segments_BQ[:, :, None] == segments_BR[:, None]
    return options.scores(scores_BKGQR), near_QR & same_BQR


def _tile(x: Array, index: Array, tile: int, axis: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, index * tile, tile, axis)


def _put(x: Array, part: Array, index: Array, tile: int, axis: int) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(x, part, index * tile, axis)
