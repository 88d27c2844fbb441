"""The loop over steps: dispatch a step, then read the metrics of the one before."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import numpy as np

from lmlib.data.batch import Batch
from lmlib.data.prefetch import Prefetch
from lmlib.experiment import Action, Every, Experiment, Moment
from lmlib.state import State
from lmlib.train import Metrics
from runner.errors import StoppedEarly
from runner.monitoring.phases import Phase, Phases
from runner.processes.lock import WorkdirLock
from runner.training.captures import Captures
from runner.training.divergence import stop_if_diverged
from runner.training.recorder import Line, Recorder
from runner.training.saving import Saver


@dataclasses.dataclass
class _Dispatched:
    """A step that the devices may still be making, unless its `line` is there."""

    step: int
    batch: Batch
    metrics: Metrics
    data_wait_seconds: float
    line: Line | None = None


@dataclasses.dataclass(frozen=True)
class Loop:
    """Makes a step of each batch.

    The metrics of a step are on disk before its checkpoint is, so that a resumed run finds a line
    for every step that it does not make again. The checkpoint is whole before other actions see its
    state, so that an evaluation that fails costs no step: the next process makes it.

    Args:
      make_step: `state, metrics = make_step(number, state, batch)`.
      saving: due when the run stops, too.
      actions: the others, in the order in which they act.
      unfinished: what an earlier process left undone after the step before `first`.
      first: the first step that this process makes.
      begun: called with that step once it is made.
      repeated: the last step that an earlier process of the run made.
      stop: whether to stop after a step, saved; the same answer on all processes.
    """

    experiment: Experiment
    workdir: Path
    make_step: Callable[[int, State, Batch], tuple[State, Metrics]]
    batches: Prefetch
    saving: Every
    actions: Sequence[Every]
    unfinished: Action | None
    recorder: Recorder
    saver: Saver
    captures: Captures
    phases: Phases
    lock: WorkdirLock
    first: int
    begun: Callable[[int], None]
    repeated: int
    stop: Callable[[int], bool]

    def run(self, state: State) -> State:
        """The state after the last step.

        Raises:
          StoppedEarly: if `stop` says so; the checkpoint of that step is whole.
          TrainingStopped: if updates or saves fail one after the other.
          WorkdirLost: if the workdir is no longer this run's.
        """
        unread: _Dispatched | None = None
        if self.unfinished is not None:
            self._act(self.unfinished, self.first - 1, state, {})
        self.recorder.restart_clock()
        while (item := self._next_batch(unread)) is not None:
            step, batch = item
            self.phases.enter(Phase.REPEATED if step <= self.repeated else Phase.STEP)
            state, metrics = self.make_step(step, state, batch)
            if unread is not None:
                # Read while this step runs, so that the devices never wait for the host.
                self._finish(self._read(unread), unread.batch, state)
            unread = _Dispatched(step, batch, metrics, self.batches.wait_seconds)

            last = step == self.experiment.steps
            stops = self.stop(step) and not last
            saves = self.saving.due(step, last) or stops
            due = [each.action for each in self.actions if each.due(step, last)]
            if saves or due:
                line = self._read(unread)
                self._finish(line, batch, state)
                unread = None
                if saves:
                    self.saving.action(self._moment(step, state, line))
                for action in due:
                    self._act(action, step, state, line)
                if stops:
                    self.saver.finish()
                    raise StoppedEarly(
                        f"stopped after step {step:,} of {self.experiment.steps:,}, as a signal "
                        "asked; its checkpoint is whole, and the same command goes on from there"
                    )
                self.recorder.restart_clock()
        self.saver.finish()
        return state

    def _next_batch(self, unread: _Dispatched | None) -> tuple[int, Batch] | None:
        """The next step, from 1, and its batch; `None` after the last."""
        if unread is not None and not self.batches.ready():
            # Timed before the wait, which belongs to the next step.
            self._read(unread)
        with self.phases.during(Phase.DATA):
            item = next(self.batches, None)
        return None if item is None else (item[0] + 1, item[1])

    def _act(self, action: Action, step: int, state: State, line: Line) -> None:
        """Acts once the checkpoint of the step is whole, and adds what comes of it to the line."""
        self.saver.settle()
        with self.phases.during(Phase.EVALUATION):
            found = action(self._moment(step, state, line)) or {}
        metrics = {name: np.asarray(each).item() for name, each in jax.device_get(found).items()}
        if known := metrics.keys() & {"step", *line}:
            raise ValueError(f"{action!r} returns {sorted(known)[0]!r}, which the step has already")
        self.lock.check()
        self.recorder.add(step, metrics)
        line.update(metrics)

    def _moment(self, step: int, state: State, line: Line) -> Moment:
        return Moment(step, state, line, self.workdir, self.recorder.message)

    def _read(self, made: _Dispatched) -> Line:
        if made.line is None:
            made.line = self.recorder.read(made.step, made.metrics, made.data_wait_seconds)
        return made.line

    def _finish(self, line: Line, batch: Batch, newest: State) -> None:
        """Writes the line of a step and acts on what it says; `newest` may be a step later."""
        self.lock.check()
        if line["step"] == self.first:
            self.begun(self.first)
            self.recorder.message(f"first step after {self.phases.text()}")
        self.recorder.write(line)
        if (message := self.captures.take(line, batch)) is not None:
            self.recorder.message(message)
        stop_if_diverged(self.experiment, line, newest, batch, self.saver)
