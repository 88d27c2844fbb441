"""One start of a run, as the parts of `fit` share it."""

import dataclasses
from pathlib import Path

import fiddle as fdl

from lmlib.experiment import Experiment
from runner.monitoring.phases import Phases
from runner.monitoring.progress import Progress
from runner.processes.lock import WorkdirLock
from runner.processes.workdir import Workdir
from runner.training.options import Options


@dataclasses.dataclass(frozen=True)
class Run:
    """One start of a run.

    Attributes:
      cfg: the config that `experiment` was built from.
      place: where the run writes.
      lock: checked before each write to the workdir.
      primary: whether this process writes files; all processes compute.
    """

    cfg: fdl.Config[Experiment]
    experiment: Experiment
    options: Options
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
        """The folder of the run's checkpoints; it may be absent."""
        return self.workdir / "checkpoints"

    def tell(self, text: str) -> None:
        """Shows `text` above the progress."""
        self.progress.message(text)
