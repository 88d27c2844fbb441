"""Trains from a Fiddle config: `fit(cfg, workdir)`."""

import dataclasses
import os
import sys
import time
from typing import Any

import fiddle as fdl
import jax

from lmlib.checkpoint import Checkpoints
from lmlib.experiment import Experiment
from lmlib.experiment.sources import check_first_rows
from lmlib.metrics.log import missing_lines, read_metrics
from lmlib.metrics.sinks import Sinks
from lmlib.parallel.axes import PartError
from lmlib.state import State
from runner.command_line.paths import check_can_be_made
from runner.config.overrides import check_values
from runner.config.text import settings
from runner.errors import WorkdirLost, chosen_sizes, user_errors
from runner.jax_settings.compilation_cache import keep_compiled_programs
from runner.jax_settings.determinism import check_determinism
from runner.monitoring.goodput import GoodputLog
from runner.monitoring.phases import Phase, Phases
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
from runner.processes.workdir import Workdir, opened
from runner.training.data_probe import read_by_this_process
from runner.training.loop import check_profile, make_steps, metrics_log
from runner.training.options import Options
from runner.training.report import Summary, earlier_summary, finish, leave_report
from runner.training.run import Run
from runner.training.saving import open_checkpoints
from runner.training.starting_point import StartingPoint, check_config, check_newest, find_start
from runner.training.starts import Start

_SMALLER = "make the model or the batch smaller, or take more devices; runner.plan says what fits"


@dataclasses.dataclass(frozen=True)
class Result:
    """The final state, the lines of metrics.jsonl (on process 0), and the final metrics."""

    state: State
    metrics: list[dict[str, Any]]
    summary: Summary


@ends_other_processes()
def fit(
    cfg: fdl.Config[Experiment], workdir: str | os.PathLike[str], options: Options | None = None
) -> Result:
    """Trains the experiment in `cfg` to its last step, resuming from the newest checkpoint.

    Args:
      cfg: builds an `Experiment`; it is not modified.
      workdir: a folder, or the URL of one in a bucket; receives config.json, settings.json,
        starts/, metrics.jsonl, tensorboard/, checkpoints/, run.log, goodput.json, result.json,
        validation.json, report.html and, after skipped updates, captures/.
      options: settings that do not change the trained weights; `None`: `Options()`.

    Raises:
      ConfigError: before anything compiles, if parts of the experiment are incompatible with each
        other or with the checkpoint, if they exceed the memory, or if another run is active in
        `workdir`.
      TrainingStopped: if too many updates or saves in a row fail.
      WorkdirLost: if the workdir or its lock was deleted during the run, or a run on another host
        took the workdir over because this run seemed dead.
      StoppedEarly: if `options.stop` asked the run to stop.
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
    # The lock is released before the progress log closes, so the loss of the lock replaces any
    # other error in the log.
    with Progress(experiment.steps, stream=sys.stderr if shown else None) as progress, held as lock:
        run = Run(cfg, experiment, options, start, place, progress, phases, lock, primary)
        if place.url is None:
            require_same_workdir(workdir / LOCK, lock.start)
        with agreed():
            check_config(run)
            start.check_jax_settings(options.allowed_changes, run.tell)
        start.tell_changes(run.tell)
        with agreed(), user_errors((PartError,)):
            run.announce()
            check_profile(run)
        beginning = find_start(run)
        phases.enter(Phase.STARTUP)
        # Nothing is written before this line, so a rejected run leaves the workdir unchanged.
        with open_checkpoints(run) as checkpoints, Watchdog(phases, options.limits, workdir):
            check_newest(beginning, from_first(checkpoints.steps()), run.checkpoints)
            checkpoints.set_aside(beginning.damaged)
            state, summary = beginning.state, None
            if beginning.step >= experiment.steps:
                run.tell(f"this run has already finished all its {experiment.steps:,} steps")
                missing = missing_lines(workdir, experiment.steps, beginning.first)
                if primary and missing:
                    run.tell(f"WARNING: {missing}")
                summary = earlier_summary(run)
            made_now = summary is None
            if summary is None:
                if primary:
                    progress.keep(workdir, lock.check)
                try:
                    state, summary = _train(run, beginning, checkpoints)
                except Exception as error:
                    if primary and not isinstance(error, WorkdirLost):
                        leave_report(run)
                    raise
            elif primary:  # an earlier start may have failed to upload metrics
                sinks = [*experiment.sinks, *options.sinks]
                Sinks(sinks, workdir, experiment.steps + 1, run.tell, lock.check).close()
            lock.check()
            if primary:
                leave_report(run, replace=made_now)
    return Result(state, read_metrics(workdir) if primary else [], summary)


def _train(run: Run, beginning: StartingPoint, checkpoints: Checkpoints) -> tuple[State, Summary]:
    """Runs the remaining steps, then evaluates and samples."""
    check, by = run.lock.check, run.lock.start
    with (
        GoodputLog(run.workdir, run.phases, check, run.primary, by) as goodput,
        metrics_log(run, beginning) as log,
    ):
        if goodput.problem is not None:
            run.tell(f"WARNING: {goodput.problem}")
        state = make_steps(run, beginning, checkpoints, goodput, log)
        run.phases.enter(Phase.EVALUATION)
        log.flush()
        return state, finish(run, state, goodput)
