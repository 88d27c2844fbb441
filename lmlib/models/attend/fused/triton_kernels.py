"""The kernels of `lmlib.models.attend.fused.triton`.

Source: FlashAttention-2 (Dao 2023, arXiv:2307.08691).

    mixed            a tile of queries mixes the values of its keys (algorithm 1)
    query_gradients  the same tiles again, for the gradient of the queries (algorithm 2)
    key_gradients    a tile of keys sums the gradients from its queries (algorithm 2)

Scores are float32; products have the dtype of the arrays.

Shapes: B batch, S sequence (queries), T sequence (keys), H heads, K kv_heads, G = H / K query heads
per key-value head, D head_dim of queries and keys, V head_dim of values, Q queries per tile, R keys
per tile, N and M tiles of queries and of keys, P pieces.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pallas_triton
from jax.typing import DTypeLike
from jaxtyping import Array

from lmlib.models.attend.fused.visits import Sight, Tiles, keys_visited, queries_visited
from lmlib.models.attend.kernel import Options
from lmlib.parallel.collectives import platform

Ref = Any  # Pallas's reference to an array in the GPU's memory, or to a tile of one

_FAR = -1e30  # negligible in any sum, and still finite
_LOG2_E = math.log2(math.e)
_SMALLEST = 1e-37  # lower bound of the sum of a query's exponentials


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


# Measured, not derived; `python benchmarks/kernels/attention.py --launches` measures others. Keys
# are the largest size of a head in bytes. Each entry was the fastest of about twenty on an
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


def mixed(
    launch: Launch, options: Options, q_BSHD: Array, k_BTKD: Array, v_BTKV: Array, sight: Sight
) -> tuple[Array, Array]:
    """The mixed values of each query, [B, S, H, V], and its log-normaliser, [B, H, S]."""
    B, S, H, _ = q_BSHD.shape
    V = v_BTKV.shape[-1]
    tiles = launch.tiles
    specs = _query_specs(tiles, q_BSHD, k_BTKD, v_BTKV)
    return _call(
        functools.partial(_mixed_kernel, tiles=tiles, options=options),
        "attention_mixed",
        launch,
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
    )(
        keys_visited(sight, tiles), q_BSHD, sight.places_S, sight.segments_BS, k_BTKD, v_BTKV,
        sight.segments_BT,
    )  # fmt: skip


def query_gradients(
    launch: Launch, options: Options, q_BSHD: Array, k_BTKD: Array, v_BTKV: Array,
    sight: Sight, d_mixed_BSHV: Array, log_normaliser_BHS: Array, towards_BHS: Array,
) -> Array:  # fmt: skip
    """dq, [B, S, H, D]; see `lmlib.models.attend.tiles.Arriving`."""
    B, S, H, D = q_BSHD.shape
    tiles = launch.tiles
    number = pl.BlockSpec((None, None, tiles.queries), lambda i, b, h: (b, h, i))
    d_mixed = pl.BlockSpec(
        (None, tiles.queries, None, d_mixed_BSHV.shape[-1]), lambda i, b, h: (b, i, h, 0)
    )
    (dq_BSHD,) = _call(
        functools.partial(_query_kernel, tiles=tiles, options=options),
        "attention_query_gradients",
        launch,
        grid=(S // tiles.queries, B, H),
        inputs=[*_query_specs(tiles, q_BSHD, k_BTKD, v_BTKV), d_mixed, number, number],
        outputs=[pl.BlockSpec((None, tiles.queries, None, D), lambda i, b, h: (b, i, h, 0))],
        shapes=[jax.ShapeDtypeStruct(q_BSHD.shape, q_BSHD.dtype)],
        flops=3 * _product_flops(q_BSHD, k_BTKD, options),
    )(
        keys_visited(sight, tiles), q_BSHD, sight.places_S, sight.segments_BS, k_BTKD, v_BTKV,
        sight.segments_BT, d_mixed_BSHV, log_normaliser_BHS, towards_BHS,
    )  # fmt: skip
    return dq_BSHD


def key_gradients(
    launch: Launch, piece: int, options: Options, q_BSHD: Array, k_BTKD: Array, v_BTKV: Array,
    sight: Sight, d_mixed_BSHV: Array, log_normaliser_BHS: Array, towards_BHS: Array,
) -> tuple[Array, Array]:  # fmt: skip
    """dk, [B, T, K, D], and dv, [B, T, K, V]; see `lmlib.models.attend.tiles.Arriving`."""
    B, S, H, D = q_BSHD.shape
    _, T, K, V = v_BTKV.shape
    tiles = launch.tiles
    visited_BMP4 = queries_visited(sight, tiles, piece)
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
        launch,
        grid=(T // tiles.keys, B, K),
        inputs=[
            pl.BlockSpec((None, None, S // piece, 4), lambda j, b, k: (b, j, 0, 0)),
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
        visited_BMP4, q_BSHD, sight.places_S, sight.segments_BS, k_BTKD, v_BTKV,
        sight.segments_BT, d_mixed_BSHV, log_normaliser_BHS, towards_BHS,
    )  # fmt: skip


def _mixed_kernel(
    visited_4: Ref, q_QD: Ref, place_Q: Ref, segment_Q: Ref, k_TD: Ref, v_TV: Ref, segment_T: Ref,
    mixed_QV: Ref, log_normaliser_Q: Ref, *,
    tiles: Tiles, options: Options,
) -> None:  # fmt: skip
    q, place, segment = q_QD[...], place_Q[...], segment_Q[...]

    def visit(j: Array, sums: tuple[Array, Array, Array], whole: bool) -> tuple[Array, ...]:
        before_QV, normaliser_Q, highest_Q = sums
        here = pl.ds(j * tiles.keys, tiles.keys)
        powers_QR = _powers(_dot(q, k_TD[here, :].T), options)
        if not whole:
            allowed_QR = _allowed(
                place[:, None], segment[:, None], _places(j, tiles)[None, :],
                segment_T[here][None, :], options,
            )  # fmt: skip
            powers_QR = jnp.where(allowed_QR, powers_QR, _FAR)
        new_Q = jnp.maximum(highest_Q, jnp.max(powers_QR, axis=1))
        weights_QR = jnp.exp2(powers_QR - new_Q[:, None])
        shrink_Q = jnp.exp2(highest_Q - new_Q)
        normaliser_Q = normaliser_Q * shrink_Q + jnp.sum(weights_QR, axis=1)
        v_RV = v_TV[here, :]
        added_QV = _dot(weights_QR.astype(v_RV.dtype), v_RV)
        return before_QV * shrink_Q[:, None] + added_QV, normaliser_Q, new_Q

    nothing_Q = jnp.zeros(place.shape, jnp.float32)
    sums = jnp.zeros(mixed_QV.shape, jnp.float32), nothing_Q, nothing_Q + _FAR
    sum_QV, normaliser_Q, highest_Q = _each([visited_4[i] for i in range(4)], visit, sums)
    normaliser_Q = jnp.maximum(normaliser_Q, _SMALLEST)
    mixed_QV[...] = (sum_QV / normaliser_Q[:, None]).astype(mixed_QV.dtype)
    log_normaliser_Q[...] = highest_Q / _LOG2_E + jnp.log(normaliser_Q)


def _query_kernel(
    visited_4: Ref, q_QD: Ref, place_Q: Ref, segment_Q: Ref, k_TD: Ref, v_TV: Ref, segment_T: Ref,
    d_mixed_QV: Ref, log_normaliser_Q: Ref, towards_Q: Ref, dq_QD: Ref, *,
    tiles: Tiles, options: Options,
) -> None:  # fmt: skip
    q, place, segment = q_QD[...], place_Q[...], segment_Q[...]
    d_mixed, towards = d_mixed_QV[...], towards_Q[...]
    log2_normaliser = log_normaliser_Q[...] * _LOG2_E

    def visit(j: Array, sum_QD: Array, whole: bool) -> Array:
        here = pl.ds(j * tiles.keys, tiles.keys)
        k_RD = k_TD[here, :]
        powers_QR = _powers(_dot(q, k_RD.T), options)
        weights_QR = jnp.exp2(powers_QR - log2_normaliser[:, None])
        if not whole:
            allowed_QR = _allowed(
                place[:, None], segment[:, None], _places(j, tiles)[None, :],
                segment_T[here][None, :], options,
            )  # fmt: skip
            weights_QR = jnp.where(allowed_QR, weights_QR, 0.0)
        d_weights_QR = _dot(d_mixed, v_TV[here, :].T) - towards[:, None]
        d_products_QR = weights_QR * d_weights_QR * _flatness(powers_QR, options)
        return sum_QD + _dot(d_products_QR.astype(k_RD.dtype), k_RD)

    nothing = jnp.zeros(dq_QD.shape, jnp.float32)
    sum_QD = _each([visited_4[i] for i in range(4)], visit, nothing)
    dq_QD[...] = (options.scale * sum_QD).astype(dq_QD.dtype)


def _key_kernel(
    visited_P4: Ref, q_SGD: Ref, place_S: Ref, segment_S: Ref, k_RD: Ref, v_RV: Ref, segment_R: Ref,
    d_mixed_SGV: Ref, log_normaliser_GS: Ref, towards_GS: Ref, dk_RD: Ref, dv_RV: Ref, *,
    tiles: Tiles, options: Options,
) -> None:  # fmt: skip
    k, v, segment = k_RD[...], v_RV[...], segment_R[...]
    place_R = _places(pl.program_id(0), tiles)

    def of_head(g: Array, sums: tuple[Array, Array]) -> tuple[Array, Array]:
        def visit(i: Array, sums: tuple[Array, Array], whole: bool) -> tuple[Array, Array]:
            dk, dv = sums
            here = pl.ds(i * tiles.queries, tiles.queries)
            q_QD, d_mixed_QV = q_SGD[here, g, :], d_mixed_SGV[here, g, :]
            # Keys are rows, as in their gradients, so that nothing computed has to be transposed.
            powers_RQ = _powers(_dot(k, q_QD.T), options)
            weights_RQ = jnp.exp2(powers_RQ - _LOG2_E * log_normaliser_GS[g, here][None, :])
            if not whole:
                allowed_RQ = _allowed(
                    place_S[here][None, :], segment_S[here][None, :], place_R[:, None],
                    segment[:, None], options,
                )  # fmt: skip
                weights_RQ = jnp.where(allowed_RQ, weights_RQ, 0.0)
            dv += _dot(weights_RQ.astype(d_mixed_QV.dtype), d_mixed_QV)
            d_weights_RQ = _dot(v, d_mixed_QV.T) - towards_GS[g, here][None, :]
            d_products_RQ = weights_RQ * d_weights_RQ * _flatness(powers_RQ, options)
            return dk + _dot(d_products_RQ.astype(q_QD.dtype), q_QD), dv

        for piece in range(visited_P4.shape[0]):
            sums = _each([visited_P4[piece, i] for i in range(4)], visit, sums)
        return sums

    nothing = jnp.zeros(dk_RD.shape, jnp.float32), jnp.zeros(dv_RV.shape, jnp.float32)
    dk, dv = jax.lax.fori_loop(0, q_SGD.shape[1], of_head, nothing)
    dk_RD[...] = (options.scale * dk).astype(dk_RD.dtype)
    dv_RV[...] = dv.astype(dv_RV.dtype)


def _each(visited: Sequence[Array], visit: Callable[..., Any], sums: Any) -> Any:
    """Runs `visit` on the tiles in `visited`, see `lmlib.models.attend.fused.visits`.

    Tiles at borders of documents and windows and on the diagonal come first, then tiles that are
    completely visible.
    """
    first, first_whole, after_whole, after = visited
    before, wholes = first_whole - first, after_whole - first_whole

    def at_a_border(i: Array, sums: Any) -> Any:
        return visit(first + i + jnp.where(i < before, 0, wholes), sums, whole=False)

    sums = jax.lax.fori_loop(0, after - first - wholes, at_a_border, sums)
    return jax.lax.fori_loop(first_whole, after_whole, functools.partial(visit, whole=True), sums)


def _allowed(
    place_q: Array, segment_q: Array, place_k: Array, segment_k: Array, options: Options
) -> Array:
    """True where a query attends to a key; queries and keys are on two different axes."""
    distance = place_q - place_k
    near = distance >= 0
    if options.window is not None:
        near &= distance < options.window
    return near & (segment_q == segment_k)


def _powers(products: Array, options: Options) -> Array:
    """Scores for powers of 2 instead of e, since GPUs compute powers of 2."""
    if options.soft_cap is None:
        return products * (options.scale * _LOG2_E)
    return options.scores(products) * _LOG2_E


def _flatness(powers: Array, options: Options) -> Array | float:
    """The derivative of scores with respect to products, divided by `options.scale`."""
    return options.slope(powers / _LOG2_E) / options.scale if options.soft_cap else 1.0


def _places(tile: Array, tiles: Tiles) -> Array:
    return tile * tiles.keys + jnp.arange(tiles.keys, dtype=jnp.int32)


def _dot(x: Array, y: Array) -> Array:
    """The product in float32, with the full precision of float32 operands."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return pallas_triton.dot(x, y, precision=precision)


