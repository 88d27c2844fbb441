"""An optimizer's numbers that a compiled step is given, so that others need no other program."""

from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

Hyperparameters = Mapping[str, Any]


def arrays_of(hyperparameters: Hyperparameters, mesh: Mesh) -> Hyperparameters:
    """The numbers among the leaves as scalars on every device of `mesh`, integers int32 and others
    float32; `None` in place of what is no number.

    Raises OverflowError if an integer does not fit.
    """
    everywhere = NamedSharding(mesh, PartitionSpec())

    def placed(number: Any) -> jax.Array:
        value = np.asarray(number, _dtype(number))
        return jax.make_array_from_callback(value.shape, everywhere, lambda _: value)

    return jax.tree.map(placed, _numbers(hyperparameters))


def abstract_arrays_of(hyperparameters: Hyperparameters, mesh: Mesh) -> Hyperparameters:
    """Shapes, dtypes and `NamedSharding`s of `arrays_of`; makes no array."""
    everywhere = NamedSharding(mesh, PartitionSpec())

    def described(number: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(np.shape(number), _dtype(number), sharding=everywhere)

    return jax.tree.map(described, _numbers(hyperparameters))


def with_arrays(hyperparameters: Hyperparameters, arrays: Hyperparameters) -> Hyperparameters:
    """`hyperparameters` with `arrays`, of its `arrays_of`, in place of its numbers."""
    return eqx.combine(arrays, eqx.filter(dict(hyperparameters), eqx.is_array_like, inverse=True))


def _numbers(hyperparameters: Hyperparameters) -> Hyperparameters:
    return eqx.filter(dict(hyperparameters), eqx.is_array_like)


def _dtype(number: Any) -> np.dtype:
    return jax.dtypes.canonicalize_dtype(np.asarray(number).dtype)
