"""Smeared tokens: each embedded token has a gated share of the token before it.

Shapes: B batch, S sequence, E embed.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray

from lmlib.models.forward_context import ForwardContext
from lmlib.models.part import Part
from lmlib.models.recurrent.cache import empty
from lmlib.models.recurrent.convolution import earlier_tokens, moved_window
from lmlib.models.weights import fill, weight, zeros
from lmlib.parallel.layout import reshard


class Smear(Part):
    """x[t] + share · sigmoid(gate · x[t, :n]) · x[t - 1], within a document.

    n is the size of the gate, and `share` starts at 0. Source: modded-nanogpt, record 34, where a
    document's first token also reads the previous document. Needs no matrix product.
    """

    rows_may_be_split = True

    gate: Float[Array, "gate_input"] = weight(zeros, rules={"gate_input": None})
    share: Float[Array, ""] = weight(zeros, dtype="float32")
    embed: int = eqx.field(static=True)

    def __init__(self, embed: int, gate_input: int, *, key: PRNGKeyArray):
        self.embed = embed
        fill(self, key, gate_input=gate_input)

    def __call__(
        self, x_BSE: Float[Array, "b s embed"], context: ForwardContext, cache: Any = None
    ) -> tuple[Float[Array, "b s embed"], Any]:
        """Returns the smeared tokens, whole along the sequence, and the new cache."""
        x_BSE = reshard(x_BSE, "batch seq embed")
        (before_BSE,) = earlier_tokens(x_BSE, 1, context, cache)
        wide = jnp.promote_types(x_BSE.dtype, jnp.float32)
        read_BSG = x_BSE[..., : self.gate.shape[0]].astype(wide)
        gate_BS = self.share * jax.nn.sigmoid(jnp.sum(read_BSG * self.gate, axis=-1))
        y_BSE = x_BSE + gate_BS[..., None].astype(x_BSE.dtype) * before_BSE
        return y_BSE, moved_window(cache, x_BSE, context)

    def empty_cache(self, rows: int, length: int, dtype: DTypeLike) -> Float[Array, "b 1 embed"]:
        """The token before the next one."""
        return empty(("batch", None, None), (rows, 1, self.embed), dtype)
