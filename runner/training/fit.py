"""Training, from a Fiddle config to a result: `fit(cfg, workdir)`."""

import contextlib
import dataclasses
import functools
import os
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import fiddle as fdl
import jax

from lmlib.checkpoint import Checkpoints
from lmlib.data.batch import Batch
from lmlib.data.prefetch import Prefetch
from lmlib.experiment import Every, Experiment
from lmlib.experiment.sources import check_first_rows
from lmlib.experiment.stages import at
from lmlib.inspect.description import describe
from lmlib.inspect.saved_activations import saved_activations
from lmlib.metrics.log import MetricsLog, missing_lines, read_metrics
from lmlib.metrics.sinks import Sinks
from lmlib.metrics.tensorboard import TensorBoard
from lmlib.parallel.axes import PartError
from lmlib.parallel.layout import sharding
from lmlib.report.page import FILE_NAME as REPORT
from lmlib.report.page import leave_page
from lmlib.state import State
from lmlib.terminal.quantities import bytes_text
from lmlib.train import Metrics
from runner.command_line.paths import check_can_be_made
from runner.config.text import settings
from runner.config.values import check_values
from runner.errors import ConfigError, WorkdirLost, chosen_sizes, user_errors
from runner.jax_settings.compilation_cache import keep_compiled_programs
from runner.jax_settings.determinism import check_determinism
from runner.jax_settings.xla_flags import IN_ORDER_ON_CPU, may_wait_for_ever
from runner.monitoring.goodput import GoodputLog
from runner.monitoring.limits import Limits
from runner.monitoring.phases import Phase, Phases
from runner.monitoring.profiling import Profiler, where_the_time_went
from runner.monitoring.progress import Progress
from runner.monitoring.watchdog import Watchdog
from runner.processes.agreement import (
    agreed,
    ends_other_processes,
    from_first,
    require_equal_devices,
    require_same,
    require_same_reads,
    require_same_workdir,
)
from runner.processes.lock import FILE_NAME as LOCK
from runner.processes.lock import WorkdirLock
from runner.processes.workdir import Workdir, opened
from runner.training.beginning import Beginning, begin, check_config, check_newest
from runner.training.captures import Captures
from runner.training.compiled_step import StepPrograms
from runner.training.data_probe import read_by_this_process
from runner.training.loop import Loop
from runner.training.options import Options
from runner.training.periodic import Evaluating, Sampling, Saving, others
from runner.training.recorder import Recorder
from runner.training.report import (
    Summary,
    finished_summary,
    from_json,
    summarise,
    totals_of,
)
from runner.training.samples import Samples
from runner.training.saving import Saver
from runner.training.starts import Start
from runner.training.validation import Validation
from runner.weights.notes import WEIGHTS_ALONE, frozen_note, reference_note

_SMALLER = "make the model or the batch smaller, or take more devices; runner.plan says what fits"


@dataclasses.dataclass(frozen=True)
class Result:
    """What a run leaves.

    Attributes:
      state: the final one, on its mesh.
      metrics: the lines of metrics.jsonl on process 0, none on the others.
      summary: its numbers.
    """

    state: State
    metrics: list[dict[str, Any]]
    summary: Summary


