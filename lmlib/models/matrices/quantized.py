"""Products of activations and weights in 8 bits, for training.

    precision  operands                     sums     largest value
    int8       x, w and dy are int8         int32    127
    float8     x and w e4m3, dy e5m2        float32  448 and 57,344
    mxfp8      in blocks of 32, `lmlib.models.matrices.mxfp8`

Sources: github.com/google/aqt; SwitchBack: Wortsman et al. 2023, arXiv:2304.13013; the float8
formats: Micikevicius et al. 2022, arXiv:2209.05433.

Each slice of an operand that is summed over gets its own scale, computed from its largest absolute
value in every step, and in float8 rounded up to a power of two. Rounding to the nearest value ·
scale is off by at most scale / 2 in int8, 2^-4 of the element or 2^-10 · scale in e4m3, and 2^-3 of
it or 2^-17 · scale in e5m2.

In the backward pass, rounding counts as the identity (straight-through: Bengio et al. 2013,
arXiv:1308.3432). dx = dy wᵀ is also a product in 8 bits. dw = xᵀ dy is computed from the unrounded
gradient: its sum runs over all tokens of the batch, and SwitchBack found errors harmful there.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float


class Formats(NamedTuple):
    """The dtypes of forward operands, and of the incoming gradient in the backward pass."""

    forward: DTypeLike
    arriving: DTypeLike


FORMATS = {
    "int8": Formats(jnp.int8, jnp.int8),
    "float8": Formats(jnp.float8_e4m3fn, jnp.float8_e5m2),
}
PRECISIONS = (*FORMATS, "mxfp8")
KINDS = ("projections", "mlp")  # kinds of products, as `Compute.quantized` names them


def check_quantized(quantized: Mapping[str, str]) -> None:
    """Raises ValueError for an unknown kind of product, or one that is not in `PRECISIONS`."""
    for kind, precision in quantized.items():
        if kind not in KINDS:
            raise ValueError(f"quantized names {kind!r}; it may name {' and '.join(KINDS)}")
        if precision not in PRECISIONS:
            raise ValueError(
                f"quantized[{kind!r}] must be one of {', '.join(PRECISIONS)}, got {precision!r}"
            )


def quantized_product(
    equation: str,
    a: Float[Array, "..."],
    b: Float[Array, "..."],
    precision: str,
    out_sharding: PartitionSpec | None,
    result: str,
) -> Float[Array, "..."]:
    """`jnp.einsum` in a precision of `PRECISIONS`; `result` is "y", or "dx" or "dw" of a gradient.

    The operands of "dw" are rounded in mxfp8 only.
    """
    if precision == "mxfp8":
        from lmlib.models.matrices.mxfp8 import block_scaled_product

        return block_scaled_product(equation, a, b, out_sharding)
    if result == "dw":
        return jnp.einsum(equation, a, b, out_sharding=out_sharding)
    formats = FORMATS[precision]
    first = formats.arriving if result == "dx" else formats.forward
    return rounded_product(equation, a, b, (first, formats.forward), out_sharding)


def rounded_product(
    equation: str,
    a: Float[Array, "..."],
    b: Float[Array, "..."],
    formats: tuple[DTypeLike, DTypeLike],
    out_sharding: PartitionSpec | None = None,
) -> Float[Array, "..."]:
    """`jnp.einsum` of `a` and `b` rounded to `formats`; the result has a's dtype.

    Each summed axis must be in both operands, and no axis in both operands and the result. If the
    summed axes are split, the sums are sent in 32 bits, or in bfloat16 for float8 of that dtype.
    """
    operands, y_axes = equation.split("->")
    a_axes, b_axes = operands.split(",")
    a_values, a_scale = rounded(_plain(a), _places_not_in(y_axes, a_axes), formats[0])
    b_values, b_scale = rounded(_plain(b), _places_not_in(y_axes, b_axes), formats[1])
    # Scales that are powers of two multiply sums in bfloat16 exactly.
    wide = jnp.bfloat16 if a.dtype == jnp.bfloat16 else jnp.float32
    if jnp.issubdtype(a_values.dtype, jnp.integer):
        wide = jnp.int32
    sums = jnp.einsum(
        equation, a_values, b_values, preferred_element_type=wide, out_sharding=out_sharding
    )
    y = sums.astype(jnp.float32)
    for scale, axes in ((a_scale, a_axes), (b_scale, b_axes)):
        y *= _shared(_spread(scale, axes, y_axes), out_sharding)
    return y.astype(a.dtype)


def rounded(
    x: Float[Array, "..."], summed: tuple[int, ...], dtype: DTypeLike
) -> tuple[Array, Float[Array, "..."]]:
    """Rounds `x` to values of `dtype` with float32 scales: x is about values · scales.

    A scale covers all elements along the axes `summed`, and is a normal number even if all are
    zero.
    """
    integer = jnp.issubdtype(dtype, jnp.integer)
    limit = float(jnp.iinfo(dtype).max if integer else jnp.finfo(dtype).max)
    wide = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(wide), axis=summed, keepdims=True)
    scale = largest / limit
    if not integer:  # the next power of two: adds to the exponent unless all other bits are zero
        bits = jax.lax.bitcast_convert_type(scale, jnp.int32)
        scale = jax.lax.bitcast_convert_type((bits + 0x7FFFFF) & 0x7F800000, jnp.float32)
    scale = jnp.maximum(scale, jnp.finfo(jnp.float32).tiny)
    values = jnp.round(wide / scale) if integer else wide * (1 / scale)
    return values.astype(dtype), scale


def _spread(scale: Array, axes: str, y_axes: str) -> Array:
    """The scales of an operand, arranged to be multiplied with the result."""
    scale = jnp.squeeze(scale, _places_not_in(y_axes, axes))
    kept = [axis for axis in axes if axis in y_axes]
    scale = jnp.transpose(scale, [kept.index(axis) for axis in y_axes if axis in kept])
    return jnp.expand_dims(scale, _places_not_in(axes, y_axes))


def _places_not_in(others: str, axes: str) -> tuple[int, ...]:
    return tuple(place for place, axis in enumerate(axes) if axis not in others)


def _plain(x: Array) -> Array:
    """Removes the `reduced` axes from the layout of `x`, which JAX supports only in products."""
    if jax.sharding.get_abstract_mesh().empty:
        return x
    return jax.sharding.reshard(x, jax.typeof(x).sharding.spec.update(reduced=frozenset()))


def _shared(scale: Array, out_sharding: PartitionSpec | None) -> Array:
    """Replicates `scale` for partial sums, since all parts of a sum have the same scale."""
    if out_sharding is None or not out_sharding.unreduced:
        return scale
    layout = jax.typeof(scale).sharding.spec
    return jax.sharding.reshard(scale, layout.update(reduced=out_sharding.unreduced))
