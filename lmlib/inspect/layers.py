"""What happens in the layers, for whoever looks: `Context.observe` sees each of them.

Shapes: B batch, S sequence (queries), T sequence (keys), L layers, E embed, H heads.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from lmlib.compute import Compute
from lmlib.data.batch import Batch
from lmlib.models.layer import AttendingLayer
from lmlib.models.protocol import Context, LayerCall, Model, Observe, Trunk
from lmlib.parallel.layout import reshard


def residual_stream(
    model: Model, batch: Batch, compute: Compute
) -> Float[Array, "b depth s embed"]:
    """The residual stream before the first layer, then after each."""

    def before(call: LayerCall) -> Array:
        return reshard(call.before, "batch seq embed")

    trunk = _observed(model, batch, compute, before)
    last_BSE = reshard(trunk.x_BSE, "batch seq embed")
    return jnp.moveaxis(jnp.concatenate([trunk.observed, last_BSE[None]]), 0, 1)


def attention_weights(
    model: Model, batch: Batch, compute: Compute
) -> Float[Array, "b layers heads s t"]:
    """The attention weights of each layer, as `lmlib.models.attend.attention_weights` defines
    them."""

    def weights(call: LayerCall) -> Array:
        if not isinstance(call.layer, AttendingLayer):
            raise ValueError(
                f"{type(call.layer).__name__} shows no attention weights: it lacks the method "
                "`attention_weights` of lmlib.models.layer.AttendingLayer"
            )
        return call.layer.attention_weights(call.before, call.context)

    return jnp.moveaxis(_observed(model, batch, compute, weights).observed, 0, 1)


def _observed(model: Model, batch: Batch, compute: Compute, observe: Observe) -> Trunk:
    tokens_BS, positions_BS, segment_ids_BS = map(
        jnp.asarray, (batch.tokens, batch.positions, batch.segment_ids)
    )
    context = Context(positions_BS, segment_ids_BS, compute, observe=observe)
    trunk = model.trunk(tokens_BS, context)
    if trunk.observed is None:
        raise ValueError(
            f"{type(model).__name__} shows nothing of its layers: it has none, or its trunk does "
            "not run them by lmlib.models.stack.run_stack"
        )
    return trunk
