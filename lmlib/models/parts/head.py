"""Features to logits.

Shapes: E embed, V vocab.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from lmlib.compute import Compute
from lmlib.parallel.layout import reshard


def logits_of(
    table_EV: Float[Array, "embed vocab"],
    cap: float | None,
    features: Float[Array, "... embed"],
    compute: Compute,
) -> Float[Array, "... vocab"]:
    """Logits of the next token, float32 (float64 if computed so), the vocabulary split over
    `tensor`. `cap`: see `capped`. The loss does not call this: it makes a few logits at a time."""
    table_EV = reshard(table_EV.astype(compute.dtype), "embed vocab")
    wide = jnp.promote_types(compute.dtype, jnp.float32)
    made = jnp.einsum("...e,ev->...v", features, table_EV, preferred_element_type=wide)
    return capped(made, cap)


def capped(logits: Float[Array, "..."], cap: float | None) -> Float[Array, "..."]:
    """cap · tanh(logits / cap) (Gemma 2, arXiv:2408.00118, §2); `None`: as they are."""
    return logits if cap is None else cap * jnp.tanh(logits / cap)