@ends_other_processes()
def fit(
    cfg: fdl.Config[Experiment],
    workdir: str | os.PathLike[str],
    options: Options | None = None,
) -> Result:
    """Trains the experiment of `cfg` to its last step, from the newest checkpoint if there is one.

    Args:
      cfg: builds to an `Experiment`; stays as it is.
      workdir: a folder, or the URL of one in a bucket; receives config.json, settings.json,
        starts/, metrics.jsonl, tensorboard/, checkpoints/, run.log, goodput.json, result.json,
        validation.json, report.html and, where an update was skipped, captures/.
      options: settings that change nothing about what it trains; `None`: `Options()`.

    Raises:
      ConfigError: if the parts of the experiment do not fit each other or into memory, or the
        checkpoint does not fit them, or if another run goes on in `workdir`; before anything
        compiles.
      TrainingStopped: if updates or saves fail one after the other.
      WorkdirLost: if the workdir or its lock was deleted meanwhile, or another host's run has taken
        this one for dead.
      StoppedEarly: if `options.stop` said so.
    """
    require_equal_devices()
    keep_compiled_programs()
    options = options or Options()
    phases = Phases(time.time() if options.started is None else options.started)
    with opened(workdir, _tell) as place:
        return _fit_in(place, cfg, options, phases)


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _fit_in(
    place: Workdir, cfg: fdl.Config[Experiment], options: Options, phases: Phases
) -> Result:
    workdir, primary = place.folder, jax.process_index() == 0
    with agreed(), user_errors():
        check_can_be_made(workdir)
        check_values(cfg)
        start = Start(cfg, workdir, options.experiment_file)
    require_same(start.software)
    with agreed(), user_errors(), chosen_sizes(_SMALLER):
        experiment = fdl.build(cfg)
        experiment.check()
        check_determinism(experiment)
        experiment.check_memory()
        check_first_rows(experiment)
    require_same({"the config": settings(cfg), "the command": options.of_the_command()})
    require_same_reads(lambda: read_by_this_process(experiment))
    shown = primary if options.reports is None else options.reports
    with agreed():
        held = place.lock()
    # The lock ends first: what goes wrong once it is lost is no news of this run's.
    with Progress(experiment.steps, stream=sys.stderr if shown else None) as progress, held as lock:
        if place.url is None:
            require_same_workdir(workdir / LOCK, lock.start)
        with agreed():
            check_config(
                cfg,
                lambda: experiment.abstract_state().changing,
                workdir,
                options.allowed_changes,
                progress,
            )
            start.check_jax_settings(options.allowed_changes, progress.message)
        start.tell_changes(progress.message)
        run = _Run(cfg, experiment, start, place, options, progress, phases, lock, primary)
        with agreed(), user_errors((PartError,)):
            run.announce()
        beginning = begin(
            experiment, settings(cfg), workdir / "checkpoints", options, progress, phases
        )
        with agreed():
            run.programs.check()
        phases.enter(Phase.STARTUP)
        # Before this line, and whatever the user's mistake, nothing is written that stays.
        with run.open_checkpoints() as checkpoints, Watchdog(phases, options.limits, workdir):
            check_newest(beginning, from_first(checkpoints.steps()), workdir / "checkpoints")
            checkpoints.set_aside(beginning.damaged)
            state, summary = beginning.state, None
            if beginning.step >= experiment.steps:
                progress.message(f"this run finished all its {experiment.steps:,} steps before")
                missing = missing_lines(workdir, experiment.steps, beginning.first)
                if primary and missing:
                    progress.message(f"WARNING: {missing}")
                summary = run.earlier_summary()
            made_now = summary is None
            if summary is None:
                if primary:
                    progress.keep(workdir, lock.check)
                try:
                    with (
                        GoodputLog(workdir, phases, lock.check, primary, lock.start) as goodput,
                        run.metrics_log(beginning) as log,
                    ):
                        if goodput.problem is not None:
                            progress.message(f"WARNING: {goodput.problem}")
                        if beginning.step < experiment.steps or run.unevaluated(beginning.step):
                            state = run.make_steps(beginning, checkpoints, goodput, log)
                        phases.enter(Phase.EVALUATION)
                        log.flush()
                        summary = run.summarise(state, goodput)
                except Exception as error:
                    if primary and not isinstance(error, WorkdirLost):
                        leave_page(workdir, progress.message, lock.check)
                    raise
            elif primary:  # sinks may lack what an earlier start could not send
                sinks = [*experiment.sinks, *options.sinks]
                Sinks(sinks, workdir, experiment.steps + 1, progress.message, lock.check).close()
            lock.check()
            if primary and (made_now or not (workdir / REPORT).exists()):
                leave_page(workdir, progress.message, lock.check)
    return Result(state, read_metrics(workdir) if primary else [], summary)


