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
from lmlib.losses.token_losses import TokenResults, token_losses, token_results
from lmlib.models.matrices.lora import map_adapted, without_adapters
from lmlib.models.model import Model
from lmlib.parallel.rows import gathered_rows, split_rows
from lmlib.parallel.selection import named_weights

# Metrics that are means over the tokens of responses, and the metrics that count these.
OF_TOKENS = {
    "chosen_logit": "chosen_tokens",
    "rejected_logit": "rejected_tokens",
    "token_accuracy": "chosen_tokens",
}


class Responses(NamedTuple):
    """Sums over the marked targets of both responses, at the last token of their pair."""

    chosen_BS: Float[Array, "b s"]
    rejected_BS: Float[Array, "b s"]

    @property
    def margin_BS(self) -> Float[Array, "b s"]:
        return self.chosen_BS - self.rejected_BS

    def times(self, factor: float) -> "Responses":
        return Responses(factor * self.chosen_BS, factor * self.rejected_BS)

    def per_token(self, tokens: "Responses") -> "Responses":
        """The means over the tokens of each response."""
        return Responses(self.chosen_BS / tokens.chosen_BS, self.rejected_BS / tokens.rejected_BS)


class Chosen(NamedTuple):
    """The cross-entropy of the chosen responses, for losses that also imitate them.

    These are sums over each pair, at its last token. With `PairedObjective.learns_prompts` they
    include the targets of the prompt.
    """

    nats_BS: Float[Array, "b s"]  # Σ -log π
    targets_BS: Float[Array, "b s"]  # how many targets these are


class WholeBatch(NamedTuple):
    """Sums over all pairs of a batch, of which others may be parts; without gradients."""

    pairs: Float[Array, ""]  # how many they are, at least 1
    chosen_targets: Float[Array, ""]  # of `Chosen`, at least 1
    rejected_gain: Float[Array, ""]  # 0 without a reference, or without `needs_whole_gain`


class PairSums(NamedTuple):
    """Sums over each pair, at its last token.

    Elsewhere log-probabilities are 0 and there is one token, so that losses are finite.
    """

    log_p: Responses  # log π of the responses under the model, nats
    gains: Responses | None  # log π - log π_ref; `None` without a reference model
    tokens: Responses  # numbers of marked targets
    likeliest: Responses  # numbers of marked targets that were the likeliest tokens
    logits: Responses  # of the mean logits over the vocabulary
    chosen: Chosen
    whole: WholeBatch
    labels_BS: Bool[Array, "b s"] | None = None  # True if the label is; `None` without labels

    @property
    def mean_log_p(self) -> Responses:
        """The mean log-probability of a token of each response."""
        return self.log_p.per_token(self.tokens)


