"""Weights as generation reads them."""

import jax
from jax.sharding import Mesh

from lmlib.models.protocol import Model
from lmlib.models.stack import unstacked
from lmlib.parallel.axes import Weight, map_weights
from lmlib.parallel.layout import gathered, stored


def ready(model: Model, dtype: str, mesh: Mesh | None, whole: bool) -> Model:
    """`model` in `dtype`, its layers apart.

    Args:
      whole: whether each device keeps all that it multiplies; otherwise weights stay split over
        `fsdp`, and are gathered for every token.
    """

    def placed(weight: Weight, array: jax.Array) -> jax.Array:
        array = array.astype(dtype)
        if mesh is None:
            return array
        layout = (gathered if whole else stored)(weight, array.shape, mesh)
        return jax.sharding.reshard(array, layout)

    return jax.jit(lambda model: map_weights(placed, unstacked(model)))(model)
