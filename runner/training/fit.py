"""Training, from a Fiddle config to a result: `fit(cfg, workdir)`."""

import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import fiddle as fdl
import jax

from lmlib.checkpoint import Checkpoints
from lmlib.data.batch import Batch
from lmlib.data.prefetch import Prefetch
from lmlib.experiment import Experiment
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
from runner.training.compiled_step import StepPrograms
from runner.training.data_probe import read_by_this_process
from runner.training.loop import Loop
from runner.training.options import Options
from runner.training.recorder import Recorder
from runner.training.report import (
    Summary,
    finished_summary,
    from_json,
    summarise,
    totals_of,
)
from runner.training.run import Run
from runner.training.saving import Saver
from runner.training.starts import Start
from runner.training.validation import Validation
from runner.weights.notes import WEIGHTS_ALONE

if TYPE_CHECKING:
    from runner.training.samples import Samples

_SMALLER = "make the model or the batch smaller, or take more devices; runner.plan says what fits"


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of a run.

    Attributes:
      state: the final state, on its mesh.
      metrics: the lines of metrics.jsonl on process 0, none on the others.
      summary: the run's numbers.
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
      options: settings that do not change the trained weights; `None`: `Options()`.

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
    with opened(workdir, lambda text: print(text, file=sys.stderr, flush=True)) as place:
        return _fit_in(place, cfg, options, phases)


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
    # The lock ends first, so that errors after its loss are not reported as this run's.
    with Progress(experiment.steps, stream=sys.stderr if shown else None) as progress, held as lock:
        run = Run(cfg, experiment, options, place, progress, phases, lock, primary)
        if place.url is None:
            require_same_workdir(workdir / LOCK, lock.start)
        with agreed():
            check_config(
                cfg,
                lambda: experiment.abstract_state().changing,
                workdir,
                options.allowed_changes,
                run.tell,
            )
            start.check_jax_settings(options.allowed_changes, run.tell)
        start.tell_changes(run.tell)
        programs = StepPrograms(run)
        with agreed(), user_errors((PartError,)):
            _announce(run)
        beginning = begin(run)
        with agreed():
            programs.check()
        phases.enter(Phase.STARTUP)
        # Nothing is written before this line, so a refused run leaves the workdir as it was.
        with _open_checkpoints(run) as checkpoints, Watchdog(phases, options.limits, workdir):
            check_newest(beginning, from_first(checkpoints.steps()), run.checkpoints)
            checkpoints.set_aside(beginning.damaged)
            state, summary = beginning.state, None
            if beginning.step >= experiment.steps:
                run.tell(f"this run finished all its {experiment.steps:,} steps before")
                missing = missing_lines(workdir, experiment.steps, beginning.first)
                if primary and missing:
                    run.tell(f"WARNING: {missing}")
                summary = _earlier_summary(run)
            made_now = summary is None
            if summary is None:
                if primary:
                    progress.keep(workdir, lock.check)
                try:
                    state, summary = _train(run, start, beginning, checkpoints, programs)
                except Exception as error:
                    if primary and not isinstance(error, WorkdirLost):
                        leave_page(workdir, run.tell, lock.check)
                    raise
            elif primary:  # an earlier start may have failed to send metrics
                sinks = [*experiment.sinks, *options.sinks]
                Sinks(sinks, workdir, experiment.steps + 1, run.tell, lock.check).close()
            lock.check()
            if primary and (made_now or not (workdir / REPORT).exists()):
                leave_page(workdir, run.tell, lock.check)
    return Result(state, read_metrics(workdir) if primary else [], summary)


def _announce(run: Run) -> None:
    experiment = run.experiment
    decays, groups = experiment.training.optimizer.decays, experiment.recipe.group_of
    run.tell(describe(experiment.recipe.made, experiment.mesh, decays, groups).short())
    for steps, stage in experiment.stages.items():
        kept = bytes_text(saved_activations(stage).bytes_per_device)
        since = f" from step {steps.start + 1:,} on" if steps.start else ""
        run.tell(f"kept for the backward pass{since}: {kept} on each device")
    if may_wait_for_ever():
        run.tell(
            "WARNING: these CPU devices may wait for each other for ever, and XLA then aborts "
            f"the process: add {IN_ORDER_ON_CPU} to XLA_FLAGS before JAX starts"
        )


