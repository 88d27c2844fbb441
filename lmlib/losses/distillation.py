"""The loss of a student that learns from a teacher's distribution.

Shapes: B batch, S sequence, E embed, F embed of the teacher, V vocab, N tokens of a chunk, K listed
ids per token.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Set
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, PRNGKeyArray

from lmlib.compute import Compute
from lmlib.data.batch import Batch
from lmlib.losses.features import features
from lmlib.losses.fused import ChunkLogits, TokenLoss, TokenLosses, batch_sums, logits_of_chunk
from lmlib.losses.objective import LossSums, Metric, Objective, ReferenceModel, check_fraction
from lmlib.models.model import Model
from lmlib.parallel.collectives import axis_index, pmax, psum
from lmlib.parallel.layout import mesh_axes_for, reshard

_DIVERGENCE = "KL(teacher ‖ student) at the temperature, without its square"


@dataclasses.dataclass(frozen=True)
class Distillation(Objective):
    """(1 - weight) · cross-entropy + weight · T² · KL(teacher ‖ student), for each valid target.

    Both distributions of the divergence are softmaxes of logits / T; the factor T² makes the size
    of its gradient independent of T (Hinton et al. 2015, arXiv:1503.02531, §2). The teacher uses
    the student's compute settings, without dropout and gradient.

    Without a `teacher`, the batches must have the k likeliest ids of one after each token, and
    their log-probabilities. The divergence is then `ListedDivergence`, over these k and one outcome
    for all other ids, whose probability is known only for T = 1.

    Reports, in nats per token, `loss`, the mixture; `cross_entropy`, -log p(target) of the student;
    and `divergence`, the KL at temperature T without the factor T².

    Args:
      teacher: `teacher(key=…)` makes the teacher, a model with the student's vocabulary; `None`:
        the data has a teacher's ids, for example `FlatTokens(teacher=…)`.
      teacher_from: source of the teacher's weights, in the form of `Experiment.init_from`; `None`:
        new weights, for trials.
      temperature, weight: T, and the weight of the divergence.
      dropout: dropout of the student; see `NextToken`.
    """

    rows_may_be_split = True
    loss_name = "distillation loss"
    cross_entropy = "cross_entropy"

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
            raise ValueError(
                f"teacher_from is {self.teacher_from!r}, but there is no teacher: "
                "set the teacher, or leave teacher_from out"
            )
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
            "loss": Metric(f"nats per token ({terms})", text="the mixture that training minimises"),
            "cross_entropy": Metric("nats per token", True, "-log p(target) of the student"),
            "divergence": Metric("nats per token", True, _DIVERGENCE),
        }

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
            loss, *given = self._taught(model, reference_model, batch, compute)
        return batch_sums(loss, model, batch, compute, key, self.dropout, None, *given)[0]

    def _taught(
        self, model: Model, reference_model: Model | None, batch: Batch, compute: Compute
    ) -> tuple[TokenLoss, tuple[Array, ...], tuple[Array, ...]]:
        """Returns the loss, and the tokens and tables that it takes from the teacher."""
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
    """The loss of `Distillation` with a teacher model.

    A `lmlib.losses.fused.TokenLoss` of the teacher's features and table. `cap` and `logits_dtype`
    apply to the teacher's logits.
    """

    temperature: float
    weight: float
    cap: float | None
    logits_dtype: str

    def __call__(
        self, logits: ChunkLogits, tokens: tuple[Array, ...], tables: tuple[Array, ...]
    ) -> TokenLosses:
        (h_NF,), (table_FV,) = tokens, tables
        taught_NV = logits_of_chunk(table_FV, h_NF, self.cap, self.logits_dtype)
        log_p_NV = _log_softmax(taught_NV / self.temperature)
        log_q_NV = _log_softmax(logits.logits_NV / self.temperature)
        p_NV = jnp.exp(log_p_NV)
        divergence_N = psum(jnp.sum(p_NV * (log_p_NV - log_q_NV), axis=-1), mesh_axes_for("vocab"))
        # d KL / d logit = (q - p) / T.
        slope_NV = self.temperature * (jnp.exp(log_q_NV) - p_NV)
        return _mixture(logits, self.weight, divergence_N, self.temperature**2, slope_NV)


@dataclasses.dataclass(frozen=True)
class ListedDivergence:
    """(1 - weight) · cross-entropy + weight · KL over K + 1 outcomes.

    These are the K listed ids, and one outcome for all others. With p the listed probabilities and
    q the student's,

        KL = Σ p_i (log p_i - log q_i) + r (log r - log(1 - Σ q_i)),   r = 1 - Σ p_i

    summed over the listed ids. It is at most the KL over all ids, and equal if all are listed.
    Rounded probabilities are divided by their sum if it exceeds 1 or all ids are listed.

    A `lmlib.losses.fused.TokenLoss` of ids and log-probabilities, (n, k) each.
    """

    weight: float
    vocab: int  # number of ids on all devices

    def __call__(
        self, logits: ChunkLogits, tokens: tuple[Array, ...], tables: tuple[Array, ...]
    ) -> TokenLosses:
        ids_NK, log_p_NK = tokens
        has_others = ids_NK.shape[1] < self.vocab
        log_p_NK = log_p_NK.astype(logits.logits_NV.dtype)
        listed_N = jnp.sum(jnp.exp(log_p_NK), axis=-1)
        whole_N = jnp.maximum(listed_N, 1) if has_others else listed_N
        log_p_NK, r_N = log_p_NK - jnp.log(whole_N)[:, None], 1 - listed_N / whole_N
        log_p_NV = _spread(ids_NK, log_p_NK, logits.logits_NV.shape[1])
        is_listed_NV = log_p_NV > -jnp.inf
        p_NV = jnp.exp(log_p_NV)
        of_listed_NV = jnp.where(is_listed_NV, p_NV * (log_p_NV - logits.log_p_NV), 0)
        divergence_N = psum(jnp.sum(of_listed_NV, axis=-1), mesh_axes_for("vocab"))
        slope_NV = logits.p_NV - p_NV  # d KL / d logit
        if has_others:
            log_sum_N, shares_NV = _log_sum(jnp.where(is_listed_NV, -jnp.inf, logits.logits_NV))
            some_N = jnp.where(r_N > 0, r_N, 1)
            divergence_N += r_N * (jnp.log(some_N) - (log_sum_N - logits.log_z_N))
            slope_NV -= r_N[:, None] * shares_NV
        return _mixture(logits, self.weight, divergence_N, 1.0, slope_NV)


def _mixture(
    logits: ChunkLogits, weight: float, divergence_N: Array, factor: float, slope_NV: Array
) -> TokenLosses:
    """(1 - weight) · cross-entropy + weight · factor · divergence, whose gradient is `slope_NV`."""
    cross_entropy_N = logits.cross_entropy_N
    loss_N = (1 - weight) * cross_entropy_N + weight * (factor * divergence_N)
    return TokenLosses(
        loss_N,
        {"loss": loss_N, "cross_entropy": cross_entropy_N, "divergence": divergence_N},
        (1 - weight) * (logits.p_NV - logits.is_target_NV) + weight * slope_NV,
    )


def _log_softmax(logits_NV: Array) -> Array:
    """Log-probabilities over the whole vocabulary, for this device's part of it."""
    shifted_NV = logits_NV - pmax(jnp.max(logits_NV, axis=-1), mesh_axes_for("vocab"))[:, None]
    normaliser_N = psum(jnp.sum(jnp.exp(shifted_NV), axis=-1), mesh_axes_for("vocab"))
    return shifted_NV - jnp.log(normaliser_N)[:, None]


