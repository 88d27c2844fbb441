"""LayerNorm over the last axes of activations, computed in float32 or wider.

Shapes: N the axes that the norm names ("embed", or "heads head_dim"), after any leading ones.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from lmlib.models.part import Part
from lmlib.models.parts.norms import last_axes
from lmlib.models.weights import Constant, fill, weight, zeros


class LayerNorm(Part):
    """(x - mean(x)) / std(x) · scale + bias (Ba et al. 2016, arXiv:1607.06450, eq. 4).

    Arguments as in `RMSNorm`; epsilon is added to the variance. `bias=False` omits the bias.
    """

    rows_may_be_split = True

    scale: Float[Array, "..."] = weight(lambda self: Constant(self.initial))
    bias: Float[Array, "..."] | None = weight(zeros)
    axes: str = eqx.field(static=True)
    epsilon: float = eqx.field(static=True)
    initial: float = eqx.field(static=True)

    def __init__(
        self,
        axes: str = "embed",
        epsilon: float = 1e-5,
        bias: bool = True,
        initial: float = 1.0,
        *,
        key: PRNGKeyArray,
        **sizes: int,
    ):
        self.axes, self.epsilon, self.initial = axes, epsilon, initial
        fill(self, key, () if bias else ("bias",), **sizes)

    def __call__(self, x_N: Float[Array, "..."]) -> Float[Array, "..."]:
        wide_N, last = x_N.astype(jnp.promote_types(x_N.dtype, jnp.float32)), last_axes(self.axes)
        centred_N = wide_N - jnp.mean(wide_N, axis=last, keepdims=True)
        variance = jnp.mean(jnp.square(centred_N), axis=last, keepdims=True)
        unit_N = (centred_N * jax.lax.rsqrt(variance + self.epsilon)).astype(x_N.dtype)
        return unit_N * self.scale if self.bias is None else unit_N * self.scale + self.bias

    @property
    def axis_names(self) -> dict[str, str]:
        return {"scale": self.axes, "bias": self.axes}
