"""The loop over steps: dispatch a step, then read the metrics of the one before."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import jax
import numpy as np

from lmlib.checkpoint import Checkpoints
from lmlib.data.batch import Batch
from lmlib.data.prefetch import Prefetch
from lmlib.experiment import Action, Every, Moment
from lmlib.experiment.stages import at
from lmlib.metrics.log import MetricsLog, read_metrics
from lmlib.parallel.layout import sharding
from lmlib.state import State
from lmlib.train import Metrics
from runner.errors import StoppedEarly
from runner.monitoring.goodput import GoodputLog
from runner.monitoring.phases import Phase
from runner.monitoring.profiling import Profiler, where_the_time_went
from runner.processes.agreement import from_first
from runner.training.beginning import Beginning
from runner.training.captures import Captures
from runner.training.compiled_step import StepPrograms
from runner.training.divergence import stop_if_diverged
from runner.training.recorder import Line, Recorder
from runner.training.run import Run
from runner.training.saving import Saver
from runner.training.starts import Start
from runner.training.validation import Validation

if TYPE_CHECKING:  # it generates, which few runs do
    from runner.training.samples import Samples


@dataclasses.dataclass
class _Dispatched:
    """A step that the devices may still be making, unless its `line` is there."""

    step: int
    batch: Batch
    metrics: Metrics
    data_wait_seconds: float
    line: Line | None = None


class Loop:
    """Makes a step of each batch.

    The metrics of a step are on disk before its checkpoint is, so that a resumed run finds a line
    for every step that it does not make again. The checkpoint is whole before other actions see its
    state, so that an evaluation that fails costs no step: the next process makes it.

    Args:
      make_step: `state, metrics = make_step(number, state, batch)`.
      repeated: the last step that an earlier process of the run made.
    """

    def __init__(
        self,
        run: Run,
        start: Start,
        beginning: Beginning,
        make_step: Callable[[int, State, Batch], tuple[State, Metrics]],
        batches: Prefetch,
        recorder: Recorder,
        saver: Saver,
        validation: Validation | None,
        samples: "Samples | None",
        repeated: int,
    ):
        self._run, self._start, self._beginning = run, start, beginning
        self._make_step, self._batches, self._repeated = make_step, batches, repeated
        self._recorder, self._saver = recorder, saver
        self._captures = Captures(run, saver, beginning.initialised_from)
        self._validation, self._samples = validation, samples
        experiment = run.experiment
        self._save_every = Every(experiment.checkpoints.every, saver.save_at, at_end=True)
        self._actions: list[Every] = []
        if validation is not None:
            self._actions.append(Every(experiment.evaluation.every, self._evaluate, at_end=True))
        if experiment.samples.every is not None:
            self._actions.append(Every(experiment.samples.every, self._sample))
        self._actions += [*experiment.actions, *run.options.actions]

    def run(self, unevaluated: bool) -> State:
        """Makes the steps that are left, and returns the state after the last.

        Args:
          unevaluated: True if an earlier process ended in the evaluation after its last step.

        Raises:
          StoppedEarly: if `Options.stop` says so; the checkpoint of that step is whole.
          TrainingStopped: if updates or saves fail one after the other.
          WorkdirLost: if the workdir is no longer this run's.
        """
        state, last_step = self._beginning.state, self._run.experiment.steps
        unread: _Dispatched | None = None
        if unevaluated:
            self._act(self._evaluate, self._beginning.step, state, {})
        self._recorder.restart_clock()
        while (item := self._next_batch(unread)) is not None:
            step, batch = item
            self._run.phases.enter(Phase.REPEATED if step <= self._repeated else Phase.STEP)
            state, metrics = self._make_step(step, state, batch)
            if unread is not None:
                # Read while this step runs, so that the devices never wait for the host.
                self._finish(self._read(unread), unread.batch, state)
            unread = _Dispatched(step, batch, metrics, self._batches.wait_seconds)

            last = step == last_step
            stops = self._run.options.stop(step) and not last
            saves = self._save_every.due(step, last) or stops
            due = [each.action for each in self._actions if each.due(step, last)]
            if saves or due:
                line = self._read(unread)
                self._finish(line, batch, state)
                unread = None
                if saves:
                    self._save_every.action(self._moment(step, state, line))
                for action in due:
                    self._act(action, step, state, line)
                if stops:
                    self._saver.finish()
                    raise StoppedEarly(
                        f"stopped after step {step:,} of {last_step:,}, as a signal asked; its "
                        "checkpoint is whole, and the same command goes on from there"
                    )
                self._recorder.restart_clock()
        self._saver.finish()
        return state

    def _next_batch(self, unread: _Dispatched | None) -> tuple[int, Batch] | None:
        """The next step, from 1, and its batch; `None` after the last."""
        if unread is not None and not self._batches.ready():
            # Timed before the wait, which belongs to the next step.
            self._read(unread)
        with self._run.phases.during(Phase.DATA):
            item = next(self._batches, None)
        return None if item is None else (item[0] + 1, item[1])

    def _act(self, action: Action, step: int, state: State, line: Line) -> None:
        """Acts once the checkpoint of the step is whole, and adds the result to the line."""
        self._saver.settle()
        with self._run.phases.during(Phase.EVALUATION):
            found = action(self._moment(step, state, line)) or {}
        metrics = {name: np.asarray(each).item() for name, each in jax.device_get(found).items()}
        if known := metrics.keys() & {"step", *line}:
            raise ValueError(f"{action!r} returns {sorted(known)[0]!r}, which the step has already")
        self._run.lock.check()
        self._recorder.add(step, metrics)
        line.update(metrics)

    def _evaluate(self, now: Moment) -> Mapping[str, float]:
        """Evaluates the model, and ranks the checkpoint of the step."""
        validation = self._validation
        assert validation is not None
        metrics = validation.metrics(now.state)
        self._run.lock.check()
        # First, since a line that has them says that the evaluation is done.
        self._saver.rank(now.step, metrics)
        self._run.progress.validated(now.step, validation.text(metrics))
        return metrics

    def _sample(self, now: Moment) -> None:
        """Continues the prompts; the samples after the last step belong to the summary."""
        if self._samples is None or now.step == self._run.experiment.steps:
            return
        if texts := self._samples.write(now.step, now.state.whole_model):
            now.tell(f"sampled after step {now.step:,}: {texts[0]!r:.200}")

    def _moment(self, step: int, state: State, line: Line) -> Moment:
        return Moment(step, state, line, self._run.workdir, self._run.tell)

    def _read(self, made: _Dispatched) -> Line:
        if made.line is None:
            made.line = self._recorder.read(made.step, made.metrics, made.data_wait_seconds)
        return made.line

    def _finish(self, line: Line, batch: Batch, newest: State) -> None:
        """Writes the line of a step and acts on it; the state `newest` may be a step later."""
        run, first = self._run, self._beginning.step + 1
        run.lock.check()
        if line["step"] == first:
            if run.primary:
                self._start.record(first, run.lock)
            run.tell(f"first step after {run.phases.text()}")
        self._recorder.write(line)
        if (message := self._captures.take(line, batch)) is not None:
            run.tell(message)
        stop_if_diverged(run.experiment, line, newest, batch, self._saver)


def make_steps(
    run: Run,
    start: Start,
    beginning: Beginning,
    checkpoints: Checkpoints,
    programs: StepPrograms,
    goodput: GoodputLog,
    log: MetricsLog,
    validation: Validation | None,
    samples: "Samples | None",
) -> State:
    """Makes the steps that are left, if any, and returns the state after the last."""
    experiment = run.experiment
    unevaluated = _unevaluated(run, beginning.step)
    if beginning.step >= experiment.steps and not unevaluated:
        return beginning.state
    rows, ahead = sharding("batch seq", experiment.mesh), experiment.prefetch_batches
    source, steps = experiment.batches, experiment.steps
    # Prefetching begins here, so that it goes on while the step compiles.
    with Prefetch(source, rows, beginning.step, steps, ahead) as batches:
        if log.missing is not None:
            run.tell(f"WARNING: {log.missing}")
        if log.set_aside is not None:
            run.tell(f"the metrics of the run before are kept in {log.set_aside}")
        with run.phases.during(Phase.COMPILE):
            compiled = programs.compiled(beginning.step)
        run.lock.check()
        saver = Saver(run, checkpoints, log, batches, beginning)
        if beginning.is_new_fork:
            saver.save_fork(beginning)
        hyperparameters = experiment.training.hyperparameters

        def make_step(step: int, state: State, batch: Batch) -> tuple[State, Metrics]:
            return at(compiled, step - 1)(state, batch, hyperparameters)

        with _profiler(run, compiled) as profiler:
            return Loop(
                run,
                start,
                beginning,
                make_step=profiler.traced(make_step),
                batches=batches,
                recorder=Recorder(run, log, goodput, beginning.tokens),
                saver=saver,
                validation=validation,
                samples=samples,
                repeated=max(goodput.furthest, log.furthest),
            ).run(unevaluated)


def _unevaluated(run: Run, step: int) -> bool:
    """True if an earlier process ended in the evaluation after `step`, which it had saved."""
    experiment = run.experiment
    due = step % experiment.evaluation.every == 0 or step == experiment.steps
    if experiment.validation is None or not due:
        return False
    lines = read_metrics(run.workdir) if run.primary else []
    return from_first(any(line["step"] == step and "evaluation_loss" not in line for line in lines))


def _profiler(run: Run, compiled: Mapping[range, jax.stages.Compiled]) -> Profiler:
    """One process traces, since the devices of the others do the same."""
    folder, steps, experiment = run.workdir / "profile", run.options.profile, run.experiment

    def tell(count: int) -> None:
        assert steps is not None
        last = min(steps[-1], experiment.steps) - 1
        program, stage = at(compiled, last), experiment.at(last)
        run.tell(where_the_time_went(folder, program, stage, count, run.lock.check))

    return Profiler(folder, steps if run.primary else None, written=tell)
