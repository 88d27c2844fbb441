"""Attention sinks: beside its scores, softmax takes a learned logit of its head, which has no value
(gpt-oss: OpenAI 2025, arXiv:2508.10925, §2.2; Xiao et al. 2023, arXiv:2309.17453, §3.3).

A kernel need not know of them: with a sink s beside scores whose normaliser is exp(n), all weights
are multiplied by exp(n) / (exp(n) + exp(s)) = sigmoid(n - s). It has to give n, and its gradient.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def with_sinks(
    mixed_BSHV: Float[Array, "b s heads value_dim"],
    log_normaliser_BSH: Float[Array, "b s heads"],
    sinks_H: Float[Array, "heads"],
) -> Float[Array, "b s heads value_dim"]:
    """What attention without sinks has mixed, as it is with them."""
    share_BSH = share(log_normaliser_BSH, sinks_H)
    return (mixed_BSHV * share_BSH[..., None]).astype(mixed_BSHV.dtype)


def share(log_normaliser: Float[Array, "..."], sinks: Float[Array, "..."]) -> Float[Array, "..."]:
    """What a sink leaves of the weights, in float32 at least."""
    wide = jnp.promote_types(sinks.dtype, jnp.float32)
    return jax.nn.sigmoid(log_normaliser - sinks.astype(wide))
