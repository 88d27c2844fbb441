"""The orthogonal matrix nearest to another one, by products alone.

Shapes: N matrices, R rows, C columns, R ≤ C.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Polynomial = tuple[float, float, float]

# Five times the same polynomial, which takes singular values from 0.01 on to between 0.68 and 1.13
# (Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks"). Their code first
# divides a matrix by its norm; see `orthogonalized`.
CLASSIC: tuple[Polynomial, ...] = ((3.4445, -4.7750, 2.0315),) * 5

# Each the best after those before it, for singular values from 0.001 to 1 (Amsel et al. 2025, "The
# Polar Express", arXiv:2505.16932, algorithm 1, with its cushion of 0.024). All but the last bear
# values that rounding has made 1 % too large.
POLAR_EXPRESS: tuple[Polynomial, ...] = (
    (8.205161, -22.901937, 16.460727),
    (4.066395, -2.861154, 0.518400),
    (3.909595, -2.823352, 0.525037),
    (3.285564, -2.415302, 0.485294),
    (2.300652, -1.668904, 0.418807),
)

_TINY = 1e-7  # beside the norm of a matrix


def orthogonalized(
    x_NRC: Float[Array, "n r c"], polynomials: Sequence[Polynomial]
) -> Float[Array, "n r c"]:
    """About U Vᵀ of each matrix U S Vᵀ; zeros stay zeros.

    Newton–Schulz: with a, b, c of each of the `polynomials` in turn, X becomes
    a X + b (X Xᵀ) X + c (X Xᵀ)² X, and with that each singular value s of it a s + b s³ + c s⁵.
    X and what is multiplied have the dtype of `x_NRC`. Each polynomial takes N · (4 R² C + 2 R³)
    FLOPs.

    X begins as the matrix over 1.01 times its Frobenius norm, for all polynomials. The code of the
    Polar Express divides so, as room for rounding. The code of Jordan et al. divides by the norm
    itself: with `CLASSIC` each singular value enters here 1 % smaller than there.
    """
    dtype = x_NRC.dtype
    wide_NRC = x_NRC.astype(jnp.float32)
    norm_N11 = jnp.sqrt(jnp.sum(wide_NRC * wide_NRC, axis=(1, 2), keepdims=True))
    # No singular value is above the Frobenius norm; rounded ones may be, by a little.
    start_NRC = (wide_NRC / (norm_N11 * 1.01 + _TINY)).astype(dtype)

    def iterate(x_NRC: Array, abc: Array) -> tuple[Array, None]:
        a, b, c = abc  # float32, and so is what they multiply
        gram_NRR = jnp.einsum("nrc,nsc->nrs", x_NRC, x_NRC)
        square_NRR = jnp.einsum("nrs,nst->nrt", gram_NRR, gram_NRR)
        factor_NRR = (b * gram_NRR + c * square_NRR).astype(dtype)
        y_NRC = jnp.einsum("nrs,nsc->nrc", factor_NRR, x_NRC)
        return (a * x_NRC + y_NRC).astype(dtype), None

    done_NRC, _ = jax.lax.scan(iterate, start_NRC, jnp.asarray(polynomials, jnp.float32))
    return done_NRC
