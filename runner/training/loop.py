"""The training loop: dispatches a step, then reads the metrics of the previous one."""

import dataclasses
import time
from collections.abc import Callable, Mapping

import jax
import numpy as np

from lmlib.checkpoint import Checkpoints
from lmlib.data.batch import Batch
from lmlib.data.prefetch import Prefetch
from lmlib.experiment import Action, PeriodicCallback, StepEvent
from lmlib.experiment.stages import at
from lmlib.metrics.log import MetricsLog, read_metrics
from lmlib.parallel.axes import PartError
from lmlib.parallel.layout import sharding
from lmlib.state import State
from lmlib.terminal.quantities import bytes_text, duration_text
from lmlib.train import Metrics
from runner.errors import ConfigError, StoppedEarly, user_errors
from runner.monitoring.goodput import GoodputLog
from runner.monitoring.phases import Phase
from runner.monitoring.profiling import Profiler, where_the_time_went
from runner.processes.agreement import from_first
from runner.training.captures import Captures
from runner.training.recorder import Line, Recorder
from runner.training.run import Run
from runner.training.saving import Saver
from runner.training.starting_point import StartingPoint


@dataclasses.dataclass
class _Dispatched:
    """A dispatched step."""

    step: int
    batch: Batch
    metrics: Metrics
    data_wait_seconds: float
    line: Line | None = None  # its metrics, once they have been read


class Loop:
    """Runs the training steps.

    The metrics of a step are on disk before its checkpoint, so a resumed run finds a line for every
    step that it does not repeat. The checkpoint is complete before other actions see its state, so
    a failed evaluation loses no step. `repeated` is the last step made by earlier processes.
    """

    def __init__(
        self,
        run: Run,
        beginning: StartingPoint,
        make_step: Callable[[int, State, Batch], tuple[State, Metrics]],
        batches: Prefetch,
        recorder: Recorder,
        saver: Saver,
        repeated: int,
    ):
        self._run, self._beginning = run, beginning
        self._make_step, self._batches, self._repeated = make_step, batches, repeated
        self._recorder, self._saver = recorder, saver
        self._captures = Captures(run, saver, beginning.initialised_from)
        settings = run.experiment
        self._save_every = PeriodicCallback(settings.checkpoints.every, saver.save_at, True)
        self._actions: list[PeriodicCallback] = []
        if run.validation is not None:
            evaluate = PeriodicCallback(settings.evaluation.every, self._evaluate, True)
            self._actions.append(evaluate)
        if settings.samples.every is not None:
            self._actions.append(PeriodicCallback(settings.samples.every, self._sample))
        self._actions += [*settings.actions, *run.options.actions]

    def run(self, unevaluated: bool) -> State:
        """Runs the remaining steps and returns the final state; the errors are those of `fit`.

        `unevaluated` is true if an earlier process ended during the evaluation of its last step.
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
                # Read the previous step while this one runs, so the devices never wait for the
                # host.
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
                        f"stopped after step {step:,} of {last_step:,} on a signal; its checkpoint "
                        "is complete. Give the same command to continue."
                    )
                self._recorder.restart_clock()
        self._saver.finish()
        return state

    def _next_batch(self, unread: _Dispatched | None) -> tuple[int, Batch] | None:
        """Returns the next step, counted from 1, and its batch; `None` after the last."""
        if unread is not None and not self._batches.ready():
            # Stop the clock of the previous step: the wait for data belongs to the next one.
            self._read(unread)
        with self._run.phases.during(Phase.DATA):
            item = next(self._batches, None)
        return None if item is None else (item[0] + 1, item[1])

    def _act(self, action: Action, step: int, state: State, line: Line) -> None:
        """Runs an action after the step's checkpoint is complete; adds its metrics to the line."""
        self._saver.settle()
        with self._run.phases.during(Phase.EVALUATION):
            found = action(self._moment(step, state, line)) or {}
        metrics = {name: np.asarray(each).item() for name, each in jax.device_get(found).items()}
        if known := metrics.keys() & {"step", *line}:
            raise ValueError(f"{action!r} returns {sorted(known)[0]!r}, which the step has already")
        self._run.lock.check()
        self._recorder.add(step, metrics)
        line.update(metrics)

    def _evaluate(self, now: StepEvent) -> Mapping[str, float]:
        """Evaluates the model, and ranks the checkpoint of the step."""
        validation = self._run.validation
        assert validation is not None
        metrics = validation.metrics(now.state)
        self._run.lock.check()
        # Rank before the metrics are written, since a line with metrics marks the evaluation as
        # done.
        self._saver.rank(now.step, metrics)
        self._run.progress.validated(now.step, validation.text(metrics))
        return metrics

    def _sample(self, now: StepEvent) -> None:
        """Samples from the prompts, except after the last step, which the summary covers."""
        samples = self._run.samples
        if samples is None or now.step == self._run.experiment.steps:
            return
        if texts := samples.write(now.step, now.state.whole_model):
            now.tell(f"sampled after step {now.step:,}: {texts[0]!r:.200}")

    def _moment(self, step: int, state: State, line: Line) -> StepEvent:
        return StepEvent(step, state, line, self._run.workdir, self._run.tell)

    def _read(self, made: _Dispatched) -> Line:
        if made.line is None:
            made.line = self._recorder.read(made.step, made.metrics, made.data_wait_seconds)
        return made.line

    def _finish(self, line: Line, batch: Batch, newest: State) -> None:
        """Writes the metrics of a step and handles skipped updates."""
        run, first = self._run, self._beginning.step + 1
        run.lock.check()
        if line["step"] == first:
            if run.primary:
                run.start.record(first, run.lock)
            run.tell(f"first step after {run.phases.text()}")
        self._recorder.write(line)
        if (message := self._captures.take(line, batch)) is not None:
            run.tell(message)
        if line["skipped_in_a_row"] >= run.experiment.guard.stop_after:
            from runner.training.divergence import stop  # which few runs need

            stop(run.experiment, line, newest, batch, self._saver)


