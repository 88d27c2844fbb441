"""Causal grouped-query attention, kept within documents.

Shapes: B batch, S sequence (queries), T sequence (keys), E embed, H heads, K kv_heads, D head_dim.
"""

from collections.abc import Callable, Hashable
from typing import Any

import equinox as eqx
import jax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray

from lmlib.compute import Compute
from lmlib.models.attend import attend, check_attention
from lmlib.models.attend.kernel import Options, Shapes
from lmlib.models.forward_context import ForwardContext
from lmlib.models.matmul import matmul
from lmlib.models.part import ActivationNames, Norm, Part
from lmlib.models.parts.rope import Rotary, rotate
from lmlib.models.weights import fan_in, fill, fold_in_name, product_flops, weight, zeros
from lmlib.parallel.layout import spec

QKV = tuple[Array, Array, Array]  # queries, keys and values


class Attention(Part):
    """softmax(scale · q kᵀ) v, where G query heads share each key-value head (arXiv:2305.13245).

    Args:
      rotary: rotates queries and keys by their positions; optional.
      window, scale, soft_cap: as in `lmlib.models.attend.attend`.
      bias, output_bias: True if queries, keys and values, or the output, have biases.
      sinks: True if each head has a sink; see `lmlib.models.attend.kernel.with_sinks`.
      norm, key_norm: make the norms of queries and (by default the same) keys before rotation.
        `RMSNorm` with axes "head_dim" norms each head, with "heads head_dim" (for keys: "kv_heads
        head_dim") all together.
      value_embedding: makes a part that adds to the values of each token, called like `norm`.
      residual_scale: factor of the output's initial values (`lmlib.models.weights`).
    """

    rows_may_be_split = True

    names = ActivationNames(
        saved=("query", "key", "value", "attention"), scopes=("projections", "attention")
    )

    rotary: Rotary | None = eqx.field(static=True)
    window: int | None = eqx.field(static=True)
    scale: float | None = eqx.field(static=True)
    soft_cap: float | None = eqx.field(static=True)
    residual_scale: float = eqx.field(static=True)
    query_norm: Norm | None
    key_norm: Norm | None
    value_embedding: Part | None
    query: Float[Array, "embed heads head_dim"] = weight(fan_in("embed"))
    key: Float[Array, "embed kv_heads head_dim"] = weight(fan_in("embed"))
    value: Float[Array, "embed kv_heads head_dim"] = weight(fan_in("embed"))
    output: Float[Array, "heads head_dim embed"] = weight(
        lambda self: fan_in("heads", "head_dim", scale=self.residual_scale)
    )
    query_bias: Float[Array, "heads head_dim"] | None = weight(zeros)
    key_bias: Float[Array, "kv_heads head_dim"] | None = weight(zeros)
    value_bias: Float[Array, "kv_heads head_dim"] | None = weight(zeros)
    output_bias: Float[Array, "embed"] | None = weight(zeros, writes=True)
    sinks: Float[Array, "heads"] | None = weight(zeros, dtype="float32")

    def __init__(
        self,
        embed: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        rotary: Rotary | None = None,
        window: int | None = None,
        scale: float | None = None,
        soft_cap: float | None = None,
        bias: bool = False,
        output_bias: bool = False,
        sinks: bool = False,
        norm: Callable[..., Norm] | None = None,
        key_norm: Callable[..., Norm] | None = None,
        value_embedding: Callable[..., Part] | None = None,
        residual_scale: float = 1.0,
        *,
        key: PRNGKeyArray,
    ):
        if kv_heads > 0 and heads % kv_heads:
            raise ValueError(f"heads = {heads} must be a multiple of kv_heads = {kv_heads}")
        if window is not None and not 1 <= window < 2**31:
            raise ValueError(f"window must be at least 1 and below 2^31, or None, got {window:,}")
        self.rotary, self.window, self.scale, self.soft_cap = rotary, window, scale, soft_cap
        self.residual_scale = residual_scale
        sizes = {"embed": embed, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
        absent = [] if bias else ["query_bias", "key_bias", "value_bias"]
        absent += [] if output_bias else ["output_bias"]
        fill(self, key, absent if sinks else [*absent, "sinks"], **sizes)
        key_norm = norm if key_norm is None else key_norm
        del sizes["embed"]
        self.query_norm = norm and norm(key=fold_in_name(key, "query_norm"), **sizes)
        self.key_norm = key_norm and key_norm(key=fold_in_name(key, "key_norm"), **sizes)
        self.value_embedding = value_embedding and value_embedding(
            key=fold_in_name(key, "value_embedding"), **sizes
        )

    def __call__(
        self, x_BSE: Float[Array, "b s embed"], context: ForwardContext, cache: Any = None
    ) -> tuple[Float[Array, "b s embed"], Any]:
        """A mixer's call; the cache is a `KeysAndValues`. `tensor` sums the last product."""
        return self.attended(self._projected(x_BSE, context), x_BSE, context, cache)

    def attended(self, qkv: QKV, x_BSE: Array, context: ForwardContext, cache: Any) -> Any:
        (q_BSHD, k_BTKD, v_BTKD), compute = qkv, context.compute
        if cache is not None:
            from lmlib.models.parts.cache import attend_cached, extended  # only generation needs it
        with jax.named_scope("attention"):
            if cache is None or cache.empty:
                mixed_BSHD = attend(
                    q_BSHD, k_BTKD, v_BTKD, context.segment_ids_BS, compute.attention,
                    window=self.window, scale=self.scale, soft_cap=self.soft_cap,
                    sinks_H=self.sinks, order=context.order, context_method=compute.context_method,
                )  # fmt: skip
                if cache is not None:
                    cache = extended(cache, k_BTKD, v_BTKD, context.positions_BS)
            else:
                options = Options.of(self.window, self.scale, self.soft_cap, q_BSHD.shape[-1])
                mixed_BSHD, cache = attend_cached(
                    q_BSHD, k_BTKD, v_BTKD, context.positions_BS, cache, options,
                    sinks_H=self.sinks,
                )  # fmt: skip
        with jax.named_scope("projections"):
            precision, residual = compute.precision("projections"), spec(compute.residual)
            mixed_BSHD = self.gated(mixed_BSHD, x_BSE, context)
            y_BSE = matmul("bshd,hde->bse", mixed_BSHD, self.output, precision, residual)
            return _biased(y_BSE, self.output_bias), cache

    def gated(self, mixed_BSHD: Array, x_BSE: Array, context: ForwardContext) -> Array:
        return mixed_BSHD

    def attention_weights(
        self, x_BSE: Float[Array, "b s embed"], context: ForwardContext
    ) -> Float[Array, "b heads s t"]:
        from lmlib.models.attend.plain import attention_weights

        q_BSHD, k_BTKD, _ = self._projected(x_BSE, context)
        return attention_weights(
            q_BSHD, k_BTKD, context.segment_ids_BS, window=self.window, scale=self.scale,
            soft_cap=self.soft_cap, sinks_H=self.sinks,
        )  # fmt: skip

    def _projected(self, x_BSE: Array, context: ForwardContext) -> QKV:
        return self.rotated(self.products(x_BSE, context), context)

    def products(self, x_BSE: Array, context: ForwardContext) -> QKV:
        """Queries, keys and values with their biases."""
        precision = context.compute.precision("projections")
        with jax.named_scope("projections"):
            q_BSHD = matmul("bse,ehd->bshd", x_BSE, self.query, precision)
            k_BTKD = matmul("bte,ekd->btkd", x_BSE, self.key, precision)
            v_BTKD = matmul("bte,ekd->btkd", x_BSE, self.value, precision)
            q_BSHD, k_BTKD = _biased(q_BSHD, self.query_bias), _biased(k_BTKD, self.key_bias)
            return q_BSHD, k_BTKD, _biased(v_BTKD, self.value_bias)

    def rotated(self, qkv: QKV, context: ForwardContext) -> QKV:
        """Queries, keys and values after value embeddings, norms and rotation."""
        q_BSHD, k_BTKD, v_BTKD = qkv
        with jax.named_scope("projections"):
            if self.value_embedding is not None:
                v_BTKD = self.value_embedding(v_BTKD, context)
            v_BTKD = checkpoint_name(v_BTKD, "value")
            q_BSHD = q_BSHD if self.query_norm is None else self.query_norm(q_BSHD)
            k_BTKD = k_BTKD if self.key_norm is None else self.key_norm(k_BTKD)
            if self.rotary is not None:
                rotations, interleaved = context.shared[self.rotary], self.rotary.interleaved
                q_BSHD = rotate(q_BSHD, rotations, interleaved)
                k_BTKD = rotate(k_BTKD, rotations, interleaved)
            q_BSHD, k_BTKD = checkpoint_name(q_BSHD, "query"), checkpoint_name(k_BTKD, "key")
        return q_BSHD, k_BTKD, v_BTKD

    @property
    def reads(self) -> tuple[Hashable, ...]:
        return super().reads if self.rotary is None else (self.rotary, *super().reads)

    def empty_cache(self, rows: int, length: int, dtype: DTypeLike) -> Any:
        """See `Part.empty_cache`; with a window the cache has the window's size."""
        from lmlib.models.parts.cache import empty_cache

        kv_heads, head_dim = self.key.shape[-2:]
        return empty_cache(rows, min(self.window or length, length), kv_heads, head_dim, dtype)

    def flops_per_token(self, sequence_length: int, causal: bool) -> float:
        """FLOPs of the weights, and 12 · heads · head_dim · mean number of visible keys."""
        heads, head_dim = self.query.shape[-2:]
        keys = float(min(self.window or sequence_length, sequence_length))
        if causal:
            keys -= keys**2 / (2 * sequence_length)
        return product_flops(self) + 12 * heads * head_dim * keys

    def check(self, sequence_length: int, compute: Compute) -> None:
        """See `Part.check`; also checks the kernel that `compute.attention` names."""
        if self.rotary is not None:
            self.rotary.check(sequence_length)
        sizes = sequence_length, self.query.shape[-1]
        shapes = Shapes(*sizes, compute.dtype, self.soft_cap, sinks=self.sinks is not None)
        check_attention(compute.attention, shapes, compute.context_method)


def _biased(x: Array, bias: Array | None) -> Array:
    return x if bias is None else x + bias
