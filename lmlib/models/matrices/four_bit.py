"""Matrices stored in 4 bits: codes in blocks along the last axis that products sum over.

A byte holds two codes of neighbours along that axis, and a block of them shares a scale. The kinds
are `lmlib.models.matrices.nf4` and `lmlib.models.matrices.mxfp4`.
"""

import dataclasses
import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Integer, UInt8

from lmlib.models.matmul import matmul
from lmlib.models.weights import Random
from lmlib.parallel.axes import Declaration, LayoutError, Weight
from lmlib.parallel.check import misfit
from lmlib.parallel.collectives import platform, shard_map
from lmlib.parallel.layout import num_shards
from lmlib.parallel.matrix import Matrix


class FourBit(Matrix):
    """value(code) · scale of the code's block, in float32, then rounded to the dtype in use.

    `gather` sends the codes and scales. Each subclass has a field `codes`, of the weight's shape
    with half the length along the axis of blocks, and its scales.
    """

    BLOCK: ClassVar[int]  # neighbours that share a scale
    VALUES: ClassVar[tuple[float, ...]]  # of the 16 codes
    LOW_FIRST: ClassVar[bool]  # the first of two neighbours has the low four bits

    codes: eqx.AbstractVar[UInt8[Array, "..."]]
    axis_names: eqx.AbstractVar[dict[str, str]]
    declaration: eqx.AbstractVar[Declaration]
    rows: eqx.AbstractVar[tuple[str, ...]]  # the axes that products sum over, blocks in the last

    @abstractmethod
    def scales(self) -> Float[Array, "..."]:
        """The scale of each block, in float32, in the layout of `codes`."""

    def declared(self, block: int) -> Declaration:
        """The declaration of an array with one element for each `block` neighbours."""
        return dataclasses.replace(self.declaration, blocks={self.rows[-1]: block})

    @property
    def axis(self) -> int:
        """The axis of blocks, counted from the last, so that stacks have the same."""
        names = self.axis_names["codes"].split()
        return names.index(self.rows[-1]) - len(names)

    @property
    def shape(self) -> tuple[int, ...]:
        shape = [*self.codes.shape]
        shape[self.axis] *= 2
        return tuple(shape)

    @property
    def size(self) -> int:
        return 2 * self.codes.size

    @property
    def ndim(self) -> int:
        return self.codes.ndim

    def gathered(self, dtype: DTypeLike, after: Array | None) -> Any:
        """See `Matrix.gathered`: the array, not computed before `after` is available.

        On one GPU it is this matrix, whose products convert it tile by tile.
        """
        if self._tiled is not None:
            return self
        one = self
        if after is not None:  # XLA would compute it before a loop, for all its iterations
            one, _ = jax.lax.optimization_barrier((self, after))
        return one.dense(dtype)

    def dense(self, dtype: DTypeLike = jnp.float32) -> Float[Array, "..."]:
        axis = self.axis % self.ndim
        first, second = self.codes >> 4, self.codes & 15
        if self.LOW_FIRST:
            first, second = second, first
        pairs = jnp.stack([first, second], axis + 1)
        scales = jnp.expand_dims(self.scales(), axis + 1)
        in_blocks = merged(pairs, axis, self.shape[axis])
        values = value_of(split(in_blocks, axis, self.BLOCK), self.VALUES)
        return merged(values * scales, axis, self.shape[axis]).astype(dtype)

    def einsum(
        self, equation: str, x: Array, precision: str | None, out_sharding: PartitionSpec | None
    ) -> Float[Array, "..."]:
        if self._tiled is None or precision is not None:
            return matmul(equation, x, self.dense(x.dtype), precision, out_sharding)
        operands, y_axes = equation.split("->")
        w_axes = operands.split(",")[1]
        kept = self.shape[len(self.rows) :]
        if not y_axes.endswith(w_axes[len(self.rows) :]):
            return matmul(equation, x, self.dense(x.dtype), None, out_sharding)
        lead = x.shape[: x.ndim - len(self.rows)]

        def on_device(x: Array, codes: Array, scales: Array) -> Array:
            from lmlib.models.matrices.triton_four_bit import product  # only GPUs need it

            wide = math.prod(kept)
            x_NE = x.reshape(-1, math.prod(x.shape[len(lead) :]))
            operands = x_NE, codes.reshape(-1, wide), scales.reshape(-1, wide)
            return product(*operands, self.VALUES, self.LOW_FIRST).reshape(*lead, *kept)

        arrays = x, jax.lax.stop_gradient(self.codes), jax.lax.stop_gradient(self.scales())
        if jax.sharding.get_abstract_mesh().empty:
            return on_device(*arrays)
        places = [jax.typeof(array).sharding.spec.partitions for array in arrays]
        layouts = [PartitionSpec(*each) for each in places]
        wanted = out_sharding or PartitionSpec(*places[0][: len(lead)], *(None,) * len(kept))
        return shard_map(on_device, layouts, wanted, tracked=False)(*arrays)

    def counts(self) -> "FourBit":
        nothing = jax.tree.map(lambda _: 0, self)
        return eqx.tree_at(lambda one: one.codes, nothing, self.size)

    @property
    def _tiled(self) -> tuple[int, int] | None:
        """The shape of the codes as a matrix, if one GPU multiplies by it tile by tile."""
        names, mesh = self.axis_names["codes"].split(), jax.sharding.get_abstract_mesh()
        if platform() != "cuda" or not (mesh.empty or mesh.size == 1):
            return None
        if self.ndim != len(names) or names[: len(self.rows)] != [*self.rows]:
            return None
        from lmlib.models.matrices.triton_four_bit import is_supported

        wide = math.prod(self.shape[len(self.rows) :])
        shape = self.codes.size // wide, wide
        return shape if is_supported(shape) else None

    def apply(self, multiply: Callable[[Array, Array], Array], x: Array) -> Array:
        return multiply(x, self.dense(x.dtype))


