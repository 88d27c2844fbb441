"""Observes each layer of a model through `ForwardContext.observe`.

Shapes: B batch, S sequence (queries), T sequence (keys), L layers, D depth (layers and one), E
embed, H heads.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from lmlib.compute import Compute
from lmlib.data.batch import Batch
from lmlib.models.forward_context import ForwardContext, LayerCall, Observe
from lmlib.models.model import Model, TrunkOutput
from lmlib.parallel.layout import reshard


def residual_stream(
    model: Model, batch: Batch, compute: Compute
) -> Float[Array, "b depth s embed"]:
    """Returns the residual stream before the first layer, then after each."""

    def before(call: LayerCall) -> Array:
        return reshard(call.before, "batch seq embed")

    trunk = _observed(model, batch, compute, before)
    last_BSE = reshard(trunk.x_BSE, "batch seq embed")
    return jnp.moveaxis(jnp.concatenate([trunk.observed, last_BSE[None]]), 0, 1)


def logit_lens(model: Model, batch: Batch, compute: Compute) -> Float[Array, "b depth s vocab"]:
    """Returns the logits of each of `residual_stream`, as if it were the last."""
    context = _context(batch, compute)
    stream_BDSE = residual_stream(model, batch, compute)

    def seen(x_BSE: Array) -> Array:
        h_BSE = model.features(reshard(x_BSE, compute.residual), context)
        return model.logits(reshard(h_BSE, "batch seq embed"), compute)

    depths = range(stream_BDSE.shape[1])
    return jnp.stack([seen(stream_BDSE[:, depth]) for depth in depths], axis=1)


def attention_weights(
    model: Model, batch: Batch, compute: Compute
) -> Float[Array, "b layers heads s t"]:
    """Returns the attention weights of each layer; see `lmlib.models.attend.attention_weights`."""

    def weights(call: LayerCall) -> Array:
        return call.layer.attention_weights(call.before, call.context)

    return jnp.moveaxis(_observed(model, batch, compute, weights).observed, 0, 1)


def _observed(model: Model, batch: Batch, compute: Compute, observe: Observe) -> TrunkOutput:
    context = dataclasses.replace(_context(batch, compute), observe=observe)
    trunk = model.trunk(jnp.asarray(batch.tokens), context)
    if trunk.observed is None:
        raise ValueError(
            f"{type(model).__name__} does not expose its layers: it has none, or its trunk does "
            "not run them in a lmlib.models.stack.Stack"
        )
    return trunk


def _context(batch: Batch, compute: Compute) -> ForwardContext:
    return ForwardContext(jnp.asarray(batch.positions), jnp.asarray(batch.segment_ids), compute)