def _query_specs(tiles: Tiles, q_BSHD: Array, k_BTKD: Array, v_BTKV: Array) -> list[pl.BlockSpec]:
    """Blocks of the inputs of a query tile, and of all keys and values of its head."""
    _, T, K, D = k_BTKD.shape
    group = q_BSHD.shape[2] // K
    key, value = (
        pl.BlockSpec((None, T, None, size), lambda i, b, h: (b, 0, h // group, 0))
        for size in (D, v_BTKV.shape[-1])
    )
    return [
        pl.BlockSpec((None, None, 4), lambda i, b, h: (b, i, 0)),
        pl.BlockSpec((None, tiles.queries, None, D), lambda i, b, h: (b, i, h, 0)),
        pl.BlockSpec((tiles.queries,), lambda i, b, h: (i,)),
        pl.BlockSpec((None, tiles.queries), lambda i, b, h: (b, i)),
        key,
        value,
        pl.BlockSpec((None, T), lambda i, b, h: (b, 0)),
    ]


def _product_flops(q_BSHD: Array, k_BTKD: Array, options: Options) -> int:
    """FLOPs of one of the products of queries and keys, for rows that are one document each."""
    B, S, H, D = q_BSHD.shape
    T = k_BTKD.shape[1]
    keys = min(options.window or T, T)
    return round(2 * B * S * H * D * (keys - keys**2 / (2 * T)))


def _call(
    kernel: Callable[..., None], name: str, launch: Launch, grid: tuple[int, ...],
    inputs: Sequence[pl.BlockSpec], outputs: Sequence[pl.BlockSpec],
    shapes: Sequence[jax.ShapeDtypeStruct], flops: int,
) -> Callable[..., Any]:  # fmt: skip
    call = pl.pallas_call(
        kernel,
        name=name,
        grid=grid,
        in_specs=inputs,
        out_specs=outputs,
        out_shape=shapes,
        compiler_params=pallas_triton.CompilerParams(
            num_warps=launch.warps, num_stages=launch.stages
        ),
        cost_estimate=pl.CostEstimate(flops=flops, transcendentals=0, bytes_accessed=0),
        interpret=platform() != "cuda",
    )
    return lambda *arrays: tuple(call(*arrays))
