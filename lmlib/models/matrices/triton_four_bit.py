"""Products with matrices in 4 bits for GPUs, in Pallas for Triton.

A tile of the matrix is converted just before its product, so that it is never in the GPU's memory
in 16 bits. Even and odd columns of the activations have separate arrays, since the two codes in a
byte are of neighbours. Sums are float32.

Shapes: N rows of activations, C bytes of codes, two contracted elements each, G blocks, F output
columns, T, B and J rows, bytes and columns of a tile; B is a block.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pallas_triton
from jaxtyping import Array, Float, Float32, UInt8

from lmlib.models.matrices.four_bit import value_of
from lmlib.parallel.collectives import platform

Ref = Any  # Pallas's reference to an array in the GPU's memory
_ROWS, _COLUMNS = 128, 128  # of a tile, at most
_SMALLEST = 16  # the minimum for a GPU's tensor cores


def is_supported(shape: Sequence[int]) -> bool:
    """True for codes of this shape (C, F), if there are tiles of columns, and int32 counts them."""
    C, F = shape
    return F % _SMALLEST == 0 and 2 * C * F < 2**31


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def product(
    x_NE: Float[Array, "n e"],
    codes_CF: UInt8[Array, "c f"],
    scales_GF: Float32[Array, "g f"],
    values: tuple[float, ...],
    low_first: bool,
) -> Float[Array, "n f"]:
    """`x_NE` times the matrix of these codes, in x's dtype; the matrix gets no gradient.

    The first of two neighbours has the low four bits if `low_first`, else the high ones.
    """
    N, F = len(x_NE), codes_CF.shape[1]
    x_NE = _padded(x_NE)
    pair = x_NE[:, ::2], x_NE[:, 1::2]
    T, J = _tiles(len(x_NE), F)
    return _call(
        functools.partial(_forward_kernel, T=T, J=J, values=values, low_first=low_first),
        "four_bit_product",
        (len(x_NE) // T, F // J),
        jax.ShapeDtypeStruct((len(x_NE), F), x_NE.dtype),
        2 * x_NE.size * F,
    )(*pair, codes_CF, scales_GF)[:N]


def _forward(
    x_NE: Array, codes_CF: Array, scales_GF: Array, values: tuple[float, ...], low_first: bool
) -> tuple[Array, tuple[Array, Array]]:
    return product(x_NE, codes_CF, scales_GF, values, low_first), (codes_CF, scales_GF)


def _backward(
    values: tuple[float, ...], low_first: bool, saved: tuple[Array, Array], dy_NF: Array
) -> tuple[Array, None, None]:
    codes_CF, scales_GF = saved
    N, C = len(dy_NF), len(codes_CF)
    B = C // len(scales_GF)
    dy_NF = _padded(dy_NF)
    T, J = _tiles(*dy_NF.shape)
    half = jax.ShapeDtypeStruct((len(dy_NF), C), dy_NF.dtype)
    even, odd = _call(
        functools.partial(_backward_kernel, T=T, J=J, B=B, values=values, low_first=low_first),
        "four_bit_gradient",
        (len(dy_NF) // T, C // B),
        [half, half],
        4 * dy_NF.size * C,
    )(dy_NF, codes_CF, scales_GF)
    return jnp.stack([even, odd], 2).reshape(len(dy_NF), 2 * C)[:N], None, None


product.defvjp(_forward, _backward)


def _pair(
    codes: Array, scales: Array, values: tuple[float, ...], low_first: bool, dtype: Any
) -> Any:
    """The tiles of even and of odd rows of the matrix."""
    codes = codes.astype(jnp.int32)
    halves = (codes & 15, codes >> 4) if low_first else (codes >> 4, codes & 15)
    return [(value_of(half, values) * scales[None, :]).astype(dtype) for half in halves]


def _forward_kernel(
    even_NC: Ref, odd_NC: Ref, codes_CF: Ref, scales_GF: Ref, y_NF: Ref, *,
    T: int, J: int, values: tuple[float, ...], low_first: bool,
) -> None:  # fmt: skip
    C, G = codes_CF.shape[0], scales_GF.shape[0]
    B = C // G
    rows = pl.ds(pl.multiple_of(pl.program_id(0) * T, T), T)
    columns = pl.ds(pl.multiple_of(pl.program_id(1) * J, J), J)

    def add(g: Array, sum_TJ: Array) -> Array:
        block = pl.ds(pl.multiple_of(g * B, B), B)
        tiles = _pair(
            codes_CF[block, columns], scales_GF[g, columns], values, low_first, even_NC.dtype
        )
        for x_NC, w_BJ in zip((even_NC, odd_NC), tiles, strict=True):
            sum_TJ += _dot(x_NC[rows, block], w_BJ)
        return sum_TJ

    sum_TJ = jax.lax.fori_loop(0, G, add, jnp.zeros((T, J), jnp.float32))
    y_NF[rows, columns] = sum_TJ.astype(y_NF.dtype)


def _backward_kernel(
    dy_NF: Ref, codes_CF: Ref, scales_GF: Ref, even_NC: Ref, odd_NC: Ref, *,
    T: int, J: int, B: int, values: tuple[float, ...], low_first: bool,
) -> None:  # fmt: skip
    g = pl.program_id(1)
    rows = pl.ds(pl.multiple_of(pl.program_id(0) * T, T), T)
    block = pl.ds(pl.multiple_of(g * B, B), B)

    def add(j: Array, sums: list[Array]) -> list[Array]:
        columns = pl.ds(pl.multiple_of(j * J, J), J)
        tiles = _pair(
            codes_CF[block, columns], scales_GF[g, columns], values, low_first, dy_NF.dtype
        )
        dy_TJ = dy_NF[rows, columns]
        return [sum_TB + _dot(dy_TJ, w_BJ.T) for sum_TB, w_BJ in zip(sums, tiles, strict=True)]

    nothing = [jnp.zeros((T, B), jnp.float32)] * 2
    sums = jax.lax.fori_loop(0, dy_NF.shape[1] // J, add, nothing)
    for made, sum_TB in zip((even_NC, odd_NC), sums, strict=True):
        made[rows, block] = sum_TB.astype(made.dtype)


def _tiles(N: int, F: int) -> tuple[int, int]:
    return math.gcd(N, _ROWS), math.gcd(F, _COLUMNS)


def _padded(x_NE: Array) -> Array:
    """Fills the last tile of rows with zeros."""
    N = len(x_NE)
    T = min(_ROWS, max(_SMALLEST, 1 << (N - 1).bit_length()))
    return jnp.pad(x_NE, ((0, -N % T), (0, 0)))


def _dot(x: Array, y: Array) -> Array:
    """The product in float32, with the full precision of float32 operands."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return pallas_triton.dot(x, y, precision=precision)


def _call(kernel: Any, name: str, grid: tuple[int, ...], made: Any, flops: int) -> Any:
    return pl.pallas_call(
        kernel,
        name=name,
        grid=grid,
        out_shape=made,
        compiler_params=pallas_triton.CompilerParams(num_warps=8, num_stages=3),
        cost_estimate=pl.CostEstimate(flops=flops, transcendentals=0, bytes_accessed=0),
        interpret=platform() != "cuda",
    )
