"""The loop over steps: dispatch a step, then read the metrics of the one before."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax

from lmlib import train
from lmlib.data.batch import Batch
from lmlib.data.prefetch import Prefetch
from lmlib.experiment import Experiment
from runner.command_line.errors import StoppedEarly
from runner.processes.lock import WorkdirLock
from runner.training.captures import Captures
from runner.training.divergence import stop_if_diverged
from runner.training.recorder import Line, Recorder
from runner.training.saving import Saver
from runner.training.validation import Validation
from runner.watch.phases import Phase, Phases
from runner.watch.profiling import Profiler


class _Dispatched(NamedTuple):
    """A step that the devices may still be making."""

    step: int
    batch: Batch
    metrics: train.Metrics
    data_wait_seconds: float


@dataclasses.dataclass(frozen=True)
class Loop:
    """Makes a step of each batch.

    The metrics of a step are on disk before its checkpoint is, so that a resumed run finds a line
    for every step that it does not make again. The state of a `Resumable` source goes into the
    checkpoint, that of every process.

    Args:
      compiled: `state, metrics = compiled(state, batch)`.
      first: the first step that this process makes.
      repeated: the last step that an earlier process of the run made.
      stop: whether to stop after a step, saved; the same answer on all processes.
    """

    experiment: Experiment
    compiled: jax.stages.Compiled
    batches: Prefetch
    validation: Validation | None
    recorder: Recorder
    saver: Saver
    captures: Captures
    profiler: Profiler
    phases: Phases
    lock: WorkdirLock
    first: int
    repeated: int
    stop: Callable[[int], bool]

    def run(self, state: train.State) -> train.State:
        """The state after the last step.

        Raises:
          StoppedEarly: if `stop` says so; the checkpoint of that step is whole.
          TrainingStopped: if updates or saves fail one after the other.
          WorkdirTaken: if another run has taken this one for dead.
        """
        experiment = self.experiment
        unread: _Dispatched | None = None
        self.recorder.restart_clock()
        for step, batch in self._batches():
            self.phases.enter(Phase.REPEATED if step <= self.repeated else Phase.STEP)
            self.profiler.before(step)
            state, metrics = self.compiled(state, batch)
            self.profiler.after(step, wait_for=metrics)
            if unread is not None:
                # Read while this step runs, so that the devices never wait for the host.
                self._finish(self._read(unread), unread.batch, state)
            unread = _Dispatched(step, batch, metrics, self.batches.wait_seconds)

            last = step == experiment.steps
            stops = self.stop(step) and not last
            evaluates = step % experiment.evaluate_every == 0 or last
            saves = step % experiment.checkpoint_every == 0 or last or stops
            if evaluates or saves:
                line = self._read(unread)
                if self.validation is not None and evaluates:
                    with self.phases.during(Phase.EVALUATION):
                        line |= self.validation.metrics(state.model)
                self._finish(line, batch, state)
                unread = None
                if saves:
                    self.saver.save(line, state, self.recorder.best, self.batches.state)
                if stops:
                    self.saver.finish()
                    raise StoppedEarly(
                        f"stopped after step {step:,} of {experiment.steps:,}, as a signal asked; "
                        "its checkpoint is whole, and the same command goes on from there"
                    )
                self.recorder.restart_clock()
        self.saver.finish()
        return state

    def _batches(self) -> Iterator[tuple[int, Batch]]:
        """Each step, from 1, with its batch."""
        while True:
            with self.phases.during(Phase.DATA):
                item = next(self.batches, None)
            if item is None:
                return
            index, batch = item
            yield index + 1, batch

    def _read(self, made: _Dispatched) -> Line:
        return self.recorder.read(made.step, made.metrics, made.data_wait_seconds)

    def _finish(self, line: Line, batch: Batch, newest: train.State) -> None:
        """Writes the line of a step and acts on what it says; `newest` may be a step later."""
        self.lock.check()
        self.recorder.write(line)
        if line["step"] == self.first:
            self.recorder.message(f"first step after {self.phases.text()}")
        if (message := self.captures.take(line, batch)) is not None:
            self.recorder.message(message)
        stop_if_diverged(self.experiment, line, newest, batch)
