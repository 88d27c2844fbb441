"""The kernels of `lmlib.models.attend.fused.triton` (FlashAttention-2: Dao 2023, arXiv:2307.08691).

    mixed            a tile of queries mixes the values of the keys that it sees (algorithm 1)
    query_gradients  the same tiles again, for the gradient of the queries (algorithm 2)
    key_gradients    a tile of keys gathers what the queries that see it give back (algorithm 2)

Scores are in float32, products of what the arrays have.

Shapes: B batch, S sequence (queries), T sequence (keys), H heads, K kv_heads, G = H / K query heads
to each key-value head, D head_dim of queries and keys, V that of values, Q queries of a tile, R
keys of a tile, N and M tiles of queries and of keys, P pieces.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pallas_triton
from jaxtyping import Array

from lmlib.models.attend.fused.visits import Tiles, Visits
from lmlib.models.attend.options import Options
from lmlib.parallel.collectives import platform

Ref = Any  # of Pallas: an array in the GPU's memory, or a tile of one

_FAR = -1e30  # a score that no sum notices, and from which no infinity comes
_SMALLEST = 1e-37  # what a query's exponentials add up to at least


# Tokens of a tile of queries and of one of keys, for heads of up to so many coordinates: what the
# shared memory of each GPU that plan knows has room for. Not measured.
_TILES = {64: Tiles(128, 64), 128: Tiles(64, 64), 256: Tiles(64, 32)}


def tiles(piece: int, head_dim: int) -> Tiles:
    """For pieces of so many tokens, which both divide."""
    largest = next(tiles for limit, tiles in _TILES.items() if head_dim <= limit)
    return Tiles(*(math.gcd(piece, size) for size in largest))


def mixed(
    tiles: Tiles, options: Options, q_BSHD: Array, k_BTKD: Array, v_BTKV: Array, seen: Visits
) -> tuple[Array, Array]:
    """What each query gets, [B, S, H, V], and the logarithm of its normaliser, [B, H, S]."""
    B, S, H, _ = q_BSHD.shape
    V = v_BTKV.shape[-1]
    specs = _query_specs(tiles, q_BSHD, k_BTKD, v_BTKV)
    return _call(
        functools.partial(_mixed_kernel, tiles=tiles, options=options),
        "attention_mixed",
        grid=(S // tiles.queries, B, H),
        inputs=specs,
        outputs=[
            pl.BlockSpec((None, tiles.queries, None, V), lambda i, b, h: (b, i, h, 0)),
            pl.BlockSpec((None, None, tiles.queries), lambda i, b, h: (b, h, i)),
        ],
        shapes=[
            jax.ShapeDtypeStruct((B, S, H, V), v_BTKV.dtype),
            jax.ShapeDtypeStruct((B, H, S), jnp.float32),
        ],
        flops=2 * _product_flops(q_BSHD, k_BTKD, options),
    )(seen.keys_BN2, q_BSHD, seen.places_S, seen.segments_BS, k_BTKD, v_BTKV, seen.segments_BT)


def query_gradients(
    tiles: Tiles,
    options: Options,
    q_BSHD: Array,
    k_BTKD: Array,
    v_BTKV: Array,
    seen: Visits,
    d_mixed_BSHV: Array,
    log_normaliser_BHS: Array,
    towards_BHS: Array,
) -> Array:
    """dq, [B, S, H, D].

    Args:
      d_mixed_BSHV, log_normaliser_BHS, towards_BHS: see `lmlib.models.attend.tiles.Arriving`.
    """
    B, S, H, D = q_BSHD.shape
    number = pl.BlockSpec((None, None, tiles.queries), lambda i, b, h: (b, h, i))
    d_mixed = pl.BlockSpec(
        (None, tiles.queries, None, d_mixed_BSHV.shape[-1]), lambda i, b, h: (b, i, h, 0)
    )
    (dq_BSHD,) = _call(
        functools.partial(_query_kernel, tiles=tiles, options=options),
        "attention_query_gradients",
        grid=(S // tiles.queries, B, H),
        inputs=[*_query_specs(tiles, q_BSHD, k_BTKD, v_BTKV), d_mixed, number, number],
        outputs=[pl.BlockSpec((None, tiles.queries, None, D), lambda i, b, h: (b, i, h, 0))],
        shapes=[jax.ShapeDtypeStruct(q_BSHD.shape, q_BSHD.dtype)],
        flops=3 * _product_flops(q_BSHD, k_BTKD, options),
    )(
        seen.keys_BN2, q_BSHD, seen.places_S, seen.segments_BS, k_BTKD, v_BTKV, seen.segments_BT,
        d_mixed_BSHV, log_normaliser_BHS, towards_BHS,
    )  # fmt: skip
    return dq_BSHD


def key_gradients(
    tiles: Tiles,
    options: Options,
    q_BSHD: Array,
    k_BTKD: Array,
    v_BTKV: Array,
    seen: Visits,
    d_mixed_BSHV: Array,
    log_normaliser_BHS: Array,
    towards_BHS: Array,
) -> tuple[Array, Array]:
    """dk, [B, T, K, D], and dv, [B, T, K, V]; arguments as `query_gradients`."""
    B, S, H, D = q_BSHD.shape
    _, T, K, V = v_BTKV.shape
    P = seen.queries_BMP2.shape[2]
    key, value = (
        pl.BlockSpec((None, tiles.keys, None, size), lambda j, b, k: (b, j, k, 0))
        for size in (D, V)
    )
    query, d_mixed = (
        pl.BlockSpec((None, S, H // K, size), lambda j, b, k: (b, 0, k, 0)) for size in (D, V)
    )
    number = pl.BlockSpec((None, H // K, S), lambda j, b, k: (b, k, 0))
    return _call(
        functools.partial(_key_kernel, tiles=tiles, options=options),
        "attention_key_gradients",
        grid=(T // tiles.keys, B, K),
        inputs=[
            pl.BlockSpec((None, None, P, 2), lambda j, b, k: (b, j, 0, 0)),
            query,
            pl.BlockSpec((S,), lambda j, b, k: (0,)),
            pl.BlockSpec((None, S), lambda j, b, k: (b, 0)),
            key,
            value,
            pl.BlockSpec((None, tiles.keys), lambda j, b, k: (b, j)),
            d_mixed,
            number,
            number,
        ],
        outputs=[key, value],
        shapes=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (k_BTKD, v_BTKV)],
        flops=4 * _product_flops(q_BSHD, k_BTKD, options),
    )(
        seen.queries_BMP2, q_BSHD, seen.places_S, seen.segments_BS, k_BTKD, v_BTKV,
        seen.segments_BT, d_mixed_BSHV, log_normaliser_BHS, towards_BHS,
    )  # fmt: skip


def _mixed_kernel(
    visited_2: Ref, q_QD: Ref, place_Q: Ref, segment_Q: Ref, k_TD: Ref, v_TV: Ref, segment_T: Ref,
    mixed_QV: Ref, log_normaliser_Q: Ref, *,
    tiles: Tiles, options: Options,
) -> None:  # fmt: skip
    q, place, segment = q_QD[...], place_Q[...], segment_Q[...]

    def visit(j: Array, sums: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        before_QV, normaliser_Q, highest_Q = sums
        here = pl.ds(j * tiles.keys, tiles.keys)
        v_RV = v_TV[here, :]
        scores_QR = options.scores(_dot(q, k_TD[here, :].T))
        allowed_QR = _allowed(place, segment, _places(j, tiles), segment_T[here], options)
        scores_QR = jnp.where(allowed_QR, scores_QR, _FAR)
        new_Q = jnp.maximum(highest_Q, jnp.max(scores_QR, axis=1))
        weights_QR = jnp.exp(scores_QR - new_Q[:, None])
        shrink_Q = jnp.exp(highest_Q - new_Q)
        normaliser_Q = normaliser_Q * shrink_Q + jnp.sum(weights_QR, axis=1)
        added_QV = _dot(weights_QR.astype(v_RV.dtype), v_RV)
        return before_QV * shrink_Q[:, None] + added_QV, normaliser_Q, new_Q

    nothing_Q = jnp.zeros(place.shape, jnp.float32)
    sums = jnp.zeros(mixed_QV.shape, jnp.float32), nothing_Q, nothing_Q + _FAR
    sum_QV, normaliser_Q, highest_Q = jax.lax.fori_loop(visited_2[0], visited_2[1], visit, sums)
    normaliser_Q = jnp.maximum(normaliser_Q, _SMALLEST)
    mixed_QV[...] = (sum_QV / normaliser_Q[:, None]).astype(mixed_QV.dtype)
    log_normaliser_Q[...] = highest_Q + jnp.log(normaliser_Q)


def _query_kernel(
    visited_2: Ref, q_QD: Ref, place_Q: Ref, segment_Q: Ref, k_TD: Ref, v_TV: Ref, segment_T: Ref,
    d_mixed_QV: Ref, log_normaliser_Q: Ref, towards_Q: Ref, dq_QD: Ref, *,
    tiles: Tiles, options: Options,
) -> None:  # fmt: skip
    q, place, segment = q_QD[...], place_Q[...], segment_Q[...]
    d_mixed, log_normaliser, towards = d_mixed_QV[...], log_normaliser_Q[...], towards_Q[...]

    def visit(j: Array, sum_QD: Array) -> Array:
        here = pl.ds(j * tiles.keys, tiles.keys)
        k_RD = k_TD[here, :]
        scores_QR = options.scores(_dot(q, k_RD.T))
        allowed_QR = _allowed(place, segment, _places(j, tiles), segment_T[here], options)
        weights_QR = jnp.where(allowed_QR, jnp.exp(scores_QR - log_normaliser[:, None]), 0.0)
        d_weights_QR = _dot(d_mixed, v_TV[here, :].T) - towards[:, None]
        d_products_QR = weights_QR * d_weights_QR * options.slope(scores_QR)
        return sum_QD + _dot(d_products_QR.astype(k_RD.dtype), k_RD)

    nothing = jnp.zeros(dq_QD.shape, jnp.float32)
    sum_QD = jax.lax.fori_loop(visited_2[0], visited_2[1], visit, nothing)
    dq_QD[...] = sum_QD.astype(dq_QD.dtype)


def _key_kernel(
    visited_P2: Ref, q_SGD: Ref, place_S: Ref, segment_S: Ref, k_RD: Ref, v_RV: Ref, segment_R: Ref,
    d_mixed_SGV: Ref, log_normaliser_GS: Ref, towards_GS: Ref, dk_RD: Ref, dv_RV: Ref, *,
    tiles: Tiles, options: Options,
) -> None:  # fmt: skip
    k, v, segment = k_RD[...], v_RV[...], segment_R[...]
    place_R = _places(pl.program_id(0), tiles)

    def of_head(g: Array, sums: tuple[Array, Array]) -> tuple[Array, Array]:
        def visit(i: Array, sums: tuple[Array, Array]) -> tuple[Array, Array]:
            dk, dv = sums
            here = pl.ds(i * tiles.queries, tiles.queries)
            q_QD, d_mixed_QV = q_SGD[here, g, :], d_mixed_SGV[here, g, :]
            scores_QR = options.scores(_dot(q_QD, k.T))
            allowed_QR = _allowed(place_S[here], segment_S[here], place_R, segment, options)
            shifted_QR = scores_QR - log_normaliser_GS[g, here][:, None]
            weights_QR = jnp.where(allowed_QR, jnp.exp(shifted_QR), 0.0)
            d_weights_QR = _dot(d_mixed_QV, v.T) - towards_GS[g, here][:, None]
            d_products_QR = weights_QR * d_weights_QR * options.slope(scores_QR)
            dk += _dot(d_products_QR.astype(q_QD.dtype).T, q_QD)
            return dk, dv + _dot(weights_QR.astype(d_mixed_QV.dtype).T, d_mixed_QV)

        for piece in range(visited_P2.shape[0]):
            sums = jax.lax.fori_loop(visited_P2[piece, 0], visited_P2[piece, 1], visit, sums)
        return sums

    nothing = jnp.zeros(dk_RD.shape, jnp.float32), jnp.zeros(dv_RV.shape, jnp.float32)
    dk, dv = jax.lax.fori_loop(0, q_SGD.shape[1], of_head, nothing)
    dk_RD[...], dv_RV[...] = dk.astype(dk_RD.dtype), dv.astype(dv_RV.dtype)


def _allowed(
    place_Q: Array, segment_Q: Array, place_R: Array, segment_R: Array, options: Options
) -> Array:
    distance_QR = place_Q[:, None] - place_R[None, :]
    near_QR = distance_QR >= 0
    if options.window is not None:
        near_QR &= distance_QR < options.window
    return near_QR & (segment_Q[:, None] == segment_R[None, :])


def _places(tile: Array, tiles: Tiles) -> Array:
    return tile * tiles.keys + jnp.arange(tiles.keys, dtype=jnp.int32)


def _dot(x: Array, y: Array) -> Array:
    """In float32; of float32 not by parts of it."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return pallas_triton.dot(x, y, precision=precision)


