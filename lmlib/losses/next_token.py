"""The next-token loss: cross-entropy, and z-loss, which keeps the normaliser near one.

Shapes: N tokens of a chunk, V vocab.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from lmlib.compute import Compute
from lmlib.data.batch import Batch
from lmlib.losses.fused import ChunkLogits, TokenLosses, batch_sums
from lmlib.losses.objective import LossSums, Metric, Objective, check_fraction
from lmlib.models.forward_context import Observe
from lmlib.models.model import Model


@dataclasses.dataclass(frozen=True)
class NextToken(Objective):
    """The cross-entropy of the next token over a batch's valid targets, nats per token.

    Args:
      z_loss: weight of log²(Σ exp logits), which keeps the normaliser near one (PaLM: Chowdhery et
        al. 2022, arXiv:2204.02311, §5); 0 turns it off.
      dropout: dropout rate in training, for embedded tokens and for the outputs of attention and
        MLP that are added to the residual stream.
    """

    rows_may_be_split = True
    cross_entropy = "loss"

    z_loss: float = 0.0
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.z_loss < math.inf:
            raise ValueError(f"z_loss must not be negative or infinite, got {self.z_loss}")
        check_fraction("dropout", self.dropout)

    @property
    def metrics(self) -> Mapping[str, Metric]:
        return {"loss": Metric("nats per token")}

    def sums(
        self,
        model: Model,
        reference_model: Model | None,
        batch: Batch,
        compute: Compute,
        key: PRNGKeyArray | None = None,
    ) -> LossSums:
        return batch_loss(model, batch, compute, self, key)[0]


def batch_loss(
    model: Model,
    batch: Batch,
    compute: Compute,
    objective: NextToken = NextToken(),
    key: PRNGKeyArray | None = None,
    observe: Observe | None = None,
) -> tuple[LossSums, Any]:
    """Returns the next-token loss, summed over `batch.loss_mask`, and the results of `observe`.

    Random layers are off without a `key`. `observe` is called in each layer.
    """
    loss = CrossEntropy(objective.z_loss)
    return batch_sums(loss, model, batch, compute, key, objective.dropout, observe)


@dataclasses.dataclass(frozen=True)
class CrossEntropy:
    """-log p(target) + z_loss · log²(Σ exp logits); a `lmlib.losses.fused.TokenLoss`."""

    z_loss: float = 0.0

    def __call__(
        self, logits: ChunkLogits, tokens: tuple[Array, ...], tables: tuple[Array, ...]
    ) -> TokenLosses:
        slope_N = 1 + 2 * self.z_loss * logits.log_z_N
        dlogits_NV = logits.p_NV * slope_N[:, None] - logits.is_target_NV
        loss_N = logits.cross_entropy_N + self.z_loss * jnp.square(logits.log_z_N)
        return TokenLosses(loss_N, {"loss": logits.cross_entropy_N}, dlogits_NV)
