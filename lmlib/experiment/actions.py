"""Periodic actions of a run, in addition to training."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from lmlib.state import State


@dataclasses.dataclass(frozen=True)
class StepEvent:
    """The state of a run after a step, as passed to an action.

    Attributes:
      step: the updates made so far, skipped ones included.
      state: after the step. The next step donates its buffers, so an action copies what it keeps.
      metrics: the step's line in metrics.jsonl, with the metrics of earlier actions.
      tell: shows a line above the progress.
    """

    step: int
    state: State
    metrics: Mapping[str, Any]
    workdir: Path
    tell: Callable[[str], None]


@runtime_checkable
class Action(Protocol):
    """Called by every process between two steps.

    If a checkpoint is due too, it is saved first, so that a failing action costs no step. If a
    process is killed in between, the action is lost.
    """

    def __call__(self, now: StepEvent) -> Mapping[str, Any] | None:
        """Acts, and returns numbers or JAX scalars to add to the metrics of the step.

        All processes must return the same names.
        """


@dataclasses.dataclass(frozen=True)
class PeriodicCallback:
    """Calls an action at a fixed interval of steps.

    Args:
      at_end: True calls it after the last step too.

    Raises:
      ValueError: if `steps` is not positive.
    """

    steps: int
    action: Action
    at_end: bool = False

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"Every needs at least 1 step, got {self.steps}")

    def due(self, step: int, last: bool) -> bool:
        """True if the action is due after `step`; `last` is True for the run's last step."""
        return step % self.steps == 0 or (self.at_end and last)
