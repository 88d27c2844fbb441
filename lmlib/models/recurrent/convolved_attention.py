"""Attention with short causal convolutions of its queries, keys and values.

Shapes: B batch, S sequence (queries), T sequence (keys), E embed, H heads, K kv_heads, D head_dim,
W width.
"""

from typing import Any, NamedTuple

import equinox as eqx
import jax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray

from lmlib.models.forward_context import ForwardContext
from lmlib.models.part import ActivationNames, Part
from lmlib.models.parts.attention import QKV, Attention
from lmlib.models.recurrent.cache import empty
from lmlib.models.recurrent.convolution import causal_convolution
from lmlib.models.weights import fill, fold_in_name, weight, zeros

Windows = tuple[Float[Array, "b before ..."] | None, ...]
_NO_WINDOWS: Windows = (None, None, None)


class Convolution(Part):
    """x + convolution(x), with a filter of a few tokens for each channel, at first zero.

    Args:
      axes: names of the last axes of x.
      width: number of tokens.
    """

    rows_may_be_split = True

    axes: str = eqx.field(static=True)
    filter: Float[Array, "..."] = weight(zeros, rules={"width": None})

    def __init__(self, axes: str, width: int, *, key: PRNGKeyArray, **sizes: int):
        if width < 2:
            raise ValueError(f"a convolution needs a width of at least 2 tokens, got {width}")
        self.axes = axes
        fill(self, key, (), width=width, **sizes)

    @property
    def axis_names(self) -> dict[str, str]:
        return {"filter": f"{self.axes} width"}

    def __call__(
        self, x_BS: Float[Array, "b s ..."], context: ForwardContext, window_BW: Array | None
    ) -> tuple[Float[Array, "b s ..."], Float[Array, "b before ..."] | None]:
        """Returns the sum and the new window; see `causal_convolution`."""
        y_BS, window_BW = causal_convolution(x_BS, self.filter, context, window_BW)
        return x_BS + y_BS, window_BW

    def empty_window(self, rows: int, dtype: DTypeLike) -> Float[Array, "b before ..."]:
        *channels, width = self.filter.shape[-1 - len(self.axes.split()) :]
        return empty(("batch", None, *self.axes.split()), (rows, width - 1, *channels), dtype)

    def flops_per_token(self, sequence_length: int, causal: bool) -> float:
        return 6.0 * self.filter.size


class ConvolvedCache(NamedTuple):
    """The last W - 1 queries, keys and values before convolution, and the cache of attention."""

    windows: Windows
    attention: Any


class ConvolvedAttention(Attention):
    """Attention whose queries, keys and values are each x + convolution(x), before any norm.

    A new layer equals an `Attention`. Keys that hold earlier tokens let one layer find the token
    that followed the last occurrence of the present one; without them that takes two layers.
    Sources: So et al. 2021, Primer (arXiv:2109.08668, §4.2); Allen-Zhu 2025, Canon-B
    (arXiv:2512.17351).

    Args:
      width: number of tokens of each convolution.
      attention: arguments of `Attention`.
    """

    rows_may_be_split = True

    names = ActivationNames(
        saved=("product", *Attention.names.saved),
        scopes=("projections", "convolution", "attention"),
    )

    convolutions: tuple[Convolution, Convolution, Convolution]

    def __init__(self, *sizes: Any, width: int = 4, key: PRNGKeyArray, **attention: Any):
        super().__init__(*sizes, key=key, **attention)
        heads, head_dim = self.query.shape[-2:]
        kv_heads = self.key.shape[-2]

        def made(name: str, axis: str) -> Convolution:
            own = fold_in_name(key, name)
            sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
            return Convolution(f"{axis} head_dim", width, key=own, **sizes)

        self.convolutions = (
            made("query", "heads"),
            made("key", "kv_heads"),
            made("value", "kv_heads"),
        )

    def __call__(
        self,
        x_BSE: Float[Array, "b s embed"],
        context: ForwardContext,
        cache: ConvolvedCache | None = None,
    ) -> tuple[Float[Array, "b s embed"], ConvolvedCache | None]:
        """A mixer's call."""
        windows, inner = (_NO_WINDOWS, None) if cache is None else cache
        qkv, windows = self._convolved(x_BSE, context, windows)
        y_BSE, inner = self.attended(self.rotated(qkv, context), x_BSE, context, inner)
        return y_BSE, None if cache is None else ConvolvedCache(windows, inner)

    def _convolved(
        self, x_BSE: Array, context: ForwardContext, windows: Windows
    ) -> tuple[QKV, Windows]:
        products = [checkpoint_name(each, "product") for each in self.products(x_BSE, context)]
        with jax.named_scope("convolution"):
            triples = zip(self.convolutions, products, windows, strict=True)
            (q_BSHD, k_BTKD, v_BTKD), windows = zip(
                *(add(x_BS, context, window_BW) for add, x_BS, window_BW in triples), strict=True
            )
        return (q_BSHD, k_BTKD, v_BTKD), windows

    def _projected(self, x_BSE: Array, context: ForwardContext) -> QKV:
        return self.rotated(self._convolved(x_BSE, context, _NO_WINDOWS)[0], context)

    def empty_cache(self, rows: int, length: int, dtype: DTypeLike) -> ConvolvedCache:
        """See `Part.empty_cache`. The windows' sizes do not depend on `length`."""
        windows = tuple(each.empty_window(rows, dtype) for each in self.convolutions)
        return ConvolvedCache(windows, super().empty_cache(rows, length, dtype))

    def flops_per_token(self, sequence_length: int, causal: bool) -> float:
        """FLOPs of attention and of the filters, six for each weight of the latter."""
        filters = sum(f.flops_per_token(sequence_length, causal) for f in self.convolutions)
        return super().flops_per_token(sequence_length, causal) + filters
