"""NF4 with double quantization (QLoRA: Dettmers et al. 2023, arXiv:2305.14314), as bitsandbytes.

A block is 64 neighbours along the axis that products sum over: 4 bits each, and a scale in 8 bits,
its largest absolute value. The scales of a matrix minus their mean are in blocks of 256, in the
order of the folder's rows, each with a float32 scale: 4.13 bits a weight. Codes and scales equal
those of bitsandbytes 0.50 on a CPU.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float32, UInt8

from lmlib.models.matrices.four_bit import (
    FourBit,
    can_be_in_blocks,
    check_blocks,
    explicit_layout,
    frozen_declaration,
    merged,
    packed,
    split,
)
from lmlib.models.weights import ones
from lmlib.parallel.axes import METADATA, Declaration, Weight

BLOCK, NESTED_BLOCK = 64, 256
VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip
_NESTED = "nested"  # the axis of scales of scales


class Nf4(FourBit):
    """A matrix in NF4; `in_nf4` makes it."""

    BLOCK = BLOCK
    VALUES = VALUES
    LOW_FIRST = False
    rows_may_be_split = True

    codes: UInt8[Array, "..."] = eqx.field(metadata={METADATA: lambda self: self.declared(2)})
    absmax: UInt8[Array, "..."] = eqx.field(metadata={METADATA: lambda self: self.declared(BLOCK)})
    nested: Float32[Array, "..."] = eqx.field(metadata={METADATA: lambda self: _wide(self)})
    offset: Float32[Array, "..."] = eqx.field(metadata={METADATA: lambda self: _wide(self)})
    axis_names: dict[str, str] = eqx.field(static=True)
    declaration: Declaration = eqx.field(static=True)
    rows: tuple[str, ...] = eqx.field(static=True)
    blocks: tuple[int, ...] = eqx.field(static=True)  # shape of one layer's `absmax`

    def scales(self) -> Float32[Array, "..."]:
        shape, own = self.absmax.shape, len(self.blocks)
        lead = len(shape) - own  # stacked layers, each with its own numbers
        index, stride = jnp.zeros(shape, jnp.int32), 1
        for place in reversed(order_of(self.axis_names["absmax"].split(), self.rows)):
            each = jax.lax.broadcasted_iota(jnp.int32, shape, lead + place)
            repeats = shape[lead + place] // self.blocks[place]  # of key and value heads, on a mesh
            index += each // repeats * stride
            stride *= self.blocks[place]
        index, stride = index // NESTED_BLOCK, self.nested.shape[-1]
        for axis in reversed(range(lead)):
            index += jax.lax.broadcasted_iota(jnp.int32, shape, axis) * stride
            stride *= shape[axis]
        layout = explicit_layout(self.absmax)
        of_block = self.nested.reshape(-1).at[index]
        of_code = jnp.asarray(nested_map()).at[self.absmax]
        scale = of_block.get(out_sharding=layout, mode="promise_in_bounds")
        value = of_code.get(out_sharding=layout, mode="promise_in_bounds")
        return value * scale + self.offset.reshape(*shape[:lead], *(1,) * own)


def _wide(matrix: Nf4) -> Declaration:
    return dataclasses.replace(matrix.declaration, initial=ones, dtype="float32")


def in_nf4(weight: Weight, array: Array) -> Nf4 | Array:
    """Converts the array of `weight` to an `Nf4` if `can_be_in_blocks`, else to bfloat16."""
    if not can_be_in_blocks(weight, array.shape, BLOCK):
        return array.astype("bfloat16")
    check_blocks(weight, array, BLOCK)
    axes, rows = weight.own_axes, weight.declaration.summed
    arrays = _quantized(array, weight.stacked, axes.index(rows[-1]), order_of(axes, rows))
    return matrix_of(weight, array.shape, arrays)


def matrix_of(weight: Weight, shape: Sequence[int], arrays: Sequence[Any]) -> Nf4:
    """The matrix of a weight of `shape` with these codes, absmax, nested and offset."""
    names, declared = " ".join(weight.own_axes), frozen_declaration(weight, shape)
    codes, absmax, nested, offset = arrays
    return Nf4(
        codes=codes, absmax=absmax, nested=nested, offset=offset,
        axis_names={"codes": names, "absmax": names, "nested": _NESTED, "offset": ""},
        declaration=dataclasses.replace(declared, rules={**declared.rules, _NESTED: None}),
        rows=weight.declaration.summed,
        blocks=tuple(absmax.shape[weight.stacked :]),
    )  # fmt: skip


def order_of(axes: Sequence[str], rows: Sequence[str]) -> tuple[int, ...]:
    """The order of axes in a folder: first the others, then those that products sum over."""
    others = (place for place, axis in enumerate(axes) if axis not in rows)
    return (*others, *(axes.index(axis) for axis in rows))


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _quantized(x: Array, stacked: int, place: int, order: tuple[int, ...]) -> tuple[Array, ...]:
    """Codes, absmax, nested scales and offset, with blocks along the axis `place` of a layer."""
    codes, absmax = codes_of(x, stacked + place)
    layout = explicit_layout(absmax)
    if layout is not None:  # the order of rows crosses devices
        absmax = jax.sharding.reshard(absmax, NamedSharding(layout.mesh, PartitionSpec()))
    axes = (*range(stacked), *(stacked + each for each in order))
    rows = absmax.transpose(axes)
    small, nested, offset = absmax_codes_of(rows.reshape(*rows.shape[:stacked], -1))
    small = small.reshape(rows.shape).transpose(sorted(range(x.ndim), key=axes.__getitem__))
    if layout is not None:
        small = jax.sharding.reshard(small, layout)
    return codes, small, nested, offset


def codes_of(x: Array, axis: int) -> tuple[UInt8[Array, "..."], Float32[Array, "..."]]:
    """The codes of `x`, two in a byte, and the largest absolute value of each block."""
    blocks = split(x.astype(jnp.float32), axis, BLOCK)
    absmax = jnp.max(jnp.abs(blocks), axis + 1)
    inverse = 1 / jnp.maximum(absmax, jnp.finfo(jnp.float32).tiny)
    scaled = blocks * jnp.expand_dims(inverse, axis + 1)
    codes = jnp.zeros(scaled.shape, jnp.uint8)
    for low, high in itertools.pairwise(np.asarray(VALUES, np.float32)):
        codes += scaled > (low + high) / np.float32(2)
    return packed(merged(codes, axis, x.shape[axis]), axis, low_first=False), absmax


def absmax_codes_of(
    absmax: Float32[Array, "... n"],
) -> tuple[UInt8[Array, "... n"], Float32[Array, "... blocks"], Float32[Array, "..."]]:
    """The codes of a matrix's scales, the scale of each 256 of them, and their mean."""
    number = absmax.shape[-1]
    # The sum of small differences has small rounding errors. Few bits are the same in both uses.
    rough = jax.lax.reduce_precision(jnp.mean(absmax, -1, keepdims=True), 8, 12)
    offset = rough + jnp.mean(absmax - rough, -1, keepdims=True)
    padding = [(0, 0)] * (absmax.ndim - 1) + [(0, -number % NESTED_BLOCK)]
    blocks = split(jnp.pad(absmax - offset, padding), absmax.ndim - 1, NESTED_BLOCK)
    nested = jnp.max(jnp.abs(blocks), -1)
    inverse = jnp.where(nested > 0, 1 / nested, 0)
    # bitsandbytes takes the first code for blocks of zeros.
    scaled = jnp.where(nested[..., None] > 0, blocks * inverse[..., None], -1)
    codes = jnp.searchsorted(jnp.asarray(_thresholds()), scaled, side="right").astype(jnp.uint8)
    return codes.reshape(*codes.shape[:-2], -1)[..., :number], nested, offset[..., 0]


