"""Losses of pairs of responses: the sums over each pair, and the base class of objectives.

Shapes: B batch, S sequence.
"""

import dataclasses
from abc import abstractmethod
from collections.abc import Set
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, PRNGKeyArray

from lmlib.compute import Compute
from lmlib.data.batch import Batch
from lmlib.losses.features import features
from lmlib.losses.fused import fused_loss
from lmlib.losses.next_token import CrossEntropy
from lmlib.losses.objective import LossSums, Objective, ReferenceModel
from lmlib.losses.token_losses import token_losses
from lmlib.models.matrices.lora import without_adapters
from lmlib.models.model import Model
from lmlib.parallel.rows import gathered_rows
from lmlib.parallel.selection import named_weights


class Responses(NamedTuple):
    """Sums over the marked targets of both responses, at the last token of their pair."""

    chosen_BS: Float[Array, "b s"]
    rejected_BS: Float[Array, "b s"]


class PairSums(NamedTuple):
    """Sums over each pair, at its last token.

    Elsewhere log-probabilities are 0 and there is one token, so that losses are finite.
    """

    log_p: Responses  # log π of the responses under the model, nats
    gains: Responses | None  # log π - log π_ref; `None` without a reference model
    tokens: Responses  # numbers of marked targets


class Pairs(NamedTuple):
    """The pairs of a batch, in the order of the rows.

    A pair is two adjacent segments of a row: segments 1 and 2, 3 and 4, …; the odd one is the
    chosen response. `Batch.loss_mask` marks the targets of the responses. A pair counts only if
    both segments have a marked target.
    """

    begins_BS: Bool[Array, "b s"]  # True where a pair begins
    chosen_BS: Bool[Array, "b s"]  # True where the target of a chosen response is marked
    rejected_BS: Bool[Array, "b s"]
    counted_BS: Bool[Array, "b s"]  # True at the last token of a pair that counts
    tokens: Responses | None  # numbers of marked targets, for pairs that count; else 1
    order: str  # of the batch; see `lmlib.row_order`

    @classmethod
    def of(cls, batch: Batch) -> "Pairs":
        """Finds the pairs of `batch`, on the current mesh."""
        segment_ids_BS, marked_BS = (
            gathered_rows(jnp.asarray(x_BS), batch.order)
            for x_BS in (batch.segment_ids, batch.loss_mask)
        )
        pair_BS = (segment_ids_BS + 1) // 2  # 0 is padding
        differs_BS = pair_BS[:, 1:] != pair_BS[:, :-1]
        begins_BS = jnp.pad(differs_BS, ((0, 0), (1, 0)), constant_values=True)
        ends_BS = jnp.pad(differs_BS, ((0, 0), (0, 1)), constant_values=True)
        is_odd_BS = segment_ids_BS % 2 == 1
        marked = marked_BS & is_odd_BS, marked_BS & ~is_odd_BS
        pairs = cls(begins_BS, *marked, ends_BS, None, batch.order)
        (tokens,) = pairs.sums(jnp.ones_like(batch.tokens, jnp.float32))
        has_both_BS = (tokens.chosen_BS > 0) & (tokens.rejected_BS > 0)
        counted_BS = ends_BS & (pair_BS > 0) & has_both_BS
        tokens = Responses(*(jnp.where(counted_BS, each_BS, 1) for each_BS in tokens))
        return pairs._replace(counted_BS=counted_BS, tokens=tokens)

    def sums(self, *values: Float[Array, "b s"]) -> list[Responses]:
        """Returns the sums of each of `values`, which have the layout of the batch."""
        values = tuple(gathered_rows(values_BS, self.order) for values_BS in values)
        marked = [
            jnp.where(marked_BS, values_BS, 0)
            for values_BS in values
            for marked_BS in (self.chosen_BS, self.rejected_BS)
        ]
        sums = list(_sums_so_far(jnp.stack(marked), self.begins_BS))
        return [Responses(*sums[i : i + 2]) for i in range(0, len(sums), 2)]

    def total(self, values_BS: Float[Array, "b s"]) -> Float[Array, ""]:
        """The sum over the pairs that count, of values at the last token of each."""
        return jnp.sum(jnp.where(self.counted_BS, values_BS, 0))


