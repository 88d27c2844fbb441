"""Low-rank adapters that share the arrays of their base."""

import dataclasses
from typing import Any

import equinox as eqx
import jax

from lmlib.generate.weights import Weights, ready
from lmlib.models.matrices.lora import is_adapted, without_adapters
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
    if not adapted or of_tables or not eqx.tree_equal(without_adapters(adapter), model):
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
