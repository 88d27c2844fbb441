"""Saves a run's checkpoints with metadata, and handles failed saves."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from lmlib.checkpoint import Checkpoints
from lmlib.data.prefetch import Prefetch
from lmlib.data.resumable import gather_states
from lmlib.experiment import StepEvent
from lmlib.metrics.log import MetricsLog
from lmlib.state import State
from lmlib.terminal.quantities import duration_text
from runner.errors import TrainingStopped, error_text, user_errors
from runner.monitoring.phases import Limits, Phase
from runner.training.data_probe import probe
from runner.training.run import Line, Run
from runner.training.starting_point import StartingPoint
from runner.weights.notes import WEIGHTS_ALONE, frozen_note, reference_note

HELD_UP_SECONDS = 1.0  # shorter delays of training are not reported


def open_checkpoints(run: Run) -> Checkpoints:
    """Opens the run's checkpoints for writing, and removes expired ones."""
    limits, kept = run.options.limits or Limits(), run.experiment.checkpoints
    with user_errors():
        return Checkpoints(
            run.checkpoints,
            keep=kept.keep,
            keep_every=kept.keep_every,
            keep_best=kept.keep_best,
            # Imported weights stay, since every start reads the frozen weights again.
            keep_steps=() if run.experiment.recipe.trained is None else (WEIGHTS_ALONE,),
            save_seconds=max(1, round(limits.checkpoint)),
            check=run.lock.check,
        )