def _sums_so_far(
    values: Float[Array, "n b s"], begins_BS: Bool[Array, "b s"]
) -> Float[Array, "n b s"]:
    """The cumulative sum of each token's pair. The bits of a scatter could differ each time."""

    def joined(one: tuple[Array, Array], next_: tuple[Array, Array]) -> tuple[Array, Array]:
        (sums, begun), (values, begins) = one, next_
        return jnp.where(begins, values, sums + values), begun | begins

    begins = jnp.broadcast_to(begins_BS, values.shape)
    return jax.lax.associative_scan(joined, (values, begins), axis=2)[0]


@dataclasses.dataclass(frozen=True)
class PairedObjective(Objective):
    """A loss of pairs of responses; see `Pairs`. `lmlib.losses.dpo.DPO` is one.

    A subclass defines the loss of each pair in `of_pairs`. If it does not need a reference model,
    it sets `uses_reference = False`, and none is computed. There is no dropout, not even in
    adapters: a difference between the dropped elements of model and reference would count as
    preference.

    Args:
      reference_from: source of the reference's weights, in the form of `Experiment.init_from`. The
        reference has the trained model's architecture without adapters. `None`: the reference is
        the trained model with its adapters switched off, which needs no memory.
    """

    uses_reference = True
    units = "pairs"
    compares_pairs = True

    reference_from: str | None = None

    @property
    def reference_model(self) -> ReferenceModel | None:
        return None if self.reference_from is None else ReferenceModel(None, self.reference_from)

    def check(self, model: Any, reference_model: Any, trained: Set[str] | None) -> None:
        if reference_model is not None or not self.uses_reference:
            return
        bases = named_weights(without_adapters(model))
        changing = [path for path in trained or bases if path.rpartition(".")[0] not in bases]
        if changing:
            raise ValueError(
                "without reference_from the reference is the model with its adapters switched off, "
                f"but {changing[0]} trains and is no adapter: set objective.reference_from, to "
                "init_from for example, or train adapters alone"
            )

    def flops_per_token(self, model: Any, sequence_length: int, causal: bool) -> float:
        # The reference's forward pass.
        flops = model.flops_per_token(sequence_length, causal) / 3
        return flops if self.uses_reference else 0.0

    def count(self, batch: Batch) -> Int32[Array, ""]:
        return jnp.sum(Pairs.of(batch).counted_BS, dtype=jnp.int32)

    @abstractmethod
    def of_pairs(self, pairs: PairSums) -> dict[str, Float[Array, "b s"]]:
        """Returns the values of `metrics` for each pair, at its last token; "loss" is minimised."""

    def sums(
        self,
        model: Model,
        reference_model: Model | None,
        batch: Batch,
        compute: Compute,
        key: PRNGKeyArray | None = None,
    ) -> LossSums:
        pairs = Pairs.of(batch)
        reference_nats_BS = None
        if self.uses_reference:
            with jax.named_scope("reference"):
                reference = without_adapters(model) if reference_model is None else reference_model
                reference = jax.lax.stop_gradient(reference)
                reference_nats_BS, _ = token_losses(reference, batch, compute)
        found = features(model, batch, compute)

        def loss(nats_BS: Array) -> tuple[Array, dict[str, Array]]:
            """`nats_BS`: -log p of each target, 0 where there is none."""
            values = [-nats_BS]
            if reference_nats_BS is not None:
                values.append(reference_nats_BS - nats_BS)
            log_p, *gains = (
                Responses(*(jnp.where(pairs.counted_BS, each_BS, 0) for each_BS in responses))
                for responses in pairs.sums(*values)
            )
            assert pairs.tokens is not None
            of_pairs = self.of_pairs(PairSums(log_p, gains[0] if gains else None, pairs.tokens))
            sums = {name: pairs.total(each_BS) for name, each_BS in of_pairs.items()}
            return sums["loss"], sums

        with jax.named_scope("loss"):
            fixed, h_BSE = jax.lax.stop_gradient((model, found.h_BSE))
            nats_BS, _ = token_losses(fixed, batch, compute, h_BSE)
            # `fused_loss` computes gradients from the derivative of the loss with respect to each
            # token's.
            (minimised, sums), weights_BS = jax.value_and_grad(loss, has_aux=True)(nats_BS)
            made = fused_loss(
                CrossEntropy(), found.h_BSE, model.unembedding_EV(), jnp.asarray(batch.targets),
                weights_BS, cap=model.logit_cap, chunk=compute.loss_chunk,
                dtype=compute.logits_dtype,
            )  # fmt: skip
        # The weighted sum has the gradient of the loss, but a different value.
        minimised += made.loss_sum - jax.lax.stop_gradient(made.loss_sum)
        return LossSums(minimised, sums, found.aux)
