"""Gated feed-forward layers, which process each position separately.

Shapes: B batch, S sequence, E embed, F mlp.
"""

from collections.abc import Callable

import equinox as eqx
import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, PRNGKeyArray

from lmlib.models.forward_context import ForwardContext
from lmlib.models.matmul import matmul
from lmlib.models.part import NO_AUX, ActivationNames, AuxOutputs, Part
from lmlib.models.weights import fan_in, fill, weight
from lmlib.parallel.layout import spec

Activation = Callable[[Array], Array]


def silu(x: Array) -> Array:
    """x · sigmoid(x) (Hendrycks & Gimpel 2016, arXiv:1606.08415, §2)."""
    return jax.nn.silu(x)


class GatedMLP(Part):
    """down(activation(gate x) · up x); SwiGLU with silu (Shazeer 2020, arXiv:2002.05202, eq. 6).

    `residual_scale` is a factor of the initial values of `down` (`lmlib.models.weights`).
    """

    rows_may_be_split = True

    names = ActivationNames(saved=("mlp_gate", "mlp_up", "mlp_hidden"), scopes=("mlp",))

    activation: Activation = eqx.field(static=True)
    residual_scale: float = eqx.field(static=True)
    gate: Float[Array, "embed mlp"] = weight(fan_in("embed"))
    up: Float[Array, "embed mlp"] = weight(fan_in("embed"))
    down: Float[Array, "mlp embed"] = weight(lambda self: fan_in("mlp", scale=self.residual_scale))

    def __init__(
        self,
        embed: int,
        mlp: int,
        activation: Activation = silu,
        residual_scale: float = 1.0,
        *,
        key: PRNGKeyArray,
    ):
        self.activation, self.residual_scale = activation, residual_scale
        fill(self, key, embed=embed, mlp=mlp)

    @jax.named_scope("mlp")
    def __call__(
        self, x_BSE: Float[Array, "b s embed"], context: ForwardContext
    ) -> tuple[Float[Array, "b s embed"], AuxOutputs]:
        """An MLP's call; see `Part`. The last product is summed over `tensor`."""
        precision, residual = context.compute.precision("mlp"), spec(context.compute.residual)
        gate_BSF = matmul("bse,ef->bsf", x_BSE, self.gate, precision)
        gate_BSF = checkpoint_name(gate_BSF, "mlp_gate")
        up_BSF = checkpoint_name(matmul("bse,ef->bsf", x_BSE, self.up, precision), "mlp_up")
        hidden_BSF = checkpoint_name(self.activation(gate_BSF) * up_BSF, "mlp_hidden")
        return matmul("bsf,fe->bse", hidden_BSF, self.down, precision, residual), NO_AUX