def _query_specs(tiles: Tiles, q_BSHD: Array, k_BTKD: Array, v_BTKV: Array) -> list[pl.BlockSpec]:
    """Of what belongs to a tile of queries, and of all keys and values of its head."""
    _, T, K, D = k_BTKD.shape
    group = q_BSHD.shape[2] // K
    key, value = (
        pl.BlockSpec((None, T, None, size), lambda i, b, h: (b, 0, h // group, 0))
        for size in (D, v_BTKV.shape[-1])
    )
    return [
        pl.BlockSpec((None, None, 2), lambda i, b, h: (b, i, 0)),
        pl.BlockSpec((None, tiles.queries, None, D), lambda i, b, h: (b, i, h, 0)),
        pl.BlockSpec((tiles.queries,), lambda i, b, h: (i,)),
        pl.BlockSpec((None, tiles.queries), lambda i, b, h: (b, i)),
        key,
        value,
        pl.BlockSpec((None, T), lambda i, b, h: (b, 0)),
    ]


def _product_flops(q_BSHD: Array, k_BTKD: Array, options: Options) -> int:
    """Of one of the products of queries and keys, of rows that are one document each."""
    B, S, H, D = q_BSHD.shape
    T = k_BTKD.shape[1]
    keys = min(options.window or T, T)
    return round(2 * B * S * H * D * (keys - keys**2 / (2 * T)))


def _call(
    kernel: Callable[..., None],
    name: str,
    grid: tuple[int, ...],
    inputs: Sequence[pl.BlockSpec],
    outputs: Sequence[pl.BlockSpec],
    shapes: Sequence[jax.ShapeDtypeStruct],
    flops: int,
) -> Callable[..., Any]:
    call = pl.pallas_call(
        kernel,
        name=name,
        grid=grid,
        in_specs=inputs,
        out_specs=outputs,
        out_shape=shapes,
        compiler_params=pallas_triton.CompilerParams(num_warps=8, num_stages=2),
        cost_estimate=pl.CostEstimate(flops=flops, transcendentals=0, bytes_accessed=0),
        interpret=platform() != "cuda",
    )
    return lambda *arrays: tuple(call(*arrays))
