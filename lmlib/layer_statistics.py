"""How large everything is, layer by layer: where numbers stop being finite, and where they grow.

Shapes: B batch, S sequence, E embed, L layers.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float

from lmlib.data.batch import Batch
from lmlib.losses import LossSettings, loss_sums
from lmlib.models.llama import Llama
from lmlib.table import columns


class LayerStatistics(NamedTuple):
    """Of one batch; float32. What is not finite shows as NaN or infinity.

    `weights` and `gradients` hold Euclidean norms by part: "embedding", "layers" (L), "norm" and,
    if it is not tied, "unembedding".
    """

    embedded: Float[Array, ""]  # root mean square of the embedded tokens
    outputs_L: Float[Array, "L"]  # root mean square of the residual stream after each layer
    loss: Float[Array, ""]  # nats per token
    weights: dict[str, Array]
    gradients: dict[str, Array]


def layer_statistics(model: Llama, batch: Batch, mesh: Mesh) -> LayerStatistics:
    """Runs `batch` (on the devices) forward and backward once; results are NumPy arrays."""
    with jax.set_mesh(mesh):
        return jax.device_get(jax.jit(_statistics)(model, batch))


def _statistics(model: Llama, batch: Batch) -> LayerStatistics:
    tokens_BS, positions_BS = jnp.asarray(batch.tokens), jnp.asarray(batch.positions)
    segment_ids_BS = jnp.asarray(batch.segment_ids)
    targets_BS, loss_mask_BS = jnp.asarray(batch.targets), jnp.asarray(batch.loss_mask)

    def loss(model: Llama) -> tuple[Array, Array]:
        x_BSE, outputs_L = model.observed_trunk(
            tokens_BS, positions_BS, segment_ids_BS, _root_mean_square
        )
        settings = LossSettings(chunk=model.loss_chunk, logits_dtype=model.logits_dtype)
        h_BSE, table_EV = model.features(x_BSE), model.unembedding_EV
        sums = loss_sums(settings, h_BSE, table_EV, targets_BS, loss_mask_BS)
        tokens = jnp.maximum(jnp.sum(loss_mask_BS, dtype=jnp.int32), 1)
        return sums.minimised / tokens, outputs_L

    (value, outputs_L), gradients = jax.value_and_grad(loss, has_aux=True)(model)
    embedded = _root_mean_square(model.embed(tokens_BS))
    return LayerStatistics(embedded, outputs_L, value, _norms(model), _norms(gradients))


def _root_mean_square(x_BSE: Array) -> Array:
    return jnp.sqrt(jnp.mean(jnp.square(x_BSE.astype(jnp.float32))))


def _norms(model: Llama) -> dict[str, Array]:
    def norm(tree: Any, stacked: bool = False) -> Array:
        squares = [
            jnp.sum(jnp.square(leaf.astype(jnp.float32)), axis=tuple(range(stacked, leaf.ndim)))
            for leaf in jax.tree.leaves(tree)
        ]
        return jnp.sqrt(functools.reduce(jnp.add, squares))

    norms = {
        "embedding": norm(model.embedding),
        "layers": norm(model.blocks, stacked=True),
        "norm": norm(model.norm),
    }
    return norms if model.unembedding is None else norms | {"unembedding": norm(model.unembedding)}


def first_offender(statistics: LayerStatistics) -> str | None:
    """Where a number that is not finite comes up first: in the weights, else in the order of the
    forward pass, else in that of the backward pass. `None` if all are finite."""
    layers = range(len(statistics.outputs_L))
    weights, gradients = statistics.weights, statistics.gradients
    found = [(f"the weights of the {part}", weights[part]) for part in weights if part != "layers"]
    found += [(f"the weights of layer {i}", weights["layers"][i]) for i in layers]
    found += [("the embedded tokens", statistics.embedded)]
    found += [(f"the output of layer {i}", statistics.outputs_L[i]) for i in layers]
    found += [("the loss", statistics.loss)]
    found += [
        (f"the gradient of the {part}", gradients[part])
        for part in ("unembedding", "norm")
        if part in gradients
    ]
    found += [(f"the gradient of layer {i}", gradients["layers"][i]) for i in reversed(layers)]
    found += [("the gradient of the embedding", gradients["embedding"])]
    return next((what for what, value in found if not math.isfinite(value)), None)


def table(statistics: LayerStatistics) -> str:
    """One line for each part of the model, in the order of the forward pass."""
    weights, gradients = statistics.weights, statistics.gradients

    def line(name: str, *values: Any) -> list[str]:
        return [name, *("" if value is None else f"{value:.4g}" for value in values)]

    rows = [["", "output rms", "weight norm", "gradient norm"]]
    rows += [
        line("embedding", statistics.embedded, weights["embedding"], gradients["embedding"]),
        *(
            line(f"layer {i}", output, weights["layers"][i], gradients["layers"][i])
            for i, output in enumerate(statistics.outputs_L)
        ),
    ]
    rows += [
        line(part, None, weights[part], gradients[part])
        for part in ("norm", "unembedding")
        if part in weights
    ]
    return columns([*rows, line("loss", statistics.loss, None, None)])
