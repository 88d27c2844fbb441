"""Pairs of tokens and experts in the order of the experts.

Shapes: M pairs, X experts, C rows, n tokens, K choices of a token, E embed.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Int32


def sorted_by(
    experts_M: Int32[Array, "m"], experts: int
) -> tuple[Int32[Array, "m"], Int32[Array, "m"], Int32[Array, "x"]]:
    """The order of pairs sorted by their expert, where equal ones stay in their order; the place of
    each pair in it; and how many pairs each expert has. An expert past the last one comes last, and
    is not counted."""
    M = len(experts_M)
    order_M = jnp.argsort(experts_M, stable=True).astype(jnp.int32)
    places_M = (
        jnp.zeros(M, jnp.int32).at[order_M].set(jnp.arange(M, dtype=jnp.int32), unique_indices=True)
    )
    ends_X = jnp.searchsorted(experts_M[order_M], jnp.arange(experts), side="right")
    return order_M, places_M, jnp.diff(ends_X.astype(jnp.int32), prepend=0)


def among(rows_C: Array, is_row_C: Bool[Array, "c"]) -> Array:
    """The rows, with zeros for those that are none."""
    mask_C = jnp.reshape(is_row_C, (-1, *(1,) * (rows_C.ndim - 1)))
    return jnp.where(mask_C, rows_C, 0)


def back_in_place(
    rows_C: Array, places_nK: Int[Array, "n k"], computed_nK: Bool[Array, "n k"], of_pairs: bool
) -> Array:
    """Each token's sum of its rows, [n, E], float32 at least; of pairs each one's own, [n, K].
    Places say where the rows of tokens are; what is not computed counts as zero."""
    if of_pairs:
        return jnp.where(computed_nK, jnp.take(rows_C, places_nK, mode="clip"), 0)
    n, K = places_nK.shape
    x_nE = jnp.zeros((n, rows_C.shape[1]), jnp.promote_types(rows_C.dtype, jnp.float32))
    for k in range(K):
        row_nE = jnp.take(rows_C, places_nK[:, k], axis=0, mode="clip")
        x_nE += among(row_nE, computed_nK[:, k])
    return x_nE
