"""Initial weights, from axis names alone: shape, scale and key of each weight in one place."""

import math
import zlib
from collections.abc import Mapping

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from lmlib.parallel.axes import Axes, LayoutError, annotated_axes

# Standard deviation of twice the sum of four uniform 16-bit integers.
BELL_DEVIATION = math.sqrt(2**2 * 4 * (2**32 - 1) / 12)


def initial_scale(axes: Axes, sizes: Mapping[str, int]) -> float | None:
    """Standard deviation of a weight's initial values; `None` for vectors, which start at one.

    It is fan_in^-1/2, which keeps the variance of activations (LeCun et al. 1998, "Efficient
    BackProp", eq. 16). A weight that ends in `embed` writes to the residual stream and sums over
    all its other axes; every other weight, and the vocabulary table where it serves as the
    unembedding, sums over `embed`.
    """
    names = [axis for axis in axes if axis is not None]
    if len(names) < 2:
        return None
    writes = names[-1] == "embed" and "vocab" not in names
    fan_in = math.prod(sizes[name] for name in names[:-1]) if writes else sizes["embed"]
    return fan_in**-0.5


def fold(key: PRNGKeyArray, name: str) -> PRNGKeyArray:
    """The key of `name` under `key`, so that a weight depends on the seed and its path only."""
    return jax.random.fold_in(key, zlib.crc32(name.encode()))


def initial_weight(
    owner: type[eqx.Module], field: str, key: PRNGKeyArray, **sizes: int
) -> jax.Array:
    """The first value of `owner.field`, float32, shaped as its annotation says.

    Matrices take `bell` values times `initial_scale`; vectors are ones.

    Raises:
      LayoutError: if `sizes` lacks an axis, or one is not positive.
    """
    axes = annotated_axes(owner, field)
    for axis in axes:
        if sizes.get(axis, 0) < 1:
            raise LayoutError(
                f"{owner.__name__}.{field} needs a positive size for axis {axis!r}, "
                f"got {sizes.get(axis)}"
            )
    shape = tuple(sizes[axis] for axis in axes)
    scale = initial_scale(axes, sizes)
    if scale is None:
        return jnp.ones(shape, jnp.float32)
    return bell(fold(key, field), shape, scale)


def bell(key: PRNGKeyArray, shape: tuple[int, ...], deviation: float) -> jax.Array:
    """Random float32 values of mean 0 and the given standard deviation, within ±3.46 of it.

    They are sums of four uniform 16-bit integers (the Irwin-Hall distribution, close to normal).
    Integers are exact and one multiplication rounds once, so the bits are the same however XLA
    splits, fuses or vectorises, where those of a normal's logarithm and root are not.
    """

    def add(total: jax.Array, key: PRNGKeyArray) -> tuple[jax.Array, None]:
        words = jax.random.bits(key, shape, jnp.uint32)
        return total + (words & 0xFFFF) + (words >> 16), None

    # A loop, since XLA takes long to compile what draws random numbers.
    total, _ = jax.lax.scan(add, jnp.zeros(shape, jnp.uint32), jax.random.split(key))
    doubled = 2 * total.astype(jnp.int32) - 4 * (2**16 - 1)
    return doubled.astype(jnp.float32) * jnp.float32(deviation / BELL_DEVIATION)
