"""Paired heads: the queries of two heads attend to the keys of both.

Shapes: B batch, S sequence, H heads, P pairs of heads, D head_dim; in tables D is half of it.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from lmlib.models.forward_context import ForwardContext
from lmlib.models.part import class_name
from lmlib.models.parts.rope import Rotary, Rotations
from lmlib.models.speedrun.record_attention import HeadGate, Projected, RecordAttention
from lmlib.parallel.collectives import devices_along, shard_map
from lmlib.parallel.layout import mesh_axes_for, partition


@dataclasses.dataclass(frozen=True)
class EvenRotary(Rotary):
    """Rotations by twice the position."""

    def __call__(self, context: ForwardContext) -> Rotations:
        return super().__call__(dataclasses.replace(context, positions_BS=2 * context.positions_BS))


class PairedAttention(RecordAttention):
    """Attention of H / 2 heads over rows of 2 S positions, two for each token.

    Position 2 s + a of pair p has the query, key and value of token s and head 2 p + a, so a token
    attends to both heads of earlier tokens, and its second head to its first. `window` counts
    positions. Source: modded-nanogpt, record 58, whose head a · H / 2 + p is ours 2 p + a. As
    there, heads with an odd number in its order rotate by 2 s + 1, and the others by 2 s.

    Args:
      attention: arguments of `RecordAttention`, without `offset`; `rotary` counts tokens.
    """

    rows_may_be_split = True

    def __init__(self, *sizes: Any, rotary: Rotary, **attention: Any):
        settings = {each.name: getattr(rotary, each.name) for each in dataclasses.fields(rotary)}
        super().__init__(*sizes, rotary=EvenRotary(**settings), **attention)
        H, K = self.query.shape[1], self.key.shape[1]
        if H % 2 or H != K:
            raise ValueError(f"paired heads need as many key heads, and an even number: {H}, {K}")
        if self.offset or not all(isinstance(part, HeadGate) for part in self.after):
            raise ValueError("paired heads have no offset of keys, and no parts but `HeadGate`")

    def of_scores(self, context: ForwardContext) -> ForwardContext:
        """The context of two positions for each token."""
        positions_BS, segments_BS = context.positions_BS, context.segment_ids_BS
        doubled_BS = _twice(2 * positions_BS) + jnp.arange(2 * positions_BS.shape[1]) % 2
        segments_BS = None if segments_BS is None else _twice(segments_BS)
        return dataclasses.replace(
            context, positions_BS=doubled_BS, segment_ids_BS=segments_BS, counts_BS=None
        )

    def _made(self, x_BSE: Array, context: ForwardContext, before_B1E: Any) -> Projected:
        assert self.rotary is not None
        rotations = context.shared[self.rotary]
        given = context.sharing({self.rotary: self._by_head(rotations)})
        return Projected(*map(_paired, super()._made(x_BSE, given, before_B1E)))

    def _by_head(self, even: Rotations) -> Rotations:
        """The rotations of each head, from those by twice the position."""
        assert self.rotary is not None
        one = self.rotary.rotations(jnp.ones((1, 1), jnp.int32), even.cos_BS1D.dtype)
        pair_H, half_H = np.divmod(np.arange(self.query.shape[1]), 2)
        is_odd_H = (half_H * (self.query.shape[1] // 2) + pair_H) % 2 == 1
        cos_HD = jnp.where(is_odd_H[:, None], one.cos_BS1D[0, 0], 1)
        sin_HD = jnp.where(is_odd_H[:, None], one.sin_BS1D[0, 0], 0)
        return Rotations(
            even.cos_BS1D * cos_HD - even.sin_BS1D * sin_HD,
            even.sin_BS1D * cos_HD + even.cos_BS1D * sin_HD,
        )

    def gated(self, mixed_BSHD: Array, x_BSE: Array, context: ForwardContext) -> Array:
        return super().gated(_unpaired(mixed_BSHD), x_BSE, context)

    def attention_weights(self, x_BSE: Array, context: ForwardContext) -> Array:
        raise ValueError(
            f"{class_name(self)} shows no attention weights: a token has two for each other token"
        )

    def empty_cache(self, rows: int, length: int, dtype: DTypeLike) -> Any:
        from lmlib.models.parts.cache import empty_cache

        _, heads, head_dim = self.key.shape
        slots = min(self.window or 2 * length, 2 * length)
        others = tuple(part.empty_cache(rows, length, dtype) for part in self.after)
        return empty_cache(rows, slots, heads // 2, head_dim, dtype), None, others

    def flops_per_token(self, sequence_length: int, causal: bool) -> float:
        return super().flops_per_token(2 * sequence_length, causal)


def _twice(x_BS: Array) -> Array:
    """Each token's number, for both of its positions."""

    def local(x_BS: Array) -> Array:
        return jnp.repeat(x_BS, 2, axis=1)

    return shard_map(local, (partition("batch seq"),), partition("batch seq"))(x_BS)


def _paired(x_BSHD: Float[Array, "b s heads d"]) -> Float[Array, "b s2 pairs d"]:
    devices, heads = devices_along(mesh_axes_for("heads")), x_BSHD.shape[2]
    if heads // 2 % devices:
        raise ValueError(f"tensor={devices} must divide the {heads // 2} pairs of heads")

    def local(x_BSHD: Array) -> Array:
        B, S, H, D = x_BSHD.shape
        x_BSPD = jnp.moveaxis(x_BSHD.reshape(B, S, H // 2, 2, D), 3, 2)
        return x_BSPD.reshape(B, 2 * S, H // 2, D)

    return _of_whole_pairs(local, x_BSHD)


def _unpaired(x_BSPD: Float[Array, "b s2 pairs d"]) -> Float[Array, "b s heads d"]:
    def local(x_BSPD: Array) -> Array:
        B, S, P, D = x_BSPD.shape
        return jnp.moveaxis(x_BSPD.reshape(B, S // 2, 2, P, D), 2, 3).reshape(B, S // 2, 2 * P, D)

    return _of_whole_pairs(local, x_BSPD)


def _of_whole_pairs(function: Callable[[Array], Array], x: Array) -> Array:
    layout = partition("batch seq heads head_dim")
    return shard_map(function, (layout,), layout)(x)