def _log_sum(logits_NV: Array) -> tuple[Float[Array, "n"], Float[Array, "n v"]]:
    """log Σ exp of the logits over the whole vocabulary, and each one's fraction of that sum."""
    highest_N = pmax(jnp.max(logits_NV, axis=-1), mesh_axes_for("vocab"))
    exponentials_NV = jnp.exp(logits_NV - highest_N[:, None])
    sum_N = psum(jnp.sum(exponentials_NV, axis=-1), mesh_axes_for("vocab"))
    return highest_N + jnp.log(sum_N), exponentials_NV / sum_N[:, None]


def _spread(
    ids_NK: Int32[Array, "n k"], values_NK: Float[Array, "n k"], vocab: int
) -> Float[Array, "n v"]:
    """Puts values at their ids in this device's part of the vocabulary, and -∞ elsewhere."""
    places_NK = ids_NK - vocab * axis_index(mesh_axes_for("vocab"))
    is_here_NK = (places_NK >= 0) & (places_NK < vocab)
    places_NK = jnp.where(is_here_NK, places_NK, vocab)  # out of range, so dropped
    N = ids_NK.shape[0]
    nothing_NV = jnp.full((N, vocab), -jnp.inf, values_NK.dtype)
    return nothing_NV.at[jnp.arange(N)[:, None], places_NK].set(values_NK, mode="drop")