@dataclasses.dataclass(frozen=True)
class _Run:
    """The parts of `fit`, and what all of them need."""

    cfg: fdl.Config[Experiment]
    experiment: Experiment
    start: Start
    place: Workdir
    options: Options
    progress: Progress
    phases: Phases
    lock: WorkdirLock
    primary: bool

    @property
    def workdir(self) -> Path:
        return self.place.folder

    @functools.cached_property
    def validation(self) -> Validation | None:
        return None if self.experiment.validation is None else Validation(self.experiment)

    @functools.cached_property
    def programs(self) -> StepPrograms:
        return StepPrograms(self.cfg, self.experiment, self.options, self.progress, self.primary)

    @property
    def samples(self) -> Samples:
        tell = self.progress.message
        return Samples(self.experiment, self.workdir, self.lock, tell, self.primary)

    def announce(self) -> None:
        experiment = self.experiment
        model = experiment.recipe.made
        decays, groups = experiment.training.optimizer.decays, experiment.recipe.group_of
        self.progress.message(describe(model, experiment.mesh, decays, groups).short())
        for steps, stage in experiment.stages.items():
            kept = saved_activations(stage).bytes_per_device
            since = f" from step {steps.start + 1:,} on" if steps.start else ""
            self.progress.message(
                f"kept for the backward pass{since}: {bytes_text(kept)} on each device"
            )
        if may_wait_for_ever():
            self.progress.message(
                "WARNING: these CPU devices may wait for each other for ever, and XLA then aborts "
                f"the process: add {IN_ORDER_ON_CPU} to XLA_FLAGS before JAX starts"
            )

    def open_checkpoints(self) -> Checkpoints:
        limits, settings = self.options.limits or Limits(), self.experiment.checkpoints
        with user_errors():
            return Checkpoints(
                self.workdir / "checkpoints",
                keep=settings.keep,
                keep_every=settings.keep_every,
                keep_best=settings.keep_best,
                # Imported weights, of which the frozen ones are read again at every start.
                keep_steps=() if self.experiment.recipe.trained is None else (WEIGHTS_ALONE,),
                save_seconds=max(1, round(limits.checkpoint)),
                check=self.lock.check,
            )

    def make_steps(
        self, beginning: Beginning, checkpoints: Checkpoints, goodput: GoodputLog, log: MetricsLog
    ) -> State:
        """The state after the last step."""
        experiment, progress, workdir = self.experiment, self.progress, self.workdir
        # Prefetching begins here, so that it goes on while the step compiles.
        with self._prefetch(beginning.step) as batches:
            if log.missing is not None:
                progress.message(f"WARNING: {log.missing}")
            if log.set_aside is not None:
                progress.message(f"the metrics of the run before are kept in {log.set_aside}")
            with self.phases.during(Phase.COMPILE):
                compiled = self.programs.compiled(beginning.step, self.workdir)
            self.lock.check()
            recorder = Recorder(experiment, log, progress, goodput, beginning.tokens)
            origin = beginning.initialised_from
            saver = Saver(
                experiment,
                checkpoints,
                log,
                progress,
                self.phases,
                origin,
                {
                    "frozen": frozen_note(beginning.state.frozen, experiment.recipe),
                    "reference_model": reference_note(beginning.state.reference_model),
                },
                beginning.before_skipped,
                beginning.fork,
                self.place.sync,
            )
            if beginning.is_new_fork:
                saver.save_fork(beginning.step, beginning.tokens, beginning.state, beginning.data)
            saving = Saving(saver, batches)
            validation, evaluating = self.validation, None
            if validation is not None:
                evaluating = Evaluating(validation, saver, self.lock, progress)
            sampling = Sampling(self.samples, experiment.steps)
            hyperparameters = experiment.training.hyperparameters

            def make_step(step: int, state: State, batch: Batch) -> tuple[State, Metrics]:
                return at(compiled, step - 1)(state, batch, hyperparameters)

            with self._profiler(compiled) as profiler:
                return Loop(
                    experiment=experiment,
                    workdir=workdir,
                    make_step=profiler.traced(make_step),
                    batches=batches,
                    saving=Every(experiment.checkpoints.every, saving, at_end=True),
                    actions=others(experiment, evaluating, sampling, self.options.actions),
                    unfinished=evaluating if self.unevaluated(beginning.step) else None,
                    recorder=recorder,
                    saver=saver,
                    captures=Captures(experiment, workdir, saver, self.lock, origin),
                    phases=self.phases,
                    lock=self.lock,
                    first=beginning.step + 1,
                    begun=functools.partial(self.start.record, lock=self.lock)
                    if self.primary
                    else lambda step: None,
                    repeated=max(goodput.furthest, log.furthest),
                    stop=self.options.stop,
                ).run(beginning.state)

    @contextlib.contextmanager
    def metrics_log(self, beginning: Beginning) -> Iterator[MetricsLog]:
        self.lock.check()  # the log begins with a file of its own
        with MetricsLog(
            self.workdir,
            None if beginning.is_new_fork else beginning.step or None,
            self.primary,
            self._lost_metrics,
            (TensorBoard, *self.experiment.sinks, *self.options.sinks),
            self.progress.message,
            beginning.first,
            self.lock.check,
        ) as log:
            try:
                yield log
            finally:
                self.phases.enter(Phase.TRACKERS)

    def _lost_metrics(self, what: str) -> None:
        """Called before metrics.jsonl is put back; raises WorkdirLost if it is another run's."""
        self.lock.check()
        self.progress.message(f"WARNING: {what} while this run went on: its lines are put back")

    def unevaluated(self, step: int) -> bool:
        """Whether an earlier process ended in the evaluation after `step`, which it had saved."""
        experiment = self.experiment
        due = step % experiment.evaluation.every == 0 or step == experiment.steps
        if experiment.validation is None or not due:
            return False
        lines = read_metrics(self.workdir) if self.primary else []
        return from_first(
            any(line["step"] == step and "evaluation_loss" not in line for line in lines)
        )

    def earlier_summary(self) -> Summary | None:
        """The summary that process 0 finds; file systems of the others may not show it yet."""
        try:
            found = finished_summary(self.workdir, self.experiment.steps)
        except ValueError as error:
            self.progress.message(f"WARNING: {error}: it is made again")
            found = None
        saved = from_first(None if found is None else dataclasses.asdict(found))
        return saved and from_json(saved)

    def summarise(self, state: State, goodput: GoodputLog) -> Summary:
        """Evaluates and samples; result.json comes last, since a run that has one is finished."""
        units, stages = self.experiment.objective.units, self.experiment.stages
        lines = read_metrics(self.workdir) if self.primary else []
        totals = from_first(totals_of(lines, units, stages) if self.primary else None)
        if totals is None:
            raise ConfigError(f"{self.workdir} has a finished checkpoint but no metrics.jsonl")
        summary, by_batch = summarise(self.experiment, state, totals, self.validation)
        if self.primary and by_batch is not None:
            by_batch.save(self.workdir, self.lock.check)
        samples = self.samples.write(self.experiment.steps, state.whole_model)
        summary = dataclasses.replace(
            summary, samples=samples, goodput=goodput.total(), start=self.lock.start
        )
        if self.primary:
            summary.save(self.workdir, self.lock.check)
        return summary

    def _prefetch(self, start: int) -> Prefetch:
        experiment = self.experiment
        rows = sharding("batch seq", experiment.mesh)
        ahead = experiment.prefetch_batches
        return Prefetch(experiment.batches, rows, start, experiment.steps, ahead)

    def _profiler(self, compiled: Mapping[range, jax.stages.Compiled]) -> Profiler:
        """One process traces: the devices of the others do the same."""
        folder, steps = self.workdir / "profile", self.options.profile

        def tell(count: int) -> None:
            assert steps is not None
            last = min(steps[-1], self.experiment.steps) - 1
            stage = self.experiment.at(last)
            told = where_the_time_went(folder, at(compiled, last), stage, count, self.lock.check)
            self.progress.message(told)

        return Profiler(folder, steps if self.primary else None, written=tell)
