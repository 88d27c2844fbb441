"""The reference model that an objective needs: read at each start of a run, always the same."""

from typing import Any

from lmlib.experiment import Experiment
from runner.errors import ConfigError
from runner.weights.notes import reference_note
from runner.weights.reading import weights_of
from runner.weights.saved_run import Access
from runner.weights.wanted import Wanted


def reference_model_of(experiment: Experiment, access: Access) -> Any:
    """The frozen model that the objective of `experiment` needs, as it is kept; `None`: it needs
    none. A line is shown about where it comes from.

    Raises:
      ConfigError: if its weights are not to be had, or it does not know the ids of the data.
    """
    recipe, reference = experiment.reference_recipe, experiment.objective.reference_model
    if recipe is None or reference is None:
        return None
    if reference.weights_from is None:
        access.show(
            "WARNING: the objective compares with a model of new weights, which knows nothing"
        )
        return recipe.new_model(experiment.mesh)
    wanted = Wanted(recipe, experiment.mesh, experiment.data)
    model, origin = weights_of(reference.weights_from, wanted, access)
    access.show(f"the objective compares with the weights of {origin}")
    return model


def check_reference_model(reference_model: Any, before: dict[str, str] | None) -> None:
    """Raises ConfigError if `reference_model` is not the model that `reference_note` described as
    `before`. Another dtype cannot be compared; an objective may have begun or ceased to need one.
    """
    now = reference_note(reference_model)
    if now is None or before is None or now["dtype"] != before["dtype"]:
        return
    if now != before:
        raise ConfigError(
            "the objective compares with other weights than those that this run was compared with "
            "before: give those again, or --allow_change=model to go on with these"
        )
