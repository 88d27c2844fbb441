"""The arguments that a model passes to every layer in a call.

Shapes: B batch, S sequence, E embed.
"""

import dataclasses
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, PRNGKeyArray

from lmlib.compute import Compute
from lmlib.models.weights import fold_in_name
from lmlib.parallel.layout import spec

# Keys of `Context.shared`. The model gives the tokens; the stack gives the residual stream that its
# first layer reads, unless the model does.
TOKENS, FIRST_RESIDUAL = "tokens", "first_residual"


@dataclasses.dataclass(frozen=True)
class ForwardContext:
    """The arguments of a call, except for the tokens. All layers get the same ones except `key`."""

    positions_BS: Int32[Array, "b s"]  # of each token within its document, from 0
    # The document of each position in its row; `None`: each row is one, then padding at most.
    segment_ids_BS: Int32[Array, "b s"] | None
    compute: Compute
    key: PRNGKeyArray | None = None  # for dropout in blocks; without it nothing is random
    dropout: float = 0.0  # its rate
    lengths_B: Int32[Array, "b"] | None = None  # of texts so far, if a cache has a part of them
    counts_BS: Bool[Array, "b s"] | None = None  # positions that count in reports; `None`: all
    order: str = "plain"  # of tokens along the mesh axis `context`; see `lmlib.row_order`
    observe: "Observe | None" = None  # called in each layer, for `TrunkOutput.observed`
    # Values of shape [b, s, ...] that layers share, by the keys that `Part.reads` lists.
    shared: Mapping[Hashable, Any] = dataclasses.field(default_factory=dict)

    def total(self, x_BS: Float[Array, "b s ..."]) -> Float[Array, "..."]:
        """The float32 sum over the positions that count, for `AuxOutputs`."""
        if self.counts_BS is not None:
            counts_BS = jnp.reshape(self.counts_BS, (*x_BS.shape[:2], *(1,) * (x_BS.ndim - 2)))
            x_BS = jnp.where(counts_BS, x_BS, 0)
        return jnp.sum(x_BS, axis=(0, 1), dtype=jnp.float32)

    def dropped(self, x_BSE: Float[Array, "b s embed"], name: str) -> Float[Array, "b s embed"]:
        """Applies dropout: each element is 0 with probability `dropout`, else x / (1 - dropout).

        The choice depends on the key, `name` and the place in the global array, so each device
        draws the same bits on every mesh. x has the layout of the residual stream.
        """
        if self.key is None:
            return x_BSE
        kept_share, layout = 1 - self.dropout, spec(self.compute.residual)
        key = fold_in_name(self.key, name)
        kept_BSE = jax.random.bernoulli(key, kept_share, x_BSE.shape, out_sharding=layout)
        # The factor in bfloat16 would be off by up to 0.4 %, and so would the mean.
        wide_BSE = x_BSE.astype(jnp.promote_types(x_BSE.dtype, jnp.float32))
        return jnp.where(kept_BSE, wide_BSE / kept_share, 0).astype(x_BSE.dtype)

    def sharing(self, values: Mapping[Hashable, Any]) -> "ForwardContext":
        """This context with `values` added to `shared`."""
        return dataclasses.replace(self, shared={**self.shared, **values})


def single_document_context(tokens_BS: Int32[Array, "b s"], compute: Compute) -> ForwardContext:
    """Returns the context for rows of one document each, from position 0."""
    positions_BS = jnp.zeros_like(tokens_BS) + jnp.arange(tokens_BS.shape[1], dtype=jnp.int32)
    return ForwardContext(positions_BS, None, compute)


class LayerCall(NamedTuple):
    """A layer, with gathered weights, and the residual stream before and after it in one call."""

    layer: Any
    before: Float[Array, "b s embed"]
    after: Float[Array, "b s embed"]
    context: ForwardContext


Observe = Callable[[LayerCall], Any]
