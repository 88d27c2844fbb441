"""The training loop: dispatches a step, then reads the metrics of the previous one."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from lmlib.checkpoint import Checkpoints
from lmlib.data.batch import Batch
from lmlib.data.prefetch import Prefetch
from lmlib.experiment import Action, Experiment, PeriodicCallback, StepEvent
from lmlib.experiment.stages import at
from lmlib.metrics.log import MetricsLog, mfu, read_metrics
from lmlib.metrics.tensorboard import TensorBoard
from lmlib.optim.average import evaluated_model
from lmlib.parallel.axes import PartError
from lmlib.parallel.layout import sharding
from lmlib.parallel.matrix import number_of_weights
from lmlib.state import State
from lmlib.terminal.quantities import bytes_text, duration_text
from lmlib.train import Metrics
from runner.errors import ConfigError, StoppedEarly, user_errors
from runner.monitoring.goodput import GoodputLog
from runner.monitoring.phases import Phase
from runner.monitoring.profiling import Profiler, where_the_time_went
from runner.monitoring.system import SystemMetrics
from runner.processes.agreement import from_first
from runner.training.captures import Captures
from runner.training.run import Line, Run
from runner.training.saving import Saver
from runner.training.starting_point import StartingPoint


@contextlib.contextmanager
def metrics_log(run: Run, beginning: StartingPoint) -> Iterator[MetricsLog]:
    """Opens metrics.jsonl and the metric sinks; enters the trackers phase on exit."""

    def lost(what: str) -> None:
        run.lock.check()  # the file may belong to another run now
        run.tell(f"WARNING: {what} during this run: its lines are put back")

    run.lock.check()  # MetricsLog creates a file right away
    with MetricsLog(
        run.workdir,
        None if beginning.is_new_fork else beginning.step or None,
        run.primary,
        lost,
        (TensorBoard, *run.experiment.sinks, *run.options.sinks),
        run.tell,
        beginning.first,
        run.lock.check,
    ) as log:
        try:
            yield log
        finally:
            run.phases.enter(Phase.TRACKERS)


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
    a failed evaluation loses no step.
    """

    def __init__(
        self,
        run: Run,
        beginning: StartingPoint,
        make_step: Callable[[int, State, Batch], tuple[State, Metrics]],
        batches: Prefetch,
        saver: Saver,
        log: MetricsLog,
        goodput: GoodputLog,
    ):
        self._run, self._beginning, self._tokens = run, beginning, beginning.tokens
        self._make_step, self._batches, self._saver = make_step, batches, saver
        self._log, self._goodput = log, goodput
        self._repeated = max(goodput.furthest, log.furthest)  # last step of earlier processes
        self._captures = Captures(run, saver, beginning.initialised_from)
        settings = run.experiment
        self._sizes = {
            steps: (stage.step_tokens, stage.flops_per_token(causal=False))
            for steps, stage in settings.stages.items()
        }
        self._devices = list(settings.mesh.devices.flat)
        self._system = SystemMetrics(jax.local_devices())
        self._save_every = PeriodicCallback(settings.checkpoints.every, saver.save_at, True)
        self._actions: list[PeriodicCallback] = []
        if run.validation is not None:
            evaluate = PeriodicCallback(settings.evaluation.every, self._evaluate, True)
            self._actions.append(evaluate)
        if settings.samples.every is not None:
            self._actions.append(PeriodicCallback(settings.samples.every, self._sample))
        self._actions += [*settings.actions, *run.options.actions]
        self._restart_clock()

    def run(self, unevaluated: bool) -> State:
        """Runs the remaining steps and returns the final state; raises the same errors as `fit`.

        `unevaluated` is true if an earlier process ended during the evaluation of its last step.
        """
        state, last_step = self._beginning.state, self._run.experiment.steps
        unread: _Dispatched | None = None
        if unevaluated:
            self._act(self._evaluate, self._beginning.step, state, {})
        self._restart_clock()
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
                self._restart_clock()
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
        self._log.add(step, metrics)
        line.update(metrics)

    def _evaluate(self, now: StepEvent) -> Mapping[str, float]:
        """Evaluates the model, and ranks the checkpoint of the step."""
        validation = self._run.validation
        assert validation is not None
        metrics = validation.metrics(now.state)
        self._run.lock.check()
        # A line with metrics marks the evaluation as done, so rank before they are written.
        self._saver.rank(now.step, metrics)
        self._run.progress.validated(now.step, validation.text(metrics))
        return metrics

    def _sample(self, now: StepEvent) -> None:
        """Samples from the prompts, except after the last step, which the summary covers."""
        if now.step == self._run.experiment.steps:
            return
        if texts := self._run.sample(now.step, evaluated_model(now.state)):
            now.tell(f"sampled after step {now.step:,}: {texts[0]!r:.200}")

    def _moment(self, step: int, state: State, line: Line) -> StepEvent:
        return StepEvent(step, state, line, self._run.workdir, self._run.tell)

    def _restart_clock(self) -> None:
        """Starts timing the next step."""
        self._clock = time.perf_counter()

    def _read(self, made: _Dispatched) -> Line:
        """Waits for a step and returns its metrics; `None` values are not written.

        The step's time begins at the end of the previous step, or at `_restart_clock`, and includes
        the wait for its batch. `tokens_per_second` and MFU count every position that the devices
        process, including padding.
        """
        if made.line is not None:
            return made.line
        metrics = made.metrics
        if self._devices[0].platform != "cpu":  # NumPy reads CPU arrays without a copy
            metrics = jax.device_get(metrics)
        values = {name: np.asarray(value).item() for name, value in metrics.items()}
        seconds = time.perf_counter() - self._clock
        self._restart_clock()
        valid = int(values.pop("tokens"))
        self._tokens += valid
        positions, flops_per_token = at(self._sizes, made.step - 1)
        tokens_per_second = positions / seconds
        statistics = [device.memory_stats() or {} for device in jax.local_devices()]
        peak = max((each.get("peak_bytes_in_use", 0) for each in statistics), default=0)
        made.line = {
            "step": made.step,
            "loss": values.pop("loss"),
            **values,
            "valid_tokens": valid,
            "tokens": self._tokens,
            "tokens_per_second": tokens_per_second,
            "step_seconds": seconds,
            "data_wait_seconds": made.data_wait_seconds,
            "step_flops": positions * flops_per_token,
            "mfu": mfu(flops_per_token, tokens_per_second, self._devices),
            "peak_memory_bytes": peak or None,
        }
        return made.line

    def _finish(self, line: Line, batch: Batch, newest: State) -> None:
        """Writes the metrics of a step and handles skipped updates."""
        run, step, first = self._run, line["step"], self._beginning.step + 1
        objective = run.experiment.objective
        run.lock.check()
        if step == first:
            if run.primary:
                run.start.record(first, run.lock, **_about(run.experiment))
            run.tell(f"first step after {run.phases.text()}")
        metrics = {name: value for name, value in line.items() if name != "step"}
        metrics["goodput"] = self._goodput.update(step)
        self._log.write(step, metrics | (self._system.at(step) if run.primary else {}))
        run.progress.update(
            step,
            loss=line["loss"],
            seconds=line["step_seconds"],
            tokens_per_second=line["tokens_per_second"],
            mfu=line["mfu"],
            others={name: line[name] for name, each in objective.metrics.items() if each.shown},
            loss_name=objective.loss_name,
        )
        if (message := self._captures.take(line, batch)) is not None:
            run.tell(message)
        if line["skipped_in_a_row"] >= run.experiment.guard.stop_after:
            from runner.training.divergence import stop  # which few runs need

            stop(run.experiment, line, newest, batch, self._saver)


def _about(experiment: Experiment) -> dict[str, Any]:
    """Returns facts for `lmlib.runs.starts.read_about`."""
    weights, objective = experiment.recipe.abstract_model, experiment.objective
    return {
        "parameters": number_of_weights(weights),
        "loss_name": objective.loss_name,
        "metrics": {name: (each.unit, each.text) for name, each in objective.metrics.items()},
    }


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
            run.tell(f"the earlier run's metrics are kept in {log.set_aside}")
        with run.phases.during(Phase.COMPILE):
            compiled = compile_steps(run, beginning.step)
        run.lock.check()
        saver = Saver(run, checkpoints, log, batches, beginning)
        if beginning.is_new_fork:
            saver.save_fork(beginning)
        hyperparameters = experiment.training.hyperparameters

        def make_step(step: int, state: State, batch: Batch) -> tuple[State, Metrics]:
            return at(compiled, step - 1)(state, batch, hyperparameters)

        with _profiler(run, compiled) as profiler:
            traced = profiler.traced(make_step)
            return Loop(run, beginning, traced, batches, saver, log, goodput).run(unevaluated)


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