class Saver:
    """Saves checkpoints; tolerates `checkpoints.tolerated_failures` failures in a row.

    A failed save ends a run of several processes, since the others wait in the middle of theirs.
    """

    def __init__(
        self,
        run: Run,
        checkpoints: Checkpoints,
        log: MetricsLog,
        batches: Prefetch,
        beginning: StartingPoint,
    ):
        self._run, self._settings = run, run.experiment.checkpoints
        self._checkpoints, self._log, self._batches = checkpoints, log, batches
        frozen, fork = beginning.state.frozen, beginning.fork
        self._unchanging = {  # metadata that is the same in all checkpoints
            "initialised_from": beginning.initialised_from,
            "frozen": frozen_note(frozen, run.experiment.recipe),
            "reference_model": reference_note(beginning.state.reference_model),
        } | ({} if fork is None else {"forked_from": fork._asdict()})
        # The step of the newest checkpoint that was saved while no updates were skipped. That
        # checkpoint is kept until training has recovered.
        self.before_skipped = beginning.before_skipped
        self._failed = 0  # consecutive failures
        self._last_error: OSError | FloatingPointError | None = None
        self._pending: Line | None = None  # the metrics of an unfinished save

    def save_at(self, now: StepEvent) -> None:
        """Starts saving the state, and the position of a `Resumable` source on each process."""
        state = self._batches.state
        data = None if state is None else gather_states(state)
        self._save(dict(now.metrics), now.state, data)

    def save_fork(self, beginning: StartingPoint) -> None:
        """Saves the initial state of a fork, so that the fork no longer needs the other run."""
        skipped = int(jax.device_get(beginning.state.guard.skipped_in_a_row))
        line = {"step": beginning.step, "tokens": beginning.tokens, "skipped_in_a_row": skipped}
        self._save(line, beginning.state, beginning.data)

    def _save(self, line: Line, state: State, data: list[dict[str, Any]] | None) -> None:
        """Starts saving the state after the step of `line`; every process must call it.

        A state with non-finite numbers is not saved, since no run could continue from it.
        """
        # Report a failure of the previous save before the next one starts.
        self.settle()
        step = line["step"]
        with self._holding_up(step):
            # The metrics up to a checkpoint's step must be on disk before the checkpoint is
            # complete. `_sync_files` syncs them in the thread that saves.
            if (unwritten := _error_of(self._log.flush)) is not None:
                self._tolerate(unwritten)
                return
            if broken := not_finite(state.model, state.optimizer):
                self._refuse(step, broken)
                return
            skipping = line["skipped_in_a_row"] > 0
            notes = {
                "tokens": line["tokens"],
                "before_skipped": self.before_skipped if skipping else step,
                "batches": probe(self._run.experiment.batches, step),
                **self._unchanging,
                **({} if data is None else {"data": data}),
            }
            if self._checkpoints.deleted:
                self._run.tell(
                    "WARNING: the folder of checkpoints was deleted during this run; step "
                    f"{step:,} is the first in a new one"
                )
            try:
                hold = self.before_skipped if skipping else None
                self._checkpoints.save(
                    step, state.changing, notes, hold, beforehand=self._sync_files
                )
            except OSError as failure:
                self._tolerate(failure)
                return
            self._pending = line

    def _sync_files(self) -> None:
        self._log.sync()
        self._run.place.sync()

    def rank(self, step: int, metrics: Mapping[str, float]) -> None:
        """Ranks the checkpoint of `step`, if any, by the metric `best_by`, for `keep_best`.

        Metrics where higher is better are negated.
        """
        best = metrics[self._settings.best_by]
        rank = -best if self._settings.best_is_highest else best
        if (error := _error_of(lambda: self._checkpoints.rank(step, rank))) is not None:
            self._tolerate(error)

    def settle(self) -> None:
        """Waits until the last save is complete or its failure is tolerated.

        Raises the same errors as `_save`.
        """
        if self._pending is None:
            return
        with self._holding_up(self._pending["step"]):
            error = self._settled()
        if error is not None:
            self._tolerate(error)

    def finish(self) -> None:
        """Waits for the last save; raises TrainingStopped or OSError if it failed."""
        with self._run.phases.during(Phase.CHECKPOINT):
            error = self._settled()
        if error is not None and jax.process_count() > 1:
            raise error
        if (failure := error or self._last_error) is not None:
            raise TrainingStopped(
                f"the last checkpoint could not be saved: {error_text(failure)}; give the same "
                "command to repeat the steps since the one before"
            )

    @contextlib.contextmanager
    def _holding_up(self, step: int) -> Iterator[None]:
        """Times a block in which training waits for the save of `step`; reports long delays."""
        began = time.perf_counter()
        with self._run.phases.during(Phase.CHECKPOINT):
            yield
        if (blocked := time.perf_counter() - began) >= HELD_UP_SECONDS:
            self._run.tell(f"saving step {step:,} delayed training by {duration_text(blocked)}")

    def _settled(self) -> OSError | None:
        """Waits for the last save; returns its error, `None` if it succeeded."""
        if self._pending is None:
            return None
        line, self._pending = self._pending, None
        error = _error_of(self._checkpoints.wait)
        if error is None:
            self._failed, self._last_error = 0, None
            if line["skipped_in_a_row"] == 0:
                self.before_skipped = line["step"]
        return error

    def _refuse(self, step: int, broken: Sequence[str]) -> None:
        """Reports a state that is not finite.

        Training continues: the next updates are skipped, or the numbers become finite again.
        """
        more = f"; so do {len(broken) - 1} more arrays" if len(broken) > 1 else ""
        self._last_error = FloatingPointError(
            f"step {step:,} is not saved: {broken[0]} holds numbers that are not finite{more}"
        )
        self._run.tell(f"WARNING: {self._last_error}; the checkpoints before stay")

    def _tolerate(self, error: OSError) -> None:
        if jax.process_count() > 1:
            raise error
        self._failed += 1
        self._last_error = error
        tolerated = self._settings.tolerated_failures
        if self._failed > tolerated:
            newest = self._checkpoints.newest()
            there = "there is none" if newest is None else f"step {newest:,}"
            raise TrainingStopped(
                f"{error_text(error)}. The last {self._failed} saves failed, and "
                f"checkpoints.tolerated_failures is {tolerated}; newest checkpoint: {there}. Give "
                "the same command to continue."
            ) from error
        self._run.tell(
            f"WARNING: {error_text(error)}. Training continues without that checkpoint, and stops "
            f"if {tolerated + 1 - self._failed} more fail"
        )


def _error_of(act: Callable[[], None]) -> OSError | None:
    try:
        act()
    except OSError as error:
        return error
    return None


def not_finite(model: Any, optimizer: Any) -> list[str]:
    """The names of the arrays that contain a non-finite number, in the order of the trees.

    Scalars of an optimizer may be infinite, such as the best loss before the first step.
    """
    checked = {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in jax.tree.leaves_with_path({"model": model, "optimizer": optimizer})
        if jnp.issubdtype(leaf.dtype, jnp.inexact) and (leaf.ndim or path[0].key == "model")
    }
    finite = jax.device_get(_all_finite([*checked.values()]))
    return [name for name, sound in zip(checked, finite, strict=True) if not sound]


_all_finite = jax.jit(lambda arrays: [jnp.all(jnp.isfinite(array)) for array in arrays])
