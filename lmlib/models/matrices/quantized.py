"""Products of activations and weights in 8 bits, for training.

    precision  operands                     sums     largest value
    int8       x, w and dy are int8         int32    127
    float8     x and w e4m3, dy e5m2        float32  448 and 57,344

Sources: github.com/google/aqt; SwitchBack: Wortsman et al. 2023, arXiv:2304.13013; the float8
formats: Micikevicius et al. 2022, arXiv:2209.05433.

Each slice of an operand that is summed over gets its own scale, computed from its largest absolute
value in every step. Rounding to the nearest value · scale is off by at most scale / 2 in int8,
2^-4 of the element or 2^-10 · scale in e4m3, and 2^-3 of it or 2^-17 · scale in e5m2.

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
KINDS = ("projections", "mlp")  # kinds of products, as `Compute.quantized` names them


def check_quantized(quantized: Mapping[str, str]) -> None:
    """Raises ValueError for an unknown kind of product, or a precision that is not in `FORMATS`."""
    for kind, precision in quantized.items():
        if kind not in KINDS:
            raise ValueError(f"quantized names {kind!r}; it may name {' and '.join(KINDS)}")
        if precision not in FORMATS:
            raise ValueError(
                f"quantized[{kind!r}] must be one of {', '.join(FORMATS)}, got {precision!r}"
            )


def rounded_product(
    equation: str,
    a: Float[Array, "..."],
    b: Float[Array, "..."],
    formats: tuple[DTypeLike, DTypeLike],
    out_sharding: PartitionSpec | None = None,
) -> Float[Array, "..."]:
    """`jnp.einsum` of `a` and `b` rounded to `formats`; the result has a's dtype.

    Each summed axis must be in both operands, and no axis in both operands and the result. If the
    summed axes are split, the sums are sent in 32 bits.
    """
    operands, y_axes = equation.split("->")
    a_axes, b_axes = operands.split(",")
    a_values, a_scale = rounded(_plain(a), _places_not_in(y_axes, a_axes), formats[0])
    b_values, b_scale = rounded(_plain(b), _places_not_in(y_axes, b_axes), formats[1])
    wide = jnp.int32 if jnp.issubdtype(a_values.dtype, jnp.integer) else jnp.float32
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
    scale = jnp.maximum(largest / limit, jnp.finfo(jnp.float32).tiny)
    values = jnp.round(wide / scale) if integer else wide / scale
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
