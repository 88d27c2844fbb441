"""Shared experts whose output has a gate.

Shapes: B batch, S sequence, E embed, O one.
"""

import jax
from jaxtyping import Array, Float, PRNGKeyArray

from lmlib.models.forward_context import ForwardContext
from lmlib.models.matmul import matmul
from lmlib.models.part import AuxOutputs
from lmlib.models.parts.mlp import Activation, GatedMLP, silu
from lmlib.models.weights import fan_in, fill, weight
from lmlib.parallel.layout import reshard


class GatedSharedExperts(GatedMLP):
    """sigmoid(share x) · mlp(x), for `Mixture(shared=…)`, as in Qwen 2 with experts.

    Source: arXiv:2407.10671, §2.2.2, and its reference implementation. Arguments are as in
    `GatedMLP`.
    """

    rows_may_be_split = True

    share: Float[Array, "embed one"] = weight(fan_in("embed"), rules={"one": None})

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
        fill(self, key, embed=embed, mlp=mlp, one=1)

    def __call__(
        self, x_BSE: Float[Array, "b s embed"], context: ForwardContext
    ) -> tuple[Float[Array, "b s embed"], AuxOutputs]:
        """An MLP's call; see `Part`."""
        y_BSE, aux = super().__call__(x_BSE, context)
        with jax.named_scope("mlp"):
            share_BSO = jax.nn.sigmoid(matmul("bse,eo->bso", x_BSE, self.share))
            return y_BSE * reshard(share_BSO, context.compute.residual), aux
