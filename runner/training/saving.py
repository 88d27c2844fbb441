"""Saves a run's checkpoints with their notes, and decides what a failed save means."""

from collections.abc import Callable
from typing import Any

import jax

from lmlib import train
from lmlib.checkpoint import Checkpoints
from lmlib.data.resumable import gather_states
from lmlib.experiment import Experiment
from lmlib.metrics import MetricsLog
from runner.command_line.errors import TrainingStopped, in_words
from runner.training.data_probe import probe
from runner.training.recorder import Line
from runner.watch.phases import Phase, Phases
from runner.watch.progress import Progress


class Saver:
    """Saves, and tolerates `experiment.tolerated_failed_saves` failures in a row.

    After one the run goes on: the checkpoints before stay, and the next save may succeed. Not so
    with several processes: the others wait for one that failed in the middle of their save, so it
    ends, and they with it.
    """

    def __init__(
        self,
        experiment: Experiment,
        checkpoints: Checkpoints,
        log: MetricsLog,
        progress: Progress,
        phases: Phases,
        initialised_from: str | None,
    ):
        """`initialised_from` says whose weights the run began with, if it was another run's."""
        self._experiment = experiment
        self._checkpoints = checkpoints
        self._log = log
        self._progress = progress
        self._phases = phases
        self._initialised_from = initialised_from
        self._failed = 0  # in a row
        self._last_error: OSError | None = None
        self._pending = False  # a save has begun, and how it ends is not known

    def save(
        self,
        line: Line,
        state: train.State,
        best: dict[str, Any] | None,
        data_state: dict[str, Any] | None,
    ) -> None:
        """Begins to save the state after the step of `line`; every process must call it.

        Args:
          line: in the log already.
          best: the best validation so far.
          data_state: of a `Resumable` source, this process's.

        Raises:
          TrainingStopped: if too many saves in a row have failed, and why.
          OSError: if one has failed on this process of several.
        """
        with self._phases.during(Phase.CHECKPOINT):
            # An earlier save fails here, and not in the middle of the next.
            self.settle()
            # A checkpoint promises that the lines up to its step are on disk: they are synced too
            # before it is whole, in the thread that saves.
            if (unwritten := _error_of(self._log.flush)) is not None:
                self._tolerate(unwritten)
                return
            step = line["step"]
            notes: dict[str, Any] = {
                "tokens": line["tokens"],
                "best": best,
                "batches": probe(self._experiment.data, step),
                "initialised_from": self._initialised_from,
            }
            if data_state is not None:
                notes["data"] = gather_states(data_state)
            try:
                blocked = self._checkpoints.save(
                    step, state, notes, line.get("validation_loss"), beforehand=self._log.sync
                )
            except OSError as failure:
                self._tolerate(failure)
                return
            self._pending = True
        self._progress.message(f"saving step {step:,} held training up for {blocked:.2f} s")

    def settle(self) -> None:
        """Returns when the save that was begun last is whole, or its failure is tolerated.

        Raises as `save` does.
        """
        if (error := self._settled()) is not None:
            self._tolerate(error)

    def finish(self) -> None:
        """Waits for the last save.

        Raises:
          TrainingStopped: if it failed: the newest checkpoint is then an earlier one.
          OSError: if it failed on this process of several.
        """
        with self._phases.during(Phase.CHECKPOINT):
            error = self._settled()
        if error is not None and jax.process_count() > 1:
            raise error
        if (failure := error or self._last_error) is not None:
            raise TrainingStopped(
                f"the last checkpoint could not be saved: {in_words(failure)}; the same "
                "command makes the steps since the one before again"
            )

    def _settled(self) -> OSError | None:
        """Waits for the save that was begun last; how it failed, if it did."""
        if not self._pending:
            return None
        self._pending = False
        error = _error_of(self._checkpoints.wait)
        if error is None:
            self._failed, self._last_error = 0, None
        return error

    def _tolerate(self, error: OSError) -> None:
        if jax.process_count() > 1:
            raise error
        self._failed += 1
        self._last_error = error
        tolerated = self._experiment.tolerated_failed_saves
        if self._failed > tolerated:
            raise TrainingStopped(
                f"{in_words(error)}. Of the saves the last {self._failed} failed, and "
                f"tolerated_failed_saves is {tolerated}; the checkpoints before are sound: the "
                "same command goes on from there"
            ) from error
        self._progress.message(
            f"WARNING: {in_words(error)}. Training goes on without that checkpoint, and stops if "
            f"{tolerated + 1 - self._failed} more fail"
        )


def _error_of(act: Callable[[], None]) -> OSError | None:
    try:
        act()
    except OSError as error:
        return error
    return None
