"""Layers of two parts: a mixer of positions and an MLP, each added to the residual stream.

Shapes: B batch, S sequence, E embed.
"""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from lmlib.models.forward_context import ForwardContext
from lmlib.models.part import (
    ActivationNames,
    AuxOutputs,
    Norm,
    Part,
    check_like,
    check_part,
    checked,
    merge_names,
)
from lmlib.parallel.layout import replicate_for_tp


class BlockBase(Part):
    """Base class of layers with a mixer and an MLP. A subclass defines `__call__` and `names`."""

    attention_norm: eqx.AbstractVar[Norm | None]
    attention: eqx.AbstractVar[Part]
    mlp_norm: eqx.AbstractVar[Norm | None]
    mlp: eqx.AbstractVar[Part]

    def __check_init__(self) -> None:
        check_part(self.attention, "x_BSE", "context", "cache")
        check_part(self.mlp, "x_BSE", "context")

    def attention_input(self, x_BSE: Float[Array, "b s embed"]) -> Float[Array, "b s embed"]:
        """The input of attention for this residual stream."""
        # This gathers the sequence over `tensor` if the residual stream is sequence-parallel.
        h_BSE = replicate_for_tp(normed(self.attention_norm, x_BSE), "batch seq embed")
        return checkpoint_name(h_BSE, "attention_input")

    def attended(self, x_BSE: Array, context: ForwardContext, cache: Any) -> tuple[Array, Any]:
        """The output of attention, and the new cache."""
        returned = self.attention(self.attention_input(x_BSE), context, cache)
        return checked(self.attention, returned, x_BSE, "cache")

    def fed_forward(self, x_BSE: Array, context: ForwardContext) -> tuple[Array, AuxOutputs]:
        """The output of the MLP, and its reports."""
        h_BSE = replicate_for_tp(normed(self.mlp_norm, x_BSE), "batch seq embed")
        returned = self.mlp(checkpoint_name(h_BSE, "mlp_input"), context)
        return checked(self.mlp, returned, x_BSE, "reports")

    def empty_cache(self, rows: int, length: int, dtype: DTypeLike) -> Any:
        return self.attention.empty_cache(rows, length, dtype)

    def attention_weights(self, x_BSE: Array, context: ForwardContext) -> Array:
        return self.attention.attention_weights(self.attention_input(x_BSE), context)

    def updated(self, tallies: Any) -> Any:
        return eqx.tree_at(lambda layer: layer.mlp, self, self.mlp.updated(tallies))

    def measured(self, tallies: Any) -> dict[str, Array]:
        return self.mlp.measured(tallies)


class Block(BlockBase):
    """x + after(attention(before(x))), then the same with the MLP. Each norm is optional.

    Pre-norm: arXiv:2002.04745; norms after, as in OLMo 2: arXiv:2501.00656, §3.1; both, as in Gemma
    2: arXiv:2408.00118, §2. Outputs have dropout, and are multiplied by `residual_multiplier`.
    """

    rows_may_be_split = True

    attention_norm: Norm | None
    attention: Part
    attention_after_norm: Norm | None
    mlp_norm: Norm | None
    mlp: Part
    mlp_after_norm: Norm | None
    residual_multiplier: float = eqx.field(static=True)

    def __init__(
        self,
        attention: Part,
        mlp: Part,
        attention_norm: Norm | None = None,
        mlp_norm: Norm | None = None,
        attention_after_norm: Norm | None = None,
        mlp_after_norm: Norm | None = None,
        residual_multiplier: float = 1.0,
    ):
        self.attention, self.mlp = attention, mlp
        self.attention_norm, self.mlp_norm = attention_norm, mlp_norm
        self.attention_after_norm, self.mlp_after_norm = attention_after_norm, mlp_after_norm
        self.residual_multiplier = residual_multiplier

    def __call__(
        self, x_BSE: Float[Array, "b s embed"], context: ForwardContext, cache: Any = None
    ) -> tuple[Float[Array, "b s embed"], AuxOutputs, Any]:
        """A layer's call; see `Part`."""
        h_BSE, cache = self.attended(x_BSE, context, cache)
        h_BSE = context.dropped(normed(self.attention_after_norm, h_BSE), "attention")
        x_BSE = checkpoint_name(x_BSE + self._scaled(h_BSE), "attention_residual")
        h_BSE, aux = self.fed_forward(x_BSE, context)
        h_BSE = context.dropped(normed(self.mlp_after_norm, h_BSE), "mlp")
        return x_BSE + self._scaled(h_BSE), aux, cache

    def _scaled(self, h_BSE: Array) -> Array:
        multiplier = self.residual_multiplier
        return h_BSE if multiplier == 1 else h_BSE * jnp.asarray(multiplier, h_BSE.dtype)

    @property
    def names(self) -> ActivationNames:
        before_attention = ActivationNames(("attention_input",))
        before_mlp = ActivationNames(("attention_residual", "mlp_input"))
        return merge_names(before_attention, self.attention.names, before_mlp, self.mlp.names)


def normed(norm: Norm | None, x_BSE: Array) -> Array:
    """norm(x), checked to be like x; x without a norm."""
    if norm is None:
        return x_BSE
    h_BSE = norm(x_BSE)
    check_like(norm, h_BSE, x_BSE)
    return h_BSE
