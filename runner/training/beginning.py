"""What a run begins with: its newest checkpoint, weights that are there, or new ones."""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import fiddle as fdl
import jax

from lmlib.checkpoint import Checkpoints, DamagedCheckpointError, Restored
from lmlib.checkpoint.folders import steps_in
from lmlib.data.resumable import Resumable
from lmlib.experiment import Experiment
from lmlib.runs.settings import read_settings
from lmlib.state import State
from runner.config.text import changed_paths, difference, settings
from runner.errors import ConfigError, TrainingStopped, user_errors
from runner.monitoring.phases import Phase, Phases
from runner.monitoring.progress import Progress
from runner.training import data_probe
from runner.training.options import Options
from runner.weights.forked import forked
from runner.weights.notes import WEIGHTS_ALONE, Fork, check_notes, fork_in
from runner.weights.reading import completed, weights_of
from runner.weights.reference_model import check_reference_model, reference_model_of
from runner.weights.saved_run import Access
from runner.weights.wanted import Wanted


@dataclasses.dataclass(frozen=True)
class Beginning:
    """The state before the next step.

    Attributes:
      step: steps made.
      tokens: target tokens that they were trained on.
      before_skipped: the newest step that was saved while no update was being skipped.
      initialised_from: whose weights the run began with, if they were not new: another run's, or a
        folder of Hugging Face's.
      damaged: newer checkpoints, which are to be set aside.
      fork: the step of another run that this one was forked from; `None`: it was not.
      is_new_fork: whether the state is that run's, and in no checkpoint of this one yet.
      data: where each process was in the stream of a `Resumable` source; `None` of others.
    """

    state: State
    step: int
    tokens: int
    before_skipped: int | None
    initialised_from: str | None
    damaged: tuple[DamagedCheckpointError, ...] = ()
    fork: Fork | None = None
    is_new_fork: bool = False
    data: list[dict[str, Any]] | None = None

    @property
    def first(self) -> int:
        """The first step that is this run's own."""
        return 1 if self.fork is None else self.fork.step + 1


def begin(
    experiment: Experiment,
    config: Mapping[str, str],
    directory: Path,
    options: Options,
    progress: Progress,
    phases: Phases,
) -> Beginning:
    """Restores, forks, warm-starts or initialises; changes nothing on disk.

    Args:
      config: the settings of what `experiment` was built of.
      directory: of the run's checkpoints; it may be absent.
      phases: is left in what this was: a restore or an initialisation.

    Raises:
      ConfigError: if the run cannot go on from what is there, and why.
    """
    init_from, forks = options.init_from or experiment.init_from, experiment.continue_optimizer
    if options.continue_optimizer is not None:
        forks = options.continue_optimizer
    access = Access(options.trusted, options.init_from, show=progress.message)
    with user_errors():
        target = experiment.abstract_state().changing
        with Checkpoints(directory, read_only=True) as checkpoints:
            newest = checkpoints.newest()
            restores = newest is not None or init_from is not None
            phases.enter(Phase.RESTORE if restores else Phase.INITIALISATION)
            found = None
            if newest is not None and newest > experiment.steps:
                raise ConfigError(
                    f"this run has made {newest:,} steps, and steps is {experiment.steps:,}: set "
                    f"it to {newest:,} or more, or begin in another workdir; init_from=RUN@STEP "
                    "with continue_optimizer forks an earlier step there"
                )
            if newest == WEIGHTS_ALONE:
                if forks:
                    raise ConfigError(
                        f"{directory} holds imported weights, which this run would begin with: "
                        "fork another run in another workdir, or leave continue_optimizer out"
                    )
                init_from = str(directory)
            else:
                found = checkpoints.restore_newest(target, fallback=options.checkpoint_fallback)
        frozen_again = found is not None and experiment.recipe.trained is not None
        if options.init_from is not None and newest is not None and not frozen_again:
            progress.message(
                f"--init_from={options.init_from} is ignored: this run has checkpoints"
            )
        if found is not None:
            check_notes(found, directory)
            return _go_on(experiment, found, fork_in(found.notes), options, access, progress)
        if forks:
            found, fork = forked(
                init_from, experiment.steps, target, config, options.allowed_changes, access
            )
            access = dataclasses.replace(access, init_from=None)
            new = _go_on(experiment, found, fork, options, access, progress)
            return dataclasses.replace(new, before_skipped=None, is_new_fork=True)
        reference_model = reference_model_of(experiment, access)
        if init_from is None:
            state = jax.block_until_ready(experiment.initial_state(reference_model=reference_model))
            return Beginning(state, 0, 0, None, None)
        wanted = Wanted(
            experiment.recipe, experiment.mesh, experiment.data, options.allowed_changes
        )
        model, initialised_from = weights_of(init_from, wanted, access)
    progress.message(f"beginning with the weights of {initialised_from}")
    return Beginning(experiment.initial_state(model, reference_model), 0, 0, None, initialised_from)


