"""The decay of a state with time steps that depend on the token, as in Mamba.

Shapes: B batch, S sequence, H heads, and K key_dim if each key channel has its own.
"""

import dataclasses
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from lmlib.models.weights import InitialValues


def log_decay(
    time_BSH: Float[Array, "b s heads *k"],
    time_bias_H: Float[Array, "heads *k"],
    log_rate_H: Float[Array, "heads *#k"],
) -> Float[Array, "b s heads *k"]:
    """-exp(log_rate) · softplus(time + time_bias), in float32 or wider (arXiv:2312.00752, §3)."""
    time_BSH = time_BSH.astype(jnp.promote_types(time_BSH.dtype, jnp.float32))
    return -jnp.exp(log_rate_H) * jax.nn.softplus(time_BSH + time_bias_H)


@dataclasses.dataclass(frozen=True)
class LogOfUniform(InitialValues):
    """Logarithms of rates that are uniform between `least` and `most`."""

    least: float
    most: float

    def make(self, key: PRNGKeyArray, shape: tuple[int, ...], sizes: Mapping[str, int]) -> Array:
        return jnp.log(jax.random.uniform(key, shape, jnp.float32, self.least, self.most))

    def text(self, sizes: Mapping[str, int]) -> str:
        return f"ln {self.least:g}…{self.most:g}"


@dataclasses.dataclass(frozen=True)
class TimeSteps(InitialValues):
    """The b for which softplus(b) is log-uniform between `least` and `most` (same source, §3.6)."""

    least: float = 1e-3
    most: float = 0.1

    def make(self, key: PRNGKeyArray, shape: tuple[int, ...], sizes: Mapping[str, int]) -> Array:
        limits = math.log(self.least), math.log(self.most)
        step = jnp.exp(jax.random.uniform(key, shape, jnp.float32, *limits))
        return step + jnp.log(-jnp.expm1(-step))

    def text(self, sizes: Mapping[str, int]) -> str:
        return f"softplus⁻¹ {self.least:g}…{self.most:g}"
