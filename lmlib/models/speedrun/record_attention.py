"""Attention whose mixed values go through further parts, with an offset of keys.

Shapes: B batch, S sequence (queries), T sequence (keys), E embed, H heads, K kv_heads, D head_dim.
"""

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from lmlib.compute import Compute
from lmlib.models.forward_context import ForwardContext
from lmlib.models.matmul import matmul
from lmlib.models.part import Part
from lmlib.models.parts.attention import Attention
from lmlib.models.recurrent.cache import empty
from lmlib.models.recurrent.convolution import earlier_tokens, moved_window
from lmlib.models.speedrun.gated_values import ATTENTION_INPUT
from lmlib.models.weights import Constant, weight
from lmlib.parallel.layout import reshard

_PROJECTED = "projected"  # the key of what `RecordAttention` computes before attention


class Projected(NamedTuple):
    """The inputs of attention."""

    q_BSHD: Float[Array, "b s heads head_dim"]
    k_BTKD: Float[Array, "b t kv_heads head_dim"]
    v_BTKD: Float[Array, "b t kv_heads head_dim"]


class AfterAttention(Part):
    """Base class of parts that change mixed values."""

    def __call__(
        self,
        mixed_BSHD: Float[Array, "b s heads head_dim"],
        projected: Projected,
        context: ForwardContext,
        cache: Any = None,
    ) -> Float[Array, "b s heads head_dim"]:
        """Returns other mixed values."""
        raise NotImplementedError

    def cache_after(self, cache: Any, projected: Projected, context: ForwardContext) -> Any:
        """Returns the cache for the next call; by default there is none."""
        return cache


