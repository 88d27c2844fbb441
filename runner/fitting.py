"""Training, from a Fiddle config to a result: `fit(cfg, workdir)`."""

import dataclasses
import os
import sys
import time
from pathlib import Path
from typing import Any

import fiddle as fdl
import jax
from jax.sharding import NamedSharding

from lmlib import train
from lmlib.activations import saved_activations
from lmlib.checkpoint import Checkpoints
from lmlib.data.batch import Batch
from lmlib.data.prefetch import Prefetch
from lmlib.data.resumable import Resumable
from lmlib.describe import describe
from lmlib.experiment import Experiment
from lmlib.guard import Guard
from lmlib.metrics import MetricsLog, read_metrics
from lmlib.optim import Optimizer
from lmlib.parallel.layout import partition
from runner import configs
from runner.agreement import agreed, from_first, require_same
from runner.config_text import difference, flattened
from runner.errors import ConfigError, ends_other_processes, user_errors
from runner.loop import run_steps
from runner.processes import limited
from runner.profiling import Profiler, dump_program
from runner.progress import Progress, bytes_text, duration_text
from runner.recorder import Recorder
from runner.report import Summary, finished_summary, summarise
from runner.validation import Validation


@dataclasses.dataclass(frozen=True)
class Result:
    """What a run leaves: the final state on its mesh, the lines of metrics.jsonl, the summary."""

    state: train.State
    metrics: list[dict[str, Any]]
    summary: Summary


@ends_other_processes()
def fit(
    cfg: fdl.Config[Experiment],
    workdir: str | os.PathLike[str],
    profile: range | None = None,
    dump_hlo: bool = False,
    reports: bool | None = None,
    data_seconds: float = 600.0,
    checkpoint_fallback: bool = True,
) -> Result:
    """Trains the experiment of `cfg` to its last step, from the newest checkpoint if there is one.

    Args:
      cfg: builds to an `Experiment`; stays as it is.
      workdir: receives config.json, config.txt, metrics.jsonl, tensorboard/, checkpoints/ and
        result.json.
      profile: steps to trace into workdir/profile.
      dump_hlo: whether to write the optimised program into workdir/hlo.
      reports: whether this process shows its progress on stderr; `None`: if it is process 0.
      data_seconds: if it waits longer for a batch, this process ends, with a message.
      checkpoint_fallback: whether to go on from an older checkpoint if the newest is damaged.

    Raises:
      ConfigError: if the parts of the experiment do not fit each other, or the checkpoint does not
        fit them; before anything compiles.
    """
    workdir = Path(workdir)
    primary = jax.process_index() == 0
    with agreed(), user_errors():
        experiment = fdl.build(cfg)
        experiment.check()
    require_same("the config", flattened(cfg))
    shown = primary if reports is None else reports
    with (
        Progress(experiment.steps, stream=sys.stderr if shown else None) as progress,
        Checkpoints(
            workdir / "checkpoints",
            keep=experiment.keep_checkpoints,
            keep_every=experiment.keep_checkpoints_every,
            keep_best=experiment.keep_best_checkpoints,
        ) as checkpoints,
    ):
        if primary:
            _show_changes(cfg, workdir, progress)
        optimizer = experiment.optimizer(experiment.steps)
        _announce(experiment, optimizer, progress)
        state, start, tokens = _begin(
            experiment, optimizer, checkpoints, checkpoint_fallback, progress
        )
        if primary:
            configs.save(cfg, workdir)
        source = experiment.validation
        validation = None if source is None else Validation(source, experiment)
        with (
            MetricsLog(workdir, start or None, enabled=primary) as log,
            Profiler(workdir, profile) as profiler,
        ):
            if start < experiment.steps:
                # Prefetching begins here, so that it goes on while the step compiles.
                with _LimitedPrefetch(experiment, start, data_seconds) as batches:
                    compiled = _compile(experiment, optimizer, state, progress)
                    if dump_hlo and primary:
                        progress.message(dump_program(compiled, workdir))
                    recorder = Recorder(experiment, log, progress, tokens)
                    state = run_steps(
                        experiment,
                        compiled,
                        state,
                        checkpoints,
                        batches,
                        recorder,
                        validation,
                        profiler,
                    )
        checkpoints.wait()
        metrics = from_first(read_metrics(workdir))
        summary = None
        if start >= experiment.steps:
            progress.message(f"this run finished all its {experiment.steps:,} steps before")
            summary = _finished_summary(workdir, experiment.steps)
        if summary is None:
            if not metrics:
                raise ConfigError(f"{workdir} has a finished checkpoint but no metrics.jsonl")
            summary = summarise(experiment, state, metrics, validation)
            if primary:
                summary.save(workdir)
    return Result(state, metrics, summary)


