"""Rotary positions (Su et al. 2021, arXiv:2104.09864).

Shapes: B batch, S sequence, H heads, D head_dim; in tables D is half of it.
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32


class Turns(NamedTuple):
    """Cosine and sine of each position's angle for each pair of coordinates, the same for all
    heads."""

    cos_BS1D: Float[Array, "b s 1 half"]
    sin_BS1D: Float[Array, "b s 1 half"]


@dataclasses.dataclass(frozen=True)
class Rotary:
    """Settings from which a table of turns follows.

    Args:
      head_dim: coordinates of a head, all of which are turned.
      theta: base of the wavelengths: pair i turns by position · theta^(-2i / head_dim) radians
        (eq. 15).

    Raises:
      ValueError: if `head_dim` is odd, or `theta` not positive.
    """

    head_dim: int
    theta: float = 10_000.0

    def __post_init__(self) -> None:
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary positions, got {self.head_dim}")
        if self.theta <= 0:
            raise ValueError(f"rope_theta must be positive, got {self.theta}")

    def turns(self, positions_BS: Int32[Array, "b s"], dtype: DTypeLike) -> Turns:
        """The table of `positions_BS`, in float32 at least; wider if `dtype` is."""
        wide = jnp.promote_types(dtype, jnp.float32)
        frequency_D = self.theta ** (-jnp.arange(0, self.head_dim, 2, dtype=wide) / self.head_dim)
        angle_BS1D = positions_BS[:, :, None, None] * frequency_D
        return Turns(jnp.cos(angle_BS1D), jnp.sin(angle_BS1D))


def rotate(x_BSHD: Float[Array, "b s h d"], turns: Turns) -> Float[Array, "b s h d"]:
    """`x` with each pair of coordinates turned (eq. 34), computed in the table's dtype.

    Coordinate i pairs with i + D/2, as in Llama's published weights.
    """
    cos_BS1D, sin_BS1D = turns
    first_BSHD, second_BSHD = jnp.split(x_BSHD.astype(cos_BS1D.dtype), 2, axis=-1)
    turned_BSHD = jnp.concatenate(
        (
            first_BSHD * cos_BS1D - second_BSHD * sin_BS1D,
            second_BSHD * cos_BS1D + first_BSHD * sin_BS1D,
        ),
        axis=-1,
    )
    return turned_BSHD.astype(x_BSHD.dtype)
