"""Composed heads: each head also mixes values with weights of all heads, within a short window.

Shapes: B batch, S sequence, H heads, D head_dim, N blocks of a row, I queries of a block, J keys of
a block and the one before.
"""

import functools
from collections.abc import Hashable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from lmlib.models.forward_context import ForwardContext
from lmlib.models.recurrent.cache import empty
from lmlib.models.recurrent.convolution import moved_window
from lmlib.models.speedrun.record_attention import AfterAttention, Projected
from lmlib.parallel.collectives import psum, shard_map
from lmlib.parallel.layout import mesh_axes_for, partition, reshard

_EPSILON = 1e-6


class ComposedHeads(AfterAttention):
    """y + output · Σ_t (Σ_h norm(input)_h p_h[t]) v[t], for the last `window` tokens t.

    p_h are the weights of attention of head h within the window and the document. `input` and
    `output` have a number for each head and token, and come from `Context.shared`; norm is RMSNorm
    over heads. Source: the correction after softmax of dynamically composable attention
    (arXiv:2405.08553), as in modded-nanogpt, record 85, with a window of 112. Rows that devices
    share are not supported.
    """

    heads: int = eqx.field(static=True)
    head_dim: int = eqx.field(static=True)
    scale: float = eqx.field(static=True)
    input: Hashable = eqx.field(static=True)
    output: Hashable = eqx.field(static=True)
    window: int = eqx.field(static=True, default=112)

    def __call__(
        self, mixed_BSHD: Array, projected: Projected, context: ForwardContext, cache: Any = None
    ) -> Float[Array, "b s heads head_dim"]:
        q_BSHD, k_BSHD, v_BSHD = projected
        input_BSH = context.shared[self.input].astype(jnp.float32)
        mean_square = jnp.mean(jnp.square(input_BSH), axis=-1, keepdims=True)
        input_BSH *= jax.lax.rsqrt(mean_square + _EPSILON)
        windows = cache
        if windows is None:
            windows = self.empty_cache(q_BSHD.shape[0], 0, q_BSHD.dtype)
        by_head = partition("batch seq heads head_dim")
        rows, gates = partition(("batch", None, "heads", None)), partition("batch seq heads")
        correction = shard_map(
            jax.checkpoint(functools.partial(_mixed, self.window, self.scale)),
            (by_head,) * 3 + (gates, partition("batch seq")) + (rows,) * 2,
            by_head,
        )(q_BSHD, k_BSHD, v_BSHD, input_BSH, context.positions_BS, *windows)
        output_BSH1 = reshard(context.shared[self.output], "batch seq heads")[..., None]
        return mixed_BSHD + (output_BSH1 * correction).astype(mixed_BSHD.dtype)

    @property
    def reads(self) -> tuple[Hashable, ...]:
        return (self.input, self.output)

    def empty_cache(self, rows: int, length: int, dtype: DTypeLike) -> Any:
        """The last `window` keys and values."""
        shape = (rows, self.window, self.heads, self.head_dim)
        return (empty(("batch", None, "heads", None), shape, dtype),) * 2

    def cache_after(self, cache: Any, projected: Projected, context: ForwardContext) -> Any:
        new = projected.k_BTKD, projected.v_BTKD
        return tuple(moved_window(old, x, context) for old, x in zip(cache, new, strict=True))

    def flops_per_token(self, sequence_length: int, causal: bool) -> float:
        """FLOPs of weights and values of the window."""
        return 12.0 * self.heads * self.head_dim * min(self.window, sequence_length)


def _mixed(
    window: int, scale: float, q_BSHD: Array, k_BSHD: Array, v_BSHD: Array, input_BSH: Array,
    positions_BS: Array, k_before: Array, v_before: Array,
) -> Array:  # fmt: skip
    """The sum over t, on one device, whose heads may be a part of all."""
    B, S, H, D = q_BSHD.shape
    blocks = -(-S // window)
    missing = blocks * window - S

    def in_blocks(x: Array) -> Array:
        padded = jnp.pad(x, ((0, 0), (0, missing), *((0, 0),) * (x.ndim - 2)))
        return padded.reshape(B, -1, window, *x.shape[2:])

    def with_block_before(before: Array, x: Array) -> Array:
        own = in_blocks(x)
        earlier = jnp.concatenate((before.astype(x.dtype)[:, None], own[:, :-1]), axis=1)
        return jnp.concatenate((earlier, own), axis=2)

    q_BNIHD, input_BNIH = in_blocks(q_BSHD), in_blocks(input_BSH)
    k_BNJHD = with_block_before(k_before, k_BSHD)
    v_BNJHD = with_block_before(v_before, v_BSHD)
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    scores = scale * product("bnihd,bnjhd->bnhij", q_BNIHD, k_BNJHD)
    distance_IJ = window + jnp.arange(window)[:, None] - jnp.arange(2 * window)
    # A token sees as many before it as its document has, at most `window` with itself.
    in_document = distance_IJ <= in_blocks(positions_BS)[..., None]
    seen = ((distance_IJ >= 0) & (distance_IJ < window) & in_document)[:, :, None]
    weights = jax.nn.softmax(jnp.where(seen, scores, jnp.finfo(jnp.float32).min), axis=-1)
    composed = psum(product("bnhij,bnih->bnij", weights, input_BNIH), mesh_axes_for("heads"))
    mixed = product("bnij,bnjhd->bnihd", composed.astype(v_BSHD.dtype), v_BNJHD)
    return mixed.reshape(B, -1, H, D)[:, :S]
