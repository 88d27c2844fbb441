"""The experts' MLPs, on rows that are sorted by expert.

Shapes: X experts (of a device), C rows, E embed, F mlp.
"""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from lmlib.models.experts.grouped import Groups, grouped_product, grouped_products
from lmlib.models.weights import fan_in, fill, weight, zeros
from lmlib.parallel.collectives import axis_index
from lmlib.parallel.layout import mesh_axes_for

Gate = Callable[[Array, Array], Array]


def swiglu(gate: Array, up: Array) -> Array:
    """silu(gate) · up (Shazeer 2020, arXiv:2002.05202, eq. 6)."""
    return jax.nn.silu(gate) * up


def geglu(gate: Array, up: Array) -> Array:
    """gelu(gate) · up (arXiv:2002.05202, eq. 6), with gelu's tanh approximation, as in Gemma."""
    return jax.nn.gelu(gate, approximate=True) * up


def clamped_swiglu(gate: Array, up: Array) -> Array:
    """gate · sigmoid(1.702 gate) · (up + 1), with gate clamped to at most 7 and up to ±7.

    Source: OpenAI 2025, arXiv:2508.10925, and its reference implementation.
    """
    gate, up = jnp.minimum(gate, 7.0), jnp.clip(up, -7.0, 7.0)
    return gate * jax.nn.sigmoid(1.702 * gate) * (up + 1)


class GatedExperts(eqx.Module):
    """Experts that each compute down(gated(gate x, up x)), with biases if `bias`.

    `mlp` is the size of each expert; `gated` is a function of the gate's and the up projection's
    output; `residual_scale` is a scale of the initial values of `down`.
    """

    rows_may_be_split = True

    gated: Gate = eqx.field(static=True)
    residual_scale: float = eqx.field(static=True)
    gate: Float[Array, "experts embed mlp"] = weight(fan_in("embed"))
    up: Float[Array, "experts embed mlp"] = weight(fan_in("embed"))
    down: Float[Array, "experts mlp embed"] = weight(
        lambda self: fan_in("mlp", scale=self.residual_scale)
    )
    gate_bias: Float[Array, "experts mlp"] | None = weight(zeros)
    up_bias: Float[Array, "experts mlp"] | None = weight(zeros)
    down_bias: Float[Array, "experts embed"] | None = weight(zeros, writes=True)

    def __init__(
        self,
        embed: int,
        mlp: int,
        experts: int,
        gated: Gate = swiglu,
        bias: bool = False,
        residual_scale: float = 1.0,
        *,
        key: PRNGKeyArray,
    ):
        self.gated, self.residual_scale = gated, residual_scale
        absent = () if bias else ("gate_bias", "up_bias", "down_bias")
        fill(self, key, absent, embed=embed, mlp=mlp, experts=experts)

    def products(
        self, rows_CE: Float[Array, "c embed"], groups: Groups
    ) -> tuple[Float[Array, "c mlp"], ...]:
        """See `lmlib.models.experts.rounds.mix_experts`."""
        gate_CF, up_CF = grouped_products(rows_CE, (self.gate, self.up), groups)
        sizes_X = groups.sizes_X
        return _biased(gate_CF, self.gate_bias, sizes_X), _biased(up_CF, self.up_bias, sizes_X)

    def outputs(
        self,
        products_CF: tuple[Float[Array, "c mlp"], ...],
        shares_C: Float[Array, "c"],
        groups: Groups,
    ) -> Float[Array, "c embed"]:
        """See `lmlib.models.experts.rounds.mix_experts`.

        Shares multiply the inputs of `down`, so their gradient needs no output.
        """
        shares_C1 = shares_C[:, None]
        hidden_CF = self.gated(*products_CF)
        hidden_CF = (hidden_CF * shares_C1).astype(hidden_CF.dtype)
        y_CE = grouped_product(hidden_CF, self.down, groups)
        if self.down_bias is None:
            return y_CE
        bias_CE = _of_rows(self.down_bias, groups.sizes_X, len(y_CE)) * shares_C1
        # Each device along `tensor` computes a partial sum; only the first adds the bias.
        bias_CE = jnp.where(axis_index(mesh_axes_for("mlp")) == 0, bias_CE, 0)
        return y_CE + bias_CE.astype(y_CE.dtype)


def _biased(y_CF: Array, bias_XF: Array | None, sizes_X: Array) -> Array:
    return y_CF if bias_XF is None else y_CF + _of_rows(bias_XF, sizes_X, len(y_CF))


def _of_rows(bias_XF: Array, sizes_X: Array, rows: int) -> Array:
    """Returns the bias of each row's expert."""
    experts_C = jnp.sum(jnp.cumsum(sizes_X) <= jnp.arange(rows)[:, None], axis=1)
    return jnp.take(bias_XF, experts_C, axis=0, mode="clip")