def can_be_in_blocks(weight: Weight, shape: Sequence[int], block: int) -> bool:
    """True for a weight that multiplies activations and whose rows consist of whole blocks.

    Weights with a vocabulary axis or their own dtype, and routers, are not among them.
    """
    declared = weight.declaration
    if not declared.multiplied or declared.dtype is not None:
        return False
    if {"vocab", "choice"} & {*weight.axes}:
        return False
    return dict(zip(weight.axes, shape, strict=True))[declared.summed[-1]] % block == 0


def check_blocks(weight: Weight, array: Array, block: int) -> None:
    """Raises LayoutError if the layout of `array`, of `weight`, splits blocks."""
    layout, axis = explicit_layout(array), weight.declaration.summed[-1]
    if layout is None:
        return
    place = layout.spec.partitions[weight.axes.index(axis)]
    blocks = array.shape[weight.axes.index(axis)] // block
    if blocks % num_shards(place, layout.mesh):
        raise LayoutError(f"{weight.path}: {misfit(axis, blocks, place, layout.mesh, block)}")


def frozen_declaration(weight: Weight, shape: Sequence[int]) -> Declaration:
    """The declaration of a frozen array of `weight`, which products don't multiply by directly."""
    declared = weight.declaration
    assert isinstance(declared.initial, Random)
    sizes = dict(zip(weight.own_axes, shape[weight.stacked :], strict=True))
    initial = Random(declared.initial.deviation(sizes))
    return dataclasses.replace(declared, initial=initial, summed=())


def value_of(codes: Integer[Array, "..."], values: Sequence[float]) -> Float[Array, "..."]:
    """`values[codes]` in float32, by selects: gathers are slow on some accelerators.

    The first selects combine scalars with bits of `codes`. A `where` of two scalars would make
    arrays of constants, which JAX computes before a loop over layers and keeps until its end.
    """
    bits = [int(each) for each in np.asarray(values, np.float32).view(np.uint32)]
    mask = -(codes & 1).astype(jnp.uint32)  # all bits or none
    pairs = zip(bits[::2], bits[1::2], strict=True)
    level = [mask & jnp.uint32(low ^ high) ^ jnp.uint32(low) for low, high in pairs]
    for bit in range(1, 4):
        is_set = (codes >> bit & 1) == 1
        pairs = zip(level[::2], level[1::2], strict=True)
        level = [jnp.where(is_set, high, low) for low, high in pairs]
    return jax.lax.bitcast_convert_type(level[0], jnp.float32)


def packed(codes: UInt8[Array, "..."], axis: int, low_first: bool) -> UInt8[Array, "..."]:
    """Two neighbours along `axis` in each byte."""
    pairs = split(codes, axis, 2)
    first, second = (jax.lax.index_in_dim(pairs, i, axis + 1, keepdims=False) for i in (0, 1))
    return (second << 4 | first) if low_first else (first << 4 | second)


def split(x: Array, axis: int, size: int) -> Array:
    """Splits `axis` into groups of `size` neighbours, which a mesh keeps whole."""
    shape, layout = (*x.shape[:axis], -1, size, *x.shape[axis + 1 :]), explicit_layout(x)
    if layout is None:
        return x.reshape(shape)
    places = [*layout.spec.partitions]
    places.insert(axis + 1, None)
    return jnp.reshape(x, shape, out_sharding=NamedSharding(layout.mesh, PartitionSpec(*places)))


def merged(x: Array, axis: int, length: int) -> Array:
    """Inverse of `split`."""
    return x.reshape(*x.shape[:axis], length, *x.shape[axis + 2 :])


def explicit_layout(x: Array) -> NamedSharding | None:
    """The layout in the type of `x`, or `None` if types have none here."""
    layout = jax.typeof(x).sharding
    return layout if AxisType.Explicit in layout.mesh.axis_types else None
