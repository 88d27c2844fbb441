"""Preference optimisation without a reward model.

Shapes: B batch, S sequence.
"""

import dataclasses
from collections.abc import Mapping, Set
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, PRNGKeyArray

from lmlib.compute import Compute
from lmlib.data.batch import Batch
from lmlib.losses.features import features
from lmlib.losses.fused import LogitSettings, fused_loss
from lmlib.losses.next_token import CrossEntropy
from lmlib.losses.objective import LossSums, Metric, Objective, ReferenceModel
from lmlib.losses.token_losses import losses_of_features, token_losses
from lmlib.models.matrices.adapted import without_adapters
from lmlib.models.model import Model
from lmlib.parallel.rows import gathered_rows
from lmlib.parallel.selection import named_weights


@dataclasses.dataclass(frozen=True)
class DPO(Objective):
    """Direct preference optimisation: -log σ(β · m) for each pair of responses. The margin m is the
    model's preference for the chosen response over the rejected one, minus the reference's:

        m = log π(chosen) - log π_ref(chosen) - log π(rejected) + log π_ref(rejected)

    (Rafailov et al. 2023, arXiv:2305.18290, eq. 7). With `label_smoothing` ε, the probability that
    a label is wrong, it is -(1 - ε) · log σ(β · m) - ε · log σ(-β · m).

    A pair is two segments of a row, one after the other: segments 1 and 2, 3 and 4, …; the odd one
    is the chosen one. `Batch.loss_mask` marks the targets of the responses. A pair without a marked
    target in each of its segments does not count. There is no dropout, also not in adapters: a
    difference in what model and reference drop would count as preference.

    Reports, on average over pairs: `loss`, nats; `reward_margin`, β · m; `reward_accuracy`, the
    share of pairs with m > 0; `chosen_log_probability` and `rejected_log_probability`, nats, of the
    model, summed over a response.

    Args:
      reference_from: where the reference's weights come from, in the form of
        `Experiment.init_from`; it has the trained model's architecture without adapters. `None`:
        the reference is the trained model with its adapters switched off, which costs no memory.
      beta: β, the weight of the margin.
      label_smoothing: ε.

    Raises:
      ValueError: if `beta` is not positive, or `label_smoothing` is not in [0, 0.5).
    """

    rows_may_be_split = True

    reference_from: str | None = None
    beta: float = 0.1
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        if not self.beta > 0:
            raise ValueError(f"beta must be positive, got {self.beta}")
        if not 0 <= self.label_smoothing < 0.5:
            raise ValueError(
                f"label_smoothing must be at least 0 and below 0.5, got {self.label_smoothing}"
            )

    @property
    def reference_model(self) -> ReferenceModel | None:
        return None if self.reference_from is None else ReferenceModel(None, self.reference_from)

    @property
    def metrics(self) -> Mapping[str, Metric]:
        return {
            "loss": Metric("nats per pair"),
            "reward_margin": Metric("nats per pair", shown=True),
            "reward_accuracy": Metric("of pairs", shown=True),
            "chosen_log_probability": Metric("nats per response"),
            "rejected_log_probability": Metric("nats per response"),
        }

    @property
    def loss_name(self) -> str:
        return "DPO loss"

    @property
    def units(self) -> str:
        return "pairs"

    @property
    def compares_pairs(self) -> bool:
        return True

    def check(self, model: Any, reference_model: Any, trained: Set[str] | None) -> None:
        if reference_model is not None:
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
        return model.flops_per_token(sequence_length, causal) / 3  # the reference's forward pass

    def count(self, batch: Batch) -> Int32[Array, ""]:
        return jnp.sum(_pairs(batch).counted_BS, dtype=jnp.int32)

    def sums(
        self,
        model: Model,
        reference_model: Model | None,
        batch: Batch,
        compute: Compute,
        key: PRNGKeyArray | None = None,
    ) -> LossSums:
        pairs = _pairs(batch)
        with jax.named_scope("reference"):
            reference = without_adapters(model) if reference_model is None else reference_model
            reference = jax.lax.stop_gradient(reference)
            reference_nats_BS, _ = token_losses(reference, batch, compute)
        found = features(model, batch, compute)
        with jax.named_scope("loss"):
            fixed = jax.lax.stop_gradient((model, found.h_BSE))
            nats_BS, _ = losses_of_features(*fixed, batch, compute)
            # How the loss changes with each token's; the fused loss makes gradients of that.
            (loss, reported), weights_BS = jax.value_and_grad(self._loss, has_aux=True)(
                nats_BS, reference_nats_BS, pairs
            )
            sums = fused_loss(
                CrossEntropy(),
                LogitSettings(model.logit_cap, compute.loss_chunk, compute.logits_dtype),
                found.h_BSE,
                model.unembedding_EV(),
                jnp.asarray(batch.targets),
                weights_BS,
            )
        # The weighted sum has the gradient of the loss, not its value.
        minimised = loss + (sums.minimised - jax.lax.stop_gradient(sums.minimised))
        return LossSums(minimised, reported, found.reports)

    def _loss(
        self, nats_BS: Array, reference_nats_BS: Array, pairs: "_Pairs"
    ) -> tuple[Array, dict[str, Array]]:
        """The sums over pairs; `nats_BS`: -log p of each target, 0 where there is none."""
        log_probabilities, gains = pairs.totals(-nats_BS, reference_nats_BS - nats_BS)
        margin_BS = self.beta * (gains.chosen_BS - gains.rejected_BS)
        smoothing = self.label_smoothing
        loss_BS = -(1 - smoothing) * jax.nn.log_sigmoid(margin_BS)
        loss_BS -= smoothing * jax.nn.log_sigmoid(-margin_BS)

        def total(values_BS: Array) -> Array:
            return jnp.sum(jnp.where(pairs.counted_BS, values_BS, 0))

        loss = total(loss_BS)
        return loss, {
            "loss": loss,
            "reward_margin": total(margin_BS),
            "reward_accuracy": total((margin_BS > 0).astype(margin_BS.dtype)),
            "chosen_log_probability": total(log_probabilities.chosen_BS),
            "rejected_log_probability": total(log_probabilities.rejected_BS),
        }


