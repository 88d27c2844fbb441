"""What every kernel of attention is told."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float


class Options(NamedTuple):
    """See `lmlib.models.attend.attend`."""

    window: int | None
    scale: float
    soft_cap: float | None

    @classmethod
    def of(
        cls, window: int | None, scale: float | None, soft_cap: float | None, head_dim: int
    ) -> "Options":
        """With the usual scale, head_dim^-1/2, for `None`."""
        return cls(window, head_dim**-0.5 if scale is None else scale, soft_cap)

    def scores(self, products: Float[Array, "..."]) -> Float[Array, "..."]:
        """What softmax gets of the products of queries and keys, before the mask."""
        scaled = products * self.scale
        return scaled if self.soft_cap is None else self.soft_cap * jnp.tanh(scaled / self.soft_cap)

    def slope(self, scores: Float[Array, "..."]) -> Float[Array, "..."] | float:
        """The derivative of `scores` with respect to the products."""
        if self.soft_cap is None:
            return self.scale
        return self.scale * (1 - jnp.square(scores / self.soft_cap))
