"""Mamba-2: a linear recurrence whose decay and step size depend on the token.

Source: Dao & Gu 2024, arXiv:2405.21060, §7.

Shapes: B batch, S sequence, E embed, H heads, G kv_heads (the paper's groups), K key_dim (the
paper's state size N), V value_dim (the paper's head size P), W width.
"""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray

from lmlib.models.forward_context import ForwardContext
from lmlib.models.matmul import matmul
from lmlib.models.part import ActivationNames, Part
from lmlib.models.recurrent.cache import RecurrentState, empty
from lmlib.models.recurrent.convolution import causal_convolution
from lmlib.models.recurrent.decay import LogOfUniform, TimeSteps
from lmlib.models.recurrent.linear_recurrence import linear_recurrence
from lmlib.models.weights import fan_in, fill, normal, ones, product_flops, weight, zeros
from lmlib.parallel.layout import reshard, spec

_SIZES = {"key_dim": None, "value_dim": None, "width": None}
_FILTER = functools.partial(weight, lambda self: normal(self.width**-0.5), rules=_SIZES)
_PROJECTION = functools.partial(weight, fan_in("embed"), rules=_SIZES)
_BIAS = functools.partial(weight, zeros, rules=_SIZES)
_FILTERED = ("input", "key", "query")
_PROJECTED = (*_FILTERED, "gate", "time_projection", "output")