class RecordAttention(Attention):
    """Attention of modded-nanogpt's records.

    Queries, keys and values are made of value_scale · x; values embedded in tokens are added later.
    With `offset`, the token before, in the same document, gives the coordinates of a key that do
    not rotate (partial key offset, record 49). `after` change the mixed values in turn. Their sum
    over heads is multiplied by output_scale. The scales are learned, from 0.5 and 1.

    Args:
      scales: False for neither scale.
      offset, after: see above.
      attention: arguments of `Attention`.
    """

    rows_may_be_split = True

    offset: bool = eqx.field(static=True)
    after: tuple[AfterAttention, ...]
    value_scale: Float[Array, ""] | None = weight(Constant(0.5), dtype="float32", learning_rate=5.0)
    output_scale: Float[Array, ""] | None = weight(
        Constant(1.0), dtype="float32", learning_rate=5.0
    )

    def __init__(
        self,
        *sizes: Any,
        scales: bool = True,
        offset: bool = False,
        after: Sequence[AfterAttention] = (),
        **attention: Any,
    ):
        super().__init__(*sizes, **attention)
        self.offset, self.after = offset, tuple(after)
        if offset and (self.rotary is None or self.rotary.head_dim >= self.key.shape[-1]):
            raise ValueError("an offset of keys needs coordinates of a head that do not rotate")
        if not scales:
            self.value_scale = self.output_scale = None

    def __call__(
        self, x_BSE: Float[Array, "b s embed"], context: ForwardContext, cache: Any = None
    ) -> tuple[Float[Array, "b s embed"], Any]:
        """A mixer's call."""
        keys, before_B1E, windows = cache or (None, None, (None,) * len(self.after))
        made = self._made(x_BSE, context, before_B1E)
        given = context.sharing({_PROJECTED: (made, windows)})
        y_BSE, keys = super().__call__(x_BSE, self.of_scores(given), keys)
        if cache is None:
            return y_BSE, None
        pairs = zip(self.after, windows, strict=True)
        windows = tuple(part.cache_after(window, made, context) for part, window in pairs)
        x_BSE = reshard(x_BSE, "batch seq embed")
        return y_BSE, (keys, moved_window(before_B1E, x_BSE, context), windows)

    def of_scores(self, context: ForwardContext) -> ForwardContext:
        """The context of the queries and keys."""
        return context

    def _projected(self, x_BSE: Array, context: ForwardContext) -> tuple[Array, Array, Array]:
        if _PROJECTED not in context.shared:
            return self._made(x_BSE, context, None)
        made: Projected = context.shared[_PROJECTED][0]
        return made

    def _made(self, x_BSE: Array, context: ForwardContext, before_B1E: Any) -> Projected:
        shared = context.sharing({ATTENTION_INPUT: x_BSE})
        made = Projected(*super()._projected(_times(self.value_scale, x_BSE), shared))
        if not self.offset:
            return made
        assert self.rotary is not None
        turned, still = jnp.split(made.k_BTKD, [self.rotary.head_dim], axis=-1)
        window = None if before_B1E is None else self._still(before_B1E, context)
        (earlier,) = earlier_tokens(still, 1, context, window)
        is_first_BT11 = context.positions_BS[..., None, None] <= 0
        still = jnp.where(is_first_BT11, still, earlier)
        return made._replace(k_BTKD=jnp.concatenate((turned, still), axis=-1))

    def _still(self, x_BSE: Array, context: ForwardContext) -> Float[Array, "b s kv_heads still"]:
        """The coordinates of keys that do not rotate, before the offset."""
        assert self.rotary is not None
        precision = context.compute.precision("projections")
        scaled_BSE = _times(self.value_scale, x_BSE.astype(context.compute.dtype))
        k_BTKD = matmul("bte,ekd->btkd", scaled_BSE, self.key, precision)
        k_BTKD = k_BTKD if self.key_norm is None else self.key_norm(k_BTKD)
        return k_BTKD[..., self.rotary.head_dim :]

    def gated(self, mixed_BSHD: Array, x_BSE: Array, context: ForwardContext) -> Array:
        projected, windows = context.shared[_PROJECTED]
        for part, window in zip(self.after, windows, strict=True):
            mixed_BSHD = part(mixed_BSHD, projected, context, window)
        return _times(self.output_scale, mixed_BSHD)

    def empty_cache(self, rows: int, length: int, dtype: DTypeLike) -> Any:
        """Keys and values, the last token's input for the offset, and the caches of `after`."""
        before = None
        if self.offset:
            before = empty(("batch", None, None), (rows, 1, self.query.shape[0]), dtype)
        others = tuple(part.empty_cache(rows, length, dtype) for part in self.after)
        return super().empty_cache(rows, length, dtype), before, others

    def flops_per_token(self, sequence_length: int, causal: bool) -> float:
        others = sum(part.flops_per_token(sequence_length, causal) for part in self.after)
        return super().flops_per_token(sequence_length, causal) + others

    def check(self, sequence_length: int, compute: Compute) -> None:
        super().check(sequence_length, compute)
        for part in self.after:
            part.check(sequence_length, compute)


def _times(scale: Array | None, x: Array) -> Array:
    if scale is None:
        return x
    return (scale * x.astype(jnp.promote_types(x.dtype, jnp.float32))).astype(x.dtype)


class HeadGate(AfterAttention):
    """Mixed values times a number for each head and token, of `Context.shared`.

    Source: modded-nanogpt, record 28, whose number was a sigmoid of the layer's input.
    """

    rows_may_be_split = True

    gates: Hashable = eqx.field(static=True)

    def __call__(
        self, mixed_BSHD: Array, projected: Projected, context: ForwardContext, cache: Any = None
    ) -> Float[Array, "b s heads head_dim"]:
        return mixed_BSHD * of_heads(context.shared[self.gates])

    @property
    def reads(self) -> tuple[Hashable, ...]:
        return (self.gates,)


def of_heads(gates_BSH: Float[Array, "b s heads"]) -> Float[Array, "b s heads 1"]:
    """Gates in the layout of heads."""
    return reshard(gates_BSH, "batch seq heads")[..., None]
