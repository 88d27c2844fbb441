"""The experts with the highest scores, of each token on the device that has it.

XLA splits no `top_k` on CPUs: given the whole batch it would gather the scores of all tokens.

Shapes: B batch, S sequence, X experts, K choices of a token, G groups.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from lmlib.parallel.collectives import on_each_device
from lmlib.parallel.layout import partition


def best(
    scores_BSX: Float[Array, "b s x"], top: int, groups: int, top_groups: int
) -> Int32[Array, "b s k"]:
    """The `top` experts of each token from its `top_groups` best groups, the best first. A group is
    as good as its two best experts together (DeepSeek-AI 2024, arXiv:2412.19437, §2.1.2).

    Layouts: as the scores, whose experts are whole; nothing is sent.
    """

    def on_device(scores_BSX: Array) -> Array:
        return jax.lax.top_k(_of_best_groups(scores_BSX, groups, top_groups), top)[1]

    layout = partition(("batch", "seq", None))
    return on_each_device(on_device, inputs=(layout,), outputs=layout)(scores_BSX)


def _of_best_groups(scores_BSX: Array, groups: int, top_groups: int) -> Array:
    """With -inf for experts outside of a token's best groups."""
    if groups == top_groups:
        return scores_BSX
    *_, X = scores_BSX.shape
    scores_BSGX = jnp.reshape(scores_BSX, (*scores_BSX.shape[:-1], groups, X // groups))
    best_BSG2, _ = jax.lax.top_k(scores_BSGX, 2)
    _, kept_BSG = jax.lax.top_k(jnp.sum(best_BSG2, axis=-1), top_groups)
    is_kept_BSG = jnp.any(kept_BSG[..., None] == jnp.arange(groups, dtype=jnp.int32), axis=-2)
    of_kept_BSGX = jnp.where(is_kept_BSG[..., None], scores_BSGX, -jnp.inf)
    return jnp.reshape(of_kept_BSGX, scores_BSX.shape)
