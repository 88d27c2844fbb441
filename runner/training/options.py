"""Settings of a run that do not change the trained weights."""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from runner.monitoring.phases import Limits

if TYPE_CHECKING:  # these import JAX
    from lmlib.experiment import PeriodicCallback
    from lmlib.metrics.sinks import MakeSink


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of `fit` that are not in the config and don't affect the loss curve.

    Args:
      profile: steps to trace into workdir/profile; a breakdown of their time is shown.
      dump_hlo: True to write the optimised program into workdir/hlo.
      reports: True to show the progress of this process on stderr; `None`: only on process 0.
      checkpoint_fallback: True to resume from an older checkpoint if the newest is damaged.
      init_from: overrides `Experiment.init_from`. Ignored once this run has checkpoints.
      continue_optimizer: overrides `Experiment.continue_optimizer` unless `None`.
      allowed_changes: the parts that may have changed since the run stopped: "data", "jax" (its
        settings) and "model".
      actions: more actions, called after `Experiment.actions`; the same on all processes.
      sinks: more metric sinks, in addition to `Experiment.sinks`.
      limits: time limits, after which the process ends; `None` for no limits.
      trusted: modules that the config.json of a run with other adapters may refer to.
      stop: called with the number of each step; if true, the run saves a checkpoint and ends. It
        must return the same on all processes.
      experiment_file: the Python file that defines the config; changes to it are reported.
      started: the start time of this process, in seconds since the epoch; `None`: the call of
        `fit`.
    """

    profile: range | None = None
    dump_hlo: bool = False
    reports: bool | None = None
    checkpoint_fallback: bool = True
    init_from: str | None = None
    continue_optimizer: bool | None = None
    allowed_changes: Collection[str] = ()
    actions: Sequence["PeriodicCallback"] = ()
    sinks: Sequence["MakeSink"] = ()
    limits: Limits | None = None
    trusted: Collection[str] = ()
    stop: Callable[[int], bool] = lambda step: False
    experiment_file: Path | None = None
    started: float | None = None

    def of_the_command(self) -> dict[str, str]:
        """Returns the flags that must be the same on all processes of a run."""
        return {
            "--init_from": self.init_from or "none",
            "--continue_optimizer": str(self.continue_optimizer),
            "--allow_change": ",".join(sorted(self.allowed_changes)) or "none",
            "--checkpoint_fallback": str(self.checkpoint_fallback).lower(),
        }
