"""Grouped matrix products for GPUs, in Pallas for Triton: one kernel each.

Groups may begin at any row, and may be empty. A tile of rows belongs to one group: a group's last
tile masks the rows behind its end. Products have the dtype of the arrays; sums are float32.

Shapes: N rows, X groups, Y = X + 1 groups and rows behind them, padded to a power of two, E
contracted axis, F output axis, T rows of a tile, K and J contracted and output columns of a tile.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pallas_triton
from jaxtyping import Array, Float, Int32

from lmlib.parallel.collectives import platform

Ref = Any  # Pallas's reference to an array in the GPU's memory

_SMALLEST = 16  # the minimum for a GPU's tensor cores
_BAND = 8  # tiles of rows that share the tiles of a matrix in the cache


def is_supported(x_NE: Array, w_XEF: Array) -> bool:
    """True if Triton has the dtype, there is a tile of rows, and int32 can count the elements."""
    N, known = len(x_NE), (jnp.bfloat16, jnp.float16, jnp.float32)
    largest = max(w_XEF.size, N * max(w_XEF.shape[1:]))
    return x_NE.dtype in known and N >= _SMALLEST and largest < 2**31


class Launch(NamedTuple):
    """How a kernel is launched: sizes of its tiles, powers of two from 16 on; warps; and stages.

    The other two sizes of a tile divide the arrays' axes, padded to multiples of 16.
    """

    rows: int
    contracted: int
    made: int
    warps: int = 8
    stages: int = 3


def _launch(N: int, contracted: int, made: int, itemsize: int) -> Launch:
    """The largest tiles whose operands fit into 96 kB of shared memory three times."""
    rows = min(128, 1 << N.bit_length() - 1)
    return Launch(rows, math.gcd(contracted, 128 // itemsize), math.gcd(made, 128))


class _Bounds(NamedTuple):
    """Ends of groups in rows and in tiles; the last group is the rows behind all others."""

    rows_Y: Int32[Array, "y"]
    tiles_Y: Int32[Array, "y"]

    @classmethod
    def of(cls, sizes_X: Int32[Array, "x"], N: int, T: int) -> "_Bounds":
        X = len(sizes_X)
        Y = 1 << X.bit_length()
        sizes_Y = jnp.pad(sizes_X, (0, Y - X)).at[X].set(N - jnp.sum(sizes_X, dtype=jnp.int32))
        return cls(jnp.cumsum(sizes_Y), jnp.cumsum(-(-sizes_Y // T)))


def rows_by_groups(
    rows: Sequence[Float[Array, "n contracted"]],
    matrices: Sequence[Float[Array, "x a b"]],
    sizes_X: Int32[Array, "x"],
    transposed: bool = False,
    launch: Launch | None = None,
) -> Float[Array, "n made"]:
    """Each row times the matrix of its group, or its transpose; rows behind all groups give 0.

    Returns the sum of these products, if there are several arrays of rows and as many of matrices.
    """
    (N, _), dtype, X = rows[0].shape, rows[0].dtype, len(sizes_X)
    columns = matrices[0].shape[1 if transposed else 2]
    rows, matrices = [*map(_filled, rows)], [_filled(w_XEF, axes=(1, 2)) for w_XEF in matrices]
    contracted, made = matrices[0].shape[:0:-1] if transposed else matrices[0].shape[1:]
    launch = launch or _launch(N, contracted, made, dtype.itemsize)
    most = N // launch.rows + X + 1  # each group may end within a tile
    bands = -(-most // _BAND)
    bounds = _Bounds.of(sizes_X, N, launch.rows)
    y_NF = _call(
        functools.partial(_rows_kernel, launch=launch, groups=X, transposed=transposed),
        "grouped_rows",
        launch,
        grid=(bands * (made // launch.made) * _BAND,),
        made=jax.ShapeDtypeStruct((N, made), dtype),
        flops=2 * N * contracted * made * len(matrices),
    )(*bounds, *rows, *matrices)
    return y_NF[:, :columns]


def _rows_kernel(
    rows_Y: Ref, tiles_Y: Ref, *arrays: Ref, launch: Launch, groups: int, transposed: bool
) -> None:
    *factors, y_NF = arrays
    half = len(factors) // 2
    T, K, J, *_ = launch
    (N, E), columns = factors[0].shape, y_NF.shape[1] // J
    program = pl.program_id(0)
    tile = program // (columns * _BAND) * _BAND + program % _BAND
    j = program // _BAND % columns
    ends_Y, last_Y = rows_Y[...], tiles_Y[...]
    group = jnp.sum((last_Y <= tile).astype(jnp.int32))
    index_Y = jnp.arange(len(ends_Y), dtype=jnp.int32)

    def at(values_Y: Array, place: Array) -> Array:
        """The value at `place`, or 0 outside the array."""
        return jnp.sum(jnp.where(index_Y == place, values_Y, 0))

    first = at(ends_Y, group - 1) + (tile - at(last_Y, group - 1)) * T
    end, start = at(ends_Y, group), jnp.minimum(first, N - T)
    rows_T = start + jnp.arange(T, dtype=jnp.int32)
    own_T1 = ((rows_T >= first) & (rows_T < end))[:, None]
    of_matrix = jnp.minimum(group, groups - 1)
    output = pl.ds(pl.multiple_of(j * J, J), J)

    def add(x_NE: Ref, w_XEF: Ref, k: Array, sum_TJ: Array) -> Array:
        contracted = pl.ds(pl.multiple_of(k * K, K), K)
        x_TK = pallas_triton.load(x_NE.at[pl.ds(start, T), contracted], mask=own_T1, other=0.0)
        if transposed:
            w_KJ = w_XEF[of_matrix, output, contracted].T
        else:
            w_KJ = w_XEF[of_matrix, contracted, output]
        return sum_TJ + _dot(x_TK, w_KJ)

    turns = (group < groups).astype(jnp.int32) * (E // K)
    sum_TJ = jnp.zeros((T, J), jnp.float32)
    for x_NE, w_XEF in zip(factors[:half], factors[half:], strict=True):
        sum_TJ = jax.lax.fori_loop(0, turns, functools.partial(add, x_NE, w_XEF), sum_TJ)
    pallas_triton.store(y_NF.at[pl.ds(start, T), output], sum_TJ.astype(y_NF.dtype), mask=own_T1)


def products_of_groups(
    x_NE: Float[Array, "n e"],
    y_NF: Float[Array, "n f"],
    sizes_X: Int32[Array, "x"],
    launch: Launch | None = None,
) -> Float[Array, "x e f"]:
    """The sum of x ⊗ y over the rows of each group."""
    sizes = x_NE.shape[1], y_NF.shape[1]
    x_NE, y_NF = _filled(x_NE), _filled(y_NF)
    (N, E), F, X = x_NE.shape, y_NF.shape[1], len(sizes_X)
    if launch is None:
        rows = min(128 // x_NE.dtype.itemsize, 1 << N.bit_length() - 1)
        launch = Launch(rows, math.gcd(E, 128), math.gcd(F, 128))
    dw_XEF = _call(
        functools.partial(_groups_kernel, launch=launch),
        "grouped_gradients",
        launch,
        grid=(E // launch.contracted, F // launch.made, X),
        made=jax.ShapeDtypeStruct((X, E, F), x_NE.dtype),
        flops=2 * N * E * F,
    )(jnp.cumsum(sizes_X), sizes_X, x_NE, y_NF)
    return dw_XEF[:, : sizes[0], : sizes[1]]


def _groups_kernel(
    ends_X: Ref, sizes_X: Ref, x_NE: Ref, y_NF: Ref, dw_XEF: Ref, *, launch: Launch
) -> None:
    T, K, J, *_ = launch
    N = x_NE.shape[0]
    i, j, group = (pl.program_id(axis) for axis in range(3))
    rows, columns = (pl.ds(pl.multiple_of(at * size, size), size) for at, size in ((i, K), (j, J)))
    end, size = ends_X[group], sizes_X[group]

    def add(turn: Array, sum_KJ: Array) -> Array:
        first = end - size + turn * T
        start = jnp.minimum(first, N - T)
        rows_T = start + jnp.arange(T, dtype=jnp.int32)
        own_T1 = ((rows_T >= first) & (rows_T < end))[:, None]
        x_TK, y_TJ = (
            pallas_triton.load(array.at[pl.ds(start, T), place], mask=own_T1, other=0.0)
            for array, place in ((x_NE, rows), (y_NF, columns))
        )
        return sum_KJ + _dot(x_TK.T, y_TJ)

    turns = (size + T - 1) // T
    sum_KJ = jax.lax.fori_loop(0, turns, add, jnp.zeros((K, J), jnp.float32))
    dw_XEF[group, rows, columns] = sum_KJ.astype(dw_XEF.dtype)


def sums_of_rows(x_NE: Float[Array, "n e"], places_MK: Int32[Array, "m k"]) -> Float[Array, "m e"]:
    """Sums the rows at K places, in float32; negative places count as zeros."""
    M, columns = len(places_MK), x_NE.shape[1]
    x_NE = _filled(x_NE)
    E, T = x_NE.shape[1], min(_SMALLEST, 1 << M.bit_length() - 1)
    tile = math.gcd(E, 512)
    y_ME = _call(
        functools.partial(_sums_kernel, T=T, columns=tile),
        "sums_of_rows",
        Launch(T, tile, tile),
        grid=(E // tile, -(-M // T)),
        made=jax.ShapeDtypeStruct((M, E), x_NE.dtype),
        flops=0,
    )(x_NE, places_MK)
    return y_ME[:, :columns]


def _sums_kernel(x_NE: Ref, places_MK: Ref, y_ME: Ref, *, T: int, columns: int) -> None:
    M, K = places_MK.shape
    first = pl.program_id(0) * columns
    here_TJ = jnp.broadcast_to(first + jnp.arange(columns, dtype=jnp.int32), (T, columns))
    rows = pl.ds(jnp.minimum(pl.program_id(1) * T, M - T), T)  # the last tile may overlap another

    def add(k: Array, sum_TJ: Array) -> Array:
        place_TJ = jnp.broadcast_to(places_MK[rows, k][:, None], (T, columns))
        x_TJ = pallas_triton.load(
            x_NE.at[jnp.maximum(place_TJ, 0), here_TJ], mask=place_TJ >= 0, other=0.0
        )
        return sum_TJ + x_TJ.astype(jnp.float32)

    sum_TJ = jax.lax.fori_loop(0, K, add, jnp.zeros((T, columns), jnp.float32))
    y_ME[rows, pl.ds(first, columns)] = sum_TJ.astype(y_ME.dtype)


def _filled(x: Array, axes: Sequence[int] = (1,)) -> Array:
    """Pads axes with zeros to multiples of the smallest tile."""
    missing = [-size % _SMALLEST if axis in axes else 0 for axis, size in enumerate(x.shape)]
    return jnp.pad(x, [(0, each) for each in missing]) if any(missing) else x


def _dot(x: Array, y: Array) -> Array:
    """The product in float32, with the full precision of float32 operands."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return pallas_triton.dot(x, y, precision=precision)


def _call(
    kernel: Any,
    name: str,
    launch: Launch,
    grid: tuple[int, ...],
    made: jax.ShapeDtypeStruct,
    flops: int,
) -> Any:
    return pl.pallas_call(
        kernel,
        name=name,
        grid=grid,
        out_shape=made,
        compiler_params=pallas_triton.CompilerParams(
            num_warps=launch.warps, num_stages=launch.stages
        ),
        cost_estimate=pl.CostEstimate(flops=flops, transcendentals=0, bytes_accessed=0),
        interpret=platform() != "cuda",
    )
