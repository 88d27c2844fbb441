"""What an objective is: what an experiment minimises, as sums over the units that it counts."""

import abc
from collections.abc import Callable, Set
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, PRNGKeyArray

from lmlib.compute import Compute
from lmlib.data.batch import Batch
from lmlib.models.protocol import Model


class LossSums(NamedTuple):
    """Sums over the units of a batch or of a part of one; any split adds up to the same.

    minimised: what has a gradient, the model's own losses included; nats.
    reported: metrics by name, "loss" among them; they have no gradient.
    """

    minimised: Float[Array, ""]
    reported: dict[str, Float[Array, ""]]


class ReferenceModel(NamedTuple):
    """A frozen model that an objective compares with: the reference of DPO, or a teacher.

    model: `model(key=…)` makes it; `None`: it is as the trained one is without adapters.
    weights_from: whose weights it has, as `Experiment.init_from`; `None`: new ones, for trials.
    """

    model: Callable[..., Any] | None
    weights_from: str | None


class Objective(abc.ABC):
    """What an experiment minimises; `NextToken` is the usual one.

    Implementations are frozen dataclasses: an objective is part of a config.
    """

    @property
    def reference_model(self) -> ReferenceModel | None:
        """The frozen model that `sums` is given; `None`: it needs none."""
        return None

    @property
    def loss_name(self) -> str:
        """What the `loss` that it reports is called where it is shown."""
        return "loss"

    @property
    def loss_unit(self) -> str:
        """In what `loss` is: a unit, or the formula where it is a sum of several."""
        return "nats per token"

    @property
    def shown(self) -> tuple[str, ...]:
        """Which of what it reports a run's progress shows beside the loss."""
        return ()

    @property
    def compares_pairs(self) -> bool:
        """Whether documents must be pairs of a chosen and a rejected answer, each in one row."""
        return False

    @property
    def reads_stored_teacher(self) -> bool:
        """Whether batches must have what a teacher said of them (`Batch.teacher_ids`)."""
        return False

    def check(self, model: Any, reference_model: Any, trained: Set[str] | None) -> None:
        """Raises ValueError if it cannot train `model` beside `reference_model`, or shapes of both.

        Args:
          trained: the paths of the weights that train; `None`: all do.
        """
        return  # most objectives can

    def flops_per_token(self, model: Any, sequence_length: int, causal: bool) -> float:
        """Analytic FLOPs for a token besides those of training `model`; arrays may be shapes. See
        `Model.flops_per_token`."""
        return 0.0

    def count(self, batch: Batch) -> Int32[Array, ""]:
        """The units of a batch over which sums are averaged: its valid targets, unless a loss says
        otherwise."""
        return jnp.sum(batch.loss_mask, dtype=jnp.int32)

    @abc.abstractmethod
    def sums(
        self,
        model: Model,
        reference_model: Model | None,
        batch: Batch,
        compute: Compute,
        key: PRNGKeyArray | None = None,
    ) -> LossSums:
        """The sums over the units of `batch`.

        Args:
          reference_model: the model that `self.reference_model` asks for.
          key: of random layers, which are off without one.
        """


def check_fraction(name: str, value: float) -> None:
    """Raises ValueError if a setting is not at least 0 and below 1."""
    if not 0 <= value < 1:
        raise ValueError(f"{name} must be at least 0 and below 1, got {value}")
