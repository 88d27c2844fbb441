"""The loop over steps: dispatch a step, then read the metrics of the one before."""

import dataclasses
from collections.abc import Callable

import jax

from lmlib import train
from lmlib.data.batch import Batch
from lmlib.data.prefetch import Prefetch
from lmlib.experiment import Experiment
from lmlib.state import State
from runner.errors import StoppedEarly
from runner.processes.lock import WorkdirLock
from runner.training.captures import Captures
from runner.training.divergence import stop_if_diverged
from runner.training.recorder import Line, Recorder
from runner.training.samples import Samples
from runner.training.saving import Saver
from runner.training.validation import Validation
from runner.watch.phases import Phase, Phases
from runner.watch.profiling import Profiler


@dataclasses.dataclass
class _Dispatched:
    """A step that the devices may still be making, unless its `line` is there."""

    step: int
    batch: Batch
    metrics: train.Metrics
    data_wait_seconds: float
    line: Line | None = None


@dataclasses.dataclass(frozen=True)
class Loop:
    """Makes a step of each batch.

    The metrics of a step are on disk before its checkpoint is, so that a resumed run finds a line
    for every step that it does not make again. The checkpoint is whole before its state is
    evaluated, so that an evaluation that fails costs no step: the next process makes it. The state
    of a `Resumable` source goes into the checkpoint, that of every process.

    Args:
      compiled: `state, metrics = compiled(state, batch)`.
      first: the first step that this process makes.
      begun: called with that step once it is made.
      repeated: the last step that an earlier process of the run made.
      unevaluated: whether the state to begin with is still to be evaluated.
      stop: whether to stop after a step, saved; the same answer on all processes.
    """

    experiment: Experiment
    compiled: jax.stages.Compiled
    batches: Prefetch
    validation: Validation | None
    samples: Samples
    recorder: Recorder
    saver: Saver
    captures: Captures
    profiler: Profiler
    phases: Phases
    lock: WorkdirLock
    first: int
    begun: Callable[[int], None]
    repeated: int
    unevaluated: bool
    stop: Callable[[int], bool]

    def run(self, state: State) -> State:
        """The state after the last step.

        Raises:
          StoppedEarly: if `stop` says so; the checkpoint of that step is whole.
          TrainingStopped: if updates or saves fail one after the other.
          WorkdirLost: if the workdir is no longer this run's.
        """
        experiment = self.experiment
        unread: _Dispatched | None = None
        if self.unevaluated:
            self._evaluate(self.first - 1, state)
        self.recorder.restart_clock()
        while (item := self._next_batch(unread)) is not None:
            step, batch = item
            self.phases.enter(Phase.REPEATED if step <= self.repeated else Phase.STEP)
            self.profiler.before(step, wait_for=state)
            state, metrics = self.compiled(state, batch)
            self.profiler.after(step, wait_for=metrics)
            if unread is not None:
                # Read while this step runs, so that the devices never wait for the host.
                self._finish(self._read(unread), unread.batch, state)
            unread = _Dispatched(step, batch, metrics, self.batches.wait_seconds)

            last = step == experiment.steps
            stops = self.stop(step) and not last
            evaluates = step % experiment.evaluation.every == 0 or last
            saves = step % experiment.checkpoints.every == 0 or last or stops
            samples = self.samples.due(step)
            if evaluates or saves or samples:
                line = self._read(unread)
                self._finish(line, batch, state)
                unread = None
                if saves:
                    self.saver.save(line, state, self.batches.state)
                if evaluates:
                    self._evaluate(step, state)
                if samples:
                    with self.phases.during(Phase.EVALUATION):
                        self.recorder.sample(step, self.samples, state.whole_model)
                if stops:
                    self.saver.finish()
                    raise StoppedEarly(
                        f"stopped after step {step:,} of {experiment.steps:,}, as a signal asked; "
                        "its checkpoint is whole, and the same command goes on from there"
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

    def _evaluate(self, step: int, state: State) -> None:
        """Adds what validation says of `state` to the line of `step`."""
        if self.validation is None:
            return
        self.saver.settle()
        with self.phases.during(Phase.EVALUATION):
            metrics = self.validation.metrics(state)
        self.lock.check()
        # First, since a line that has them says that the evaluation is done.
        self.saver.rank(step, metrics)
        self.recorder.add(step, metrics, self.validation.text(metrics))

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
