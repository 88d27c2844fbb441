"""RMSNorm over the last axes of activations, computed in float32 or wider.

Shapes: N the axes that the norm names ("embed", or "heads head_dim"), after any leading ones.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from lmlib.models.part import Part
from lmlib.models.weights import Constant, fill, weight


class RMSNorm(Part):
    """x / rms(x) · scale (Zhang & Sennrich 2019, arXiv:1910.07467, eq. 4).

    Args:
      axes: names of the last axes of x, over which it is normed: "embed"; "head_dim" for each
        head separately; "heads head_dim" for all heads together.
      offset: added to the scale. With 1, as in Gemma, the scale starts at zero.
      initial, learned: initial factor of x / rms(x); False omits the scale.
    """

    rows_may_be_split = True

    scale: Float[Array, "..."] | None = weight(
        lambda self: Constant(self.initial - self.offset),
        # bfloat16 cannot represent small changes of a sum with the offset, large or near zero.
        dtype=lambda self: "float32" if self.offset else None,
    )
    axes: str = eqx.field(static=True)
    epsilon: float = eqx.field(static=True)
    offset: float = eqx.field(static=True)
    initial: float = eqx.field(static=True)

    def __init__(
        self,
        axes: str = "embed",
        epsilon: float = 1e-5,
        offset: float = 0.0,
        initial: float = 1.0,
        learned: bool = True,
        *,
        key: PRNGKeyArray,
        **sizes: int,
    ):
        self.axes, self.epsilon, self.offset, self.initial = axes, epsilon, offset, initial
        fill(self, key, () if learned else ("scale",), **sizes)

    def __call__(self, x_N: Float[Array, "..."]) -> Float[Array, "..."]:
        wide_N = x_N.astype(jnp.promote_types(x_N.dtype, jnp.float32))
        mean_square = jnp.mean(jnp.square(wide_N), axis=last_axes(self.axes), keepdims=True)
        unit_N = wide_N * jax.lax.rsqrt(mean_square + self.epsilon)
        if self.scale is None:
            return unit_N.astype(x_N.dtype)
        if self.offset == 0:
            return unit_N.astype(x_N.dtype) * self.scale
        scale_N = self.offset + self.scale.astype(wide_N.dtype)
        return (unit_N * scale_N).astype(x_N.dtype)

    @property
    def axis_names(self) -> dict[str, str]:
        return {"scale": self.axes}


def last_axes(axes: str) -> tuple[int, ...]:
    """The indices of the last axes, as many as there are names."""
    return tuple(range(-len(axes.split()), 0))
