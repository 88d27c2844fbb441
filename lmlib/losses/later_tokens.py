"""The loss of several tokens after a position, with one distribution for all of them.

Shapes: B batch, S sequence, V vocab, N tokens of a chunk.
"""

import dataclasses
import math

import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from lmlib.compute import Compute
from lmlib.data.batch import Batch
from lmlib.losses.fused import ChunkLogits, TokenLosses, batch_sums, vocabulary_ids
from lmlib.losses.multi_token import tokens_ahead
from lmlib.losses.next_token import CrossEntropy, NextToken
from lmlib.losses.objective import LossSums
from lmlib.models.model import Model
from lmlib.parallel.collectives import psum
from lmlib.parallel.layout import mesh_axes_for


@dataclasses.dataclass(frozen=True)
class LaterTokens(NextToken):
    """The next-token loss, plus weights[k - 1] · -log p(token i + k + 1), with the same p.

    Later tokens count if they are valid targets of the same document. Sums are divided by the
    number of valid next tokens; `loss` is the next token's. Source: modded-nanogpt, record 53.

    Args:
      weights: of the second, third and further tokens after a position.
      z_loss, dropout: as in `NextToken`.
    """

    rows_may_be_split = True

    weights: tuple[float, ...] = (0.5,)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not all(0 <= each < math.inf for each in self.weights):
            raise ValueError(f"weights must be numbers of at least 0, got {self.weights}")

    def sums(
        self,
        model: Model,
        reference_model: Model | None,
        batch: Batch,
        compute: Compute,
        key: PRNGKeyArray | None = None,
    ) -> LossSums:
        ahead = [tokens_ahead(batch, depth) for depth in range(1, 1 + len(self.weights))]
        targets = tuple(each.targets_BS for each in ahead)
        counted = tuple(
            weight * each.loss_mask_BS.astype(jnp.float32)
            for weight, each in zip(self.weights, ahead, strict=True)
        )
        loss, tokens = _OfAll(self.z_loss), (*targets, *counted)
        return batch_sums(loss, model, batch, compute, key, self.dropout, tokens=tokens)[0]


@dataclasses.dataclass(frozen=True)
class _OfAll(CrossEntropy):
    """A `TokenLoss`. `tokens` are later targets, and then their weights."""

    def __call__(
        self, logits: ChunkLogits, tokens: tuple[Array, ...], tables: tuple[Array, ...]
    ) -> TokenLosses:
        found = super().__call__(logits, (), tables)
        later, weights = tokens[: len(tokens) // 2], tokens[len(tokens) // 2 :]
        loss_N, dlogits_NV = found.loss_N, found.dlogits_NV
        for targets_N, weight_N in zip(later, weights, strict=True):
            is_target_NV = targets_N[:, None] == vocabulary_ids(logits.logits_NV)
            own_N = jnp.sum(jnp.where(is_target_NV, logits.log_p_NV, 0), axis=-1)
            loss_N -= weight_N * psum(own_N, mesh_axes_for("vocab"))
            dlogits_NV += weight_N[:, None] * (logits.p_NV - is_target_NV)
        return found._replace(loss_N=loss_N, dlogits_NV=dlogits_NV)
