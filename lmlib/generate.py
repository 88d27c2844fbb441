"""Sampling, for a look at what a model has learned.

Shapes: B batch (prompts), S sequence, V vocab.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float, Int32, PRNGKeyArray

from lmlib.compute import Compute
from lmlib.models.head import logits
from lmlib.models.protocol import Model, whole_rows
from lmlib.parallel.layout import COMPUTE, partition, pieces, reshard


def sample(
    model: Model,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    key: PRNGKeyArray,
    mesh: Mesh,
    compute: Compute,
    temperature: float = 0.8,
) -> list[list[int]]:
    """Continues each prompt (token ids, at least one) by `new_tokens` tokens.

    The whole sequence is computed again for every token: right for a few lines, wasteful for more.
    `temperature` divides the logits; 0 takes the likeliest token. `compute` is sampling's own: what
    suits training's sequences may not suit these, which have any length.

    Raises:
      ValueError: if a prompt is empty.
    """
    if not all(prompts):
        raise ValueError("every prompt needs at least one token")
    lengths = [len(prompt) for prompt in prompts]
    # Rows are added until the mesh divides the batch.
    rows = -len(prompts) % pieces(COMPUTE["batch"], mesh) + len(prompts)
    tokens_BS = np.zeros((rows, max(lengths) + new_tokens), np.int32)
    for row, prompt in enumerate(prompts):
        tokens_BS[row, : len(prompt)] = prompt
    lengths_B1 = np.array([*lengths, *([1] * (rows - len(prompts)))], np.int32)[:, None]
    by_row = NamedSharding(mesh, partition("batch seq"))

    def extend(model: Model, tokens_BS: Array, lengths_B1: Array, key: PRNGKeyArray) -> Array:
        def next_column(column: Array, tokens_BS: Int32[Array, "b s"]) -> Int32[Array, "b s"]:
            context = whole_rows(tokens_BS, compute)
            h_BSE = model.features(model.trunk(tokens_BS, context).x_BSE, context)
            h_BE = jax.lax.dynamic_index_in_dim(h_BSE, column - 1, 1, keepdims=False)
            logits_BV = reshard(logits(model, h_BE, compute), "batch whole_vocab")
            chosen_B1 = choose(logits_BV, jax.random.fold_in(key, column), temperature)[:, None]
            is_column_S = jnp.arange(tokens_BS.shape[1]) == column
            return jnp.where(is_column_S & (column >= lengths_B1), chosen_B1, tokens_BS)

        return jax.lax.fori_loop(min(lengths), tokens_BS.shape[1], next_column, tokens_BS)

    with jax.set_mesh(mesh):
        extended_BS = jax.jit(extend, out_shardings=by_row)(
            model, jax.device_put(tokens_BS, by_row), jax.device_put(lengths_B1, by_row), key
        )
        everywhere = NamedSharding(mesh, partition((None, None)))
        extended_BS = np.asarray(jax.device_put(extended_BS, everywhere))
    return [extended_BS[row, : length + new_tokens].tolist() for row, length in enumerate(lengths)]


def choose(
    logits_BV: Float[Array, "b vocab"], key: PRNGKeyArray, temperature: float
) -> Int32[Array, "b"]:
    """A token for each row: the likeliest after Gumbel noise scaled by `temperature`."""
    noise_BV = jax.random.gumbel(key, logits_BV.shape, logits_BV.dtype)
    return jnp.argmax(logits_BV + temperature * noise_BV, axis=-1).astype(jnp.int32)
