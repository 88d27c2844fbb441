"""Caches of rows: creates and concatenates them, and checks that they fit in memory.

A model without a cache recomputes the whole sequence for every token.

Shapes: B batch (rows), S sequence, N longest sequence, E embed, V vocab.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int32

from lmlib.compute import Compute
from lmlib.hardware.free_memory import check_fits
from lmlib.models.forward_context import ForwardContext, single_document_context
from lmlib.models.model import Model
from lmlib.models.parts.cache import KeysAndValues
from lmlib.parallel.collectives import platform
from lmlib.parallel.layout import reshard


class TokensSoFar(eqx.Module):
    """The tokens so far, in place of a cache."""

    tokens: Int32[Array, "1 b n"]


def recompute(
    model: Model, tokens_BS: Int32[Array, "b s"], context: ForwardContext, cache: TokensSoFar
) -> tuple[Float[Array, "b s embed"], TokensSoFar]:
    """Returns the residual stream without a cache, and the tokens so far."""
    is_at_BSN = context.positions_BS[:, :, None] == jnp.arange(cache.tokens.shape[2])
    given_BN = jnp.sum(jnp.where(is_at_BSN, tokens_BS[:, :, None], 0), axis=1)
    tokens_BN = jnp.where(jnp.any(is_at_BSN, axis=1), given_BN, cache.tokens[0])
    whole = dataclasses.replace(
        single_document_context(tokens_BN, context.compute), lengths_B=context.lengths_B
    )
    x_BNE = reshard(model.trunk(tokens_BN, whole).x_BSE, "batch seq embed")
    x_BSE = jnp.einsum("bsn,bne->bse", is_at_BSN.astype(x_BNE.dtype), x_BNE)
    return x_BSE, TokensSoFar(tokens_BN[None])


def empty(model: Model, rows: int, length: int, compute: Compute, spare: int = 0) -> Any:
    """Returns an empty cache for rows of `length` tokens.

    Layers with a window remember `spare` more tokens than they need, so that as many of the newest
    can be taken back.
    """
    cache = model.empty_cache(rows, length, compute.dtype)
    if cache is None:
        return TokensSoFar(reshard(jnp.zeros((1, rows, length), jnp.int32), (None, "batch", None)))

    def widened(part: Any) -> Any:
        if spare == 0 or not isinstance(part, KeysAndValues):
            return part
        more = min(spare, length - part.keys.shape[-1])
        slots = {"keys": [(0, 0)] * 4 + [(0, more)], "values": [(0, 0)] * 3 + [(0, more), (0, 0)]}
        padded = [jnp.pad(getattr(part, name), widths) for name, widths in slots.items()]
        return eqx.tree_at(lambda part: (part.keys, part.values), part, padded)

    return jax.tree.map(widened, cache, is_leaf=is_by_position)


def is_by_position(cache: Any) -> bool:
    """True if a part of a cache stores tokens by position: later writes replace wrong tokens."""
    return isinstance(cache, (KeysAndValues, TokensSoFar))


def check_memory(
    model: Model, mesh: Mesh | None, rows: int, length: int, compute: Compute, spare: int = 0
) -> None:
    """Raises MemoryError if the cache and the logits do not fit in free memory.

    Does nothing with several processes: they might measure different numbers, and then wait for
    each other.
    """
    if jax.process_count() > 1:
        return

    def made(model: Model) -> tuple[Any, jax.Array]:
        logits_BV = jnp.zeros((rows, model.vocab), jnp.float32)
        return empty(model, rows, length, compute, spare), reshard(logits_BV, "batch whole_vocab")

    cache, logits_BV = jax.eval_shape(made, model)
    # On CPUs, prompts are computed in groups, and the groups' caches are concatenated.
    copies = 2 if platform() == "cpu" and rows > 1 else 1
    devices = jax.devices()[:1] if mesh is None else list(mesh.devices.flat)
    check_fits(f"a cache of {rows:,} × {length:,} tokens", [[cache] * copies, logits_BV], devices)


@jax.jit
def rows_of(tree: Any, row_B: jax.Array) -> Any:
    """Selects rows along the second axis of each array."""

    def chosen(x: jax.Array) -> jax.Array:
        lies = None if jax.sharding.get_abstract_mesh().empty else jax.typeof(x).sharding.spec
        return x.at[:, row_B].get(out_sharding=lies)

    return jax.tree.map(chosen, tree)


@jax.jit
def concatenate_caches(
    caches: Sequence[Any], features: Sequence[jax.Array]
) -> tuple[Any, jax.Array]:
    """Concatenates caches along rows, their arrays' second axis, and also the features."""
    cache = jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), *caches)
    return cache, jnp.concatenate(features)
