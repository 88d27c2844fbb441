"""Settings of a run that do not change the trained weights."""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from runner.monitoring.limits import Limits

if TYPE_CHECKING:  # which imports JAX
    from jax.sharding import Mesh
    from jax.stages import Compiled, Lowered

    from lmlib.experiment import Every
    from lmlib.metrics.sinks import MakeSink


def never(step: int) -> bool:
    return False


def compiled_for_this_run(
    step: "Lowered", mesh: "Mesh", compile_step: Callable[[], "Compiled"]
) -> "Compiled":
    return compile_step()


@dataclasses.dataclass(frozen=True)
class Options:
    """Settings of `fit` besides the config; none changes the curve.

    Args:
      profile: steps to trace into workdir/profile; their time is shown by parts.
      dump_hlo: writes the optimised program into workdir/hlo.
      reports: shows the progress of this process on stderr; `None`: if it is process 0.
      checkpoint_fallback: goes on from an older checkpoint if the newest is damaged.
      init_from: as in `Experiment`, instead of the experiment's own. Ignored once this run has
        checkpoints of its own.
      continue_optimizer: as in `Experiment`, instead of the experiment's own, unless `None`.
      allowed_changes: "data", "jax" (its settings), "model": what may have changed since the run
        stopped.
      save_compiled: a file to write the compiled step to.
      compiled: a file to take it from instead of compiling; loading it can run any code.
      programs: gets the step, its mesh and a function that compiles it, and returns the compiled
        step; a caller that makes several runs may keep some.
      actions: as in `Experiment`, after its own; the same on all processes.
      sinks: as in `Experiment`, besides its own.
      limits: this process ends if something takes longer; `None`: it never does.
      trusted: modules that the config.json of a run with other adapters may refer to.
      stop: called with the number of each step; if true the run saves a checkpoint and ends. It
        must answer alike on all processes.
      experiment_file: the file of code that the config came from; its edits are told of.
      started: when this process started, in seconds since the epoch; `None`: when `fit` is called.
    """

    profile: range | None = None
    dump_hlo: bool = False
    reports: bool | None = None
    checkpoint_fallback: bool = True
    init_from: str | None = None
    continue_optimizer: bool | None = None
    allowed_changes: Collection[str] = ()
    save_compiled: Path | None = None
    compiled: Path | None = None
    programs: Callable[["Lowered", "Mesh", Callable[[], "Compiled"]], "Compiled"] = (
        compiled_for_this_run
    )
    actions: Sequence["Every"] = ()
    sinks: Sequence["MakeSink"] = ()
    limits: Limits | None = None
    trusted: Collection[str] = ()
    stop: Callable[[int], bool] = never
    experiment_file: Path | None = None
    started: float | None = None

    def of_the_command(self) -> dict[str, str]:
        """Returns the flags that must be the same for all processes of a run."""
        return {
            "--init_from": self.init_from or "none",
            "--continue_optimizer": str(self.continue_optimizer),
            "--allow_change": ",".join(sorted(self.allowed_changes)) or "none",
            "--checkpoint_fallback": str(self.checkpoint_fallback).lower(),
        }
