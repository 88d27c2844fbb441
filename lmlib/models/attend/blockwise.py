"""Attention tile by tile in plain JAX (FlashAttention-2: Dao 2023, arXiv:2307.08691).

A scan visits the pairs of a tile of queries and a tile of keys that causality and the window leave.
The forward pass keeps its output and the logarithm of each query's normaliser; the backward pass
computes the weights of a tile again from those. Memory grows with S, not with S × S.

Shapes: B batch, S sequence, H heads, K kv_heads, G = H / K query heads to each key-value head,
D head_dim of queries and keys, V that of values, Q queries of a tile, T keys of a tile, P pairs of
tiles.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int32

from lmlib.models.attend.options import Options
from lmlib.parallel.collectives import platform

Pair = tuple[Array, Array]
Carry = tuple[Array, Array, Array]

_FAR = -1e30  # a score that no sum notices, and from which no infinity comes
_PADDING = -1  # the segment of positions that fill up the last tile


def attend(
    q_BSHD: Float[Array, "b s h d"],
    k_BSKD: Float[Array, "b s k d"],
    v_BSKV: Float[Array, "b s k v"],
    segment_ids_BS: Int32[Array, "b s"],
    options: Options,
) -> Float[Array, "b s h v"]:
    """See `lmlib.models.attend.attend`; on the part of one device."""
    mixed_BSHV, _ = attend_and_normalise(q_BSHD, k_BSKD, v_BSKV, segment_ids_BS, options)
    return mixed_BSHV


def attend_and_normalise(
    q_BSHD: Float[Array, "b s h d"],
    k_BSKD: Float[Array, "b s k d"],
    v_BSKV: Float[Array, "b s k v"],
    segment_ids_BS: Int32[Array, "b s"],
    options: Options,
) -> tuple[Float[Array, "b s h v"], Float[Array, "b s h"]]:
    """As `attend`, and the logarithm of what softmax divides each query's exponentials by."""
    B, S, H, D = q_BSHD.shape
    # Tiles that stay in a CPU core's cache; elsewhere, few large steps.
    tile = min(S, 128 if platform() == "cpu" else 512)
    tail = -S % tile

    def padded(x_BSHD: Array) -> Array:
        return jnp.pad(x_BSHD, ((0, 0), (0, tail), (0, 0), (0, 0))).swapaxes(1, 2)

    def whole(x_BKGS: Array) -> Array:
        x_BHS = x_BKGS.reshape(B, H, *x_BKGS.shape[3:])
        return x_BHS.swapaxes(1, 2)[:, :S]

    q_BKGSD = padded(q_BSHD).reshape(B, k_BSKD.shape[2], -1, S + tail, D)
    segments_BS = jnp.pad(segment_ids_BS, ((0, 0), (0, tail)), constant_values=_PADDING)
    mixed_BKGSV, log_normaliser_BKGS = _attend(
        tile, options, q_BKGSD, padded(k_BSKD), padded(v_BSKV), segments_BS
    )
    return whole(mixed_BKGSV), whole(log_normaliser_BKGS)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(
    tile: int, options: Options, q_BKGSD: Array, k_BKSD: Array, v_BKSV: Array, segments_BS: Array
) -> tuple[Array, Array]:
    return _forward(tile, options, q_BKGSD, k_BKSD, v_BKSV, segments_BS)[0]


