"""The loss of a student that learns from the whole distribution of a teacher.

Shapes: B batch, S sequence, E embed, F embed of the teacher, V vocab, N tokens of a chunk.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Set
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from lmlib.compute import Compute
from lmlib.data.batch import Batch
from lmlib.losses.features import features
from lmlib.losses.fused import LogitSettings, TokenLoss, TokenLosses, fused_loss
from lmlib.losses.listed_divergence import ListedDivergence
from lmlib.losses.logit_chunks import ChunkLogits, logits_alone
from lmlib.losses.next_token import CrossEntropy
from lmlib.losses.objective import LossSums, Metric, Objective, ReferenceModel, check_fraction
from lmlib.models.model import Model
from lmlib.parallel.collectives import pmax, psum
from lmlib.parallel.layout import along, reshard


@dataclasses.dataclass(frozen=True)
class Distillation(Objective):
    """(1 - weight) · cross-entropy + weight · T² · KL(teacher ‖ student), for each valid target.

    Both distributions of the divergence are softmaxes of logits / T; the factor T² makes the size
    of its gradient independent of T (Hinton et al. 2015, arXiv:1503.02531, §2). The teacher uses
    the student's compute settings without dropout and has no gradient. Its logits are made a chunk
    of tokens at a time.

    Without a `teacher` the batches hold what a teacher said: the k likeliest ids after each token
    and their log-probabilities. The divergence is then `ListedDivergence`, over those k and one
    outcome for all other ids, whose probability the k alone would leave open. T must be 1, since
    the probability of that outcome is known at no other temperature.

    Reports `loss`, that mixture; `cross_entropy`, -log p(target) of the student; and `divergence`,
    the KL at temperature T without the factor T². All are in nats per token.

    Args:
      teacher: `teacher(key=…)` makes the teacher, a model of the student's vocabulary; `None`: the
        data holds what a teacher said, for example `FlatTokens(teacher=…)`.
      teacher_from: where the teacher's weights come from, in the form of `Experiment.init_from`;
        `None`: they are new, for trials.
      temperature: T.
      weight: of the divergence.
      dropout: of the student; see `NextToken`.

    Raises:
      ValueError: if `temperature` is not positive, or not 1 without a teacher; `teacher_from` is
        given without one; `weight` is not in [0, 1], or `dropout` is not in [0, 1).
    """

    rows_may_be_split = True

    teacher: Callable[..., Any] | None = None
    teacher_from: str | None = None
    temperature: float = 1.0
    weight: float = 0.5
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f"temperature must be positive, got {self.temperature}")
        if self.teacher is None and self.temperature != 1:
            raise ValueError(
                f"temperature must be 1 without a teacher, got {self.temperature}: the data has "
                "its likeliest ids alone, and how likely the others are at 1"
            )
        if self.teacher is None and self.teacher_from is not None:
            raise ValueError(f"teacher_from is {self.teacher_from!r}, but there is no teacher")
        if not 0 <= self.weight <= 1:
            raise ValueError(f"weight must be at least 0 and at most 1, got {self.weight}")
        check_fraction("dropout", self.dropout)

    @property
    def reference_model(self) -> ReferenceModel | None:
        return None if self.teacher is None else ReferenceModel(self.teacher, self.teacher_from)

    @property
    def reads_stored_teacher(self) -> bool:
        return self.teacher is None

    @property
    def metrics(self) -> Mapping[str, Metric]:
        weight = self.weight * self.temperature**2
        terms = f"{1 - self.weight:g} · cross-entropy + {weight:g} · divergence"
        return {
            "loss": Metric(f"nats per token ({terms})"),
            "cross_entropy": Metric("nats per token", shown=True),
            "divergence": Metric("nats per token", shown=True),
        }

    @property
    def loss_name(self) -> str:
        return "distillation loss"

    @property
    def cross_entropy(self) -> str | None:
        return "cross_entropy"

    def check(self, model: Any, reference_model: Any, trained: Set[str] | None) -> None:
        if reference_model is not None and reference_model.vocab != model.vocab:
            raise ValueError(
                f"the teacher's vocabulary has {reference_model.vocab:,} ids and the model's "
                f"{model.vocab:,}: a student has the vocabulary of its teacher, padding included"
            )

    def flops_per_token(self, model: Any, sequence_length: int, causal: bool) -> float:
        if self.teacher is None:
            return 0.0
        teacher = jax.eval_shape(functools.partial(self.teacher, key=jax.random.key(0)))
        return teacher.flops_per_token(sequence_length, causal) / 3  # its forward pass

    def sums(
        self,
        model: Model,
        reference_model: Model | None,
        batch: Batch,
        compute: Compute,
        key: PRNGKeyArray | None = None,
    ) -> LossSums:
        with jax.named_scope("teacher"):
            loss, tokens, tables = self._taught(model, reference_model, batch, compute)
        found = features(model, batch, compute, key, self.dropout)
        how = LogitSettings(model.logit_cap, compute.loss_chunk, compute.logits_dtype)
        targets_BS, loss_mask_BS = jnp.asarray(batch.targets), jnp.asarray(batch.loss_mask)
        with jax.named_scope("loss"):
            sums = fused_loss(
                loss,
                how,
                found.h_BSE,
                model.unembedding_EV(),
                targets_BS,
                loss_mask_BS,
                tokens,
                tables,
            )
        return sums._replace(model=found.reports)

    def _taught(
        self, model: Model, reference_model: Model | None, batch: Batch, compute: Compute
    ) -> tuple[TokenLoss, tuple[Array, ...], tuple[Array, ...]]:
        """The loss, and the tokens and tables that it takes from the teacher."""
        if reference_model is None:
            if batch.teacher_ids is None or batch.teacher_log_probabilities is None:
                raise ValueError(
                    "Distillation without a teacher needs batches with what one said: take "
                    "FlatTokens(teacher=…)"
                )
            listed = batch.teacher_ids, batch.teacher_log_probabilities
            return ListedDivergence(self.weight, model.vocab), tuple(map(jnp.asarray, listed)), ()
        teacher = jax.lax.stop_gradient(reference_model)
        h_BSF = reshard(features(teacher, batch, compute).h_BSE, "batch seq embed")
        table_FV = reshard(teacher.unembedding_EV().astype(h_BSF.dtype), "embed vocab")
        loss = Divergence(self.temperature, self.weight, teacher.logit_cap, compute.logits_dtype)
        return loss, (h_BSF,), (table_FV,)


@dataclasses.dataclass(frozen=True)
class Divergence:
    """The loss that `Distillation` describes; a `lmlib.losses.fused.TokenLoss`, which is given the
    teacher's features and table. `cap` and `logits_dtype` are of the teacher's logits."""

    temperature: float
    weight: float
    cap: float | None
    logits_dtype: str

    def __call__(
        self, logits: ChunkLogits, tokens: tuple[Array, ...], tables: tuple[Array, ...]
    ) -> TokenLosses:
        (h_NF,), (table_FV,) = tokens, tables
        taught_NV = logits_alone(table_FV, h_NF, self.cap, self.logits_dtype)
        log_p_NV = _log_softmax(taught_NV / self.temperature)
        log_q_NV = _log_softmax(logits.logits_NV / self.temperature)
        p_NV = jnp.exp(log_p_NV)
        divergence_N = psum(jnp.sum(p_NV * (log_p_NV - log_q_NV), axis=-1), along("vocab"))
        _, reported, dlogits_NV = CrossEntropy()(logits, (), ())
        minimised_N = self._mixed(reported["loss"], self.temperature**2 * divergence_N)
        # d KL / d logit = (q - p) / T.
        ddivergence_NV = self.temperature * (jnp.exp(log_q_NV) - p_NV)
        return TokenLosses(
            minimised_N,
            {"loss": minimised_N, "cross_entropy": reported["loss"], "divergence": divergence_N},
            self._mixed(dlogits_NV, ddivergence_NV),
        )

    def _mixed(self, of_cross_entropy: Array, of_divergence: Array) -> Array:
        return (1 - self.weight) * of_cross_entropy + self.weight * of_divergence


def _log_softmax(logits_NV: Array) -> Array:
    """Over the whole vocabulary, of which this device has a share."""
    shifted_NV = logits_NV - pmax(jnp.max(logits_NV, axis=-1), along("vocab"))[:, None]
    normaliser_N = psum(jnp.sum(jnp.exp(shifted_NV), axis=-1), along("vocab"))
    return shifted_NV - jnp.log(normaliser_N)[:, None]
