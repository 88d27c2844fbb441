"""The model that lmlib's families share: embedding, stack of blocks, norm, unembedding.

Shapes: B batch, S sequence, E embed, V vocab.
"""

import functools
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32, PRNGKeyArray

from lmlib.models.forward_context import TOKENS, ForwardContext
from lmlib.models.model import Model, TrunkOutput, WeightGroup
from lmlib.models.part import ActivationNames, Norm, merge_names
from lmlib.models.parts.embedding import Positions, embedded
from lmlib.models.scan import policy
from lmlib.models.stack import Segment, Stack
from lmlib.models.weights import fan_in, initial_values, normal, weight
from lmlib.parallel.gathering import gather
from lmlib.parallel.matrix import dense


class Decoder(Model):
    """A language model: tokens to logits. Weights are float32.

    Args:
      tied: True if one table embeds and unembeds.
      logit_cap: c, if logits z become c · tanh(z / c); `None` leaves them as they are.
      embedding_deviation: standard deviation of the embedding's initial values.
      embedding_scale, logits_scale: factors of embedded tokens, and of logits.
    """

    rows_may_be_split = True

    vocab: int = eqx.field(static=True)
    embedding_deviation: float = eqx.field(static=True)
    embedding_scale: float = eqx.field(static=True)
    embedding: Float[Array, "vocab embed"] = weight(lambda self: normal(self.embedding_deviation))
    positions: Positions | None
    stack: Stack
    norm: Norm | None
    # For features of variance 1 the first loss is ln(vocab) + 0.35² / 2.
    unembedding: Float[Array, "embed vocab"] | None = weight(fan_in("embed", scale=0.35))
    logit_cap: float | None = eqx.field(static=True)
    logits_scale: float = eqx.field(static=True)

    def __init__(
        self,
        vocab: int,
        embed: int,
        segments: Sequence[Segment],
        norm: Norm | None = None,
        tied: bool = False,
        logit_cap: float | None = None,
        embedding_deviation: float = 1.0,
        embedding_scale: float = 1.0,
        logits_scale: float = 1.0,
        positions: Positions | None = None,
        *,
        key: PRNGKeyArray,
    ):
        self.vocab, self.logit_cap, self.logits_scale = vocab, logit_cap, logits_scale
        self.embedding_deviation, self.embedding_scale = embedding_deviation, embedding_scale
        sizes = {"vocab": vocab, "embed": embed}
        self.embedding = initial_values(self, "embedding", key, **sizes)
        self.positions, self.stack, self.norm = positions, Stack(segments, key), norm
        self.unembedding = None if tied else initial_values(self, "unembedding", key, **sizes)

    def trunk(
        self, tokens_BS: Int32[Array, "b s"], context: ForwardContext, cache: Any = None
    ) -> TrunkOutput:
        compute = context.compute
        context = context.sharing({TOKENS: tokens_BS})
        with jax.named_scope("embed"):
            x_BSE = embedded(dense(self.embedding), tokens_BS, compute.dtype, compute.residual)
            x_BSE = _scaled(x_BSE, self.embedding_scale)
            if self.positions is not None:
                x_BSE += gather(self.positions, compute.dtype)(context)
        if context.key is not None and context.dropout > 0:
            # Drawn again in the backward pass instead of saved, as in the layers.
            x_BSE = jax.checkpoint(functools.partial(context.dropped, name="embedding"))(x_BSE)
        return self.stack(x_BSE, context, cache)

    def empty_cache(self, rows: int, length: int, dtype: DTypeLike) -> Any:
        return self.stack.empty_cache(rows, length, dtype)

    def features(
        self, x_BSE: Float[Array, "b s embed"], context: ForwardContext
    ) -> Float[Array, "b s embed"]:
        compute = context.compute

        def normed(x_BSE: Array) -> Array:
            x_BSE = checkpoint_name(x_BSE, "head_input")
            h_BSE = x_BSE if self.norm is None else gather(self.norm, compute.dtype)(x_BSE)
            return _scaled(h_BSE, self.logits_scale)

        return jax.checkpoint(normed, policy=policy(compute, ()))(x_BSE)

    @property
    def names(self) -> ActivationNames:
        return merge_names(ActivationNames(scopes=("embed",)), super().names)

    def updated(self, tallies: Any) -> "Decoder":
        return eqx.tree_at(lambda model: model.stack, self, self.stack.updated(tallies))

    def measured(self, tallies: Any) -> dict[str, Array]:
        return self.stack.measured(tallies)

    def unembedding_EV(self) -> Float[Array, "embed vocab"]:
        return dense(self.embedding).T if self.unembedding is None else dense(self.unembedding)

    def flops_per_token(self, sequence_length: int, causal: bool) -> float:
        head = 6.0 * self.embedding.size  # as large as the unembedding
        return head + self.stack.flops_per_token(sequence_length, causal)

    def weight_groups(self) -> tuple[WeightGroup, ...]:
        def groups(*names: str) -> list[WeightGroup]:
            found = ((name, getattr(self, name)) for name in names)
            return [WeightGroup(*each) for each in found if each[1] is not None]

        before, after = groups("embedding", "positions"), groups("norm", "unembedding")
        return (*before, *self.stack.weight_groups(), *after)


def _scaled(x_BSE: Array, scale: float) -> Array:
    return x_BSE if scale == 1 else x_BSE * jnp.asarray(scale, x_BSE.dtype)