def _forward(
    tile: int, options: Options, q_BKGSD: Array, k_BKSD: Array, v_BKSV: Array, segments_BS: Array
) -> tuple[tuple[Array, Array], tuple[Array, ...]]:
    """Running maximum, normaliser and sum for each query (the paper's algorithm 1)."""
    wide = jnp.promote_types(q_BKGSD.dtype, jnp.float32)

    def visit(carry: Carry, pair: Pair) -> tuple[Carry, None]:
        sum_BKGSV, normaliser_BKGS, highest_BKGS = carry
        i, j = pair
        scores_BKGQT, allowed_BQT = _scores(tile, options, q_BKGSD, k_BKSD, segments_BS, i, j)
        scores_BKGQT = jnp.where(allowed_BQT[:, None, None], scores_BKGQT, _FAR)
        before_BKGQ = _tile(highest_BKGS, i, tile, 3)
        highest_BKGQ = jnp.maximum(before_BKGQ, jnp.max(scores_BKGQT, axis=-1))
        weights_BKGQT = jnp.exp(scores_BKGQT - highest_BKGQ[..., None])
        shrink_BKGQ = jnp.exp(before_BKGQ - highest_BKGQ)
        mixed_BKGQV = jnp.einsum(
            "bkgqt,bktv->bkgqv",
            weights_BKGQT.astype(v_BKSV.dtype),
            _tile(v_BKSV, j, tile, 2),
            preferred_element_type=wide,
        )
        sum_BKGQV = _tile(sum_BKGSV, i, tile, 3) * shrink_BKGQ[..., None] + mixed_BKGQV
        normaliser_BKGQ = _tile(normaliser_BKGS, i, tile, 3) * shrink_BKGQ
        normaliser_BKGQ += jnp.sum(weights_BKGQT, axis=-1)
        return (
            _put(sum_BKGSV, sum_BKGQV, i, tile, 3),
            _put(normaliser_BKGS, normaliser_BKGQ, i, tile, 3),
            _put(highest_BKGS, highest_BKGQ, i, tile, 3),
        ), None

    nothing_BKGS = jnp.zeros(q_BKGSD.shape[:-1], wide)
    start = (
        jnp.zeros((*nothing_BKGS.shape, v_BKSV.shape[-1]), wide),
        nothing_BKGS,
        nothing_BKGS + _FAR,
    )
    (sum_BKGSV, normaliser_BKGS, highest_BKGS), _ = jax.lax.scan(
        visit, start, _pairs(q_BKGSD.shape[3] // tile, tile, options.window)
    )
    mixed_BKGSV = (sum_BKGSV / normaliser_BKGS[..., None]).astype(v_BKSV.dtype)
    mixed_BKGSV = checkpoint_name(mixed_BKGSV, "attention_kernel")
    log_normaliser_BKGS = highest_BKGS + jnp.log(normaliser_BKGS)
    log_normaliser_BKGS = checkpoint_name(log_normaliser_BKGS, "attention_kernel")
    saved = q_BKGSD, k_BKSD, v_BKSV, segments_BS, mixed_BKGSV, log_normaliser_BKGS
    return (mixed_BKGSV, log_normaliser_BKGS), saved


def _backward(
    tile: int, options: Options, saved: tuple[Array, ...], arriving: tuple[Array, Array]
) -> tuple[Array, Array, Array, None]:
    """Algorithm 2 of the paper. The derivative of a log-normaliser is the weights themselves, so
    what arrives for it is added to what arrives for each weight."""
    d_mixed_BKGSV, d_log_normaliser_BKGS = arriving
    q_BKGSD, k_BKSD, v_BKSV, segments_BS, mixed_BKGSV, log_normaliser_BKGS = saved
    wide = log_normaliser_BKGS.dtype
    product = functools.partial(jnp.einsum, preferred_element_type=wide)
    towards_BKGS = jnp.sum(mixed_BKGSV.astype(wide) * d_mixed_BKGSV.astype(wide), axis=-1)
    towards_BKGS -= d_log_normaliser_BKGS

    def visit(carry: Carry, pair: Pair) -> tuple[Carry, None]:
        dq_BKGSD, dk_BKSD, dv_BKSV = carry
        i, j = pair
        scores_BKGQT, allowed_BQT = _scores(tile, options, q_BKGSD, k_BKSD, segments_BS, i, j)
        shifted_BKGQT = scores_BKGQT - _tile(log_normaliser_BKGS, i, tile, 3)[..., None]
        weights_BKGQT = jnp.where(allowed_BQT[:, None, None], jnp.exp(shifted_BKGQT), 0)
        d_mixed_BKGQV = _tile(d_mixed_BKGSV, i, tile, 3)
        v_BKTV, k_BKTD = _tile(v_BKSV, j, tile, 2), _tile(k_BKSD, j, tile, 2)
        d_weights_BKGQT = product("bkgqv,bktv->bkgqt", d_mixed_BKGQV, v_BKTV)
        d_scores_BKGQT = d_weights_BKGQT - _tile(towards_BKGS, i, tile, 3)[..., None]
        d_products_BKGQT = weights_BKGQT * d_scores_BKGQT * options.slope(scores_BKGQT)
        d_products_BKGQT = d_products_BKGQT.astype(q_BKGSD.dtype)
        weights_BKGQT = weights_BKGQT.astype(v_BKSV.dtype)
        dq_BKGQD = product("bkgqt,bktd->bkgqd", d_products_BKGQT, k_BKTD)
        dk_BKTD = product("bkgqt,bkgqd->bktd", d_products_BKGQT, _tile(q_BKGSD, i, tile, 3))
        dv_BKTV = product("bkgqt,bkgqv->bktv", weights_BKGQT, d_mixed_BKGQV)
        return (
            _put(dq_BKGSD, _tile(dq_BKGSD, i, tile, 3) + dq_BKGQD, i, tile, 3),
            _put(dk_BKSD, _tile(dk_BKSD, j, tile, 2) + dk_BKTD, j, tile, 2),
            _put(dv_BKSV, _tile(dv_BKSV, j, tile, 2) + dv_BKTV, j, tile, 2),
        ), None

    dq, dk, dv = (jnp.zeros(x.shape, wide) for x in (q_BKGSD, k_BKSD, v_BKSV))
    pairs = _pairs(q_BKGSD.shape[3] // tile, tile, options.window)
    (dq_BKGSD, dk_BKSD, dv_BKSV), _ = jax.lax.scan(visit, (dq, dk, dv), pairs)
    return (
        dq_BKGSD.astype(q_BKGSD.dtype),
        dk_BKSD.astype(k_BKSD.dtype),
        dv_BKSV.astype(v_BKSV.dtype),
        None,
    )


_attend.defvjp(_forward, _backward)


def _scores(
    tile: int,
    options: Options,
    q_BKGSD: Array,
    k_BKSD: Array,
    segments_BS: Array,
    i: Array,
    j: Array,
) -> tuple[Float[Array, "b k g q t"], Bool[Array, "b q t"]]:
    """The scores of query tile i and key tile j, and which of them count."""
    q_BKGQD, k_BKTD = _tile(q_BKGSD, i, tile, 3), _tile(k_BKSD, j, tile, 2)
    wide = jnp.promote_types(q_BKGSD.dtype, jnp.float32)
    scores_BKGQT = jnp.einsum("bkgqd,bktd->bkgqt", q_BKGQD, k_BKTD, preferred_element_type=wide)
    distance_QT = (i - j) * tile + jnp.arange(tile)[:, None] - jnp.arange(tile)
    near_QT = distance_QT >= 0
    if options.window is not None:
        near_QT &= distance_QT < options.window
    same_BQT = _tile(segments_BS, i, tile, 1)[:, :, None] == _tile(segments_BS, j, tile, 1)[:, None]
    return options.scores(scores_BKGQT), near_QT & same_BQT


def _pairs(tiles: int, tile: int, window: int | None) -> Pair:
    """(P,) and (P,) int32: every tile of queries with each tile of keys that any of them sees."""
    pairs = [
        (i, j)
        for i in range(tiles)
        for j in range(i + 1)
        # The nearest two positions of different tiles.
        if window is None or i == j or (i - j - 1) * tile + 1 < window
    ]
    queries_P, keys_P = np.array(pairs, np.int32).T
    return jnp.asarray(queries_P), jnp.asarray(keys_P)


def _tile(x: Array, index: Array, tile: int, axis: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, index * tile, tile, axis)


def _put(x: Array, part: Array, index: Array, tile: int, axis: int) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(x, part, index * tile, axis)
