"""MXFP4: e2m1 codes, and a power of two for each 32 neighbours along the axis that products sum.

The format is of the Open Compute Project (2023, Microscaling Formats v1.0, §5.3.3), and gpt-oss'
folders have it for experts. Scales are rounded up, so that no element overflows, as Triton's
`downcast_to_mxfp` does for transformers. Weights that were in MXFP4 keep their values.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, UInt8

from lmlib.models.matrices.four_bit import (
    FourBit,
    can_be_in_blocks,
    check_blocks,
    frozen_declaration,
    merged,
    packed,
    split,
)
from lmlib.parallel.axes import METADATA, Declaration, Weight

BLOCK = 32
_HALF = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = (*_HALF, *(-value for value in _HALF))


class Mxfp4(FourBit):
    """A matrix in MXFP4; `in_mxfp4` makes it."""

    BLOCK = BLOCK
    VALUES = VALUES
    LOW_FIRST = True
    rows_may_be_split = True

    codes: UInt8[Array, "..."] = eqx.field(metadata={METADATA: lambda self: self.declared(2)})
    # e8m0: exponents of two, plus 127
    exponents: UInt8[Array, "..."] = eqx.field(
        metadata={METADATA: lambda self: self.declared(BLOCK)}
    )
    axis_names: dict[str, str] = eqx.field(static=True)
    declaration: Declaration = eqx.field(static=True)
    rows: tuple[str, ...] = eqx.field(static=True)

    def scales(self) -> Float32[Array, "..."]:
        bits = self.exponents.astype(jnp.uint32) << 23
        return jax.lax.bitcast_convert_type(jnp.maximum(bits, 1 << 22), jnp.float32)


def in_mxfp4(weight: Weight, array: Array) -> Mxfp4 | Array:
    """Converts the array of `weight` to an `Mxfp4` if `can_be_in_blocks`, else to bfloat16."""
    if not can_be_in_blocks(weight, array.shape, BLOCK):
        return array.astype("bfloat16")
    check_blocks(weight, array, BLOCK)
    axis = weight.stacked + weight.own_axes.index(weight.declaration.summed[-1])
    return matrix_of(weight, array.shape, _quantized(array, axis))


def matrix_of(weight: Weight, shape: Sequence[int], arrays: Sequence[Any]) -> Mxfp4:
    """The matrix of a weight of `shape` with these codes and exponents."""
    codes, exponents = arrays
    names = " ".join(weight.own_axes)
    return Mxfp4(
        codes=codes, exponents=exponents,
        axis_names={"codes": names, "exponents": names},
        declaration=frozen_declaration(weight, shape),
        rows=weight.declaration.summed,
    )  # fmt: skip


def quantized(x: Array, axis: int) -> tuple[UInt8[Array, "..."], UInt8[Array, "..."]]:
    """The codes of `x` along `axis`, two in a byte, and the exponents of the blocks.

    Values round to the nearest one, and halfway to the one whose last bit is 0.
    """
    blocks = split(x.astype(jnp.float32), axis, BLOCK)
    largest = jnp.max(jnp.abs(blocks), axis + 1)
    bits = jax.lax.bitcast_convert_type(largest, jnp.uint32)
    # The least power of two by which the largest value is at most 6, 1.5 · 2^2.
    exponents = jnp.maximum((bits + 0x3FFFFF) >> 23, 3) - 2
    inverse = jax.lax.bitcast_convert_type((254 - exponents) << 23, jnp.float32)
    scaled = blocks * jnp.expand_dims(inverse, axis + 1)
    size, codes = jnp.abs(scaled), jnp.zeros(scaled.shape, jnp.uint8)
    for code, (low, high) in enumerate(itertools.pairwise(_HALF)):
        middle = np.float32((low + high) / 2)
        codes += size >= middle if code % 2 else size > middle
    codes |= (jnp.signbit(scaled).astype(jnp.uint8)) << 3
    whole = merged(codes, axis, x.shape[axis])
    return packed(whole, axis, low_first=True), exponents.astype(jnp.uint8)


# Jitted, so that an array on a mesh keeps its layout outside of a program, too.
_quantized = jax.jit(quantized, static_argnums=1)
