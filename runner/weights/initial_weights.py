"""Weights from outside a run: initial and frozen weights, reference models, states of forks."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from lmlib.checkpoint import Checkpoints, Restored
from lmlib.checkpoint.folders import reading
from lmlib.experiment import Experiment
from lmlib.runs.settings import read_settings
from lmlib.state import State
from lmlib.storage.local_folder import shown
from runner.config.references import RunReference, resolve
from runner.errors import ConfigError, error_text, user_errors
from runner.processes.agreement import agreed
from runner.weights.models import SavedRun, frozen_weights, open_model, read_weights
from runner.weights.notes import WEIGHTS_ALONE, Fork, check_notes, check_same_model, reference_note
from runner.weights.target import LoadOptions, LoadTarget

_NO_STATE = "holds no optimizer state: leave continue_optimizer out to begin with its weights"


@dataclasses.dataclass(frozen=True)
class InitialWeights:
    """Reads the weights that `experiment` does not make itself.

    Its methods raise ConfigError if the weights do not exist or do not fit.

    Args:
      options: without `init_from`.
      allowed_changes: as in `LoadTarget`.
    """

    experiment: Experiment
    options: LoadOptions
    allowed_changes: Collection[str] = ()

    def initial_state(self, init_from: str | None) -> tuple[State, str | None]:
        """Returns the state before the first step, and the name of the weights in it.

        Args:
          init_from: a reference to the initial weights; `None`: newly initialised weights.
        """
        experiment, model, name = self.experiment, None, None
        reference_model = self.reference_model()
        if init_from is not None:
            target = LoadTarget(
                experiment.recipe, experiment.mesh, experiment.data, self.allowed_changes
            )
            model, name = read_weights(init_from, target, self.options)
        return experiment.initial_state(model, reference_model), name

    def complete(self, found: Restored, init_from: str | None = None) -> State:
        """Returns the state of a checkpoint, including the weights that checkpoints leave out.

        Args:
          init_from: where to look for the frozen weights first.
        """
        experiment, recipe = self.experiment, self.experiment.recipe
        reference_model = self.reference_model()
        if "model" not in self.allowed_changes:
            _check_reference_model(reference_model, found.notes["reference_model"])
        state = found.state.with_reference_model(reference_model)
        if recipe.trained is None:
            return state
        options = dataclasses.replace(self.options, init_from=init_from)
        return state.with_frozen(frozen_weights(found.notes, recipe, experiment.mesh, options))

    def reference_model(self) -> Any:
        """Returns the frozen model that the objective needs, or `None`."""
        experiment, show = self.experiment, self.options.show
        recipe, reference = experiment.reference_recipe, experiment.objective.reference_model
        if recipe is None or reference is None:
            return None
        if reference.weights_from is None:
            show("WARNING: the reference model of the objective has new, untrained weights")
            return recipe.new_model(experiment.mesh)
        target = LoadTarget(recipe, experiment.mesh, experiment.data)
        model, origin = read_weights(reference.weights_from, target, self.options)
        show(f"the objective compares with the weights of {origin}")
        return model

    def fork(self, reference: str | None, config: Mapping[str, str]) -> tuple[Restored, Fork]:
        """Returns the state of another run at `RUN@STEP`, and the location of its checkpoint.

        Args:
          config: the settings of `experiment`.
        """
        steps, target = self.experiment.steps, self.experiment.abstract_state().changing
        with agreed():
            if reference is None:
                raise ConfigError("continue_optimizer forks a run: set init_from=RUN@STEP")
            found = resolve(reference)
            run = open_model(found, self.options)
            if not isinstance(found, RunReference) or not isinstance(run, SavedRun):
                raise ConfigError(f"{run.name} {_NO_STATE}")
            if found.step is None:
                raise ConfigError(f"a fork needs a fixed step: name it, as in init_from={run.name}")
            if found.step == WEIGHTS_ALONE:
                raise ConfigError(f"{run.name} {_NO_STATE}")
            if steps <= found.step:
                raise ConfigError(
                    f"{run.name} has made {found.step:,} steps, and steps is {steps:,}, which "
                    "includes them: increase it"
                )
            with user_errors(), Checkpoints(run.checkpoints, read_only=True) as checkpoints:
                check_same_model(
                    run.name,
                    read_settings(run.workdir),
                    config,
                    self.allowed_changes,
                    lambda: checkpoints.fits(run.step, target),
                )
        with reading(run.folder), Checkpoints(run.checkpoints, read_only=True) as checkpoints:
            try:
                state, notes = checkpoints.restore(run.step, target)
            except (ValueError, OSError) as error:
                raise ConfigError(
                    f"{run.name} cannot be forked: {error_text(error)}. Without continue_optimizer "
                    "a run starts from its weights only"
                ) from error
        restored = Restored(run.step, state, notes, ())
        check_notes(restored, run.checkpoints)
        return restored, Fork(shown(run.checkpoints.absolute()), run.step)


def _check_reference_model(reference_model: Any, before: dict[str, str] | None) -> None:
    """Raises ConfigError if `reference_model` is not the model of the note `before`.

    Models of different dtypes cannot be compared, so they pass. So does an objective that no longer
    needs a reference model, or needs one for the first time.
    """
    now = reference_note(reference_model)
    if now is None or before is None or now["dtype"] != before["dtype"]:
        return
    if now != before:
        raise ConfigError(
            "the reference model of the objective has changed since this run began: restore it, or "
            "give --allow_change=model to continue with the new one"
        )
