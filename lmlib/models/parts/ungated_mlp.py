"""Feed-forward layers without a gate, and their activations.

Shapes: B batch, S sequence, E embed, F mlp.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, PRNGKeyArray

from lmlib.models.forward_context import ForwardContext
from lmlib.models.matmul import matmul
from lmlib.models.part import NO_AUX, ActivationNames, AuxOutputs, Part
from lmlib.models.parts.mlp import Activation
from lmlib.models.weights import fan_in, fill, weight, zeros
from lmlib.parallel.layout import spec


def gelu(x: Array) -> Array:
    """x · Φ(x), with the error function (arXiv:1606.08415, §2), in float32 or wider."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return jax.nn.gelu(wide, approximate=False).astype(x.dtype)


def gelu_tanh(x: Array) -> Array:
    """The tanh approximation of `gelu` (arXiv:1606.08415, §2), used by GPT-2 and Gemma."""
    return jax.nn.gelu(x, approximate=True)


def relu_squared(x: Array) -> Array:
    """max(x, 0)² (So et al. 2021, arXiv:2109.08668, §3)."""
    return jnp.square(jax.nn.relu(x))


class MLP(Part):
    """down(activation(up x)), with optional biases (arXiv:1706.03762, eq. 2)."""

    rows_may_be_split = True

    names = ActivationNames(saved=("mlp_up", "mlp_hidden"), scopes=("mlp",))

    activation: Activation = eqx.field(static=True)
    residual_scale: float = eqx.field(static=True)
    up: Float[Array, "embed mlp"] = weight(fan_in("embed"))
    up_bias: Float[Array, "mlp"] | None = weight(zeros)
    down: Float[Array, "mlp embed"] = weight(lambda self: fan_in("mlp", scale=self.residual_scale))
    down_bias: Float[Array, "embed"] | None = weight(zeros, writes=True)

    def __init__(
        self,
        embed: int,
        mlp: int,
        activation: Activation = gelu_tanh,
        bias: bool = True,
        residual_scale: float = 1.0,
        *,
        key: PRNGKeyArray,
    ):
        self.activation, self.residual_scale = activation, residual_scale
        fill(self, key, () if bias else ("up_bias", "down_bias"), embed=embed, mlp=mlp)

    @jax.named_scope("mlp")
    def __call__(
        self, x_BSE: Float[Array, "b s embed"], context: ForwardContext
    ) -> tuple[Float[Array, "b s embed"], AuxOutputs]:
        """An MLP's call; see `Part`. The last product is summed over `tensor`."""
        precision, residual = context.compute.precision("mlp"), spec(context.compute.residual)
        up_BSF = matmul("bse,ef->bsf", x_BSE, self.up, precision)
        up_BSF = up_BSF if self.up_bias is None else up_BSF + self.up_bias
        up_BSF = checkpoint_name(up_BSF, "mlp_up")
        hidden_BSF = checkpoint_name(self.activation(up_BSF), "mlp_hidden")
        y_BSE = matmul("bsf,fe->bse", hidden_BSF, self.down, precision, residual)
        return (y_BSE if self.down_bias is None else y_BSE + self.down_bias), NO_AUX