class Mamba2(Part):
    """norm((S_tᵀ C_t + D x_t) · silu(z_t)) with a state S of each head.

    S_t = exp(-exp(A_log) Δ_t) S_{t-1} + Δ_t B_t x_tᵀ (eq. 1, and §7.1). In the paper's letters,
    `input` is x, `key` B, `query` C, `gate` z, `time` Δ, `skip` D and `log_rate` A_log. x, B and C
    have short convolutions and silu. Δ is softplus(time + time_bias), within `time_limits`. Each of
    `kv_heads` groups of adjacent heads shares B and C, and is normed together.

    Args:
      key_dim, value_dim: sizes of B and C of a group, and of x and z of a head.
      width: number of tokens of the convolutions.
      time_limits: least and largest Δ; `None`: any.
      filter_bias, bias: True if the convolutions, or the projections, have biases.
      epsilon: of the norm.
      residual_scale: factor of the output's initial values (`lmlib.models.weights`).
    """

    rows_may_be_split = True

    names = ActivationNames(
        saved=("gate", "input", "key", "query", "recurrence"), scopes=("projections", "recurrence")
    )

    kv_heads: int = eqx.field(static=True)
    width: int = eqx.field(static=True)
    time_limits: tuple[float, float] | None = eqx.field(static=True)
    epsilon: float = eqx.field(static=True)
    residual_scale: float = eqx.field(static=True)
    gate: Float[Array, "embed heads value_dim"] = _PROJECTION()
    input: Float[Array, "embed heads value_dim"] = _PROJECTION()
    key: Float[Array, "embed kv_heads key_dim"] = _PROJECTION()
    query: Float[Array, "embed kv_heads key_dim"] = _PROJECTION()
    time: Float[Array, "embed heads"] = _PROJECTION()
    gate_bias: Float[Array, "heads value_dim"] | None = _BIAS()
    input_bias: Float[Array, "heads value_dim"] | None = _BIAS()
    key_bias: Float[Array, "kv_heads key_dim"] | None = _BIAS()
    query_bias: Float[Array, "kv_heads key_dim"] | None = _BIAS()
    time_projection_bias: Float[Array, "heads"] | None = _BIAS()
    input_filter: Float[Array, "heads value_dim width"] = _FILTER()
    key_filter: Float[Array, "kv_heads key_dim width"] = _FILTER()
    query_filter: Float[Array, "kv_heads key_dim width"] = _FILTER()
    input_filter_bias: Float[Array, "heads value_dim"] | None = _BIAS()
    key_filter_bias: Float[Array, "kv_heads key_dim"] | None = _BIAS()
    query_filter_bias: Float[Array, "kv_heads key_dim"] | None = _BIAS()
    log_rate: Float[Array, "heads"] = weight(LogOfUniform(1.0, 16.0), dtype="float32")
    time_bias: Float[Array, "heads"] = weight(TimeSteps(), dtype="float32")
    skip: Float[Array, "heads"] = weight(ones, dtype="float32")
    norm_scale: Float[Array, "heads value_dim"] = weight(ones, rules=_SIZES)
    output: Float[Array, "heads value_dim embed"] = weight(
        lambda self: fan_in("heads", "value_dim", scale=self.residual_scale), rules=_SIZES
    )
    output_bias: Float[Array, "embed"] | None = weight(zeros, writes=True)

    def __init__(
        self,
        embed: int,
        heads: int,
        kv_heads: int,
        key_dim: int,
        value_dim: int,
        width: int = 4,
        time_limits: tuple[float, float] | None = None,
        filter_bias: bool = True,
        bias: bool = False,
        epsilon: float = 1e-5,
        residual_scale: float = 1.0,
        *,
        key: PRNGKeyArray,
    ):
        if kv_heads > 0 and heads % kv_heads:
            raise ValueError(f"heads = {heads} must be a multiple of kv_heads = {kv_heads}")
        if time_limits is not None and not 0 <= time_limits[0] < time_limits[1]:
            raise ValueError(
                f"time_limits must be two rising numbers, at least 0, got {time_limits}"
            )
        self.kv_heads, self.width, self.time_limits = kv_heads, width, time_limits
        self.epsilon, self.residual_scale = epsilon, residual_scale
        absent = [] if bias else [f"{name}_bias" for name in _PROJECTED]
        absent += [] if filter_bias else [f"{name}_filter_bias" for name in _FILTERED]
        fill(
            self, key, absent, embed=embed, heads=heads, kv_heads=kv_heads, key_dim=key_dim,
            value_dim=value_dim, width=width,
        )  # fmt: skip

    def __call__(
        self,
        x_BSE: Float[Array, "b s embed"],
        context: ForwardContext,
        cache: RecurrentState | None = None,
    ) -> tuple[Float[Array, "b s embed"], RecurrentState | None]:
        """A mixer's call. `tensor` splits heads and groups, and sums the last product."""
        precision = context.compute.precision("projections")
        with jax.named_scope("projections"):
            z_BSHV = matmul("bse,ehv->bshv", x_BSE, self.gate, precision)
            x_BSHV = matmul("bse,ehv->bshv", x_BSE, self.input, precision)
            B_BSGK = matmul("bse,egk->bsgk", x_BSE, self.key, precision)
            C_BSGK = matmul("bse,egk->bsgk", x_BSE, self.query, precision)
            dt_BSH = _biased(matmul("bse,eh->bsh", x_BSE, self.time), self.time_projection_bias)
            z_BSHV = checkpoint_name(_biased(z_BSHV, self.gate_bias), "gate")
            x_BSHV = checkpoint_name(_biased(x_BSHV, self.input_bias), "input")
            B_BSGK = checkpoint_name(_biased(B_BSGK, self.key_bias), "key")
            C_BSGK = checkpoint_name(_biased(C_BSGK, self.query_bias), "query")
        with jax.named_scope("recurrence"):
            state, windows = (None, (None,) * 3) if cache is None else (cache.state, cache.windows)
            x_BSHV, of_x = self._convolved("input", x_BSHV, context, windows[0])
            B_BSGK, of_B = self._convolved("key", B_BSGK, context, windows[1])
            C_BSGK, of_C = self._convolved("query", C_BSGK, context, windows[2])
            dt_BSH = jax.nn.softplus(_wide(dt_BSH) + self.time_bias)
            if self.time_limits is not None:
                dt_BSH = jnp.clip(dt_BSH, *self.time_limits)
            log_decay_BSH = -jnp.exp(self.log_rate) * dt_BSH
            v_BSHV = (_wide(x_BSHV) * dt_BSH[..., None]).astype(x_BSHV.dtype)
            y_BSHV, state = linear_recurrence(
                C_BSGK, B_BSGK, v_BSHV, log_decay_BSH, None, context, state
            )
            y_BSHV = checkpoint_name(y_BSHV, "recurrence")
            y_BSHV = _wide(y_BSHV) + self.skip[:, None] * _wide(x_BSHV)
            y_BSHV = self._normed(y_BSHV * jax.nn.silu(_wide(z_BSHV))) * self.norm_scale
            y_BSHV = y_BSHV.astype(z_BSHV.dtype)
        with jax.named_scope("projections"):
            residual = spec(context.compute.residual)
            y_BSE = matmul("bshv,hve->bse", y_BSHV, self.output, precision, residual)
            y_BSE = _biased(y_BSE, self.output_bias)
        if cache is not None:
            cache = RecurrentState(state, (of_x, of_B, of_C))  # type: ignore[arg-type]
        return y_BSE, cache

    def _convolved(
        self, name: str, x_BS: Array, context: ForwardContext, window_BW: Array | None
    ) -> tuple[Array, Array | None]:
        """silu(convolution + bias), added up in float32, and the new window."""
        filter_W = _wide(getattr(self, f"{name}_filter"))
        y_BS, window_BW = causal_convolution(_wide(x_BS), filter_W, context, window_BW)
        y_BS = _biased(y_BS, getattr(self, f"{name}_filter_bias"))
        return jax.nn.silu(y_BS).astype(x_BS.dtype), window_BW

    def _normed(self, y_BSHV: Float[Array, "b s heads value_dim"]) -> Array:
        """y / rms(y) over the heads of each group. `tensor` gathers one number for each head."""
        H = y_BSHV.shape[2]
        square_BSH = reshard(jnp.mean(jnp.square(y_BSHV), axis=-1), ("batch", "seq", None))
        square_BSGH = square_BSH.reshape(*square_BSH.shape[:2], self.kv_heads, -1)
        square_BSH = jnp.repeat(jnp.mean(square_BSGH, axis=-1), H // self.kv_heads, axis=-1)
        square_BSH = reshard(square_BSH, "batch seq heads")
        return y_BSHV * jax.lax.rsqrt(square_BSH + self.epsilon)[..., None]

    def empty_cache(self, rows: int, length: int, dtype: DTypeLike) -> RecurrentState:
        """See `Part.empty_cache`. The size does not depend on `length`."""
        H, V, _ = self.output.shape[-3:]
        *_, G, K = self.key.shape
        before = rows, self.width - 1
        of_x = empty(("batch", None, "heads", None), (*before, H, V), dtype)
        of_B, of_C = (
            empty(("batch", None, "kv_heads", None), (*before, G, K), dtype) for _ in "BC"
        )
        state = empty(("batch", "heads", None, None), (rows, H, K, V), "float32")
        return RecurrentState(state, (of_x, of_B, of_C))

    def flops_per_token(self, sequence_length: int, causal: bool) -> float:
        """FLOPs of weights and filters, and 12 · heads · key_dim · value_dim.

        For each head, B xᵀ is added to the state, and C reads it.
        """
        H, V, _ = self.output.shape[-3:]
        filters = sum(getattr(self, f"{name}_filter").size for name in _FILTERED)
        return product_flops(self) + 6.0 * filters + 12 * H * self.key.shape[-1] * V


def _biased(x: Array, bias: Array | None) -> Array:
    return x if bias is None else x + bias


def _wide(x: Array) -> Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
