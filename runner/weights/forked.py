"""A step of another run as the beginning of a run: weights, moments and counts, all that it was."""

import dataclasses
from collections.abc import Collection, Mapping

from lmlib.checkpoint import Checkpoints, Restored
from lmlib.checkpoint.removal import reading
from lmlib.runs.settings import read_settings
from lmlib.state import State
from lmlib.storage.bucket.copies import shown
from runner.config.references import HuggingFace, located
from runner.config.text import changed_paths
from runner.errors import ConfigError, in_words, user_errors
from runner.processes.agreement import agreed
from runner.weights.notes import WEIGHTS_ALONE, Fork, check_notes
from runner.weights.saved_run import Access, SavedRun, opened


def forked(
    reference: str | None,
    steps: int,
    target: State,
    config: Mapping[str, str],
    allowed_changes: Collection[str],
    access: Access,
) -> tuple[Restored, Fork]:
    """The state at the step of another run that `reference` means, and where that is.

    Args:
      reference: `RUN@STEP`, as in `located`.
      steps: those of the fork.
      target: as in `Checkpoints.restore`, of the fork.
      config: the fork's settings.
      allowed_changes: "model": settings of the model may be others, where its arrays fit.

    Raises:
      ConfigError: if it names no step of a run, that step is damaged, holds another model or
        another optimizer's state, or is not before the fork's last step.
    """
    with agreed():
        if reference is None:
            raise ConfigError("continue_optimizer forks a run: say which, with init_from=RUN@STEP")
        found = located(reference)
        if isinstance(found, HuggingFace):
            raise ConfigError(
                f"{found.name} holds weights and no optimizer's state to continue: leave "
                "continue_optimizer out to begin with its weights"
            )
        run = opened(found, dataclasses.replace(access, init_from=None))
        _check_step(found.step, run, steps)
        if "model" not in allowed_changes:
            _check_model(run, config, target)
    with reading(run.folder), Checkpoints(run.checkpoints, read_only=True) as checkpoints:
        try:
            state, notes = checkpoints.restore(run.step, target)
        except (ValueError, OSError) as error:
            raise ConfigError(
                f"{run.name} cannot be forked: {in_words(error)}. Without continue_optimizer a run "
                "begins with its weights alone"
            ) from error
    found_there = Restored(run.step, state, notes, ())
    check_notes(found_there, run.checkpoints)
    return found_there, Fork(shown(run.checkpoints.absolute()), run.step)


def _check_step(step: int | None, run: SavedRun, steps: int) -> None:
    """Raises ConfigError if a fork to `steps` cannot begin with `run`; `step` is the one named."""
    if step is None:
        raise ConfigError(
            f"{run.workdir} may save newer steps, and a fork begins where it began whenever it is "
            f"started again: name the step, as in init_from={run.name}"
        )
    if step == WEIGHTS_ALONE:
        raise ConfigError(
            f"{run.name} holds weights and no optimizer's state to continue: leave "
            "continue_optimizer out to begin with its weights"
        )
    if steps <= step:
        raise ConfigError(
            f"{run.name} has made {step:,} steps, and steps, which counts these too, is {steps:,}: "
            "set it to more"
        )


def _check_model(run: SavedRun, config: Mapping[str, str], target: State) -> None:
    """Raises ConfigError if the model's settings in `config` are not those of `run`."""
    with user_errors():
        before = read_settings(run.workdir)
    changed = [] if before is None else changed_paths(before, config)
    of_the_model = [path for path in changed if path.partition(".")[0] == "model"]
    if of_the_model:
        with Checkpoints(run.checkpoints, read_only=True) as checkpoints:
            fits = checkpoints.fits(run.step, target)
        remedy = "; --allow_change=model goes on all the same" if fits else " with other shapes"
        raise ConfigError(
            f"{run.name} cannot be forked: {', '.join(of_the_model)} is not what it was there, so "
            f"its weights are those of another model{remedy}"
        )
