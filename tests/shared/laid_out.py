"""Weights made once, on one device, and put on the meshes that tests ask about.

A program that draws random numbers takes longer to compile than what most tests ask of the model,
and the weights are the same on every mesh: tests/test_sharded_training.py asks that.
"""

from typing import TypeVar

import jax
from jax.sharding import Mesh

from lmlib import optim, train
from lmlib.parallel.layout import shardings

M = TypeVar("M")


def laid_out(model: M, mesh: Mesh) -> M:
    """A copy of `model` on `mesh`, laid out as a run lays it out; its buffers may be donated."""
    layout = shardings(train.abstract_model(lambda: model, mesh))
    return jax.device_put(jax.device_get(model), layout)


def first_state(model, optimizer: optim.Optimizer, mesh: Mesh, **settings) -> train.State:
    """As `train.init`, with the weights of `model`."""
    return train.begin(laid_out(model, mesh), optimizer, mesh, **settings)
