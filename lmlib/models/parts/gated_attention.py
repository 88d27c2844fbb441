"""Attention with an output gate.

Shapes: B batch, S sequence, E embed, H heads, D head_dim.
"""

from typing import Any

import equinox as eqx
import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from lmlib.models.forward_context import ForwardContext
from lmlib.models.matmul import matmul
from lmlib.models.part import ActivationNames
from lmlib.models.parts.attention import Attention
from lmlib.models.weights import fan_in, weight


class GatedAttention(Attention):
    """Attention whose mixed values are multiplied by sigmoid(gate x) (arXiv:2505.06708, §2.2).

    Args:
      per_head: True for one gate for each head; False for one for each of its elements.
      attention: arguments of `Attention`.
    """

    rows_may_be_split = True

    names = ActivationNames(
        saved=("query", "key", "value", "attention", "gate"), scopes=("projections", "attention")
    )

    per_head: bool = eqx.field(static=True)
    gate: Float[Array, "embed heads ..."] = weight(fan_in("embed"))

    def __init__(self, *sizes: Any, per_head: bool = False, **attention: Any):
        self.per_head = per_head
        super().__init__(*sizes, **attention)

    @property
    def axis_names(self) -> dict[str, str]:
        return {"gate": "embed heads" if self.per_head else "embed heads head_dim"}

    def gated(
        self, mixed_BSHD: Float[Array, "b s h d"], x_BSE: Array, context: ForwardContext
    ) -> Float[Array, "b s h d"]:
        """The mixed values, multiplied by their gates."""
        equation = "bse,eh->bsh" if self.per_head else "bse,ehd->bshd"
        precision = context.compute.precision("projections")
        gate = checkpoint_name(matmul(equation, x_BSE, self.gate, precision), "gate")
        return mixed_BSHD * jax.nn.sigmoid(gate[..., None] if self.per_head else gate)