class Pairs(NamedTuple):
    """The pairs of a batch, in the order of the rows.

    A pair is two adjacent segments of a row: segments 1 and 2, 3 and 4, …; the odd one is the
    chosen response. `Batch.loss_mask` marks the targets of the responses. A pair counts only if
    both segments have a marked target.
    """

    begins_BS: Bool[Array, "b s"]  # True where a pair begins
    chosen_BS: Bool[Array, "b s"]  # True where the target of a chosen response is marked
    rejected_BS: Bool[Array, "b s"]
    learned_BS: Bool[Array, "b s"]  # True at the targets of `Chosen`
    odd_BS: Bool[Array, "b s"]  # True in documents of chosen responses
    last_BS: Bool[Array, "b s"]  # True at the last token of a document
    counted_BS: Bool[Array, "b s"]  # True at the last token of a pair that counts
    tokens: Responses | None  # numbers of marked targets, for pairs that count; else 1
    labels_BS: Bool[Array, "b s"] | None  # at the last token of a pair: True if one is in it
    order: str  # of the batch; see `lmlib.row_order`

    @classmethod
    def of(cls, batch: Batch, learns_prompts: bool = False) -> "Pairs":
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
        changes_BS = segment_ids_BS[:, 1:] != segment_ids_BS[:, :-1]
        last_BS = jnp.pad(changes_BS, ((0, 0), (0, 1)), constant_values=True)
        learned_BS = marked[0]
        if learns_prompts:  # the rejected segment follows, so the last token has no target
            learned_BS = is_odd_BS & ~last_BS
        of_documents = learned_BS, is_odd_BS, last_BS
        pairs = cls(begins_BS, *marked, *of_documents, ends_BS, None, None, batch.order)
        if batch.labels is not None:
            labels_BS = jnp.asarray(batch.labels, jnp.float32)
            (found_BS,) = pairs._sums([(labels_BS, segment_ids_BS > 0)])
            pairs = pairs._replace(labels_BS=found_BS > 0)
        (tokens,) = pairs.sums(jnp.ones_like(batch.tokens, jnp.float32))
        has_both_BS = (tokens.chosen_BS > 0) & (tokens.rejected_BS > 0)
        counted_BS = ends_BS & (pair_BS > 0) & has_both_BS
        tokens = Responses(*(jnp.where(counted_BS, each_BS, 1) for each_BS in tokens))
        return pairs._replace(counted_BS=counted_BS, tokens=tokens)

    def sums(self, *values: Float[Array, "b s"]) -> list[Responses]:
        """Returns the sums of each of `values`, which have the layout of the batch."""
        both = self.chosen_BS, self.rejected_BS
        sums = self._sums([(x_BS, mask_BS) for x_BS in values for mask_BS in both])
        return [Responses(*sums[i : i + 2]) for i in range(0, len(sums), 2)]

    def learned(self, nats_BS: Float[Array, "b s"]) -> Chosen:
        """Returns the sums of `nats_BS` over the targets of `Chosen`, and how many these are."""
        both = nats_BS, jnp.ones_like(nats_BS)
        return Chosen(*self._sums([(x_BS, self.learned_BS) for x_BS in both]))

    def last(self, values_BS: Float[Array, "b s"]) -> Responses:
        """Returns the values at the last token of both documents of each pair."""
        both = self.last_BS & self.odd_BS, self.last_BS & ~self.odd_BS
        return Responses(*self._sums([(values_BS, mask_BS) for mask_BS in both]))

    def _sums(self, masked: list[tuple[Array, Array]]) -> list[Array]:
        marked = [
            jnp.where(mask_BS, gathered_rows(x_BS, self.order), 0) for x_BS, mask_BS in masked
        ]
        return list(_sums_so_far(jnp.stack(marked), self.begins_BS))

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
    it sets `uses_reference = False`, and none is computed. With `learns_prompts = True` the targets
    of `Chosen` include prompts, and with `needs_whole_gain = True` microbatches see the gain of
    their whole batch, for another forward pass of both models. There is no dropout, not even in
    adapters: a difference between the dropped elements of model and reference would count as
    preference.

    Args:
      reference_from: source of the reference's weights, in the form of `Experiment.init_from`. The
        reference has the trained model's architecture without adapters. `None`: the reference is
        the trained model with its adapters switched off, which needs no memory.
    """

    uses_reference = True
    learns_prompts = False
    needs_whole_gain = False
    units = "pairs"
    compares_pairs = True

    reference_from: str | None = None

    @property
    def reference_model(self) -> ReferenceModel | None:
        without = self.reference_from is None or not self.uses_reference
        return None if without else ReferenceModel(None, self.reference_from)

    def check(self, model: Any, reference_model: Any, trained: Set[str] | None) -> None:
        if not self.uses_reference and self.reference_from is not None:
            raise ValueError(
                f"{type(self).__name__} compares with no reference model, but reference_from is "
                f"{self.reference_from!r}: leave it out"
            )
        if reference_model is not None or not self.uses_reference:
            return
        adapters = set[str]()
        map_adapted(lambda path, _: adapters.add(path), model)
        trained = trained or named_weights(without_adapters(model)).keys()
        changing = [path for path in trained if path.rpartition(".")[0] not in adapters]
        if changing:
            raise ValueError(
                "without reference_from the reference is the model with its adapters switched off, "
                f"but {changing[0]} trains and is no adapter: set objective.reference_from, to "
                "init_from for example, or train adapters alone"
            )

    def flops_per_token(self, model: Any, sequence_length: int, causal: bool) -> float:
        if not self.uses_reference:
            return 0.0
        return _forward(without_adapters(model), sequence_length, causal)

    def flops_of_whole_batch(self, model: Any, sequence_length: int, causal: bool) -> float:
        if not self.needs_whole_gain:
            return 0.0
        of_reference = self.flops_per_token(model, sequence_length, causal)
        return _forward(model, sequence_length, causal) + of_reference

    def count(self, batch: Batch) -> Int32[Array, ""]:
        return jnp.sum(Pairs.of(batch).counted_BS, dtype=jnp.int32)

    def of_whole_batch(
        self, model: Model, reference_model: Model | None, parts: Batch, compute: Compute
    ) -> dict[str, Any]:
        def of(part: Batch) -> WholeBatch:
            nats_BS = nothing_BS = jnp.zeros_like(part.tokens, jnp.float32)
            reference_nats_BS = None
            if self.needs_whole_gain:
                nats_BS, _ = token_losses(model, part, compute)
                reference_nats_BS = self._reference_nats(model, reference_model, part, compute)
            pairs = Pairs.of(part, self.learns_prompts)
            found = TokenResults(nats_BS, nothing_BS, nothing_BS)
            return _sums_of(pairs, found, reference_nats_BS).whole

        with jax.named_scope("whole_batch"):
            sums_M = jax.lax.map(of, parts)
        return {"whole": jax.tree.map(lambda x_M: jnp.sum(x_M, axis=0), sums_M)}

    def _reference_nats(
        self, model: Model, reference_model: Model | None, batch: Batch, compute: Compute
    ) -> Array | None:
        """-log p of each target under the reference; `None` if the loss uses none."""
        if not self.uses_reference:
            return None
        with jax.named_scope("reference"):
            reference = without_adapters(model) if reference_model is None else reference_model
            return token_losses(jax.lax.stop_gradient(reference), batch, compute)[0]

    def means(self, per_unit: dict[str, Any]) -> dict[str, Any]:
        found = dict(per_unit)
        for name, tokens in OF_TOKENS.items():
            if name in per_unit:
                found[name] = per_unit[name] / (per_unit[tokens] + (per_unit[tokens] == 0))
        return found

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
        whole: WholeBatch | None = None,  # sums over all parts, if `batch` is a part
    ) -> LossSums:
        pairs = Pairs.of(batch, self.learns_prompts)
        reference_nats_BS = self._reference_nats(model, reference_model, batch, compute)
        found = features(model, batch, compute)
        if self.learns_prompts:
            learned_BS = split_rows(pairs.learned_BS, batch.order)
            batch = dataclasses.replace(batch, loss_mask=batch.loss_mask | learned_BS)

        def loss(nats_BS: Array) -> tuple[Array, dict[str, Array]]:
            """`nats_BS`: -log p of each target, 0 where there is none."""
            of_pairs = _sums_of(pairs, of_tokens._replace(nats_BS=nats_BS), reference_nats_BS)
            of_batch = of_pairs.whole if whole is None else whole
            of_batch = jax.tree.map(jax.lax.stop_gradient, of_batch)
            at_least_1 = jnp.maximum(of_batch.pairs, 1), jnp.maximum(of_batch.chosen_targets, 1)
            of_batch = WholeBatch(*at_least_1, of_batch.rejected_gain)
            values = self.of_pairs(of_pairs._replace(whole=of_batch))
            sums = {name: pairs.total(each_BS) for name, each_BS in values.items()}
            return sums["loss"], sums

        with jax.named_scope("loss"):
            fixed, h_BSE = jax.lax.stop_gradient((model, found.h_BSE))
            of_tokens = token_results(fixed, batch, compute, h_BSE)
            # `fused_loss` computes gradients from the derivative of the loss with respect to each
            # token's.
            (minimised, sums), weights_BS = jax.value_and_grad(loss, has_aux=True)(
                of_tokens.nats_BS
            )
            made = fused_loss(
                CrossEntropy(), found.h_BSE, model.unembedding_EV(), jnp.asarray(batch.targets),
                weights_BS, cap=model.logit_cap, chunk=compute.loss_chunk,
                dtype=compute.logits_dtype,
            )  # fmt: skip
        # The weighted sum has the gradient of the loss, but a different value.
        minimised += made.loss_sum - jax.lax.stop_gradient(made.loss_sum)
        return LossSums(minimised, sums, found.aux)


def _forward(model: Any, sequence_length: int, causal: bool) -> float:
    """FLOPs per token of a forward pass."""
    return model.flops_per_token(sequence_length, causal) / 3


def _sums_of(pairs: Pairs, found: TokenResults, reference_nats_BS: Array | None) -> PairSums:
    """The sums over each of `pairs`, and over all of them, of the results of each target."""
    nats_BS = found.nats_BS
    values = [-nats_BS, found.is_likeliest_BS.astype(nats_BS.dtype), found.mean_logit_BS]
    if reference_nats_BS is not None:
        values.append(reference_nats_BS - nats_BS)
    log_p, likeliest, logits, *gains = (
        Responses(*(jnp.where(pairs.counted_BS, each_BS, 0) for each_BS in responses))
        for responses in pairs.sums(*values)
    )
    chosen = pairs.learned(nats_BS)
    nothing_BS = jnp.zeros_like(nats_BS)
    rejected_BS = gains[0].rejected_BS if gains else nothing_BS
    totals = map(pairs.total, (nothing_BS + 1, chosen.targets_BS, rejected_BS))
    assert pairs.tokens is not None
    given = gains[0] if gains else None
    of_responses = log_p, given, pairs.tokens, likeliest, logits
    return PairSums(*of_responses, chosen, WholeBatch(*totals), pairs.labels_BS)