def make_steps(
    run: Run,
    beginning: StartingPoint,
    checkpoints: Checkpoints,
    goodput: GoodputLog,
    log: MetricsLog,
) -> State:
    """Runs the remaining steps, if any, and returns the final state."""
    experiment, steps = run.experiment, run.experiment.steps
    unevaluated = _unevaluated(run, beginning.step)
    if beginning.step >= steps and not unevaluated:
        return beginning.state
    rows, ahead = sharding("batch seq", experiment.mesh), experiment.prefetch_batches
    # Start prefetching now, so that it overlaps with compilation.
    with Prefetch(experiment.batches, rows, beginning.step, steps, ahead) as batches:
        if log.missing is not None:
            run.tell(f"WARNING: {log.missing}")
        if log.set_aside is not None:
            run.tell(f"the metrics of the run before are kept in {log.set_aside}")
        with run.phases.during(Phase.COMPILE):
            compiled = compile_steps(run, beginning.step)
        run.lock.check()
        saver = Saver(run, checkpoints, log, batches, beginning)
        if beginning.is_new_fork:
            saver.save_fork(beginning)
        hyperparameters = experiment.training.hyperparameters

        def make_step(step: int, state: State, batch: Batch) -> tuple[State, Metrics]:
            return at(compiled, step - 1)(state, batch, hyperparameters)

        recorder = Recorder(run, log, goodput, beginning.tokens)
        repeated = max(goodput.furthest, log.furthest)
        with _profiler(run, compiled) as profiler:
            make_step = profiler.traced(make_step)
            loop = Loop(run, beginning, make_step, batches, recorder, saver, repeated)
            return loop.run(unevaluated)


def _unevaluated(run: Run, step: int) -> bool:
    """True if an earlier process saved `step` but ended during its evaluation."""
    experiment = run.experiment
    due = step % experiment.evaluation.every == 0 or step == experiment.steps
    if experiment.validation is None or not due:
        return False
    lines = read_metrics(run.workdir) if run.primary else []
    return from_first(any(line["step"] == step and "evaluation_loss" not in line for line in lines))


def _profiler(run: Run, compiled: Mapping[range, jax.stages.Compiled]) -> Profiler:
    """Returns the profiler. Only process 0 traces, since all devices do the same work."""
    folder, steps, experiment = run.workdir / "profile", run.options.profile, run.experiment

    def tell(count: int) -> None:
        assert steps is not None
        last = min(steps[-1], experiment.steps) - 1
        program, stage = at(compiled, last), experiment.at(last)
        run.tell(where_the_time_went(folder, program, stage, count, run.lock.check))

    return Profiler(folder, steps if run.primary else None, written=tell)


def check_profile(run: Run) -> None:
    """Raises ConfigError if the steps to profile belong to several stages."""
    traced = run.options.profile or range(0)
    for steps in run.experiment.stages:
        if steps.start in traced and steps.start + 1 in traced:
            raise ConfigError(
                f"--profile: steps {steps.start:,} and {steps.start + 1:,} belong to different "
                f"stages; trace up to step {steps.start:,}, or from {steps.start + 1:,} on"
            )


def compile_steps(run: Run, made: int) -> dict[range, jax.stages.Compiled]:
    """Compiles the steps of the stages that remain after `made` steps, so errors appear early.

    Returns:
      The compiled step of each stage, by the stage's range of steps, counted from 0.
    """
    compiled = {}
    for steps, stage in run.experiment.stages.items():
        if steps.stop <= made and steps.stop < run.experiment.steps:
            continue
        title = f"the step from {steps.start + 1:,} on" if steps.start else "the step"
        began = time.perf_counter()
        run.tell(f"compiling {title}")
        with user_errors((PartError,)):
            lowered = stage.trace_step().lower()
        compiled[steps] = program = lowered.compile()
        run.tell(f"compiled {title} in {duration_text(time.perf_counter() - began)}")
        memory = program.memory_analysis()
        if memory is not None:  # some platforms don't report it
            run.tell(
                f"memory per device: {bytes_text(memory.argument_size_in_bytes)} for state and "
                f"batch, {bytes_text(memory.temp_size_in_bytes)} for temporaries"
            )
        if run.options.dump_hlo and run.primary:
            name = f"train_step_{steps.start + 1}" if steps.start else "train_step"
            file = run.workdir / "hlo" / f"{name}.txt"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(program.as_text() or "", encoding="utf-8")
            run.tell(f"wrote {file}")
    return compiled
