"""Magnitudes layer by layer, to find where numbers grow or stop being finite.

Shapes: B batch, S sequence, E embed, L layers.
"""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array

from lmlib.compute import Compute
from lmlib.data.batch import Batch
from lmlib.losses.features import features
from lmlib.losses.next_token import NextToken
from lmlib.losses.objective import Objective, sums_of
from lmlib.models.forward_context import LayerCall
from lmlib.models.matrices.four_bit import FourBit
from lmlib.models.matrices.int8 import Int8
from lmlib.models.model import Model, WeightGroup
from lmlib.terminal.table import columns

NEXT_TOKEN = NextToken()


class PartStatistics(NamedTuple):
    """Magnitudes of one part of a model; NaN or infinite if its numbers are not finite."""

    name: str  # "embedding", "layer 3", "norm"
    output: float | None  # RMS of the residual stream after the part; `None` if not observed
    weights: float  # Euclidean norm
    gradients: float  # Euclidean norm; a matrix stored in 8 bits has no gradient


class LayerStatistics(NamedTuple):
    """Magnitudes of a model on one batch."""

    parts: tuple[PartStatistics, ...]  # in the order of the forward pass
    loss: float  # the objective's, averaged over its units, in nats
    loss_name: str  # for display


def layer_statistics(
    model: Model,
    batch: Batch,
    mesh: Mesh,
    compute: Compute,
    objective: Objective = NEXT_TOKEN,
    reference_model: Model | None = None,
) -> LayerStatistics:
    """Runs `batch` (on the devices) forward and backward once, without dropout.

    The gradients belong to the loss of `objective`; some objectives require a `reference_model`.
    """
    with jax.set_mesh(mesh):
        found = jax.device_get(_measuring(compute, objective)(model, reference_model, batch))
    loss, outputs, weights, gradients = found
    first, after_layers = (None, None) if outputs is None else (float(outputs[0][0]), outputs[1])
    before: list[PartStatistics] = []
    layers: dict[int, PartStatistics] = {}
    after: list[PartStatistics] = []
    for part, weight, gradient in zip(model.weight_groups(), weights, gradients, strict=True):
        if part.layers is None:
            output = None if before or layers else first
            statistics = PartStatistics(part.name, output, float(weight), float(gradient))
            (after if layers else before).append(statistics)
            continue
        for i, w, g in zip(part.layers, weight, gradient, strict=True):
            output = None if after_layers is None else float(after_layers[i])
            layers[i] = PartStatistics(f"layer {i}", output, float(w), float(g))
    parts = (*before, *(layers[i] for i in sorted(layers)), *after)
    return LayerStatistics(parts, float(loss), objective.loss_name)


@functools.lru_cache(maxsize=4)
def _measuring(compute: Compute, objective: Objective) -> Callable[..., Any]:
    """Returns `_measured`, compiled once per kind of model."""
    return jax.jit(functools.partial(_measured, compute=compute, objective=objective))


def _measured(
    model: Model,
    reference_model: Model | None,
    batch: Batch,
    compute: Compute,
    objective: Objective,
) -> tuple[Array, Any, Any, Any]:
    in_floats, in_8_bits = eqx.partition(model, lambda leaf: not _rests(leaf), is_leaf=_rests)

    def loss(in_floats: Model) -> Array:
        model = eqx.combine(in_floats, in_8_bits, is_leaf=_rests)
        sums = sums_of(objective, model, reference_model, batch, compute)
        positions = jnp.sum(batch.segment_ids > 0, dtype=jnp.int32)
        counts = (jnp.maximum(each, 1) for each in (objective.count(batch), positions))
        return objective.mean_loss(sums, *counts)

    value, gradients = jax.value_and_grad(loss)(in_floats)
    outputs = features(model, batch, compute, observe=_root_mean_squares).observed
    return (
        value,
        outputs,
        [*map(_norm, model.weight_groups())],
        [*map(_norm, gradients.weight_groups())],
    )


def _root_mean_squares(call: LayerCall) -> tuple[Array, ...]:
    """Returns the root mean square of the residual stream before and after the layer."""
    both = (x_BSE.astype(jnp.float32) for x_BSE in (call.before, call.after))
    return tuple(jnp.sqrt(jnp.mean(jnp.square(x_BSE))) for x_BSE in both)


def _norm(part: WeightGroup) -> Array:
    """Returns the norm of a part's arrays; one per layer if they are stacked."""
    stacked = 0 if part.layers is None else 1
    arrays = [
        leaf.dense() if _rests(leaf) else leaf.astype(jnp.float32)
        for leaf in jax.tree.leaves(part.weights, is_leaf=_rests)
    ]
    squares = [
        jnp.sum(jnp.square(array), axis=tuple(range(stacked, array.ndim))) for array in arrays
    ]
    return jnp.sqrt(functools.reduce(jnp.add, squares))


def _rests(leaf: Any) -> bool:
    """True for a matrix stored in 8 or 4 bits."""
    return isinstance(leaf, Int8 | FourBit)


def first_offender(statistics: LayerStatistics) -> str | None:
    """Returns the first place with a number that is not finite; `None` if all are finite.

    The weights come first, then the forward pass in order, then the backward pass in order.
    """

    def found() -> Iterator[tuple[str, float]]:
        parts = statistics.parts
        yield from ((f"the weights of {part.name}", part.weights) for part in parts)
        yield from (
            (f"the output of {part.name}", part.output) for part in parts if part.output is not None
        )
        yield f"the {statistics.loss_name}", statistics.loss
        yield from ((f"the gradient of {part.name}", part.gradients) for part in reversed(parts))

    return next((what for what, value in found() if not math.isfinite(value)), None)


def table(statistics: LayerStatistics) -> str:
    """Formats one line per part of the model, in the order of the forward pass."""
    rows = [("", "output rms", "weight norm", "gradient norm")]
    for name, output, weights, gradients in statistics.parts:
        first = "" if output is None else f"{output:.4g}"
        rows.append((name, first, f"{weights:.4g}", f"{gradients:.4g}"))
    return columns([*rows, (statistics.loss_name, f"{statistics.loss:.4g}", "", "")])
