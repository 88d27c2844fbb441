"""Lower triangular matrices of the pairs of a chunk's tokens, made of halves.

A matrix of 2s tokens has two matrices of s tokens on its diagonal, and below them the pairs of a
token of the second half and one of the first. All matrices of one size are computed at once.

Shapes: L tokens of a chunk, a power of two, n matrices of s tokens in it, K key_dim.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from lmlib.parallel.collectives import platform

_EXACT = jax.lax.Precision.HIGHEST
_LEAST = -128.0  # of a logarithm of a decay; its exponential is zero in float32
_PER_UNIT = 256.0  # so that sums over 512 tokens are exact in float32


class Sums(NamedTuple):
    """The logarithm of the decay from the start to each token, in two summands.

    The first are multiples of 1/256, whose differences are exact: so a strong decay takes no digits
    of a weak one.
    """

    whole: Float[Array, "..."]
    rest: Float[Array, "..."]

    @classmethod
    def along(cls, log_decay: Float[Array, "..."], axis: int) -> "Sums":
        log_decay = jnp.maximum(log_decay, _LEAST)
        whole = jax.lax.stop_gradient(jnp.round(log_decay * _PER_UNIT) / _PER_UNIT)
        return cls(jnp.cumsum(whole, axis), jnp.cumsum(log_decay - whole, axis))

    def at(self, *places: Any) -> "Sums":
        return Sums(self.whole[places], self.rest[places])

    def since(self, earlier: "Sums") -> Float[Array, "..."]:
        """The logarithm of the decay after `earlier`."""
        return (self.whole - earlier.whole) + (self.rest - earlier.rest)

    def total(self) -> Float[Array, "..."]:
        return self.whole + self.rest


@jax.custom_vjp
def unit_inverse(lower_LL: Float[Array, "... l l"]) -> Float[Array, "... l l"]:
    """(I + A)^-1 of a strictly lower triangular A.

    [[A, 0], [C, B]]^-1 = [[A^-1, 0], [-B^-1 C A^-1, B^-1]]. A product of powers of A would lose
    all digits where keys are equal: its terms are binomial coefficients.
    """
    if platform() == "tpu":
        return _inverse_in_a_loop(lower_LL)
    *batch, L, _ = lower_LL.shape
    inverse_nss = jnp.ones((*batch, L, 1, 1), lower_LL.dtype)
    while (n := inverse_nss.shape[-3]) > 1:
        first, second = inverse_nss[..., 0::2, :, :], inverse_nss[..., 1::2, :, :]
        below = _product(second, _product(_below(lower_LL, n // 2), first))
        inverse_nss = _of_halves(first, -below, second)
    return inverse_nss[..., 0, :, :]


def _inverse_in_a_loop(lower_LL: Array) -> Array:
    """The same halves in whole matrices: libtpu takes long to compile many small ones."""
    L = lower_LL.shape[-1]

    def joined(level: Array, inverse_LL: Array) -> Array:
        half_L = jnp.arange(L) >> level
        between_LL = (half_L[:, None] == half_L + 1) & (half_L % 2 == 0)
        below_LL = _product(jnp.where(between_LL, lower_LL, 0), inverse_LL)
        return inverse_LL - _product(inverse_LL, below_LL)

    diagonal_LL = jnp.broadcast_to(jnp.eye(L, dtype=lower_LL.dtype), lower_LL.shape)
    return jax.lax.fori_loop(0, L.bit_length() - 1, joined, diagonal_LL)


def _forward(lower_LL: Array) -> tuple[Array, Array]:
    inverse_LL = unit_inverse(lower_LL)
    return inverse_LL, inverse_LL


def _backward(inverse_LL: Array, d_LL: Array) -> tuple[Array]:
    return (-jnp.tril(_product(inverse_LL.mT, _product(d_LL, inverse_LL.mT)), -1),)


unit_inverse.defvjp(_forward, _backward)


def decayed_products(
    rows: Sequence[Float[Array, "... l key_dim"]],
    columns_LK: Float[Array, "... l key_dim"],
    sums_LK: Sums,
    dtype: DTypeLike,
) -> list[Float[Array, "... l l"]]:
    """Σ_k row[i, k] column[j, k] exp(sum[i, k] - sum[j, k]) for j < i, else 0, for all `rows`.

    Rows and columns decay as far as the border between the halves, so neither can overflow. They
    are multiplied in `dtype`.
    """
    *batch, L, K = columns_LK.shape
    wide = sums_LK.rest.dtype
    products = [jnp.zeros((*batch, L, 1, 1), wide) for _ in rows]
    while (n := products[0].shape[-3]) > 1:
        halves = (*batch, n // 2, 2, L // n, K)
        sums = Sums(*(each.reshape(halves) for each in sums_LK))
        border = sums.at(..., 0, slice(-1, None), slice(None))
        late = jnp.exp(sums.at(..., 1, slice(None), slice(None)).since(border))
        early = jnp.exp(border.since(sums.at(..., 0, slice(None), slice(None))))
        columns = (columns_LK.reshape(halves)[..., 0, :, :] * early).astype(dtype)
        for i, row_LK in enumerate(rows):
            row = (row_LK.reshape(halves)[..., 1, :, :] * late).astype(dtype)
            below = jnp.matmul(row, columns.mT, preferred_element_type=wide)
            first, second = products[i][..., 0::2, :, :], products[i][..., 1::2, :, :]
            products[i] = _of_halves(first, below, second)
    return [each[..., 0, :, :] for each in products]


def _below(lower_LL: Array, n: int) -> Float[Array, "... n s s"]:
    """The pairs between the halves of each of n matrices on the diagonal."""
    *batch, L, _ = lower_LL.shape
    s = L // n // 2
    pairs = lower_LL.reshape(*batch, n, 2, s, n, 2, s)[..., 1, :, :, 0, :]
    return jnp.sum(jnp.where(jnp.eye(n, dtype=bool)[:, None, :, None], pairs, 0), axis=-2)


def _of_halves(first: Array, below: Array, second: Array) -> Float[Array, "... n s s"]:
    above = jnp.concatenate((first, jnp.zeros_like(below)), axis=-1)
    return jnp.concatenate((above, jnp.concatenate((below, second), axis=-1)), axis=-2)


def _product(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, precision=_EXACT)
