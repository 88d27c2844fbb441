"""Causal grouped-query attention with rotary positions, kept within documents.

Shapes: B batch, S sequence (queries), T sequence (keys), E embed, H heads, K kv_heads, D head_dim.
"""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int32, PRNGKeyArray

from lmlib.models.attend import attend
from lmlib.models.initial import initial_weight
from lmlib.models.product import product
from lmlib.parallel.layout import spec


class Attention(eqx.Module):
    """softmax(q kᵀ / √D) v with G query heads sharing each key-value head (Ainslie et al. 2023,
    arXiv:2305.13245). `tensor` splits the heads; each device attends with its own."""

    query: Float[Array, "embed heads head_dim"]
    key: Float[Array, "embed kv_heads head_dim"]
    value: Float[Array, "embed kv_heads head_dim"]
    output: Float[Array, "heads head_dim embed"]
    rope_theta: float = eqx.field(static=True)
    window: int | None = eqx.field(static=True)
    precision: str | None = eqx.field(static=True)

    def __init__(
        self,
        embed: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        rope_theta: float,
        window: int | None = None,
        precision: str | None = None,
        *,
        key: PRNGKeyArray,
    ):
        sizes = {"embed": embed, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
        self.query = initial_weight(Attention, "query", key, **sizes)
        self.key = initial_weight(Attention, "key", key, **sizes)
        self.value = initial_weight(Attention, "value", key, **sizes)
        self.output = initial_weight(Attention, "output", key, **sizes)
        self.rope_theta = rope_theta
        self.window = window
        self.precision = precision

    def __call__(
        self,
        x_BSE: Float[Array, "b s embed"],
        positions_BS: Int32[Array, "b s"],
        segment_ids_BS: Int32[Array, "b s"],
        residual: str,
        implementation: str = "auto",
    ) -> Float[Array, "b s embed"]:
        """Layouts: x whole along `seq`; the result as `residual` names (a sum over `tensor`)."""
        multiply = functools.partial(product, precision=self.precision)
        with jax.named_scope("projections"):
            q_BSHD = multiply("bse,ehd->bshd", x_BSE, self.query)
            k_BTKD = multiply("bte,ekd->btkd", x_BSE, self.key)
            v_BTKD = checkpoint_name(multiply("bte,ekd->btkd", x_BSE, self.value), "value")
            q_BSHD = checkpoint_name(rotate(q_BSHD, positions_BS, self.rope_theta), "query")
            k_BTKD = checkpoint_name(rotate(k_BTKD, positions_BS, self.rope_theta), "key")
        with jax.named_scope("attention"):
            mixed_BSHD = attend(q_BSHD, k_BTKD, v_BTKD, segment_ids_BS, implementation, self.window)
        with jax.named_scope("projections"):
            return multiply("bshd,hde->bse", mixed_BSHD, self.output, spec(residual))


def rotate(
    x_BSHD: Float[Array, "b s h d"], positions_BS: Int32[Array, "b s"], theta: float
) -> Float[Array, "b s h d"]:
    """Rotary position embedding (Su et al. 2021, arXiv:2104.09864, eq. 34).

    Coordinate i pairs with i + D/2, as in Llama's published weights; pair i turns by
    position · theta^(-2i/D) radians, computed in float32 at least.
    """
    wide = jnp.promote_types(x_BSHD.dtype, jnp.float32)
    D = x_BSHD.shape[-1]
    frequency_D = theta ** (-jnp.arange(0, D, 2, dtype=wide) / D)
    angle_BS1D = positions_BS[:, :, None, None] * frequency_D
    cos_BS1D, sin_BS1D = jnp.cos(angle_BS1D), jnp.sin(angle_BS1D)
    first_BSHD, second_BSHD = jnp.split(x_BSHD.astype(wide), 2, axis=-1)
    turned_BSHD = jnp.concatenate(
        (
            first_BSHD * cos_BS1D - second_BSHD * sin_BS1D,
            second_BSHD * cos_BS1D + first_BSHD * sin_BS1D,
        ),
        axis=-1,
    )
    return turned_BSHD.astype(x_BSHD.dtype)
