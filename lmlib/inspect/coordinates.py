"""Coordinate check: how much the first steps change activations, for models of several sizes.

Changes that grow with width or depth call for smaller learning rates in larger models, and changes
that shrink for larger ones. If they stay constant, one rate suits all sizes (Yang et al. 2022,
arXiv:2203.03466, appendix D.1).

Shapes: B batch, S sequence, D depth (layers and one), E embed, V vocab.
"""

import functools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from lmlib.compute import Compute
from lmlib.data.batch import Batch, place
from lmlib.experiment import Experiment
from lmlib.inspect.layers import residual_stream
from lmlib.losses.features import features
from lmlib.models.model import Model
from lmlib.parallel.layout import reshard, sharding

LOOKED_AT = ("embedding", "middle layer", "last layer", "logits")

Changes = Mapping[str, Sequence[float]]


def changes(experiment: Experiment) -> Changes:
    """Returns the change of activations after each step of `experiment`, for each of `LOOKED_AT`.

    The change is the root mean square, over all elements of the first batch, of the difference from
    the values before the first step. Raises ValueError as `Experiment.check`, or if the model does
    not expose its layers.
    """
    experiment.check()
    mesh, data = experiment.mesh, experiment.data
    rows = sharding("batch seq", mesh)
    first = place(data, 0, rows)
    seen = functools.partial(_seen, compute=experiment.compute)
    state = experiment.initial_state()
    step = experiment.trace_step().lower().compile()
    found: list[dict[str, Array]] = []
    with jax.set_mesh(mesh):
        before = seen(state.whole_model, first)
    for number in range(experiment.steps):
        batch = place(data, number, rows)
        state, _ = step(state, batch, experiment.training.hyperparameters)
        with jax.set_mesh(mesh):
            found.append(jax.device_get(_changes(seen(state.whole_model, first), before)))
    return {name: [float(now[name]) for now in found] for name in LOOKED_AT}


def slope(sizes: Sequence[int], values: Sequence[float]) -> float:
    """Fits the exponent p in values ∝ sizes^p by least squares of logarithms; NaN without one."""
    with np.errstate(all="ignore"):
        x, y = np.log(np.asarray(sizes, float)), np.log(np.asarray(values, float))
    if len(x) < 2 or not np.isfinite(y).all():
        return float("nan")
    return float(np.sum((x - x.mean()) * y) / np.sum((x - x.mean()) ** 2))


@functools.partial(jax.jit, static_argnames="compute")
def _seen(model: Model, batch: Batch, compute: Compute) -> dict[str, Array]:
    stream_BDSE = residual_stream(model, batch, compute)
    h_BSE = features(model, batch, compute).h_BSE
    z_BSV = model.logits(reshard(h_BSE, "batch seq embed"), compute)
    middle = stream_BDSE.shape[1] // 2
    looked_at = (stream_BDSE[:, 0], stream_BDSE[:, middle], stream_BDSE[:, -1], z_BSV)
    return dict(zip(LOOKED_AT, looked_at, strict=True))


@jax.jit
def _changes(now: Mapping[str, Array], before: Mapping[str, Array]) -> dict[str, Array]:
    def change(new: Array, old: Array) -> Array:
        difference = new.astype(jnp.float32) - old.astype(jnp.float32)
        return jnp.sqrt(jnp.mean(jnp.square(difference)))

    return jax.tree.map(change, dict(now), dict(before))
