"""The parts of a decoder block that see one position at a time.

Shapes: B batch, S sequence, E embed, F mlp.
"""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, PRNGKeyArray

from lmlib.models.initial import initial_weight
from lmlib.models.product import product
from lmlib.parallel.layout import spec


class RMSNorm(eqx.Module):
    """x / rms(x) · scale, in float32 at least (Zhang & Sennrich 2019, arXiv:1910.07467, eq. 4)."""

    scale: Float[Array, "embed"]
    epsilon: float = eqx.field(static=True)

    def __init__(self, embed: int, epsilon: float, *, key: PRNGKeyArray):
        self.scale = initial_weight(RMSNorm, "scale", key, embed=embed)
        self.epsilon = epsilon

    def __call__(self, x_BSE: Float[Array, "b s embed"]) -> Float[Array, "b s embed"]:
        wide_BSE = x_BSE.astype(jnp.promote_types(x_BSE.dtype, jnp.float32))
        mean_square_BS1 = jnp.mean(jnp.square(wide_BSE), axis=-1, keepdims=True)
        unit_BSE = wide_BSE * jax.lax.rsqrt(mean_square_BS1 + self.epsilon)
        return unit_BSE.astype(x_BSE.dtype) * self.scale


class SwiGLU(eqx.Module):
    """down(silu(gate x) · up x) (Shazeer 2020, arXiv:2002.05202, eq. 6)."""

    gate: Float[Array, "embed mlp"]
    up: Float[Array, "embed mlp"]
    down: Float[Array, "mlp embed"]
    precision: str | None = eqx.field(static=True)

    def __init__(self, embed: int, mlp: int, precision: str | None = None, *, key: PRNGKeyArray):
        sizes = {"embed": embed, "mlp": mlp}
        self.gate = initial_weight(SwiGLU, "gate", key, **sizes)
        self.up = initial_weight(SwiGLU, "up", key, **sizes)
        self.down = initial_weight(SwiGLU, "down", key, **sizes)
        self.precision = precision

    @jax.named_scope("mlp")
    def __call__(
        self, x_BSE: Float[Array, "b s embed"], residual: str
    ) -> Float[Array, "b s embed"]:
        """Layouts: x whole along `seq`; the result as `residual` names (a sum over `tensor`)."""
        multiply = functools.partial(product, precision=self.precision)
        gate_BSF = checkpoint_name(multiply("bse,ef->bsf", x_BSE, self.gate), "mlp_gate")
        up_BSF = checkpoint_name(multiply("bse,ef->bsf", x_BSE, self.up), "mlp_up")
        hidden_BSF = checkpoint_name(jax.nn.silu(gate_BSF) * up_BSF, "mlp_hidden")
        return multiply("bsf,fe->bse", hidden_BSF, self.down, spec(residual))
