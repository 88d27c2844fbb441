"""Gated DeltaNet: a state that forgets by gates and is written by the delta rule.

Shapes: B batch, S sequence, E embed, G kv_heads, H heads, K key_dim, V value_dim, W width.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray

from lmlib.models.forward_context import ForwardContext
from lmlib.models.matmul import matmul
from lmlib.models.part import ActivationNames, Part
from lmlib.models.parts.norms import RMSNorm
from lmlib.models.recurrent.cache import RecurrentState, empty
from lmlib.models.recurrent.convolution import causal_convolution
from lmlib.models.recurrent.decay import LogOfUniform, TimeSteps, log_decay
from lmlib.models.recurrent.linear_recurrence import linear_recurrence
from lmlib.models.weights import fan_in, fill, fold_in_name, normal, product_flops, weight
from lmlib.parallel.layout import spec

_SIZES = {"key_dim": None, "value_dim": None, "width": None}  # whole, like head_dim


class GatedDeltaNet(Part):
    """norm(y) · silu(gate), where y is the `linear_recurrence` with the delta rule.

    Queries, keys and values have short convolutions and silu; queries and keys then have length 1
    (Yang et al. 2024, arXiv:2412.06464, §3.3). Each of `kv_heads` keys serves heads / kv_heads
    adjacent heads of values, which have a decay and a rate β each.

    Args:
      width: number of tokens of the convolutions.
      negative: True for β between 0 and 2 instead of 1: factors of the state may then be negative
        (Grazzi et al. 2024, arXiv:2411.12537, §4).
      epsilon: of the norm of each head's output.
      residual_scale: factor of the output's initial values (`lmlib.models.weights`).
    """

    rows_may_be_split = True

    names = ActivationNames(
        saved=("query", "key", "value", "gate", "recurrence"), scopes=("projections", "recurrence")
    )

    width: int = eqx.field(static=True)
    negative: bool = eqx.field(static=True)
    residual_scale: float = eqx.field(static=True)
    query: Float[Array, "embed kv_heads key_dim"] = weight(fan_in("embed"), rules=_SIZES)
    key: Float[Array, "embed kv_heads key_dim"] = weight(fan_in("embed"), rules=_SIZES)
    value: Float[Array, "embed heads value_dim"] = weight(fan_in("embed"), rules=_SIZES)
    gate: Float[Array, "embed heads value_dim"] = weight(fan_in("embed"), rules=_SIZES)
    rate: Float[Array, "embed heads"] = weight(fan_in("embed"))
    time: Float[Array, "embed heads"] = weight(fan_in("embed"))
    query_filter: Float[Array, "kv_heads key_dim width"] = weight(
        lambda self: normal(self.width**-0.5), rules=_SIZES
    )
    key_filter: Float[Array, "kv_heads key_dim width"] = weight(
        lambda self: normal(self.width**-0.5), rules=_SIZES
    )
    value_filter: Float[Array, "heads value_dim width"] = weight(
        lambda self: normal(self.width**-0.5), rules=_SIZES
    )
    time_bias: Float[Array, "heads"] = weight(TimeSteps(), dtype="float32")
    log_rate: Float[Array, "heads"] = weight(LogOfUniform(0.01, 16.0), dtype="float32")
    norm: RMSNorm
    output: Float[Array, "heads value_dim embed"] = weight(
        lambda self: fan_in("heads", "value_dim", scale=self.residual_scale), rules=_SIZES
    )

    def __init__(
        self,
        embed: int,
        heads: int,
        kv_heads: int,
        key_dim: int,
        value_dim: int,
        width: int = 4,
        negative: bool = False,
        epsilon: float = 1e-5,
        residual_scale: float = 1.0,
        *,
        key: PRNGKeyArray,
    ):
        if kv_heads > 0 and heads % kv_heads:
            raise ValueError(f"heads = {heads} must be a multiple of kv_heads = {kv_heads}")
        self.width, self.negative, self.residual_scale = width, negative, residual_scale
        fill(
            self, key, embed=embed, heads=heads, kv_heads=kv_heads, key_dim=key_dim,
            value_dim=value_dim, width=width,
        )  # fmt: skip
        # "head_dim": an axis that the layout table keeps whole.
        of_norm = fold_in_name(key, "norm")
        self.norm = RMSNorm("head_dim", epsilon, key=of_norm, head_dim=value_dim)

    def __call__(
        self,
        x_BSE: Float[Array, "b s embed"],
        context: ForwardContext,
        cache: RecurrentState | None = None,
    ) -> tuple[Float[Array, "b s embed"], RecurrentState | None]:
        """A mixer's call. `tensor` sums the last product."""
        precision = context.compute.precision("projections")
        with jax.named_scope("projections"):
            q_BSGK = checkpoint_name(matmul("bse,egk->bsgk", x_BSE, self.query, precision), "query")
            k_BSGK = checkpoint_name(matmul("bse,egk->bsgk", x_BSE, self.key, precision), "key")
            v_BSHV = checkpoint_name(matmul("bse,ehv->bshv", x_BSE, self.value, precision), "value")
            z_BSHV = checkpoint_name(matmul("bse,ehv->bshv", x_BSE, self.gate, precision), "gate")
            rate_BSH = matmul("bse,eh->bsh", x_BSE, self.rate)
            time_BSH = matmul("bse,eh->bsh", x_BSE, self.time)
        with jax.named_scope("recurrence"):
            windows = (None, None, None) if cache is None else cache.windows
            q_BSGK, q_window = causal_convolution(q_BSGK, self.query_filter, context, windows[0])
            k_BSGK, k_window = causal_convolution(k_BSGK, self.key_filter, context, windows[1])
            v_BSHV, v_window = causal_convolution(v_BSHV, self.value_filter, context, windows[2])
            q_BSGK = unit(jax.nn.silu(q_BSGK), q_BSGK.shape[-1] ** -0.5)
            k_BSGK = unit(jax.nn.silu(k_BSGK))
            beta_BSH = (2 if self.negative else 1) * jax.nn.sigmoid(wide(rate_BSH))
            y_BSHV, state = linear_recurrence(
                q_BSGK, k_BSGK, jax.nn.silu(v_BSHV),
                log_decay(time_BSH, self.time_bias, self.log_rate), beta_BSH, context,
                None if cache is None else cache.state,
            )  # fmt: skip
            y_BSHV = checkpoint_name(y_BSHV.astype(x_BSE.dtype), "recurrence")
            y_BSHV = (self.norm(y_BSHV) * jax.nn.silu(wide(z_BSHV))).astype(x_BSE.dtype)
        if cache is not None:
            cache = RecurrentState(state, (q_window, k_window, v_window))  # type: ignore[arg-type]
        with jax.named_scope("projections"):
            residual = spec(context.compute.residual)
            return matmul("bshv,hve->bse", y_BSHV, self.output, precision, residual), cache

    def empty_cache(self, rows: int, length: int, dtype: DTypeLike) -> RecurrentState:
        """See `Part.empty_cache`. The size does not depend on `length`."""
        heads, value_dim, _ = self.output.shape[-3:]
        *_, kv_heads, key_dim = self.key.shape
        keys = rows, self.width - 1, kv_heads, key_dim
        values = rows, self.width - 1, heads, value_dim
        windows = ("batch", None, "kv_heads", None), ("batch", None, "heads", None)
        state = ("batch", "heads", None, None), (rows, heads, key_dim, value_dim)
        return RecurrentState(
            empty(*state, "float32"),
            (*(empty(windows[0], keys, dtype) for _ in "qk"), empty(windows[1], values, dtype)),
        )

    def flops_per_token(self, sequence_length: int, causal: bool) -> float:
        """FLOPs of weights and filters, and 18 · heads · key_dim · value_dim.

        For each head, k reads the state, k vᵀ is added to it, and q reads it.
        """
        heads, value_dim, _ = self.output.shape[-3:]
        filters = self.query_filter.size + self.key_filter.size + self.value_filter.size
        of_state = 18 * heads * self.key.shape[-1] * value_dim
        return product_flops(self) + 6.0 * filters + of_state


def wide(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """`x` in float32 or wider."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def unit(x_BSGK: Float[Array, "b s g k"], length: float = 1.0) -> Float[Array, "b s g k"]:
    """`x` with another Euclidean length, computed in float32 or wider."""
    wide_BSGK = wide(x_BSGK)
    square_BSG1 = jnp.sum(jnp.square(wide_BSGK), axis=-1, keepdims=True)
    return (wide_BSGK * (length * jax.lax.rsqrt(square_BSG1 + 1e-6))).astype(x_BSGK.dtype)
