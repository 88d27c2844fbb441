"""Bigram embeddings: a hashed table of vectors for pairs of adjacent tokens.

Shapes: B batch, S sequence, E embed, R rows of the table.
"""

from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32, PRNGKeyArray

from lmlib.models.forward_context import ForwardContext
from lmlib.models.part import Part
from lmlib.models.parts.value_embedding import looked_up
from lmlib.models.recurrent.cache import empty
from lmlib.models.recurrent.convolution import earlier_tokens, moved_window
from lmlib.models.weights import fill, weight, zeros
from lmlib.parallel.layout import reshard
from lmlib.parallel.matrix import dense

_OF_TOKEN, _OF_PREVIOUS = 36_313, 27_191
_SIGN_ROWS = 8_192


class BigramEmbedding(Part):
    """signs · table[(36313 · token xor 27191 · previous) mod (R - 1)], in 32-bit integers.

    Pairs that share a row have other signs, a function of (token xor previous) mod 8192. The first
    token of a document has the last row. The table starts at zero, and its columns are split over
    all devices, like those of a `ValueEmbedding`. Its learning rate is 75 times the optimizer's.
    Source: modded-nanogpt, records 62 and 83, where signs are drawn once and a document's first
    token also reads the previous document.
    """

    rows_may_be_split = True

    table: Float[Array, "bigrams looked_up"] = weight(
        zeros, rules={"bigrams": None}, dtype="float32", decays=True, learning_rate=75.0
    )

    def __init__(self, rows: int, embed: int, *, key: PRNGKeyArray):
        if rows < 2:
            raise ValueError(f"a table of bigrams needs at least 2 rows, got {rows}")
        fill(self, key, bigrams=rows, looked_up=embed)

    def __call__(
        self, tokens_BS: Int32[Array, "b s"], context: ForwardContext, cache: Any = None
    ) -> tuple[Float[Array, "b s embed"], Any]:
        """Returns the vectors of tokens, in the layout of the residual stream, and the cache."""
        table_RE = dense(self.table)
        (before_BS,) = earlier_tokens(tokens_BS, 1, context, cache)
        is_first_BS = context.positions_BS <= 0
        last = table_RE.shape[0] - 1
        hash_BS = (_OF_TOKEN * tokens_BS ^ _OF_PREVIOUS * before_BS) % last
        rows_BS = jnp.where(is_first_BS, last, hash_BS)
        x_BSE = looked_up(table_RE, rows_BS, context.compute.dtype)
        x_BSE = reshard(x_BSE, context.compute.residual)
        of_pair_BS = jnp.where(is_first_BS, 0, (tokens_BS ^ before_BS) % _SIGN_ROWS)
        signs_BSE = reshard(signs(of_pair_BS, x_BSE.shape[-1]), context.compute.residual)
        return x_BSE * signs_BSE.astype(x_BSE.dtype), moved_window(cache, tokens_BS, context)

    def empty_cache(self, rows: int, length: int, dtype: DTypeLike) -> Int32[Array, "b 1"]:
        """The token before the next one."""
        return empty(("batch", None), (rows, 1), jnp.int32)


def signs(row_BS: Int32[Array, "..."], columns: int) -> Int32[Array, "... columns"]:
    """Returns 1 or -1 for each column, which look random, from the row's number.

    They are the last bits of MurmurHash3's mix of 32 bits (Appleby 2011).
    """
    x = row_BS[..., None].astype(jnp.uint32) * columns + jnp.arange(columns, dtype=jnp.uint32)
    x = (x ^ x >> 16) * jnp.uint32(0x85EBCA6B)
    x = (x ^ x >> 13) * jnp.uint32(0xC2B2AE35)
    return 1 - 2 * ((x ^ x >> 16) & 1).astype(jnp.int32)
