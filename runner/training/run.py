"""The objects that all parts of `fit` share."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import fiddle as fdl

from lmlib.experiment import Experiment
from lmlib.inspect.description import describe
from lmlib.inspect.saved_activations import saved_activations
from lmlib.terminal.quantities import bytes_text
from runner.jax_settings.xla_flags import IN_ORDER_ON_CPU, may_wait_for_ever
from runner.monitoring.phases import Phases
from runner.monitoring.progress import Progress
from runner.processes.lock import WorkdirLock
from runner.processes.workdir import Workdir
from runner.training.options import Options
from runner.training.starts import Start
from runner.training.validation import Validation

Line = dict[str, Any]  # the metrics of a step


@dataclasses.dataclass(frozen=True)
class Run:
    """One start of a run; the `primary` process writes files, and all processes compute."""

    cfg: fdl.Config[Experiment]
    experiment: Experiment
    options: Options
    start: Start
    place: Workdir
    progress: Progress
    phases: Phases
    lock: WorkdirLock
    primary: bool

    @property
    def workdir(self) -> Path:
        return self.place.folder

    @property
    def checkpoints(self) -> Path:
        """The folder for the run's checkpoints, which may not exist yet."""
        return self.workdir / "checkpoints"

    @functools.cached_property
    def validation(self) -> Validation | None:
        return None if self.experiment.validation is None else Validation(self.experiment)

    def sample(self, step: int, model: Any) -> tuple[str, ...]:
        """Continues the experiment's prompts, if any, and writes the texts."""
        if not self.experiment.samples.prompts:
            return ()
        from runner.training.samples import write_samples  # loads all of lmlib.generate

        return write_samples(self, step, model)

    def tell(self, text: str) -> None:
        """Shows `text` above the progress line."""
        self.progress.message(text)

    def announce(self) -> None:
        """Shows a summary of the model, and the memory for saved activations.

        Raises PartError if a part of the model lacks methods or attributes.
        """
        experiment = self.experiment
        decays, groups = experiment.training.optimizer.decays, experiment.recipe.group_of
        self.tell(
            describe(experiment.recipe.abstract_model, experiment.mesh, decays, groups).short()
        )
        for steps, stage in experiment.stages.items():
            kept = bytes_text(saved_activations(stage).bytes_per_device)
            since = f" from step {steps.start + 1:,} on" if steps.start else ""
            self.tell(f"saved activations{since}: {kept} per device")
        if may_wait_for_ever():
            self.tell(
                "WARNING: these CPU devices may wait for each other for ever, and XLA then aborts "
                f"the process: add {IN_ORDER_ON_CPU} to XLA_FLAGS before JAX starts"
            )
