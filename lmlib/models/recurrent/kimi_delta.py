"""Kimi Delta Attention: the delta rule with a decay of each key channel.

Shapes: B batch, S sequence, E embed, L latent, H heads, K key_dim, V value_dim, W width.
"""

import equinox as eqx
import jax
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
from lmlib.models.recurrent.gated_deltanet import unit, wide
from lmlib.models.recurrent.linear_recurrence import linear_recurrence
from lmlib.models.weights import fan_in, fill, fold_in_name, normal, product_flops, weight
from lmlib.parallel.layout import replicate_for_tp, spec
from lmlib.parallel.matrix import Matrix

_SIZES = {"key_dim": None, "value_dim": None, "width": None}  # whole, like head_dim


class KimiDelta(Part):
    """norm(y) · sigmoid(gate), where y is the `linear_recurrence` with the delta rule.

    Queries, keys and values have short convolutions and silu; queries and keys then have length 1.
    The time steps of each key channel, and the gate, are products of two matrices, over a latent
    (Kimi Team 2025, arXiv:2510.26692, §4).

    Args:
      latent: size of the latents of time steps and gates.
      width: number of tokens of the convolutions.
      epsilon: of the norm of each head's output.
      residual_scale: factor of the output's initial values (`lmlib.models.weights`).
    """

    rows_may_be_split = True

    names = ActivationNames(
        saved=("query", "key", "value", "latent", "recurrence"),
        scopes=("projections", "recurrence"),
    )

    width: int = eqx.field(static=True)
    residual_scale: float = eqx.field(static=True)
    query: Float[Array, "embed heads key_dim"] = weight(fan_in("embed"), rules=_SIZES)
    key: Float[Array, "embed heads key_dim"] = weight(fan_in("embed"), rules=_SIZES)
    value: Float[Array, "embed heads value_dim"] = weight(fan_in("embed"), rules=_SIZES)
    rate: Float[Array, "embed heads"] = weight(fan_in("embed"))
    time_down: Float[Array, "embed latent"] = weight(fan_in("embed"))
    time_up: Float[Array, "latent heads key_dim"] = weight(fan_in("latent"), rules=_SIZES)
    gate_down: Float[Array, "embed latent"] = weight(fan_in("embed"))
    gate_up: Float[Array, "latent heads value_dim"] = weight(fan_in("latent"), rules=_SIZES)
    query_filter: Float[Array, "heads key_dim width"] = weight(
        lambda self: normal(self.width**-0.5), rules=_SIZES
    )
    key_filter: Float[Array, "heads key_dim width"] = weight(
        lambda self: normal(self.width**-0.5), rules=_SIZES
    )
    value_filter: Float[Array, "heads value_dim width"] = weight(
        lambda self: normal(self.width**-0.5), rules=_SIZES
    )
    time_bias: Float[Array, "heads key_dim"] = weight(TimeSteps(), rules=_SIZES, dtype="float32")
    log_rate: Float[Array, "heads"] = weight(LogOfUniform(1.0, 16.0), dtype="float32")
    norm: RMSNorm
    output: Float[Array, "heads value_dim embed"] = weight(
        lambda self: fan_in("heads", "value_dim", scale=self.residual_scale), rules=_SIZES
    )

    def __init__(
        self,
        embed: int,
        heads: int,
        key_dim: int,
        value_dim: int,
        latent: int,
        width: int = 4,
        epsilon: float = 1e-5,
        residual_scale: float = 1.0,
        *,
        key: PRNGKeyArray,
    ):
        self.width, self.residual_scale = width, residual_scale
        fill(
            self, key, embed=embed, heads=heads, key_dim=key_dim, value_dim=value_dim,
            latent=latent, width=width,
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
            q_BSHK = checkpoint_name(matmul("bse,ehk->bshk", x_BSE, self.query, precision), "query")
            k_BSHK = checkpoint_name(matmul("bse,ehk->bshk", x_BSE, self.key, precision), "key")
            v_BSHV = checkpoint_name(matmul("bse,ehv->bshv", x_BSE, self.value, precision), "value")
            rate_BSH = matmul("bse,eh->bsh", x_BSE, self.rate)
            time_BSL = _latent(x_BSE, self.time_down, precision)
            time_BSHK = matmul("bsl,lhk->bshk", time_BSL, self.time_up, precision)
            gate_BSL = _latent(x_BSE, self.gate_down, precision)
            gate_BSHV = matmul("bsl,lhv->bshv", gate_BSL, self.gate_up, precision)
        with jax.named_scope("recurrence"):
            windows = (None, None, None) if cache is None else cache.windows
            q_BSHK, q_window = causal_convolution(q_BSHK, self.query_filter, context, windows[0])
            k_BSHK, k_window = causal_convolution(k_BSHK, self.key_filter, context, windows[1])
            v_BSHV, v_window = causal_convolution(v_BSHV, self.value_filter, context, windows[2])
            q_BSHK = unit(jax.nn.silu(q_BSHK), q_BSHK.shape[-1] ** -0.5)
            k_BSHK = unit(jax.nn.silu(k_BSHK))
            y_BSHV, state = linear_recurrence(
                q_BSHK, k_BSHK, jax.nn.silu(v_BSHV),
                log_decay(time_BSHK, self.time_bias, self.log_rate[:, None]),
                jax.nn.sigmoid(wide(rate_BSH)), context, None if cache is None else cache.state,
            )  # fmt: skip
            y_BSHV = checkpoint_name(y_BSHV.astype(x_BSE.dtype), "recurrence")
            y_BSHV = self.norm(wide(y_BSHV)) * jax.nn.sigmoid(wide(gate_BSHV))
        if cache is not None:
            cache = RecurrentState(state, (q_window, k_window, v_window))  # type: ignore[arg-type]
        with jax.named_scope("projections"):
            residual = spec(context.compute.residual)
            y_BSHV = y_BSHV.astype(x_BSE.dtype)
            return matmul("bshv,hve->bse", y_BSHV, self.output, precision, residual), cache

    def empty_cache(self, rows: int, length: int, dtype: DTypeLike) -> RecurrentState:
        """See `Part.empty_cache`. The size does not depend on `length`."""
        heads, value_dim, _ = self.output.shape[-3:]
        key_dim, axes = self.key.shape[-1], ("batch", None, "heads", None)
        state = empty(("batch", "heads", None, None), (rows, heads, key_dim, value_dim), "float32")
        sizes = key_dim, key_dim, value_dim
        windows = (empty(axes, (rows, self.width - 1, heads, size), dtype) for size in sizes)
        return RecurrentState(state, tuple(windows))

    def flops_per_token(self, sequence_length: int, causal: bool) -> float:
        """FLOPs of weights and filters, and 18 · heads · key_dim · value_dim.

        For each head, k reads the state, k vᵀ is added to it, and q reads it.
        """
        heads, value_dim, _ = self.output.shape[-3:]
        filters = self.query_filter.size + self.key_filter.size + self.value_filter.size
        of_state = 18 * heads * self.key.shape[-1] * value_dim
        return product_flops(self) + 6.0 * filters + of_state


def _latent(
    x_BSE: Array, down: Array | Matrix, precision: str | None
) -> Float[Array, "b s latent"]:
    latent_BSL = checkpoint_name(matmul("bse,el->bsl", x_BSE, down, precision), "latent")
    return replicate_for_tp(latent_BSL, ("batch", "seq", None))
