"""A learned vector for each token, from the layer's own table, added to attention's values.

Shapes: B batch, T sequence (keys), V vocab, C columns: kv_heads · head_dim, K kv_heads, D head_dim.
"""

from collections.abc import Hashable

import equinox as eqx
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32, PRNGKeyArray

from lmlib.models.forward_context import TOKENS, ForwardContext
from lmlib.models.part import Part
from lmlib.models.weights import Constant, fill, normal, weight
from lmlib.parallel.collectives import all_gather, all_to_all, shard_map
from lmlib.parallel.layout import STORED, mesh_axes_for, partition, reshard
from lmlib.parallel.matrix import dense


class ValueEmbedding(Part):
    """v + share · table[token], with a learned share, which starts at 0.5.

    Jordan et al. 2024, https://github.com/KellerJordan/modded-nanogpt, after arXiv:2410.17897, §3.
    The table is never gathered: its columns are split over all devices that hold parts of a layer.
    It needs vocab · kv_heads · head_dim weights in each layer that has one, and no FLOPs.
    """

    rows_may_be_split = True

    table: Float[Array, "vocab looked_up"] = weight(
        normal(1.0), rules={"vocab": None}, dtype="float32"
    )
    share: Float[Array, ""] = weight(Constant(0.5), dtype="float32")
    kv_heads: int = eqx.field(static=True)

    def __init__(
        self, vocab: int, kv_heads: int, head_dim: int, *, key: PRNGKeyArray, **others: int
    ):
        self.kv_heads = kv_heads
        fill(self, key, vocab=vocab, looked_up=kv_heads * head_dim)

    @property
    def reads(self) -> tuple[Hashable, ...]:
        return (TOKENS,)

    def __call__(
        self, v_BTKD: Float[Array, "b t kv_heads head_dim"], context: ForwardContext
    ) -> Float[Array, "b t kv_heads head_dim"]:
        """Returns the values plus the rows of their tokens, with heads repeated as in `v_BTKD`."""
        return v_BTKD + self.share.astype(v_BTKD.dtype) * self.rows(v_BTKD, context)

    def rows(
        self, v_BTKD: Float[Array, "b t kv_heads head_dim"], context: ForwardContext
    ) -> Float[Array, "b t kv_heads head_dim"]:
        """The rows of the table for the context's tokens, by head."""
        rows_BTC = looked_up(dense(self.table), context.shared[TOKENS], v_BTKD.dtype)
        B, T, K, D = v_BTKD.shape
        if self.kv_heads == K:
            return _by_head(rows_BTC, D)
        rows_BTC = reshard(rows_BTC, ("batch", "seq", None))
        rows_BTKD = rows_BTC.reshape(B, T, self.kv_heads, D)
        rows_BTKD = jnp.repeat(rows_BTKD, K // self.kv_heads, axis=2)
        return reshard(rows_BTKD, "batch seq kv_heads head_dim")


def looked_up(
    table_VC: Float[Array, "vocab looked_up"], tokens_BS: Int32[Array, "b s"], dtype: DTypeLike
) -> Float[Array, "b s c"]:
    """The rows `tokens_BS` of the table, in `dtype`, with columns split over `tensor`.

    The table stays in place, as in `lmlib.models.parts.embedding.embedded`. A token's gradient is
    summed in the table's dtype. Nothing as large as the table is sent, except over `data`.
    """

    def look_up(table_VC: Array, tokens_BS: Array) -> Array:
        tokens_BS = all_gather(tokens_BS, mesh_axes_for("embed", STORED), axis=0)
        x_BSC = table_VC.at[tokens_BS].get(mode="fill", fill_value=0).astype(dtype)
        return all_to_all(x_BSC, mesh_axes_for("embed", STORED), split=0, joined=2)

    return shard_map(
        look_up,
        inputs=(partition(("whole_vocab", "looked_up")), partition("batch seq")),
        outputs=partition("batch seq kv_heads"),
    )(table_VC, tokens_BS)


def _by_head(rows_BTC: Array, head_dim: int) -> Array:
    """Splits columns into whole heads, each on one device."""

    def split(rows_BTC: Array) -> Array:
        return jnp.reshape(rows_BTC, (*rows_BTC.shape[:2], -1, head_dim))

    columns, heads = partition("batch seq kv_heads"), partition("batch seq kv_heads head_dim")
    return shard_map(split, (columns,), heads)(rows_BTC)