class _Totals(NamedTuple):
    """Sums over the marked targets of each response, at the last token of its pair."""

    chosen_BS: Float[Array, "b s"]
    rejected_BS: Float[Array, "b s"]


class _Pairs(NamedTuple):
    """The pairs of rows, in the order of the rows.

    begins_BS: whether a pair begins at a token.
    chosen_BS, rejected_BS: whether a token's target is marked, in a chosen or a rejected response.
    counted_BS: whether a token is the last one of a pair that counts.
    order: of the batch; see `lmlib.row_order`.
    """

    begins_BS: Bool[Array, "b s"]
    chosen_BS: Bool[Array, "b s"]
    rejected_BS: Bool[Array, "b s"]
    counted_BS: Bool[Array, "b s"]
    order: str

    def totals(self, *values: Float[Array, "b s"]) -> list[_Totals]:
        """The totals of each of `values`, which lie as the batch does."""
        values = tuple(gathered_rows(values_BS, self.order) for values_BS in values)
        marked = [
            jnp.where(marked_BS, values_BS, 0)
            for values_BS in values
            for marked_BS in (self.chosen_BS, self.rejected_BS)
        ]
        sums = list(_sums_so_far(jnp.stack(marked), self.begins_BS))
        return [_Totals(*sums[i : i + 2]) for i in range(0, len(sums), 2)]


def _pairs(batch: Batch) -> _Pairs:
    segment_ids_BS, marked_BS = (
        gathered_rows(jnp.asarray(x_BS), batch.order)
        for x_BS in (batch.segment_ids, batch.loss_mask)
    )
    pair_BS = (segment_ids_BS + 1) // 2  # 0 is padding
    differs_BS = pair_BS[:, 1:] != pair_BS[:, :-1]
    begins_BS = jnp.pad(differs_BS, ((0, 0), (1, 0)), constant_values=True)
    ends_BS = jnp.pad(differs_BS, ((0, 0), (0, 1)), constant_values=True)
    is_odd_BS = segment_ids_BS % 2 == 1
    pairs = _Pairs(begins_BS, marked_BS & is_odd_BS, marked_BS & ~is_odd_BS, ends_BS, batch.order)
    (targets,) = pairs.totals(jnp.ones_like(batch.tokens, jnp.float32))
    has_both_BS = (targets.chosen_BS > 0) & (targets.rejected_BS > 0)
    return pairs._replace(counted_BS=ends_BS & (pair_BS > 0) & has_both_BS)


def _sums_so_far(
    values: Float[Array, "n b s"], begins_BS: Bool[Array, "b s"]
) -> Float[Array, "n b s"]:
    """For each token the sum over its pair up to it. A scatter's bits could differ each time."""

    def joined(one: tuple[Array, Array], next_: tuple[Array, Array]) -> tuple[Array, Array]:
        (sums, begun), (values, begins) = one, next_
        return jnp.where(begins, values, sums + values), begun | begins

    begins = jnp.broadcast_to(begins_BS, values.shape)
    return jax.lax.associative_scan(joined, (values, begins), axis=2)[0]