def _open_checkpoints(run: Run) -> Checkpoints:
    limits, kept = run.options.limits or Limits(), run.experiment.checkpoints
    with user_errors():
        return Checkpoints(
            run.checkpoints,
            keep=kept.keep,
            keep_every=kept.keep_every,
            keep_best=kept.keep_best,
            # Imported weights stay: every start reads the frozen ones again.
            keep_steps=() if run.experiment.recipe.trained is None else (WEIGHTS_ALONE,),
            save_seconds=max(1, round(limits.checkpoint)),
            check=run.lock.check,
        )


def _train(
    run: Run,
    start: Start,
    beginning: Beginning,
    checkpoints: Checkpoints,
    programs: StepPrograms,
) -> tuple[State, Summary]:
    """Makes the steps that are left, then evaluates and samples; returns the last state."""
    experiment, workdir = run.experiment, run.workdir
    validation = None if experiment.validation is None else Validation(experiment)
    samples = _samples(run) if experiment.samples.prompts else None
    state = beginning.state
    with (
        GoodputLog(workdir, run.phases, run.lock.check, run.primary, run.lock.start) as goodput,
        _metrics_log(run, beginning) as log,
    ):
        if goodput.problem is not None:
            run.tell(f"WARNING: {goodput.problem}")
        unevaluated = _unevaluated(run, beginning.step)
        if beginning.step < experiment.steps or unevaluated:
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
                    state = Loop(
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
        run.phases.enter(Phase.EVALUATION)
        log.flush()
        lines = read_metrics(workdir) if run.primary else []
        units = experiment.objective.units
        totals = from_first(totals_of(lines, units, experiment.stages) if run.primary else None)
        if totals is None:
            raise ConfigError(f"{workdir} has a finished checkpoint but no metrics.jsonl")
        summary, by_batch = summarise(experiment, state, totals, validation)
        if run.primary and by_batch is not None:
            by_batch.save(workdir, run.lock.check)
        texts = () if samples is None else samples.write(experiment.steps, state.whole_model)
        summary = dataclasses.replace(
            summary, samples=texts, goodput=goodput.total(), start=run.lock.start
        )
        if run.primary:  # last, since a run with a result.json is finished
            summary.save(workdir, run.lock.check)
        return state, summary


def _samples(run: Run) -> "Samples":
    from runner.training.samples import Samples  # here, since it imports all of lmlib.generate

    return Samples(run)


@contextlib.contextmanager
def _metrics_log(run: Run, beginning: Beginning) -> Iterator[MetricsLog]:
    def lost(what: str) -> None:
        """Called before metrics.jsonl is put back; raises WorkdirLost if it is another run's."""
        run.lock.check()
        run.tell(f"WARNING: {what} while this run went on: its lines are put back")

    run.lock.check()  # the log begins with a file of its own
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


def _unevaluated(run: Run, step: int) -> bool:
    """True if an earlier process ended in the evaluation after `step`, which it had saved."""
    experiment = run.experiment
    due = step % experiment.evaluation.every == 0 or step == experiment.steps
    if experiment.validation is None or not due:
        return False
    lines = read_metrics(run.workdir) if run.primary else []
    return from_first(any(line["step"] == step and "evaluation_loss" not in line for line in lines))


def _earlier_summary(run: Run) -> Summary | None:
    """The summary that process 0 finds; file systems of the others may not show it yet."""
    try:
        found = finished_summary(run.workdir, run.experiment.steps)
    except ValueError as error:
        run.tell(f"WARNING: {error}: it is made again")
        found = None
    saved = from_first(None if found is None else dataclasses.asdict(found))
    return saved and from_json(saved)


def _profiler(run: Run, compiled: Mapping[range, jax.stages.Compiled]) -> Profiler:
    """One process traces, since the devices of the others do the same."""
    folder, steps, experiment = run.workdir / "profile", run.options.profile, run.experiment

    def tell(count: int) -> None:
        assert steps is not None
        last = min(steps[-1], experiment.steps) - 1
        program, stage = at(compiled, last), experiment.at(last)
        run.tell(where_the_time_went(folder, program, stage, count, run.lock.check))

    return Profiler(folder, steps if run.primary else None, written=tell)