def _go_on(
    experiment: Experiment,
    found: Restored,
    fork: Fork | None,
    options: Options,
    access: Access,
    progress: Progress,
) -> Beginning:
    """The state of the checkpoint `found`, whose notes were checked, with what it does not hold."""
    _check_data(experiment, found, "data" in options.allowed_changes, progress)
    _say(found, experiment, fork, progress)
    saved = found.notes
    reference_model = reference_model_of(experiment, access)
    if "model" not in options.allowed_changes:
        check_reference_model(reference_model, saved["reference_model"])
    return Beginning(
        completed(found, experiment, reference_model, access),
        found.step,
        saved["tokens"],
        saved["before_skipped"],
        saved["initialised_from"],
        found.damaged,
        fork,
        data=saved.get("data"),
    )


def check_newest(beginning: Beginning, steps: Sequence[int], directory: Path) -> None:
    """Raises TrainingStopped if one of `steps`, the checkpoints of now, came after `beginning`."""
    damaged = {error.folder.name for error in beginning.damaged}
    newer = [step for step in steps if step > beginning.step and str(step) not in damaged]
    if newer:
        raise TrainingStopped(
            f"another run has saved step {newer[-1]:,} in {directory} while this one began after "
            f"step {beginning.step:,}: see that it has ended; the same command goes on from there"
        )


def check_config(
    cfg: fdl.Config[Experiment],
    target: Callable[[], State],
    workdir: Path,
    allowed_changes: Collection[str],
    progress: Progress,
) -> None:
    """Shows how the config differs from the one that the run in `workdir` was last trained with.

    Compares with settings.json: of the config.json of an old run perhaps not every module is left.
    `target()` is what a checkpoint is restored into.

    Raises:
      ConfigError: if the model is not the one that was trained and "model" is not allowed.
    """
    with user_errors():
        before, now = read_settings(workdir), settings(cfg)
    if before is None or not (changes := difference(before, now)):
        return
    progress.message(f"the config has changed since this run was last trained:\n{changes}")
    changed = changed_paths(before, now)
    if "init_from" in changed and steps_in(workdir / "checkpoints"):
        progress.message("the new init_from is ignored: this run has checkpoints")
    of_the_model = [path for path in changed if path.partition(".")[0] == "model"]
    if of_the_model and "model" not in allowed_changes:
        with user_errors(), Checkpoints(workdir / "checkpoints", read_only=True) as checkpoints:
            newest = checkpoints.newest()
            fits = newest is None or checkpoints.fits(newest, target())
        remedy = ", whose shapes are others: use another workdir"
        if fits:
            remedy = (
                "; use another workdir (--init_from takes them there), or give "
                "--allow_change=model to go on all the same"
            )
        raise ConfigError(
            f"{', '.join(of_the_model)} changed since the run in {workdir} was trained, so its "
            f"weights are those of another model{remedy}"
        )


def _check_data(
    experiment: Experiment, found: Restored, may_change: bool, progress: Progress
) -> None:
    """Checks that the data is what the run was trained on; moves a stream to where it was."""
    source = experiment.batches
    problem = data_probe.changed(source, found.notes["batches"])
    if problem is None and isinstance(source, Resumable):
        try:
            if "data" not in found.notes:
                raise ValueError("it does not say where in the stream it was")
            source.restore(found.step, found.notes["data"])
        except ValueError as error:
            problem = str(error)
    if problem is None:
        return
    if not may_change:
        raise ConfigError(
            f"checkpoint {found.step} was trained on other data: {problem}. Use another workdir, "
            "or give --allow_change=data to go on all the same"
        )
    progress.message(f"going on with other data, since --allow_change=data: {problem}")


def _say(found: Restored, experiment: Experiment, fork: Fork | None, progress: Progress) -> None:
    for damage in found.damaged:
        progress.message(f"WARNING: {damage}")
    if found.damaged:
        progress.message(f"WARNING: going back to the newest sound checkpoint, step {found.step:,}")
    if found.step < experiment.steps:
        doing = "resuming"
        if fork is not None and fork.step == found.step:
            doing = f"forked from {fork.checkpoints}: going on, with its moments and counts,"
        progress.message(f"{doing} after step {found.step:,} of {experiment.steps:,}")
