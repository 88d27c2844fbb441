"""Weights made once, on one device, and put on the meshes that tests ask about.

A program that draws random numbers takes longer to compile than what most tests ask of the model,
and the weights are the same on every mesh: tests/test_sharded_training.py asks that.
"""

from typing import TypeVar

import jax
from jax.sharding import Mesh

from lmlib import optim
from lmlib.parallel.layout import shardings
from lmlib.state import State, Training, abstract_model, initial_state

M = TypeVar("M")


def laid_out(model: M, mesh: Mesh) -> M:
    """A copy of `model` on `mesh`, laid out as a run lays it out; its buffers may be donated."""
    layout = shardings(abstract_model(lambda: model, mesh))
    return jax.device_put(jax.device_get(model), layout)


def first_state(model, optimizer: optim.Optimizer, mesh: Mesh, **settings) -> State:
    """As `initial_state`, of a copy of `model`; `settings`: of `Training`."""
    return initial_state(laid_out(model, mesh), Training(optimizer, mesh, **settings))
