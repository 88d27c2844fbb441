"""DoRA: a matrix with an adapter, and a trained magnitude for each output."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from lmlib.models.matmul import matmul
from lmlib.models.matrices.lora import LoRAMatrix, dropped, low_rank_product
from lmlib.models.weights import zeros
from lmlib.parallel.axes import METADATA, Declaration
from lmlib.parallel.matrix import dense


class DoRAMatrix(LoRAMatrix):
    """m · V / |V| with V = base + scale · down · up (Liu et al. 2024, arXiv:2402.09353, eq. 5).

    |V| is the norm over the inputs of each output, a constant in the backward pass (section 4.3).
    m = |base| + `magnitude_change`, so new adapters need no values of the base, and bfloat16 keeps
    small changes. The changes have the axes of `up`, with a rank of 1. Where |V| is zero, the
    factor is 1.
    """

    magnitude_change: Float[Array, "..."] = eqx.field(
        kw_only=True, metadata={METADATA: lambda self: self.declared_change}
    )

    @property
    def declared_change(self) -> Declaration:
        """The declaration of `magnitude_change`: zero, without decay, float32 in products."""
        return Declaration(zeros, rules=self.declaration.rules, dtype="float32")

    def magnitude(self) -> Float[Array, "..."]:
        """m, in the shape of `magnitude_change`, in float32 or wider."""
        change = self.magnitude_change
        return change + _in_layout_of(change, self._norm(dense(self.base)))

    def with_magnitude(self, magnitude: Float[Array, "..."]) -> "DoRAMatrix":
        """Returns the matrix with this m, in the shape and layout of `magnitude_change`."""
        before = _in_layout_of(magnitude, self._norm(dense(self.base)))
        return dataclasses.replace(self, magnitude_change=magnitude - before)

    def einsum(
        self, equation: str, x: Array, precision: str | None, out_sharding: PartitionSpec | None
    ) -> Float[Array, "..."]:
        """The product of `x`; dropout acts on all of it but the base's own product, as in PEFT."""
        operands, y_axes = equation.split("->")
        x_axes, w_axes = operands.split(",")
        kept = [axis for axis in w_axes if axis not in x_axes]
        factor = self._factor()[0].transpose([kept.index(axis) for axis in y_axes if axis in kept])
        factor = jnp.expand_dims(factor, [y_axes.index(axis) for axis in y_axes if axis in x_axes])
        inputs, base = dropped(x, self), jax.lax.stop_gradient(self.base)
        y = matmul(equation, inputs, base, precision, out_sharding)
        added = low_rank_product(equation, inputs, self, out_sharding)
        result = ((y + added) * factor).astype(y.dtype)
        if self.key is None:
            return result
        return result + matmul(equation, x, base, precision, out_sharding) - y

    def dense(self, dtype: DTypeLike = jnp.float32) -> Float[Array, "..."]:
        """m · V / |V|, in float32 or wider, in the layout of `base`."""
        return super().dense(dtype) * jnp.expand_dims(self._factor(), self._inputs[1:])

    def _factor(self) -> Float[Array, "..."]:
        """m / |V|, in the layout of `base`; only `magnitude_change` gets a gradient."""
        base = jax.lax.stop_gradient(dense(self.base))
        base = _in_layout_of(base, base)
        whole = LoRAMatrix.dense(dataclasses.replace(self, base=base, key=None))
        norm = self._norm(jax.lax.stop_gradient(whole))
        m = self._norm(base) + _in_layout_of(norm, self.magnitude_change)
        return jnp.where(norm > 0, m / jnp.where(norm > 0, norm, 1), 1)

    @property
    def _inputs(self) -> tuple[int, ...]:
        """The positions of the axes of `base` that products sum over."""
        stacked = len(self.base.shape) - len(self.axis_names["base"].split())
        return tuple(range(stacked, stacked + len(self.summed)))

    def _norm(self, array: Array) -> Array:
        """The norms of `array`, which has the shape of `base`, in that of `magnitude_change`."""
        wide = array.astype(jnp.promote_types(array.dtype, jnp.float32))
        norm = jnp.sqrt(jnp.sum(jnp.square(wide), self._inputs))
        return jnp.expand_dims(norm, self._inputs[0])


def with_magnitude(one: LoRAMatrix) -> DoRAMatrix:
    """Adds magnitudes, at first those of the base, to new adapters of a matrix, not of experts."""
    fields = {field.name: getattr(one, field.name) for field in dataclasses.fields(one)}
    fields["axis_names"] = one.axis_names | {"magnitude_change": one.axis_names["up"]}
    at = one.up.ndim - len(one.axis_names["up"].split())
    shape = (*one.up.shape[:at], 1, *one.up.shape[at + 1 :])
    return DoRAMatrix(**fields, magnitude_change=jnp.zeros(shape))


def _in_layout_of(example: Array, array: Array) -> Array:
    """Moves `array` to the layout of `example`, which has its shape; not reduced."""
    if jax.sharding.get_abstract_mesh().empty:
        return array
    return jax.sharding.reshard(array, PartitionSpec(*jax.typeof(example).sharding.spec.partitions))
