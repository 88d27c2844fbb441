"""Prepares weights for generation."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float

from lmlib.models.matrices.int8 import in_int8
from lmlib.models.model import Model
from lmlib.models.stack import Stack, repeats_of
from lmlib.parallel.axes import M, Weight, map_weights
from lmlib.parallel.collectives import platform
from lmlib.parallel.gathering import moves_of


class Weights(NamedTuple):
    """A model, and a separate copy of its unembedding if that is faster."""

    model: Model
    table_EV: Float[Array, "embed vocab"] | None

    def unembedding_EV(self) -> Float[Array, "embed vocab"]:
        return self.model.unembedding_EV() if self.table_EV is None else self.table_EV


def ready(model: Model, dtype: str, mesh: Mesh | None, whole: bool, int8: bool) -> Weights:
    """Converts `model` to `dtype`, or the dtype that a weight declares, and unstacks layers.

    Args: see `lmlib.generate.generator.Generator`.
    """

    def placed(weight: Weight, array: jax.Array) -> jax.Array:
        if jnp.issubdtype(array.dtype, jnp.floating):
            array = array.astype(weight.declaration.dtype or dtype)
        if mesh is None:
            return array
        moves = moves_of(weight, array.shape, mesh)
        return jax.sharding.reshard(array, moves.whole if whole else moves.stored)

    @jax.jit
    def made(model: Model) -> Weights:
        model = unstacked(model)
        model = map_weights(placed, map_weights(in_int8, model) if int8 else model)
        table_EV = model.unembedding_EV()
        tied = not any(table_EV is leaf for leaf in jax.tree.leaves(model))
        # A CPU would transpose a tied table for every token.
        return Weights(model, table_EV if tied and platform() == "cpu" else None)

    return made(model)


def unstacked(model: M) -> M:
    """Turns each layer of the model's stacks into a pattern of its own.

    A loop over tokens then reads the weights in place. With a loop over layers inside, it would
    first copy each layer's weights.
    """

    def is_stack(node: Any) -> bool:
        return isinstance(node, Stack)

    def apart(stack: Stack) -> Stack:
        patterns = tuple(
            (layer,)
            for pattern in stack.patterns
            for i in range(repeats_of(pattern))
            for layer in jax.tree.map(lambda w_R, i=i: w_R[i : i + 1], pattern)
        )
        return eqx.tree_at(lambda stack: stack.patterns, stack, patterns)

    return jax.tree.map(lambda x: apart(x) if is_stack(x) else x, model, is_leaf=is_stack)
