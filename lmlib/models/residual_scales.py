"""A layer whose input is a mix of the residual stream and the first layer's input.

Shapes: B batch, S sequence, E embed.
"""

from collections.abc import Hashable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray

from lmlib.models.forward_context import FIRST_RESIDUAL, ForwardContext
from lmlib.models.part import AuxOutputs, Part
from lmlib.models.weights import Constant, fill, weight


class ResidualScales(Part):
    """layer(residual · x + first · x0), with x0 the residual stream before the first layer.

    Both scales are learned (the "x0 lambdas" of Jordan et al. 2024,
    https://github.com/KellerJordan/modded-nanogpt). `residual` starts at 1, `first` at
    `initial_first`.
    """

    rows_may_be_split = True

    layer: Part
    residual: Float[Array, ""] = weight(Constant(1.0), dtype="float32")
    first: Float[Array, ""] = weight(lambda self: Constant(self.initial_first), dtype="float32")
    initial_first: float = eqx.field(static=True)

    def __init__(self, layer: Part, initial_first: float = 0.0, *, key: PRNGKeyArray):
        self.layer, self.initial_first = layer, initial_first
        fill(self, key)

    def __call__(
        self, x_BSE: Float[Array, "b s embed"], context: ForwardContext, cache: Any = None
    ) -> tuple[Float[Array, "b s embed"], AuxOutputs, Any]:
        """A layer's call; see `Part`."""
        return self.layer(self.mixed(x_BSE, context), context, cache)

    def mixed(
        self, x_BSE: Float[Array, "b s embed"], context: ForwardContext
    ) -> Float[Array, "b s embed"]:
        """The layer's input, summed in float32 or wider."""
        # A scale starts at 1, and bfloat16 cannot represent small changes of it.
        wide = jnp.promote_types(x_BSE.dtype, jnp.float32)
        kept_BSE = self.residual * x_BSE.astype(wide)
        first_BSE = context.shared[FIRST_RESIDUAL].astype(wide)
        return (kept_BSE + self.first * first_BSE).astype(x_BSE.dtype)

    @property
    def reads(self) -> tuple[Hashable, ...]:
        return (FIRST_RESIDUAL, *super().reads)

    def empty_cache(self, rows: int, length: int, dtype: DTypeLike) -> Any:
        return self.layer.empty_cache(rows, length, dtype)

    def attention_weights(self, x_BSE: Array, context: ForwardContext) -> Array:
        return self.layer.attention_weights(self.mixed(x_BSE, context), context)

    def updated(self, tallies: Any) -> "ResidualScales":
        return eqx.tree_at(lambda scaled: scaled.layer, self, self.layer.updated(tallies))

    def measured(self, tallies: Any) -> dict[str, Array]:
        return self.layer.measured(tallies)
