"""Low-rank adapters that share the arrays of their base."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from lmlib.generate.weights import Weights, ready
from lmlib.models.matrices.lora import is_adapted
from lmlib.models.model import Model


def with_base(
    name: str, adapter: Model, model: Model, base: Weights, settings: tuple[Any, ...]
) -> Weights:
    """Returns the weights of `adapter`, ready for generation, with the arrays of `base`.

    Args:
      name: for messages.
      model: the base as it was given.
      base: `ready(model, *settings)`.

    Raises:
      ValueError: if the adapter has another base, or changes more than matrices of layers.
    """
    adapted = [x for x in jax.tree.leaves(adapter, is_leaf=is_adapted) if is_adapted(x)]
    of_tables = any("vocab" in each.axis_names["base"].split() for each in adapted)
    if not adapted or of_tables or not _is_base_of(adapter, model):
        raise ValueError(
            f"the adapter {name!r} must have the same base as the model, and change nothing but "
            "matrices of layers: otherwise merge it (lmlib.adapters.merged), and serve the result "
            "as another model"
        )

    def alone(adapter: Model) -> Any:
        return jax.tree.map(
            lambda x: dataclasses.replace(x, base=None) if is_adapted(x) else None,
            ready(adapter, *settings).model,
            is_leaf=is_adapted,
        )

    joined = jax.tree.map(
        lambda one, base: base if one is None else dataclasses.replace(one, base=base),
        jax.jit(alone)(adapter),  # computes no copy of the base
        base.model,
        is_leaf=lambda x: x is None or is_adapted(x),
    )
    return Weights(joined, base.table_EV)


def _is_base_of(adapter: Model, model: Model) -> bool:
    def same(one: Any, other: Any) -> bool:
        ours, theirs = jax.tree.leaves(one.base if is_adapted(one) else one), jax.tree.leaves(other)
        return len(ours) == len(theirs) and all(map(equal, ours, theirs))

    def equal(x: Any, y: Any) -> bool:
        return x is y or (x.shape == y.shape and bool(jnp.array_equal(x, y)))

    try:
        return all(jax.tree.leaves(jax.tree.map(same, adapter, model, is_leaf=is_adapted)))
    except ValueError:  # trees of other structures
        return False
