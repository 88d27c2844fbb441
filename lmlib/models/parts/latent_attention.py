"""Multi-head latent attention: keys and values of all heads come from one small vector.

Shapes: B batch, S sequence (queries), T sequence (keys), E embed, L latent, H heads, D head_dim (of
the part without positions), R rotary_dim, Q = D + R query_dim, V value_dim, K kv_heads of a cache.
"""

import functools
from collections.abc import Callable, Hashable

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray

from lmlib.compute import Compute
from lmlib.models.attend import attend, check_attention
from lmlib.models.attend.kernel import Options, Shapes
from lmlib.models.forward_context import ForwardContext
from lmlib.models.matmul import matmul
from lmlib.models.part import ActivationNames, Norm, Part
from lmlib.models.parts.cache import KeysAndValues, attend_cached, empty_cache, extended
from lmlib.models.parts.norms import RMSNorm
from lmlib.models.parts.rope import Rotary, rotate
from lmlib.models.weights import fan_in, fold_in_name, initial_values, product_flops, weight
from lmlib.parallel.layout import replicate_for_tp, spec
from lmlib.parallel.matrix import dense

NORM = functools.partial(RMSNorm, "latent", 1e-6)
_SIZES = {"query_dim": None, "rotary_dim": None, "value_dim": None}  # whole, like head_dim


