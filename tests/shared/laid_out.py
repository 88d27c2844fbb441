"""Weights made once by NumPy or on one device and then placed on the meshes of tests, and gradients
there. Programs that draw random numbers take seconds to compile."""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from lmlib.data.batch import place
from lmlib.losses.next_token import batch_loss
from lmlib.optim.optimizer import Optimizer
from lmlib.parallel.axes import map_weights
from lmlib.parallel.layout import sharding, shardings
from lmlib.parallel.mesh import make_mesh
from lmlib.state import State, Training, abstract_model, initial_state

M = TypeVar("M")


def drawn(shapes: M, seed: int = 0) -> M:
    """A model of these `shapes` with values from NumPy, about as large as a new model's."""
    random = np.random.default_rng(seed)

    def values(weight, leaf):
        if not weight.declaration.gradient:
            return jnp.zeros(leaf.shape, leaf.dtype)
        middle = 1.0 if weight.path.endswith("scale") else 0.0
        return jnp.asarray(random.normal(middle, 0.2, leaf.shape), leaf.dtype)

    return map_weights(values, shapes)


def as_dict(model, of=lambda x: x):
    """The weights by path, with the arrays of each layer apart."""
    found = {}
    map_weights(lambda w, x: found.update({w.path: of(x)}), model)
    return found


def layers_of(weights, model):
    """The weights of each layer, by the path inside it."""
    for p, pattern in enumerate(model.stack.patterns):
        for r in range(jax.tree.leaves(pattern)[0].shape[0]):
            for j in range(len(pattern)):
                start = f"stack.patterns.{p}.{j}."
                yield {
                    path.removeprefix(start): x[r] for path, x in weights.items() if start in path
                }


def laid_out(model: M, mesh: Mesh) -> M:
    """A copy of `model` on `mesh`, laid out as a run lays it out; its buffers may be donated."""
    layout = shardings(abstract_model(lambda: model, mesh))
    return jax.device_put(jax.device_get(model), layout)


def loss_and_gradients(
    model: M, sizes: dict[str, int], compute, source, order: str = "zigzag"
) -> tuple[float, M]:
    """The mean loss of the first batch of `source` on a mesh of these `sizes`, and its gradients,
    which have the layout of the weights."""

    def mean(model, batch):
        return batch_loss(model, batch, compute)[0].loss_sum / batch.loss_mask.sum()

    mesh = make_mesh(**sizes)
    model = laid_out(model, mesh)
    with jax.set_mesh(mesh):
        batch = place(source, 0, sharding("batch seq", mesh), order)
        loss, gradients = jax.jit(jax.value_and_grad(mean))(model, batch)
    assert shardings(gradients) == shardings(model)
    return float(loss), jax.device_get(gradients)


def assert_near(found: Any, expected: Any, bound: float = 1e-5, least: float = 0.0) -> None:
    """Asserts that each array is off by at most `bound` times its norm, or `least`."""
    for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert np.linalg.norm(one - other) <= bound * np.linalg.norm(other) + least


def first_state(model, optimizer: Optimizer, mesh: Mesh, **settings) -> State:
    """Returns `initial_state` of a copy of `model`; `settings` are arguments of `Training`."""
    return initial_state(laid_out(model, mesh), Training(optimizer, mesh, **settings))
