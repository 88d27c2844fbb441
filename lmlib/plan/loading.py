"""What reading weights takes of each device's memory, before the first step."""

import math
from typing import Any

from jax.sharding import NamedSharding

from lmlib.experiment import Experiment
from lmlib.parallel.axes import Weight, map_weights
from lmlib.parallel.layout import stored

_IN_A_FOLDER = 2  # bytes of a number: nearly all folders are published in bfloat16
_READ = 4  # of one that was read, before it is kept in another dtype


def reading(experiment: Experiment) -> int:
    """Bytes of each device that reading a folder of weights takes besides the weights that were
    read; 0 if a run of `experiment` reads none.

    Each device has its share of a tensor, the whole tensor, and its part of a layer's weight, as
    `lmlib.hf.load` says. The largest weight decides.
    """
    mesh, reference_model = experiment.mesh, experiment.objective.reference_model
    found = [0]

    def count(weight: Weight, array: Any) -> None:
        stacked = weight.stacked > 0
        shape = array.shape[stacked:]
        layout = NamedSharding(mesh, stored(weight, array.shape, mesh))
        part = math.prod(layout.shard_shape(array.shape)[stacked:])
        size = math.prod(shape)
        share = -(-size // mesh.devices.size)
        found.append(_IN_A_FOLDER * (share + size) + _READ * part)

    if experiment.init_from is not None:
        map_weights(count, experiment.recipe.bare)
    recipe = experiment.reference_recipe
    if (
        recipe is not None
        and reference_model is not None
        and reference_model.weights_from is not None
    ):
        map_weights(count, recipe.bare)
    return max(found)