class LatentAttention(Part):
    """softmax(scale · q kᵀ) v, with keys and values computed from a latent of each token.

    The cache holds a normed latent and a rotary key for each token (DeepSeek-AI 2024,
    arXiv:2405.04434, §2.1). Each head computes its values and the first `head_dim` coordinates of
    its keys from the latent; the others are the rotary key, which all heads share. Queries come
    from a second latent, or without `query_latent` from the residual stream.

    Args:
      head_dim, rotary_dim: sizes of a head's queries and keys without and with rotary positions.
      rotary: rotates the latter; `None`: they are not rotated either.
      value_dim, latent, query_latent: sizes of a head's values, and of the latents.
      scale: factor of the products; `None`: (head_dim + rotary_dim)^-1/2.
      norm: makes the norms of latents, called with `key` and the size of "latent".
    """

    rows_may_be_split = True

    names = ActivationNames(
        saved=("latent", "query", "key", "value", "attention"), scopes=("projections", "attention")
    )

    rotary: Rotary | None = eqx.field(static=True)
    scale: float | None = eqx.field(static=True)
    residual_scale: float = eqx.field(static=True)
    query_down: Float[Array, "embed latent"] | None = weight(fan_in("embed"))
    query_norm: Norm | None
    query_up: Float[Array, "latent heads query_dim"] | None = weight(fan_in("latent"), rules=_SIZES)
    query: Float[Array, "embed heads query_dim"] | None = weight(fan_in("embed"), rules=_SIZES)
    down: Float[Array, "embed latent"] = weight(fan_in("embed"))
    norm: Norm
    rotary_key: Float[Array, "embed rotary_dim"] = weight(fan_in("embed"), rules=_SIZES)
    key: Float[Array, "latent heads head_dim"] = weight(fan_in("latent"))
    value: Float[Array, "latent heads value_dim"] = weight(fan_in("latent"), rules=_SIZES)
    output: Float[Array, "heads value_dim embed"] = weight(
        lambda self: fan_in("heads", "value_dim", scale=self.residual_scale), rules=_SIZES
    )

    def __init__(
        self,
        embed: int,
        heads: int,
        head_dim: int,
        rotary_dim: int,
        value_dim: int,
        latent: int,
        query_latent: int | None,
        rotary: Rotary | None,
        scale: float | None = None,
        norm: Callable[..., Norm] = NORM,
        residual_scale: float = 1.0,
        *,
        key: PRNGKeyArray,
    ):
        if rotary is not None and rotary.head_dim != rotary_dim:
            raise ValueError(f"rotary turns {rotary.head_dim} of rotary_dim = {rotary_dim}")
        self.rotary, self.scale, self.residual_scale = rotary, scale, residual_scale
        sizes = {"embed": embed, "heads": heads, "head_dim": head_dim, "rotary_dim": rotary_dim}
        sizes |= {"query_dim": head_dim + rotary_dim, "value_dim": value_dim}

        def first(field: str, latent: int | None = latent) -> Array:
            return initial_values(self, field, key, **sizes, latent=latent or 0)

        self.query_down = self.query_norm = self.query_up = self.query = None
        if query_latent is None:
            self.query = first("query")
        else:
            self.query_down = first("query_down", query_latent)
            self.query_norm = norm(key=fold_in_name(key, "query_norm"), latent=query_latent)
            self.query_up = first("query_up", query_latent)
        self.down, self.rotary_key = first("down"), first("rotary_key")
        self.norm = norm(key=fold_in_name(key, "norm"), latent=latent)
        self.key, self.value, self.output = first("key"), first("value"), first("output")

    def __call__(
        self,
        x_BSE: Float[Array, "b s embed"],
        context: ForwardContext,
        cache: KeysAndValues | None = None,
    ) -> tuple[Float[Array, "b s embed"], KeysAndValues | None]:
        """Returns the output of attention and the new cache of latents and rotary keys."""
        q_BSHQ = self._queries(x_BSE, context)
        latent_BTL, rotary_BTR = self._latents(x_BSE, context)
        if cache is None or cache.empty:
            k_BTHQ, v_BTHV = self._keys_and_values(latent_BTL, rotary_BTR, context)
            with jax.named_scope("attention"):
                mixed_BSHV = attend(
                    q_BSHQ, k_BTHQ, v_BTHV, context.segment_ids_BS, context.compute.attention,
                    scale=self.scale, order=context.order,
                    context_method=context.compute.context_method,
                )  # fmt: skip
                if cache is not None:
                    kept = _as_one_head(cache, rotary_BTR), _as_one_head(cache, latent_BTL)
                    cache = extended(cache, *kept, context.positions_BS)
        else:
            mixed_BSHV, cache = self._mixed_from(cache, q_BSHQ, latent_BTL, rotary_BTR, context)
        with jax.named_scope("projections"):
            precision = context.compute.precision("projections")
            residual = spec(context.compute.residual)
            return matmul("bshv,hve->bse", mixed_BSHV, self.output, precision, residual), cache

    def attention_weights(
        self, x_BSE: Float[Array, "b s embed"], context: ForwardContext
    ) -> Float[Array, "b heads s t"]:
        from lmlib.models.attend.plain import attention_weights

        q_BSHQ = self._queries(x_BSE, context)
        k_BTHQ, _ = self._keys_and_values(*self._latents(x_BSE, context), context)
        return attention_weights(q_BSHQ, k_BTHQ, context.segment_ids_BS, scale=self.scale)

    @jax.named_scope("projections")
    def _queries(
        self, x_BSE: Array, context: ForwardContext
    ) -> Float[Array, "b s heads query_dim"]:
        precision = context.compute.precision("projections")
        if self.query is not None:
            q_BSHQ = matmul("bse,ehq->bshq", x_BSE, self.query, precision)
        else:
            assert self.query_down is not None and self.query_up is not None
            assert self.query_norm is not None
            latent_BSL = matmul("bse,el->bsl", x_BSE, self.query_down, precision)
            latent_BSL = checkpoint_name(self.query_norm(latent_BSL), "latent")
            latent_BSL = replicate_for_tp(latent_BSL, ("batch", "seq", None))
            q_BSHQ = matmul("bsl,lhq->bshq", latent_BSL, self.query_up, precision)
        q_BSHD, q_BSHR = jnp.split(q_BSHQ, [self.key.shape[-1]], axis=-1)
        q_BSHR = self._rotated(q_BSHR, context)
        return checkpoint_name(jnp.concatenate((q_BSHD, q_BSHR), axis=-1), "query")

    @jax.named_scope("projections")
    def _latents(self, x_BSE: Array, context: ForwardContext) -> tuple[Array, Array]:
        """The cached values of each token: its normed latent and its rotated rotary key."""
        precision = context.compute.precision("projections")
        latent_BTL = self.norm(matmul("bte,el->btl", x_BSE, self.down, precision))
        rotary_BTR = matmul("bte,er->btr", x_BSE, self.rotary_key, precision)
        rotary_BTR = self._rotated(rotary_BTR[:, :, None], context)[:, :, 0]
        return checkpoint_name(latent_BTL, "latent"), checkpoint_name(rotary_BTR, "latent")

    def _rotated(self, x_BSHR: Array, context: ForwardContext) -> Array:
        if self.rotary is None:
            return x_BSHR
        return rotate(x_BSHR, context.shared[self.rotary], self.rotary.interleaved)

    @jax.named_scope("projections")
    def _keys_and_values(
        self, latent_BTL: Array, rotary_BTR: Array, context: ForwardContext
    ) -> tuple[Array, Array]:
        """The keys and values of each head."""
        precision = context.compute.precision("projections")
        latent_BTL = replicate_for_tp(latent_BTL, ("batch", "seq", None))
        k_BTHD = matmul("btl,lhd->bthd", latent_BTL, self.key, precision)
        v_BTHV = matmul("btl,lhv->bthv", latent_BTL, self.value, precision)
        shape, heads = (*k_BTHD.shape[:-1], rotary_BTR.shape[-1]), spec("batch seq heads head_dim")
        k_BTHR = jnp.broadcast_to(rotary_BTR[:, :, None], shape, out_sharding=heads)
        k_BTHQ = jnp.concatenate((k_BTHD, k_BTHR), axis=-1)
        return checkpoint_name(k_BTHQ, "key"), checkpoint_name(v_BTHV, "value")

    def _mixed_from(
        self,
        cache: KeysAndValues,
        q_BSHQ: Array,
        latent_BSL: Array,
        rotary_BSR: Array,
        context: ForwardContext,
    ) -> tuple[Array, KeysAndValues]:
        """Attention over latents: queries times the matrix of keys (arXiv:2405.04434, §2.1.2)."""
        q_BSHD, q_BSHR = jnp.split(q_BSHQ, [self.key.shape[-1]], axis=-1)
        with jax.named_scope("projections"):
            of_latents_BSHL = matmul("bshd,lhd->bshl", q_BSHD, dense(self.key).astype(q_BSHD.dtype))
        with jax.named_scope("attention"):
            keys, values = _as_one_head(cache, rotary_BSR), _as_one_head(cache, latent_BSL)
            options = Options.of(None, self.scale, None, q_BSHQ.shape[-1])
            mixed_BSHL, cache = attend_cached(
                q_BSHR, keys, values, context.positions_BS, cache, options,
                of_values_BSHV=of_latents_BSHL,
            )  # fmt: skip
        with jax.named_scope("projections"):
            value_LHV = dense(self.value).astype(mixed_BSHL.dtype)
            return matmul("bshl,lhv->bshv", mixed_BSHL, value_LHV), cache

    @property
    def reads(self) -> tuple[Hashable, ...]:
        return super().reads if self.rotary is None else (self.rotary, *super().reads)

    def empty_cache(self, rows: int, length: int, dtype: DTypeLike) -> KeysAndValues:
        """See `Part.empty_cache`. Its one head stores rotary keys as keys and latents as values."""
        latent, rotary_dim = self.down.shape[-1], self.rotary_key.shape[-1]
        return empty_cache(rows, length, 1, rotary_dim, dtype, value_dim=latent)

    def flops_per_token(self, sequence_length: int, causal: bool) -> float:
        """FLOPs of the weights, and 6 · heads · (query_dim + value_dim) · keys."""
        heads, value_dim, _ = self.output.shape[-3:]
        query_dim = self.key.shape[-1] + self.rotary_key.shape[-1]
        keys = sequence_length / 2 if causal else float(sequence_length)
        return product_flops(self) + 6 * heads * (query_dim + value_dim) * keys

    def check(self, sequence_length: int, compute: Compute) -> None:
        """Same as in `lmlib.models.parts.attention.Attention`."""
        if self.rotary is not None:
            self.rotary.check(sequence_length)
        query_dim = self.key.shape[-1] + self.rotary_key.shape[-1]
        shapes = Shapes(sequence_length, query_dim, compute.dtype, value_dim=self.value.shape[-1])
        check_attention(compute.attention, shapes, compute.context_method)


def _as_one_head(cache: KeysAndValues, x_BTL: Float[Array, "b t l"]) -> Float[Array, "b t k l"]:
    """Returns x as the cache stores it: one head on each device along `tensor`."""
    K = cache.keys.shape[1]
    shape = (*x_BTL.shape[:2], K, x_BTL.shape[-1])
    out_sharding = spec("batch seq kv_heads head_dim")
    return jnp.broadcast_to(x_BTL[:, :, None], shape, out_sharding=out_sharding)
