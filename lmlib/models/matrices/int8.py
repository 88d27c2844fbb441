"""Matrices stored in 8 bits: half the memory of bfloat16, for weights that are not trained."""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from lmlib.models.matmul import matmul
from lmlib.models.matrices.lora import DOWN_RANK, UP_RANK
from lmlib.models.matrices.quantized import rounded
from lmlib.models.weights import Random, ones
from lmlib.parallel.axes import METADATA, Declaration, Weight
from lmlib.parallel.matrix import Matrix

_ONE = "one"  # the axis of a scale along which products sum


class Int8(Matrix):
    """values · scale, with a scale for each slice that a product sums over.

    `lmlib.models.matrices.quantized.rounded` makes both, in the weight's layout. `gather` sends the
    8 bits, and converts them where they are used.
    """

    rows_may_be_split = True

    values: Array = eqx.field(metadata={METADATA: lambda self: self.declaration})
    scale: Float[Array, "..."] = eqx.field(
        metadata={
            METADATA: lambda self: dataclasses.replace(self.declaration, initial=ones, summed=())
        }
    )
    axis_names: dict[str, str] = eqx.field(static=True)
    declaration: Declaration = eqx.field(static=True)

    def gathered(self, dtype: DTypeLike, after: Array | None) -> Float[Array, "..."]:
        """See `Matrix.gathered`: the array, not computed before `after` is available.

        XLA would compute it before a loop, for all its iterations.
        """
        values, scale = self.values, self.scale
        if after is not None:
            values, scale, _ = jax.lax.optimization_barrier((values, scale, after))
        return values.astype(dtype) * scale.astype(dtype)

    def dense(self, dtype: DTypeLike = jnp.float32) -> Float[Array, "..."]:
        return self.gathered(dtype, None)

    def einsum(
        self, equation: str, x: Array, precision: str | None, out_sharding: PartitionSpec | None
    ) -> Float[Array, "..."]:
        return matmul(equation, x, self.dense(x.dtype), precision, out_sharding)

    def apply(self, multiply: Callable[[Array, Array], Array], x: Array) -> Array:
        return multiply(x, self.dense(x.dtype))

    def counts(self) -> "Int8":
        return eqx.tree_at(lambda one: one.scale, super().counts(), 0)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape


# Jitted, so that an array on a mesh keeps its layout outside of a program, too.
_rounded = jax.jit(rounded, static_argnames=("summed", "dtype"))


def in_int8(weight: Weight, array: Array) -> Any:
    """Converts the array of `weight` to an `Int8` if it multiplies activations; otherwise returns
    it.

    Weights with a vocabulary axis or their own dtype, and adapters, stay as they are.
    """
    declared = weight.declaration
    stay = not {"vocab", DOWN_RANK, UP_RANK}.isdisjoint(weight.axes)
    if not declared.multiplied or declared.dtype is not None or stay:
        return array
    assert isinstance(declared.initial, Random)
    summed = declared.initial.summed
    places = tuple(i for i, axis in enumerate(weight.axes) if axis in summed)
    values, scale = _rounded(array, summed=places, dtype=jnp.int8)
    names = weight.own_axes
    sizes = dict(zip(names, array.shape[-len(names) :], strict=True))
    return Int8(
        values,
        scale,
        {
            "values": " ".join(names),
            "scale": " ".join(_ONE if axis in summed else axis for axis in names),
        },
        dataclasses.replace(
            declared,
            initial=Random(declared.initial.deviation(sizes)),
            summed=(),  # products multiply by the dense array
            rules={**declared.rules, _ONE: None},
        ),
    )
