"""Sorts pairs of a token and an expert by expert.

Shapes: M pairs, X experts, C rows, n tokens, K choices of a token, E embed.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Int32


def sorted_by(
    experts_M: Int32[Array, "m"], experts: int
) -> tuple[Int32[Array, "m"], Int32[Array, "m"], Int32[Array, "x"]]:
    """Sorts pairs by their expert, stably: the order, each pair's place in it, and experts' counts.

    Experts beyond the last one come last and are not counted.
    """
    M = len(experts_M)
    order_M = jnp.argsort(experts_M, stable=True).astype(jnp.int32)
    places_M = (
        jnp.zeros(M, jnp.int32).at[order_M].set(jnp.arange(M, dtype=jnp.int32), unique_indices=True)
    )
    ends_X = jnp.searchsorted(experts_M[order_M], jnp.arange(experts), side="right")
    return order_M, places_M, jnp.diff(ends_X.astype(jnp.int32), prepend=0)


def zero_padding(rows_C: Array, is_row_C: Bool[Array, "c"]) -> Array:
    """Replaces padding rows by zeros."""
    mask_C = jnp.reshape(is_row_C, (-1, *(1,) * (rows_C.ndim - 1)))
    return jnp.where(mask_C, rows_C, 0)


def unsort(
    rows_C: Array, places_nK: Int[Array, "n k"], computed_nK: Bool[Array, "n k"], of_pairs: bool
) -> Array:
    """Sums each token's rows, [n, E] in at least float32; or places values of pairs, [n, K].

    `places_nK` are the indices of the tokens' rows. Pairs that are not computed count as zero.
    """
    if of_pairs:
        return jnp.where(computed_nK, jnp.take(rows_C, places_nK, mode="clip"), 0)
    n, K = places_nK.shape
    x_nE = jnp.zeros((n, rows_C.shape[1]), jnp.promote_types(rows_C.dtype, jnp.float32))
    for k in range(K):
        row_nE = jnp.take(rows_C, places_nK[:, k], axis=0, mode="clip")
        x_nE += zero_padding(row_nE, computed_nK[:, k])
    return x_nE
