"""Dropout: activations that are left out at random while a model trains.

Shapes: B batch, S sequence, E embed.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from lmlib.models.weights import fold
from lmlib.parallel.layout import spec


def dropout(
    x_BSE: Float[Array, "b s embed"],
    rate: float,
    key: PRNGKeyArray | None,
    name: str,
    layout: str,
) -> Float[Array, "b s embed"]:
    """Each element is 0 with probability `rate`, else x / (1 - rate), so that the mean stays
    (Srivastava et al. 2014, "Dropout: a simple way to prevent neural networks from overfitting").

    Whether an element is dropped depends on `key`, `name` and its place in the whole array. Each
    device draws for its own elements, x lying as `layout` says: nothing travels, and every mesh
    draws the same bits. Without a key x stays as it is.
    """
    if key is None:
        return x_BSE
    kept_BSE = jax.random.bernoulli(
        fold(key, name), 1 - rate, x_BSE.shape, out_sharding=spec(layout)
    )
    # In bfloat16 the factor itself would be off by up to 0.4 %, and with it the mean.
    wide_BSE = x_BSE.astype(jnp.promote_types(x_BSE.dtype, jnp.float32))
    return jnp.where(kept_BSE, wide_BSE / (1 - rate), 0).astype(x_BSE.dtype)
