"""Initial values of decay rates and time steps, as in the code of Mamba-2 (arXiv:2405.21060)."""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from lmlib.models.weights import InitialValues

_SHARES = (np.arange(1_024) + 0.5) / 1_024


@dataclasses.dataclass(frozen=True)
class OneOf(InitialValues):
    """One of `values`, each equally likely. The bits are the same on every mesh."""

    values: tuple[float, ...]

    def make(self, key: PRNGKeyArray, shape: tuple[int, ...], sizes: Mapping[str, int]) -> Array:
        index = jax.random.bits(key, shape, jnp.uint32) % len(self.values)
        return jnp.asarray(self.values, jnp.float32)[index]

    def text(self, sizes: Mapping[str, int]) -> str:
        return f"{min(self.values):.4g} to {max(self.values):.4g}"


def log_of_uniform(low: float, high: float) -> OneOf:
    """ln(x), with x uniform between `low` and `high`."""
    return OneOf(tuple(np.log(low + (high - low) * _SHARES).tolist()))


def bias_of_time_steps(low: float = 1e-3, high: float = 1e-1) -> OneOf:
    """x with softplus(x) between `low` and `high`, uniform on a logarithmic scale."""
    steps = low * (high / low) ** _SHARES
    return OneOf(tuple((steps + np.log(-np.expm1(-steps))).tolist()))
