"""Periodic actions of a run besides training."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from lmlib.state import State


@dataclasses.dataclass(frozen=True)
class Moment:
    """A run after a step, as an action sees it.

    Attributes:
      step: the updates made so far, skipped ones included.
      state: after the step, on its mesh. The next step takes its buffers: what an action keeps, it
        copies.
      metrics: the line of the step in metrics.jsonl, with the metrics of earlier actions.
      workdir: of the run.
      tell: shows a line above the progress.
    """

    step: int
    state: State
    metrics: Mapping[str, Any]
    workdir: Path
    tell: Callable[[str], None]


@runtime_checkable
class Action(Protocol):
    """Called by every process, between two steps, while no step is on its way.

    If a checkpoint is due too, it is saved first, so that an action that fails costs no step. A
    process that is killed in between leaves the action undone.
    """

    def __call__(self, now: Moment) -> Mapping[str, Any] | None:
        """Acts, and returns numbers or JAX scalars to add to the metrics of the step.

        All processes must return the same names.
        """


@dataclasses.dataclass(frozen=True)
class Every:
    """An action after every so many steps.

    Args:
      at_end: after the last step too.

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
        """True if the action is due after `step`; `last` says that it is the run's last."""
        return step % self.steps == 0 or (self.at_end and last)
