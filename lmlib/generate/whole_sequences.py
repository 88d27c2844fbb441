"""For models that keep no cache: the whole sequence again for every token.

Shapes: B batch (rows), S sequence, N longest sequence, E embed.
"""

import dataclasses

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from lmlib.models.context import Context, whole_rows
from lmlib.models.model import Model
from lmlib.parallel.layout import reshard


class TokensSoFar(eqx.Module):
    """In place of a cache."""

    tokens: Int32[Array, "1 b n"]


def recomputed(
    model: Model, tokens_BS: Int32[Array, "b s"], context: Context, cache: TokensSoFar
) -> tuple[Float[Array, "b s embed"], TokensSoFar]:
    """The residual stream at the context's positions, and the tokens with the new ones."""
    is_at_BSN = context.positions_BS[:, :, None] == jnp.arange(cache.tokens.shape[2])
    given_BN = jnp.sum(jnp.where(is_at_BSN, tokens_BS[:, :, None], 0), axis=1)
    tokens_BN = jnp.where(jnp.any(is_at_BSN, axis=1), given_BN, cache.tokens[0])
    whole = dataclasses.replace(whole_rows(tokens_BN, context.compute), lengths_B=context.lengths_B)
    x_BNE = reshard(model.trunk(tokens_BN, whole).x_BSE, "batch seq embed")
    x_BSE = jnp.einsum("bsn,bne->bse", is_at_BSN.astype(x_BNE.dtype), x_BNE)
    return x_BSE, TokensSoFar(tokens_BN[None])
