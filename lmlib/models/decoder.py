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


def table_values(embed: int, tied: bool) -> tuple[float, float]:
    """What `embedding_deviation` is to be, and the first scale of the last norm. A tied table
    embeds and unembeds: the norm between its two uses makes up for their difference, and makes
    logits that start small (`tied_scale`), as `unembedding_scale` makes those of an untied one. So
    the first loss is ln(vocab) to 0.1.

    benchmarks/initial_values.py chose them, with residual writes / √(2 · layers): nats per token of
    held-out text after 200 steps of 512 tokens, the better of two rates, the mean of three seeds
    (their standard deviation is 0.03, the median over all runs).

        embed, layers                   32, 2  32, 6  64, 2  64, 6  128, 2  128, 6
        all by fan-in, table embed^-½   4.927  5.134  4.876  5.061   4.712   4.911
        GPT-2's 0.02                    4.690  4.779  4.527  4.840   4.839   5.249
        table 1                         4.499  4.508  4.199  4.226   4.123   4.054
        table 1, logits embed^-½        4.462  4.488  4.221  4.370   4.135   4.100
        tied: all by fan-in             5.084  5.273  4.880  5.209   4.770
        tied: GPT-2's 0.02              5.490  5.623  5.268  5.635   4.938
        tied: table 1                   5.074  5.066  4.675  4.756   4.447   4.525
        tied: table 1, logits embed^-½  5.056  5.053  4.653  4.744   4.380   4.496
        tied: table 1/4                 4.755  4.827  4.488  4.666   4.452   4.463
        tied: table 1/2                 4.833  4.876  4.510  4.629   4.397   4.431
        table 1, logits 0.4                                  4.231           4.028
        table 1, logits 0.3                                  4.254           4.033
        table 1, logits 0.25                          4.182  4.275
        table 1, logits 0                             4.430  4.650
        tied: table 1/2, logits embed^-½              4.509  4.643
        tied: table 1/2, logits 0                     4.528  4.683

    Logits have standard deviation 1 unless it is said. Untied ones that start smaller cost nothing
    down to about 0.35; a head of zeros costs a lot, a tied one little. (The tied pair at 128, 6 was
    measured on another validation text: embed^-½ cost 0.007.)
    """
    return (0.5, tied_scale(embed, 0.5)) if tied else (1.0, 1.0)


def tied_scale(embed: int, deviation: float) -> float:
    """The first scale of the last norm with which the logits of a tied table of this deviation
    start with standard deviation embed^-1/2, as `table_values` has it. The logit of the token that
    is read, whose row is in the residual stream, then starts below 1, whatever the width."""
    return 1 / (deviation * embed)


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
