"""The loss of multi-token prediction, DeepSeek-V3's (arXiv:2412.19437, §2.2, eq. 24 and 25).

Shapes: B batch, S sequence, E embed.
"""

import dataclasses
import math
from collections.abc import Mapping, Set
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Int32, PRNGKeyArray

from lmlib.compute import Compute
from lmlib.data.batch import Batch
from lmlib.losses.features import features
from lmlib.losses.fused import fused_loss
from lmlib.losses.next_token import CrossEntropy, NextToken
from lmlib.losses.objective import LossSums, Metric
from lmlib.models.model import Model
from lmlib.models.multi_token import MultiTokenDecoder
from lmlib.parallel.layout import reshard
from lmlib.parallel.rows import gathered_rows, split_rows


@dataclasses.dataclass(frozen=True)
class MultiToken(NextToken):
    """The next-token loss, plus a weighted cross-entropy for each head of a `MultiTokenDecoder`.

    The head of depth k predicts token i + k + 1 at position i if both it and token i + k belong to
    the document of position i, and it is a valid target. The sums that are minimised are divided
    by the number of valid targets of the next token (eq. 24).

    Reports, in nats per token, `loss`, of the next token; `loss_2`, of the token after it, and so
    on. `targets_2` is the number of its targets, relative to the next token's.

    Args:
      weights: factor of each head's loss, from depth 1 on: λ / D in the paper, which uses λ = 0.3
        for most of its training.
      z_loss, dropout: as in `NextToken`, for the heads too.
    """

    rows_may_be_split = True
    trains_predictors = True

    weights: tuple[float, ...] = (0.3,)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.weights or not all(0 <= each < math.inf for each in self.weights):
            raise ValueError(
                f"weights must be numbers of at least 0, one for each head, got {self.weights}"
            )

    @property
    def metrics(self) -> Mapping[str, Metric]:
        found = {"loss": Metric("nats per token")}
        for n in range(2, 2 + len(self.weights)):
            text = f"-log p(token {n} after a position)"
            found[f"loss_{n}"] = Metric("nats per token", True, text)
            found[f"targets_{n}"] = Metric("of targets", text=f"targets of loss_{n}")
        return found

    def means(self, per_unit: dict[str, Any]) -> dict[str, Any]:
        found = dict(per_unit)
        for n in range(2, 2 + len(self.weights)):
            targets = per_unit[f"targets_{n}"]
            found[f"loss_{n}"] = per_unit[f"loss_{n}"] / (targets + (targets == 0))
        return found

    def check(self, model: Any, reference_model: Any, trained: Set[str] | None) -> None:
        heads = len(model.predictors) if isinstance(model, MultiTokenDecoder) else 0
        if heads != len(self.weights):
            raise ValueError(
                f"the objective has weights for {len(self.weights)} heads, and the model has "
                f"{heads}: make it with lmlib.models.multi_token.multi_token(of=…, "
                f"depths={len(self.weights)}), or give a weight for each head"
            )

    def flops_per_token(self, model: Any, sequence_length: int, causal: bool) -> float:
        of_head = 6.0 * model.embedding.size
        return sum(
            of_head + head.flops_per_token(sequence_length, causal) for head in model.predictors
        )

    def sums(
        self,
        model: Model,
        reference_model: Model | None,
        batch: Batch,
        compute: Compute,
        key: PRNGKeyArray | None = None,
    ) -> LossSums:
        assert isinstance(model, MultiTokenDecoder), "`check` refuses others"

        def loss_of(h_BSE: Array, targets_BS: Array, mask_BS: Array) -> LossSums:
            with jax.named_scope("loss"):
                return fused_loss(
                    CrossEntropy(self.z_loss), h_BSE, model.unembedding_EV(), targets_BS, mask_BS,
                    cap=model.logit_cap, chunk=compute.loss_chunk, dtype=compute.logits_dtype,
                )  # fmt: skip

        found = features(model, batch, compute, key, self.dropout)
        h_BSE, aux = found.h_BSE, []
        own = loss_of(h_BSE, jnp.asarray(batch.targets), jnp.asarray(batch.loss_mask))
        total, reported = own.loss_sum, dict(own.reported)
        for depth, weight in enumerate(self.weights, 1):
            ahead = tokens_ahead(batch, depth)
            context = dataclasses.replace(found.context, counts_BS=ahead.is_there_BS)
            made = model.ahead(depth, h_BSE, ahead.tokens_BS, context)
            h_BSE = checkpoint_name(made.x_BSE, "loss_gradient")
            aux.append(made.aux)
            of_depth = loss_of(h_BSE, ahead.targets_BS, ahead.loss_mask_BS)
            total += weight * of_depth.loss_sum
            reported[f"loss_{depth + 1}"] = of_depth.reported["loss"]
            reported[f"targets_{depth + 1}"] = jnp.sum(ahead.loss_mask_BS, dtype=jnp.float32)
        return LossSums(total, reported, model.with_heads(found.aux, aux))


class TokensAhead(NamedTuple):
    """The inputs and targets of a head, at the positions of the batch."""

    tokens_BS: Int32[Array, "b s"]  # token i + depth; 0 where it is of another document
    targets_BS: Int32[Array, "b s"]  # token i + depth + 1
    is_there_BS: Bool[Array, "b s"]  # True if token i + depth is of the document of token i
    loss_mask_BS: Bool[Array, "b s"]  # True if the target counts


def tokens_ahead(batch: Batch, depth: int) -> TokensAhead:
    """Returns the inputs and targets of the head of `depth`, at least 1.

    Nothing after the row's last target is read. If devices share rows, they exchange these integers
    along `context`, and no activations.
    """

    def later(x_BS: Any, by: int) -> Array:
        x_BS = gathered_rows(reshard(jnp.asarray(x_BS), "batch seq"), batch.order)
        x_BS = jnp.pad(x_BS[:, by:], ((0, 0), (0, min(by, x_BS.shape[1]))))
        return split_rows(x_BS, batch.order)

    segment_ids_BS = later(batch.segment_ids, 0)
    is_there_BS = (segment_ids_BS > 0) & (later(batch.segment_ids, depth) == segment_ids_BS)
    return TokensAhead(
        jnp.where(is_there_BS, later(batch.targets, depth - 1), 0),
        later(batch.targets, depth),
        is_there_BS,
        later(batch.loss_mask, depth) & is_there_BS,
    )
