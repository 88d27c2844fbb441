"""A decoder block: a mixer of positions, then an mlp, each added to the residual stream.

Shapes: B batch, S sequence, E embed.
"""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import equinox as eqx
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from lmlib.compute import Compute
from lmlib.models.parts.dropout import dropout
from lmlib.models.protocol import Context
from lmlib.models.weights import product_flops
from lmlib.parallel.layout import share

Norm = Callable[[Array], Array]
Losses = dict[str, Array]


@runtime_checkable
class Mixer(Protocol):
    """What a block asks of its attention, or of what stands in its place. One with an attribute
    `rotary` finds that `Rotary`'s table in `context.turns`."""

    def __call__(self, x_BSE: Array, context: Context, cache: Any = None) -> tuple[Array, Any]:
        """What is added to the residual stream, laid out as `context.compute.residual` names, and
        the new cache; x is whole along `seq`."""

    def flops_per_token(self, sequence_length: int, causal: bool) -> float:
        """Forward and backward, besides those of its weights."""

    def check(self, sequence_length: int, compute: Compute) -> None:
        """Raises ValueError for what it cannot compute."""


@runtime_checkable
class CachedMixer(Mixer, Protocol):
    """A mixer that goes on from a cache."""

    def empty_cache(self, rows: int, length: int, dtype: DTypeLike) -> Any:
        """Of one layer, as `lmlib.models.protocol.Cached` says, but with the rows along the first
        axis."""


@runtime_checkable
class WeightingMixer(Mixer, Protocol):
    """A mixer that takes weighted means of positions, and shows the weights."""

    def weights(self, x_BSE: Array, context: Context) -> Array:
        """[b, heads, s, t]: how much each position (s) takes from each (t), of the same x as a
        call."""


@runtime_checkable
class FeedForward(Protocol):
    """What a block asks of its mlp."""

    def __call__(self, x_BSE: Array, context: Context) -> tuple[Array, Losses]:
        """As of `Mixer`, and sums for the loss, as in `Trunk.losses`."""


class Block(eqx.Module):
    """x + after(attention(before(x))), then the same with the mlp; each norm may be absent.

    With norms before, pre-norm (Xiong et al. 2020, arXiv:2002.04745); with norms after as in OLMo 2
    (arXiv:2501.00656, §3.1), with both as in Gemma 2 (arXiv:2408.00118, §2). In calls with a key
    what is added is dropped at the context's rate (GPT-2 drops at the same places; Vaswani et al.
    2017, arXiv:1706.03762, §5.4).

    Args:
      attention, mlp: what is added to the residual stream.
      attention_norm, mlp_norm: before each of them.
      attention_after_norm, mlp_after_norm: after each of them.
      residual_multiplier: of what each of them adds.
    """

    attention_norm: Norm | None
    attention: Mixer
    attention_after_norm: Norm | None
    mlp_norm: Norm | None
    mlp: FeedForward
    mlp_after_norm: Norm | None
    residual_multiplier: float = eqx.field(static=True)

    def __init__(
        self,
        attention: Mixer,
        mlp: FeedForward,
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
        self, x_BSE: Float[Array, "b s embed"], context: Context, cache: Any = None
    ) -> tuple[Float[Array, "b s embed"], Losses, Any]:
        """The residual stream, sums for the loss, and the new cache."""
        h_BSE = checkpoint_name(self.attention_input(x_BSE), "attention_input")
        h_BSE, cache = self.attention(h_BSE, context, cache)
        h_BSE = _normed(self.attention_after_norm, h_BSE)
        x_BSE = added(x_BSE, h_BSE, self.residual_multiplier, "attention", context)
        x_BSE = checkpoint_name(x_BSE, "attention_residual")
        h_BSE = share(_normed(self.mlp_norm, x_BSE), "batch seq embed")
        h_BSE = checkpoint_name(h_BSE, "mlp_input")
        h_BSE, losses = self.mlp(h_BSE, context)
        h_BSE = _normed(self.mlp_after_norm, h_BSE)
        x_BSE = added(x_BSE, h_BSE, self.residual_multiplier, "mlp", context)
        return x_BSE, losses, cache

    def attention_input(self, x_BSE: Float[Array, "b s embed"]) -> Float[Array, "b s embed"]:
        """What attention is given of the residual stream."""
        # `share` gathers the sequence over `tensor` when the residual stream is sequence-parallel.
        return share(_normed(self.attention_norm, x_BSE), "batch seq embed")

    def flops_per_token(self, sequence_length: int, causal: bool) -> float:
        """Forward and backward, of one layer."""
        attention = self.attention.flops_per_token(sequence_length, causal)
        return attention + product_flops(self.attention) + product_flops(self.mlp)


def added(x_BSE: Array, h_BSE: Array, multiplier: float, name: str, context: Context) -> Array:
    """The residual stream with multiplier · h, of which elements are dropped as the context says;
    `name`: of what adds, for the key of the elements."""
    h_BSE = dropout(h_BSE, context.dropout, context.key, name, context.compute.residual)
    return x_BSE + (h_BSE if multiplier == 1 else h_BSE * jnp.asarray(multiplier, h_BSE.dtype))


def _normed(norm: Norm | None, x_BSE: Array) -> Array:
    return x_BSE if norm is None else norm(x_BSE)
