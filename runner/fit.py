"""Training, from a Fiddle config to a result: `fit(cfg, workdir)`."""

import contextlib
import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

import fiddle as fdl
import jax
from jax.sharding import NamedSharding
from lmlib.metrics import MetricsLog
from runner.profiling import Profiler, dump_optimised_program
from runner.progress import Progress, bytes_text

from lmlib import train
from lmlib.activations import saved_activations
from lmlib.checkpoint import Checkpoints
from lmlib.data.prefetch import Prefetch
from lmlib.describe import describe
from lmlib.evaluate import Evaluator
from lmlib.experiment import Experiment
from lmlib.parallel.layout import partition
from runner import configs, report
from runner.recorder import Recorder


@dataclasses.dataclass(frozen=True)
class Result:
    """What a run leaves: the final state on its mesh, the lines of metrics.jsonl, the summary."""

    state: train.State
    metrics: list[dict[str, Any]]
    summary: report.Summary


def fit(
    cfg: fdl.Config[Experiment],
    workdir: str | os.PathLike[str],
    profile: range | None = None,
    dump_hlo: bool = False,
) -> Result:
    """Trains the experiment of `cfg` until its last step, from the newest checkpoint if any.

    Args:
      cfg: builds to an `Experiment`; not changed.
      workdir: receives config.json, config.txt, metrics.jsonl, tensorboard/, checkpoints/ and
        result.json.
      profile: steps to trace into workdir/profile.
      dump_hlo: writes the optimised program into workdir/hlo.

    Raises:
      ConfigError: if the parts of the experiment do not fit each other, or the checkpoint does not
        fit the experiment; before anything compiles.
    """
    workdir = Path(workdir)
    with configs.user_errors():
        experiment = fdl.build(cfg)
        experiment.check()
    primary = jax.process_index() == 0
    progress = Progress(experiment.steps, stream=sys.stderr if primary else None)
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.closing(progress))
        checkpoints = stack.enter_context(
            Checkpoints(workdir / "checkpoints", keep=experiment.keep_checkpoints)
        )
        if primary:
            _save_config(cfg, workdir, progress)
        progress.message(describe(experiment.abstract_model(), experiment.mesh).short())
        progress.message(
            "the backward pass keeps "
            f"{bytes_text(saved_activations(experiment).bytes_per_device)} of activations "
            "on each device"
        )
        optimizer = experiment.optimizer(experiment.steps)
        target = train.abstract_state(experiment.make_model, optimizer, experiment.mesh)
        start = checkpoints.newest()
        if start is None:
            state, tokens = train.init(experiment.make_model, optimizer, experiment.mesh), 0
        else:
            with configs.user_errors():
                state, saved = checkpoints.restore(start, target)
            tokens = saved["tokens"]
            progress.message(f"resuming at step {start} of {experiment.steps}")
        log = stack.enter_context(MetricsLog(workdir, start, enabled=primary))
        recorder = Recorder(experiment, log, progress, tokens)
        evaluator = (
            Evaluator(experiment.validation, experiment.mesh) if experiment.validation else None
        )
        if (start or 0) < experiment.steps:
            compiled = _compile(experiment, target, optimizer, progress)
            if dump_hlo and primary:
                progress.message(dump_optimised_program(compiled, workdir))
            profiler = stack.enter_context(Profiler(workdir, profile))
            state = _train(
                experiment, compiled, state, start or 0, checkpoints, recorder, evaluator, profiler
            )
        ...


def _train(
    experiment: Experiment,
    compiled: Any,
    state: train.State,
    start: int,
    checkpoints: Checkpoints,
    recorder: Recorder,
    evaluator: Evaluator | None,
    profiler: Profiler,
) -> train.State:
    rows = NamedSharding(experiment.mesh, partition("batch seq"))
    unread = None
    with Prefetch(experiment.data, rows, start, experiment.steps) as batches:
        recorder.restart_clock()
        for index, batch in batches:
            step = index + 1
            profiler.before(step)
            state, metrics = compiled(state, batch)
            profiler.after(step, wait_for=metrics)
            if unread is not None:
                # Read while the next step runs, so that the devices never wait for the host.
                recorder.write(recorder.read(*unread))
            unread = (step, metrics)