@functools.cache
def nested_map() -> np.ndarray:
    """The 256 values of codes of scales (Dettmers et al. 2021, arXiv:2110.02861).

    `lmlib.optim.eight_bit.dynamic_map` has the same values, rounded otherwise than PyTorch.
    """
    values = [np.float32(0), np.float32(1)]
    for decade in range(7):
        count = 2**decade
        step = np.float64((np.float32(1) - np.float32(0.1)) / np.float32(count))
        i = np.arange(count + 1)
        upward, downward = np.float64(np.float32(0.1)) + step * i, 1 - step * (count - i)
        edges = np.where(i < (count + 1) // 2, upward, downward).astype(np.float32)
        middles = np.float32(10.0 ** (decade - 6)) * ((edges[:-1] + edges[1:]) / np.float32(2))
        values += [*middles, *-middles]
    return np.sort(np.asarray(values, np.float32))


@functools.cache
def _thresholds() -> np.ndarray:
    """The least float32 of each code but the first; bitsandbytes rounds to a grid before."""
    table = nested_map().astype(np.float64)
    grid = np.arange(65_536) * 2 / 65_535 - 1
    codes = np.searchsorted((table[1:] + table[:-1]) / 2, grid)
    least = np.searchsorted(codes, np.arange(1, 256)).astype(np.float32)
    low, high = np.full(255, -1, np.float32), np.ones(255, np.float32)
    while True:  # bisects until `low` and `high` are neighbours
        middle = ((low.astype(np.float64) + high) / 2).astype(np.float32)
        if np.all((middle == low) | (middle == high)):
            return high
        reached = np.floor((middle + np.float32(1)) * np.float32(32_767.5) + np.float32(0.5))
        low, high = np.where(reached < least, middle, low), np.where(reached < least, high, middle)
