"""Weights made once by NumPy or on one device, and then placed on the meshes of tests.

Programs that draw random numbers take seconds to compile.
"""

from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from lmlib.optim.optimizer import Optimizer
from lmlib.parallel.axes import map_weights
from lmlib.parallel.layout import shardings
from lmlib.state import State, Training, abstract_model, initial_state

M = TypeVar("M")


def drawn(shapes: M, seed: int = 0) -> M:
    """A model of these `shapes` with values from NumPy, about as large as those of a new one."""
    random = np.random.default_rng(seed)

    def values(weight, leaf):
        if not weight.declaration.gradient:
            return jnp.zeros(leaf.shape, leaf.dtype)
        middle = 1.0 if weight.path.endswith("scale") else 0.0
        return jnp.asarray(random.normal(middle, 0.2, leaf.shape), leaf.dtype)

    return map_weights(values, shapes)


def laid_out(model: M, mesh: Mesh) -> M:
    """A copy of `model` on `mesh`, laid out as a run lays it out; its buffers may be donated."""
    layout = shardings(abstract_model(lambda: model, mesh))
    return jax.device_put(jax.device_get(model), layout)


def first_state(model, optimizer: Optimizer, mesh: Mesh, **settings) -> State:
    """As `initial_state`, of a copy of `model`; `settings`: of `Training`."""
    return initial_state(laid_out(model, mesh), Training(optimizer, mesh, **settings))
