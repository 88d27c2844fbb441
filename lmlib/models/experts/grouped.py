"""Grouped matrix products: rows are sorted by group, and each group has its own matrix.

    implementation  where      description
    triton          GPUs       kernels of `lmlib.models.experts.triton_grouped`
    ragged_dot      TPUs       XLA's kernels
    blocks          anywhere   a loop over blocks of rows, each within one group

"auto" chooses triton on GPUs, ragged_dot if XLA has a kernel for it, else blocks. Without a kernel,
XLA expands ragged_dot into a product of all rows with all matrices, which multiplies the cost by
the number of groups.

Shapes: N rows, X groups, E contracted axis, F output axis, A and B are E and F in either order,
R rank, T rows of a block, L blocks.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.lax import RaggedDotDimensionNumbers
from jaxtyping import Array, Float, Int32

from lmlib.models.experts import triton_grouped
from lmlib.parallel.collectives import platform
from lmlib.parallel.matrix import Matrix

IMPLEMENTATIONS = ("triton", "ragged_dot", "blocks")
EVEN_TURNS = "even_turns_"  # scope name, followed by the loop's trip count for groups of equal size
# XLA has the kernel for gradients of the matrices since JAX 0.11.
_KERNEL_FOR_GRADIENTS = jax.__version_info__ >= (0, 11)


class Groups(NamedTuple):
    """The number of rows of each group, and one of `IMPLEMENTATIONS` or "auto"."""

    sizes_X: Int32[Array, "x"]
    implementation: str = "auto"


def grouped_product(
    x_NE: Float[Array, "n e"], w_XEF: Float[Array, "x e f"] | Matrix, groups: Groups
) -> Float[Array, "n f"]:
    """Multiplies each row by the matrix of its group: the first `sizes_X[0]` rows by `w_XEF[0]`, …

    Rows beyond all groups give zeros, regardless of their content. If an axis of the weight is
    split over devices, the result is partial, and the caller must sum it over them.
    """
    (y_NF,) = grouped_products(x_NE, (w_XEF,), groups)
    return y_NF


def grouped_products(
    x_NE: Float[Array, "n e"], weights: Sequence[Float[Array, "x e f"] | Matrix], groups: Groups
) -> tuple[Float[Array, "n f"], ...]:
    """`grouped_product` of the same rows with each of several weights, of one size."""
    if not any(isinstance(weight, Matrix) for weight in weights):
        return _products(x_NE, tuple(weights), *groups)

    def multiply(x_NE: Array, w_XEF: Array) -> Array:
        return _products(x_NE, (w_XEF,), *groups)[0]

    return tuple(
        weight.apply(multiply, x_NE) if isinstance(weight, Matrix) else multiply(x_NE, weight)
        for weight in weights
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _products(
    x_NE: Array, weights: tuple[Array, ...], sizes_X: Array, implementation: str
) -> tuple[Array, ...]:
    def product(w_XEF: Array) -> Array:
        if resolved == "triton":
            return triton_grouped.rows_by_groups([x_NE], [w_XEF], sizes_X)
        if resolved == "blocks":
            return _rows(x_NE, w_XEF, sizes_X, "te,ef->tf")
        y_NF = jax.lax.ragged_dot(x_NE, w_XEF, sizes_X, preferred_element_type=x_NE.dtype)
        return _within(y_NF, sizes_X)

    resolved = _resolved(implementation, x_NE, weights[0])
    return tuple(map(product, weights))


_Saved = tuple[Array, tuple[Array, ...], Array]


def _forward(
    x_NE: Array, weights: tuple[Array, ...], sizes_X: Array, implementation: str
) -> tuple[tuple[Array, ...], _Saved]:
    return _products(x_NE, weights, sizes_X, implementation), (x_NE, weights, sizes_X)


def _backward(
    implementation: str, saved: _Saved, given: tuple[Array, ...]
) -> tuple[Array, tuple[Array, ...], None]:
    x_NE, weights, sizes_X = saved
    given = tuple(dy_NF.astype(x_NE.dtype) for dy_NF in given)

    def towards_rows(dy_NF: Array, w_XEF: Array) -> Array:
        if resolved == "blocks":
            return _rows(dy_NF, w_XEF, sizes_X, "tf,ef->te")
        dx_NE = jax.lax.ragged_dot_general(
            dy_NF, w_XEF, sizes_X, _BY_TRANSPOSED, preferred_element_type=x_NE.dtype
        )
        return _within(dx_NE, sizes_X)

    def gradient(dy_NF: Array) -> Array:
        if resolved == "triton":
            return triton_grouped.products_of_groups(x_NE, dy_NF, sizes_X)
        if _resolved(implementation, x_NE, weights[0], gradient=True) == "blocks":
            return _gradient(x_NE, dy_NF, sizes_X)
        rows_NE = _within(x_NE, sizes_X)
        return jax.lax.ragged_dot_general(
            rows_NE, dy_NF, sizes_X, _OF_GROUPS, preferred_element_type=x_NE.dtype
        )

    resolved = _resolved(implementation, x_NE, weights[0])
    if resolved == "triton":
        dx_NE = triton_grouped.rows_by_groups(given, weights, sizes_X, transposed=True)
    else:
        dx_NE = functools.reduce(jnp.add, map(towards_rows, given, weights))
    return dx_NE, tuple(map(gradient, given)), None


_products.defvjp(_forward, _backward)

_BY_TRANSPOSED = RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[0],
)
_OF_GROUPS = RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[],
)


def _resolved(implementation: str, x_NE: Array, w_XEF: Array, gradient: bool = False) -> str:
    if implementation != "auto":
        return implementation
    if platform() == "cuda" and triton_grouped.is_supported(x_NE, w_XEF):
        return "triton"
    has_kernel = platform() == "tpu" and (_KERNEL_FOR_GRADIENTS or not gradient)
    return "ragged_dot" if has_kernel else "blocks"


def _gradient(x_NE: Array, dy_NF: Array, sizes_X: Array) -> Array:
    """Computes each matrix's gradient: the sum of x ⊗ dy over its group's rows."""
    N, wide = len(x_NE), jnp.promote_types(x_NE.dtype, jnp.float32)
    # XLA's CPU backend copies the first operand of such a product in transposed order. So the
    # smaller operand comes first there, and the sums are transposed at the end.
    swapped = platform() == "cpu" and x_NE.shape[1] > dy_NF.shape[1]
    a_NA, b_NB = (dy_NF, x_NE) if swapped else (x_NE, dy_NF)

    def add(block: _Block, dw_XAB: Array) -> Array:
        mask_T = block.mask(N)
        a_TA = jnp.where(mask_T[:, None], _slice(a_NA, block), 0)
        b_TB = jnp.where(mask_T[:, None], _slice(b_NB, block), 0)
        dw_AB = jnp.einsum("ta,tb->ab", a_TA, b_TB, preferred_element_type=wide)
        before_AB = jax.lax.dynamic_index_in_dim(dw_XAB, block.group, keepdims=False)
        return jax.lax.dynamic_update_index_in_dim(dw_XAB, before_AB + dw_AB, block.group, 0)

    zeros_XAB = jnp.zeros((len(sizes_X), a_NA.shape[1], b_NB.shape[1]), wide)
    dw_XAB = _over_blocks(add, zeros_XAB, sizes_X, N)
    dw_XEF = jnp.swapaxes(dw_XAB, 1, 2) if swapped else dw_XAB
    return dw_XEF.astype(x_NE.dtype)


def _within(y_NF: Array, sizes_X: Array) -> Array:
    """Sets rows beyond all groups to zero; kernels leave them uninitialized."""
    inside_N = jnp.arange(len(y_NF)) < jnp.sum(sizes_X)
    return jnp.where(inside_N[:, None], y_NF, 0)


class _Block(NamedTuple):
    """Rows [start, end) of one group, in a slice of T rows that begins at `start` or earlier."""

    group: Array
    start: Array
    end: Array
    T: int

    def mask(self, N: int) -> Array:
        rows_T = jnp.minimum(self.start, N - self.T) + jnp.arange(self.T, dtype=jnp.int32)
        return (rows_T >= self.start) & (rows_T < self.end)


def _over_blocks(
    one: Callable[[_Block, Array], Array], made: Array, sizes_X: Int32[Array, "x"], N: int
) -> Array:
    """Folds `one` over blocks that cover all groups, in order, and returns the final `made`."""
    X = len(sizes_X)
    T = _rows_of_a_block(N, X)
    starts_X = jnp.cumsum(sizes_X) - sizes_X

    def visit(group: Array, first: Array | int, T: int, i: Array | int, made: Array) -> Array:
        """Processes the block of T rows that begins i blocks after the group's row `first`."""
        start = starts_X[group] + first + i * T
        end = jnp.clip(starts_X[group] + sizes_X[group], start, start + T)
        return one(_Block(group, start, end, T), made)

    def of_group(group: Array, made: Array) -> Array:
        """Processes a group in full blocks, then in smaller ones to waste fewer rows."""
        size, even, t = sizes_X[group], N // X, max(T // 4, 1)
        with jax.named_scope(f"{EVEN_TURNS}{even // T}"):
            whole = functools.partial(visit, group, 0, T)
            made = jax.lax.fori_loop(0, size // T, whole, made)
        with jax.named_scope(f"{EVEN_TURNS}{-(-(even % T) // t)}"):
            small = functools.partial(visit, group, size // T * T, t)
            return jax.lax.fori_loop(0, -(-(size % T) // t), small, made)

    if platform() == "cpu":
        return jax.lax.fori_loop(0, X, of_group, made)
    # Elsewhere, a loop of unknown length asks the host after each iteration if it goes on.
    most = (N + min(X, N) * (T - 1)) // T  # each nonempty group fills its last block
    blocks_X = -(-sizes_X // T)
    last_X = jnp.cumsum(blocks_X)
    indices_L = jnp.arange(most, dtype=jnp.int32)
    groups_L = jnp.minimum(jnp.searchsorted(last_X, indices_L, side="right"), X - 1)
    firsts_L = T * (indices_L - (last_X - blocks_X)[groups_L])
    return jax.lax.fori_loop(
        0, most, lambda i, made: visit(groups_L[i], firsts_L[i], T, 0, made), made
    )


def _rows_of_a_block(N: int, X: int) -> int:
    """Returns the rows of a block, a power of two: four blocks for a group of mean size.

    Each group wastes up to a block. From a GPU's memory, reading a matrix for each block takes
    longer than the waste of larger blocks.
    """
    least, most = (16, 512) if platform() == "cpu" else (128, 2_048)
    T = 1 << max(N // (4 * X), 1).bit_length() - 1  # four to a group of mean size
    return min(max(T, least), most, N)


def _slice(x_NE: Array, block: _Block) -> Array:
    return jax.lax.dynamic_slice_in_dim(x_NE, block.start, block.T)


def _rows(x_NE: Array, w_XEF: Array, sizes_X: Array, equation: str) -> Array:
    """Multiplies each block by its group's matrix."""
    N = len(x_NE)
    made = w_XEF.shape[2 if equation.endswith("f") else 1]

    def put(block: _Block, y_NF: Array) -> Array:
        w_EF = jax.lax.dynamic_index_in_dim(w_XEF, block.group, keepdims=False)
        y_TF = jnp.einsum(equation, _slice(x_NE, block), w_EF)
        y_TF = jnp.where(block.mask(N)[:, None], y_TF, _slice(y_NF, block))
        return jax.lax.dynamic_update_slice_in_dim(y_NF, y_TF, block.start, 0)

    return _over_blocks(put, jnp.zeros((N, made), x_NE.dtype), sizes_X, N)
