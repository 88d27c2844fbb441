"""The model that lmlib's families share: embedding, stack of blocks, norm, unembedding.

Shapes: B batch, S sequence, E embed, V vocab.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32, PRNGKeyArray

from lmlib.compute import Compute
from lmlib.models.layer import Norm
from lmlib.models.matrices.adapted import whole
from lmlib.models.parts.dropout import dropout
from lmlib.models.parts.embedding import embedded
from lmlib.models.parts.head import logits
from lmlib.models.parts.positions import Positions
from lmlib.models.precision import usual_dtype
from lmlib.models.protocol import Context, Names, Part, Trunk, joined, whole_rows
from lmlib.models.rematerialization import policy
from lmlib.models.stack import (
    Segment,
    Stack,
    check_stack,
    make_stack,
    measured_stack,
    run_stack,
    stack_cache,
    stack_flops_per_token,
    stack_names,
    stack_parts,
    stack_switches,
    updated_stack,
)
from lmlib.models.weights import fan_in, initial_values, normal, weight
from lmlib.parallel.gathering import gather
from lmlib.parallel.layout import reshard
from lmlib.parallel.mesh import on_mesh_of


class Decoder(eqx.Module):
    """Tokens to logits; a `lmlib.models.protocol.Model`. Weights are float32.

    Args:
      vocab, embed: sizes.
      segments: the layers, as `make_stack` takes them.
      norm: after the last layer; may be absent.
      tied: one table embeds and unembeds.
      logit_cap: c, where logits z become c · tanh(z / c); `None` where they stay.
      embedding_deviation: standard deviation of the embedding's initial values.
      embedding_scale: what embedded tokens are multiplied by.
      unembedding_scale: standard deviation of the logits that the initial unembedding makes of
        features of variance 1; the first loss is ln(vocab) + unembedding_scale² / 2.
      logits_scale: what features are multiplied by before the unembedding, and so logits.
      positions: learned ones, added to embedded tokens; `None`: there are none.
      key: seed of the weights.
    """

    rows_may_be_split = True

    embedding_deviation: float = eqx.field(static=True)
    embedding_scale: float = eqx.field(static=True)
    embedding: Float[Array, "vocab embed"] = weight(lambda self: normal(self.embedding_deviation))
    positions: Positions | None
    stack: Stack
    norm: Norm | None
    unembedding: Float[Array, "embed vocab"] | None = weight(
        lambda self: fan_in("embed", scale=self.unembedding_scale)
    )
    unembedding_scale: float = eqx.field(static=True)
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
        unembedding_scale: float = 0.35,
        logits_scale: float = 1.0,
        positions: Positions | None = None,
        *,
        key: PRNGKeyArray,
    ):
        self.logit_cap, self.logits_scale, self.positions = logit_cap, logits_scale, positions
        self.embedding_deviation, self.embedding_scale = embedding_deviation, embedding_scale
        self.unembedding_scale = unembedding_scale
        sizes = {"vocab": vocab, "embed": embed}
        self.embedding = initial_values(self, "embedding", key, **sizes)
        self.stack = make_stack(segments, key)
        self.norm = norm
        self.unembedding = None if tied else initial_values(self, "unembedding", key, **sizes)

    def __call__(
        self, tokens_BS: Int32[Array, "b s"], context: Context | None = None
    ) -> Float[Array, "b s vocab"]:
        """Logits of the next token; see `lmlib.models.parts.head.logits`. Without a context each
        row is one document, computed in float32 on CPUs and in bfloat16 elsewhere, as
        `lmlib.generate` does. The mesh that the weights lie on is set unless one is; it must divide
        the rows."""
        with on_mesh_of(self.embedding):
            tokens_BS = reshard(tokens_BS, "batch seq")
            context = context or whole_rows(tokens_BS, Compute(dtype=usual_dtype()))
            h_BSE = self.features(self.trunk(tokens_BS, context).x_BSE, context)
            return logits(self, reshard(h_BSE, "batch seq embed"), context.compute)

    def trunk(self, tokens_BS: Int32[Array, "b s"], context: Context, cache: Any = None) -> Trunk:
        """See `Model.trunk`."""
        compute, key = context.compute, context.key
        context = dataclasses.replace(context, tokens_BS=tokens_BS)
        with jax.named_scope("embed"):
            x_BSE = embedded(whole(self.embedding), tokens_BS, compute.dtype, compute.residual)
            x_BSE = _scaled(x_BSE, self.embedding_scale)
            if self.positions is not None:
                x_BSE += gather(self.positions, compute.dtype)(context)
        if key is not None and context.dropout > 0:
            # Drawn again in the backward pass, as in the layers, rather than kept.
            x_BSE = jax.checkpoint(dropout, static_argnums=(1, 3, 4))(
                x_BSE, context.dropout, key, "embedding", compute.residual
            )
        return run_stack(self.stack, x_BSE, context, cache)

    def empty_cache(self, rows: int, length: int, dtype: DTypeLike) -> Any:
        """See `lmlib.models.protocol.Cached`."""
        return stack_cache(self.stack, rows, length, dtype)

    @property
    def switches(self) -> tuple[int, ...]:
        """See `lmlib.models.protocol.Switching`."""
        return stack_switches(self.stack)

    def features(
        self, x_BSE: Float[Array, "b s embed"], context: Context
    ) -> Float[Array, "b s embed"]:
        """See `Model.features`."""
        compute = context.compute

        def normed(x_BSE: Array) -> Array:
            x_BSE = checkpoint_name(x_BSE, "head_input")
            h_BSE = x_BSE if self.norm is None else gather(self.norm, compute.dtype)(x_BSE)
            return _scaled(h_BSE, self.logits_scale)

        return jax.checkpoint(normed, policy=policy(compute, ()))(x_BSE)

    @property
    def names(self) -> Names:
        """See `Model.names`."""
        return joined(Names(scopes=("embed",)), stack_names(self.stack))

    def updated(self, tallies: Any) -> "Decoder":
        """See `lmlib.models.layer.Updating`."""
        stack = updated_stack(self.stack, tallies)
        return eqx.tree_at(lambda model: model.stack, self, stack)

    def measured(self, tallies: Any) -> dict[str, Array]:
        """See `lmlib.models.layer.Measuring`."""
        return measured_stack(self.stack, tallies)

    @property
    def vocab(self) -> int:
        return self.embedding.shape[0]

    def unembedding_EV(self) -> Float[Array, "embed vocab"]:
        """See `Model.unembedding_EV`."""
        return whole(self.embedding).T if self.unembedding is None else whole(self.unembedding)

    def flops_per_token(self, sequence_length: int, causal: bool) -> float:
        """See `Model.flops_per_token`: six for each parameter that multiplies activations, and what
        attention multiplies besides."""
        head = 6.0 * self.embedding.size  # as large as the unembedding
        return head + stack_flops_per_token(self.stack, sequence_length, causal)

    def parts(self) -> tuple[Part, ...]:
        """See `Model.parts`."""

        def there(**parts: Any) -> list[Part]:
            return [Part(name, part) for name, part in parts.items() if part is not None]

        return (
            *there(embedding=self.embedding, positions=self.positions),
            *stack_parts(self.stack),
            *there(norm=self.norm, unembedding=self.unembedding),
        )

    def check(self, sequence_length: int, compute: Compute) -> None:
        """See `Model.check`."""
        check_stack(self.stack, sequence_length, compute)
        if self.positions is not None:
            self.positions.check(sequence_length)


def _scaled(x_BSE: Array, scale: float) -> Array:
    return x_BSE if scale == 1 else x_BSE * jnp.asarray(scale, x_BSE.dtype)
