"""Objectives: sums over tokens or pairs. A training step minimises one of the sums."""

import abc
import dataclasses
from collections.abc import Callable, Mapping, Set
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, PRNGKeyArray

from lmlib.compute import Compute
from lmlib.data.batch import Batch
from lmlib.models.model import Model
from lmlib.models.part import NO_AUX, AuxOutputs, check_scalars, class_name
from lmlib.parallel.axes import PartError


class LossSums(NamedTuple):
    """Sums over the units of a batch or of a part of it. Parts add up to the whole batch."""

    loss_sum: Float[Array, ""]  # the sum that has a gradient; nats
    reported: dict[str, Float[Array, ""]]  # the metrics of `Objective.metrics`, without gradients
    model: AuxOutputs = NO_AUX  # reports of the model, summed over all tokens except padding


class Metric(NamedTuple):
    """A number that an objective reports."""

    unit: str  # of its mean over tokens or pairs; follows the number in texts
    shown: bool = False  # True if a run's progress shows it next to the loss
    text: str = ""  # its meaning, for the page of a run


class ReferenceModel(NamedTuple):
    """A frozen model that an objective compares with: the reference of DPO, or a teacher."""

    model: Callable[..., Any] | None  # makes it; `None`: the trained architecture, no adapters
    weights_from: str | None  # as `Experiment.init_from`; `None`: new weights, for trials


@dataclasses.dataclass(frozen=True, kw_only=True)
class Objective(abc.ABC):
    """The loss of an experiment, a frozen dataclass; `NextToken` is the usual one.

    Args:
      model_losses: coefficients of losses that the model itself reports, by name, for each token:
        `{"router_balance": 0.01}`. Its other losses are only metrics.
    """

    loss_name: ClassVar[str] = "loss"  # in texts
    units: ClassVar[str] = "tokens"  # the name of what `count` counts, and of a metric of steps
    # The metric that is -log p(target), nats per valid target, for bits per byte; optional.
    cross_entropy: ClassVar[str | None] = None
    compares_pairs: ClassVar[bool] = False  # True if documents are pairs of answers, each in a row
    reads_labels: ClassVar[bool] = False  # True if documents are labelled answers
    trains_predictors: ClassVar[bool] = False  # True if the loss includes multi-token predictors

    model_losses: Mapping[str, float] = dataclasses.field(default_factory=dict, hash=False)

    @property
    def reference_model(self) -> ReferenceModel | None:
        """The frozen model that `sums` needs; `None`: it needs none."""
        return None

    @property
    @abc.abstractmethod
    def metrics(self) -> Mapping[str, Metric]:
        """The metrics that `sums` reports, by name, "loss" first.

        Evaluations prefix the names with "evaluation_", the last validation with "validation_".
        """

    def means(self, per_unit: dict[str, Any]) -> dict[str, Any]:
        """Returns means of all metrics of a step or an evaluation, given their sums per unit."""
        return per_unit

    @property
    def reads_stored_teacher(self) -> bool:
        """True if batches must have the likeliest ids of a teacher (`Batch.teacher_ids`)."""
        return False

    def check(self, model: Any, reference_model: Any, trained: Set[str] | None) -> None:
        """Raises ValueError if the objective cannot train `model` with `reference_model`.

        Both may be abstract. `trained` are the paths of the weights that train; `None`: all do.
        """
        return  # most objectives can

    def flops_per_token(self, model: Any, sequence_length: int, causal: bool) -> float:
        """Analytic FLOPs per token beyond `Part.flops_per_token` of `model`, maybe abstract."""
        return 0.0

    def flops_of_whole_batch(self, model: Any, sequence_length: int, causal: bool) -> float:
        """Analytic FLOPs per token of `of_whole_batch`, which runs with several microbatches."""
        return 0.0

    def count(self, batch: Batch) -> Int32[Array, ""]:
        """The number of `units` of a batch, which divides sums: by default its valid targets."""
        return jnp.sum(batch.loss_mask, dtype=jnp.int32)

    def mean_loss(self, sums: LossSums, count: Array, positions: Array) -> Float[Array, ""]:
        """Returns the contribution of `sums`, of a part of a batch, to the loss of a step.

        `count` units and `positions`, tokens except padding, are in the whole batch, at least 1.
        """
        total = sums.loss_sum / count
        for name, coefficient in self.model_losses.items():
            total += coefficient * (sums.model.losses[name].astype(jnp.float32) / positions)
        return total

    def of_whole_batch(
        self, model: Model, reference_model: Model | None, parts: Batch, compute: Compute
    ) -> dict[str, Any]:
        """Returns further arguments of `sums`, if the sums of a part depend on its whole batch.

        `parts` are the parts of the batch, stacked: (parts, batch, seq).
        """
        return {}

    @abc.abstractmethod
    def sums(
        self,
        model: Model,
        reference_model: Model | None,
        batch: Batch,
        compute: Compute,
        key: PRNGKeyArray | None = None,
    ) -> LossSums:
        """Returns the sums over the units of `batch`. Without a key, random layers are off."""


def sums_of(
    objective: Objective,
    model: Model,
    reference_model: Model | None,
    batch: Batch,
    compute: Compute,
    key: PRNGKeyArray | None = None,
    **of_whole_batch: Any,
) -> LossSums:
    """Calls `objective.sums`. Raises PartError if it returns no `LossSums` with all metrics."""
    sums = objective.sums(model, reference_model, batch, compute, key, **of_whole_batch)
    if not isinstance(sums, LossSums):
        raise PartError(
            f"{class_name(objective)}.sums must return LossSums, got a {type(sums).__name__}"
        )
    check_scalars(objective, "sums", {"loss_sum": sums.loss_sum})
    check_scalars(objective, "reported", sums.reported)
    if lacking := [name for name in objective.metrics if name not in sums.reported]:
        raise PartError(
            f"{class_name(objective)} has the metric {lacking[0]!r}, but its sums report "
            f"{', '.join(sums.reported) or 'nothing'}"
        )
    return sums


def check_fraction(name: str, value: float) -> None:
    """Raises ValueError if a setting is not at least 0 and below 1."""
    if not 0 <= value < 1:
        raise ValueError(f"{name} must be at least 0 and below 1, got {value}")


def check_positive(name: str, value: float) -> None:
    """Raises ValueError if a setting is not positive."""
    if not value > 0:
        raise ValueError(f"{name} must be positive, got {value}")