def _show_changes(cfg: fdl.Config[Experiment], workdir: Path, progress: Progress) -> None:
    """Says how the config differs from the one that the workdir was begun with."""
    if not (workdir / "config.json").exists():
        return
    try:
        changed = difference(configs.load(str(workdir)), cfg)
    except ConfigError as error:
        progress.message(f"the config of the run so far cannot be read: {error}")
    else:
        if changed:
            progress.message(f"the config has changed since this run began:\n{changed}")


def _announce(experiment: Experiment, optimizer: Optimizer, progress: Progress) -> None:
    model = experiment.abstract_model()
    progress.message(describe(model, experiment.mesh, optimizer.decays).short())
    kept = saved_activations(experiment).bytes_per_device
    progress.message(f"kept for the backward pass: {bytes_text(kept)} on each device")


def _begin(
    experiment: Experiment,
    optimizer: Optimizer,
    checkpoints: Checkpoints,
    fallback: bool,
    progress: Progress,
) -> tuple[train.State, int, int]:
    """The state to go on from, the steps already made, and the tokens they were trained on."""
    made = experiment.make_model, optimizer, experiment.mesh, experiment.guard or Guard()
    with user_errors():
        found = checkpoints.restore_newest(train.abstract_state(*made), fallback=fallback)
        if found is None:
            return train.init(*made), 0, 0
        if isinstance(experiment.data, Resumable):
            if "data" not in found.progress:
                raise ConfigError(
                    f"checkpoint {found.step} does not say where the data stream was: it was saved "
                    "with another kind of data source; train on that, or use another workdir"
                )
            experiment.data.restore(found.step, found.progress["data"])
    for damage in found.damaged:
        progress.message(f"WARNING: {damage}")
    if found.damaged:
        progress.message(f"WARNING: going back to the newest sound checkpoint, step {found.step:,}")
    if found.step < experiment.steps:
        progress.message(f"resuming after step {found.step:,} of {experiment.steps:,}")
    return found.state, found.step, found.progress["tokens"]


class _LimitedPrefetch(Prefetch):
    """The experiment's batches from step `start` on, each within `data_seconds`."""

    def __init__(self, experiment: Experiment, start: int, data_seconds: float):
        rows = NamedSharding(experiment.mesh, partition("batch seq"))
        super().__init__(
            experiment.data, rows, start, experiment.steps, experiment.prefetch_batches
        )
        self._data_seconds = data_seconds

    def __next__(self) -> tuple[int, Batch]:
        with limited(self._data_seconds, "waiting for its data source"):
            return super().__next__()


def _finished_summary(workdir: Path, steps: int) -> Summary | None:
    """What process 0 finds: the file systems of the others may not show it yet."""
    found = finished_summary(workdir, steps)
    saved = from_first(None if found is None else dataclasses.asdict(found))
    return saved and Summary(**{**saved, "samples": tuple(saved["samples"])})


def _compile(
    experiment: Experiment, optimizer: Optimizer, state: train.State, progress: Progress
) -> jax.stages.Compiled:
    data = experiment.data
    batch = train.abstract_batch(data.batch_size, data.sequence_length, experiment.mesh)
    began = time.perf_counter()
    compiled = train.compile_step(
        state,
        batch,
        optimizer,
        experiment.mesh,
        experiment.microbatches,
        experiment.z_loss,
        experiment.guard or Guard(),
    )
    seconds = time.perf_counter() - began
    progress.message(f"compiled the step in {duration_text(seconds)}")
    memory = compiled.memory_analysis()
    if memory is not None:  # not every platform says
        progress.message(
            f"on each device it needs {bytes_text(memory.argument_size_in_bytes)} for state and "
            f"batch and {bytes_text(memory.temp_size_in_bytes)} for temporaries"
        )
    return compiled
