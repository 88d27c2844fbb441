"""The reference model that an objective needs: read at each start of a run, always the same."""

from collections.abc import Callable, Collection
from typing import Any

import jax

from lmlib.experiment import Experiment
from lmlib.parallel.fingerprint import fingerprint
from lmlib.state import new_model
from runner.errors import ConfigError
from runner.weights.reading import weights_of


def reference_model_of(
    experiment: Experiment, show: Callable[[str], None], trusted: Collection[str] = ()
) -> Any:
    """The frozen model that the objective of `experiment` needs, as it is kept; `None`: it needs
    none. `show` gets a line about where it comes from; `trusted`: as in `weights_of`.

    Raises:
      ConfigError: if its weights are not to be had, or it does not know the ids of the data.
    """
    recipe, wanted = experiment.reference_recipe, experiment.objective.reference_model
    if recipe is None or wanted is None:
        return None
    if wanted.weights_from is None:
        show("WARNING: the objective compares with a model of new weights, which knows nothing")
        return new_model(recipe.make, experiment.mesh, recipe.made)
    mesh, data = experiment.mesh, experiment.data
    model, origin = weights_of(wanted.weights_from, recipe, mesh, data, (), show, trusted)
    show(f"the objective compares with the weights of {origin}")
    return model


def reference_note(reference_model: Any) -> dict[str, str] | None:
    """What checkpoints keep of a reference model; `None` if there is none."""
    if reference_model is None:
        return None
    dtype = jax.tree.leaves(reference_model)[0].dtype.name
    return {"digest": fingerprint(reference_model), "dtype": dtype}


def is_reference_note(value: Any) -> bool:
    """Whether `reference_note` can have returned it."""
    return value is None or (
        isinstance(value, dict)
        and value.keys() == {"digest", "dtype"}
        and all(isinstance(each, str) for each in value.values())
    )


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
