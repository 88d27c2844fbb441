"""Exclusive self-attention: attention without a share of the token's own value.

Shapes: B batch, S sequence, H heads, D head_dim.
"""

from collections.abc import Hashable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from lmlib.models.forward_context import ForwardContext
from lmlib.models.speedrun.record_attention import AfterAttention, Projected, of_heads


class Exclusive(AfterAttention):
    """y - tanh(α) · (y · v / v²) · v: without a share of the token's own value, for each head.

    α comes from `Context.shared`. Source: exclusive self attention (arXiv:2603.09078), which
    removes all of it; modded-nanogpt, record 82.
    """

    rows_may_be_split = True

    gates: Hashable = eqx.field(static=True)

    def __call__(
        self, mixed_BSHD: Array, projected: Projected, context: ForwardContext, cache: Any = None
    ) -> Float[Array, "b s heads head_dim"]:
        v_BSHD = projected.v_BTKD
        along_BSH1 = jnp.sum(mixed_BSHD * v_BSHD, axis=-1, keepdims=True)
        size_BSH1 = jnp.maximum(jnp.sum(jnp.square(v_BSHD), axis=-1, keepdims=True), 1e-8)
        share_BSH1 = jnp.tanh(of_heads(context.shared[self.gates])) * along_BSH1 / size_BSH1
        return mixed_BSHD - share_BSH1 * v_BSHD

    @property
    def reads(self) -> tuple[Hashable, ...]:
        return (self.gates,)
