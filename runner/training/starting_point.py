"""The initial state of a run: its newest checkpoint, given weights, or new weights."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from lmlib.checkpoint import Checkpoints, DamagedCheckpointError, Restored
from lmlib.checkpoint.folders import steps_in
from lmlib.data.resumable import Resumable
from lmlib.runs.settings import read_settings
from lmlib.state import State
from runner.config.text import changed_paths, difference, settings
from runner.errors import ConfigError, TrainingStopped, user_errors
from runner.monitoring.phases import Phase
from runner.training import data_probe
from runner.training.run import Run
from runner.weights.notes import WEIGHTS_ALONE, Fork, check_notes, check_same_model

if TYPE_CHECKING:
    from runner.weights.initial_weights import InitialWeights


@dataclasses.dataclass(frozen=True)
class StartingPoint:
    """The state of a run before its next step.

    Attributes:
      step, tokens: completed steps and their target tokens.
      before_skipped: the newest checkpoint that was saved while no updates were skipped, or `None`.
      initialised_from: the run or Hugging Face folder of the initial weights; `None` if new.
      damaged: newer checkpoints that must be set aside.
      fork: the step of another run that this run was forked from; `None` if it is not a fork.
      is_new_fork: True if the state comes from the other run and is not saved in this run yet.
      data: each process's position in the stream of a `Resumable` source; otherwise `None`.
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
        """The first step made by this run, after the steps of the run that it forks."""
        return 1 if self.fork is None else self.fork.step + 1


def find_start(run: Run) -> StartingPoint:
    """Restores, forks, warm-starts or initialises the state; changes nothing on disk.

    Enters the restore or initialisation phase of the run. Raises ConfigError if the run cannot
    continue from its checkpoints; the message says why.
    """
    experiment, options, directory = run.experiment, run.options, run.checkpoints
    init_from, forks = options.init_from or experiment.init_from, experiment.continue_optimizer
    if options.continue_optimizer is not None:
        forks = options.continue_optimizer
    with user_errors():
        target = experiment.abstract_state().changing
        with Checkpoints(directory, read_only=True) as checkpoints:
            newest = checkpoints.newest()
            restores = newest is not None or init_from is not None
            run.phases.enter(Phase.RESTORE if restores else Phase.INITIALISATION)
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
            run.tell(f"--init_from={options.init_from} is ignored: this run has checkpoints")
        given = _given(run, found is None and (init_from is not None or forks))
        if found is not None:
            check_notes(found, directory)
            fork = found.notes.get("forked_from")
            fork = fork and Fork(**fork)
            return _go_on(run, found, fork, given, options.init_from)
        if forks:
            assert given is not None
            found, fork = given.fork(init_from, settings(run.cfg))
            new = _go_on(run, found, fork, given, None)
            return dataclasses.replace(new, before_skipped=None, is_new_fork=True)
        name: str | None = None
        if given is None:
            state = experiment.initial_state()
        else:
            state, name = given.initial_state(init_from)
        jax.block_until_ready(state)
    if name is not None:
        run.tell(f"beginning with the weights of {name}")
    return StartingPoint(state, 0, 0, None, name)


def _given(run: Run, begins_with_them: bool) -> "InitialWeights | None":
    """Returns a reader for existing weights that the run needs; `None` if it needs none."""
    experiment, options = run.experiment, run.options
    has_frozen = experiment.recipe.trained is not None
    if not (begins_with_them or has_frozen or experiment.objective.reference_model is not None):
        return None
    # Imported here because it loads every model family, which runs with new weights don't need.
    from runner.weights.initial_weights import InitialWeights
    from runner.weights.target import LoadOptions

    load_options = LoadOptions(options.trusted, show=run.tell)
    return InitialWeights(experiment, load_options, options.allowed_changes)


def _go_on(
    run: Run,
    found: Restored,
    fork: Fork | None,
    given: "InitialWeights | None",
    init_from: str | None,
) -> StartingPoint:
    """Returns the state of the checkpoint `found`, completed with weights that it lacks."""
    _check_data(run, found)
    _say(run, found, fork)
    notes = found.notes
    return StartingPoint(
        found.state if given is None else given.complete(found, init_from),
        found.step,
        notes["tokens"],
        notes["before_skipped"],
        notes["initialised_from"],
        found.damaged,
        fork,
        data=notes.get("data"),
    )


def check_newest(beginning: StartingPoint, steps: Sequence[int], directory: Path) -> None:
    """Checks that no other run has saved a checkpoint since `beginning` was read."""
    damaged = {error.folder.name for error in beginning.damaged}
    newer = [step for step in steps if step > beginning.step and str(step) not in damaged]
    if newer:
        raise TrainingStopped(
            f"another run has saved step {newer[-1]:,} in {directory} while this one began after "
            f"step {beginning.step:,}: once it has ended, give the same command to continue"
        )


def check_config(run: Run) -> None:
    """Reports how the config differs from the config of the previous start.

    It compares settings.json, since the modules that an old config.json names may no longer exist.
    """
    with user_errors():
        before, now = read_settings(run.workdir), settings(run.cfg)
    if before is None or not (changes := difference(before, now)):
        return
    run.tell(f"the config has changed since this run was last trained:\n{changes}")
    if "init_from" in changed_paths(before, now) and steps_in(run.checkpoints):
        run.tell("the new init_from is ignored: this run has checkpoints")

    def weights_fit() -> bool:
        with user_errors(), Checkpoints(run.checkpoints, read_only=True) as checkpoints:
            newest, target = checkpoints.newest(), run.experiment.abstract_state().changing
            return newest is None or checkpoints.fits(newest, target)

    name, allowed = f"the run in {run.workdir}", run.options.allowed_changes
    check_same_model(name, before, now, allowed, weights_fit)


def _check_data(run: Run, found: Restored) -> None:
    """Checks that the data has not changed; moves a stream to its saved position."""
    source = run.experiment.batches
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
    if "data" not in run.options.allowed_changes:
        raise ConfigError(
            f"checkpoint {found.step} was trained on other data: {problem}. Use another workdir, "
            "or continue with --allow_change=data"
        )
    run.tell(f"continuing with other data, since --allow_change=data was given: {problem}")


def _say(run: Run, found: Restored, fork: Fork | None) -> None:
    for damage in found.damaged:
        run.tell(f"WARNING: {damage}")
    if found.damaged:
        run.tell(f"WARNING: using the newest sound checkpoint, step {found.step:,}")
    if found.step < run.experiment.steps:
        doing = "resuming"
        if fork is not None and fork.step == found.step:
            doing = f"forked from {fork.checkpoints}: continuing, with its moments and counts,"
        run.tell(f"{doing} after step {found.step:,} of {run.experiment.steps:,}")
