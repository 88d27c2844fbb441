"""Rows of a table that is split along both its axes.

Shapes: B batch, S sequence, V vocab, E embed.
"""

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32

from lmlib.parallel.collectives import (
    all_gather,
    all_to_all,
    axis_index,
    on_each_device,
    psum,
    psum_scatter,
)
from lmlib.parallel.layout import STORED, along, partition


def embedded(
    table_VE: Float[Array, "vocab embed"],
    tokens_BS: Int32[Array, "b s"],
    dtype: DTypeLike,
    residual: str,
) -> Float[Array, "b s embed"]:
    """The rows `tokens_BS` of the table, in `dtype`.

    Layouts: the table as stored; the result as `residual` names. The table stays where it is: each
    device looks up the tokens of all devices along `fsdp` in its own columns, and rows are put
    together by an all-to-all over `fsdp`, which sends less than gathering the table would unless a
    device has more tokens than the vocabulary. Over `tensor`, where each device has its own share
    of the vocabulary, rows are summed: all but one are zero. A token's gradient is summed in
    float32 at least, and nothing as large as the table travels, except over `data`.
    """
    wide = jnp.promote_types(dtype, jnp.float32)

    def look_up(table_VE: Array, tokens_BS: Array) -> Array:
        tokens_BS = all_gather(tokens_BS, along("embed", STORED), axis=0)
        V = table_VE.shape[0]
        rows_BS = tokens_BS - V * axis_index(along("vocab"))
        rows_BS = jnp.where(rows_BS < 0, V, rows_BS)  # negative ones would count from the end
        x_BSE = table_VE.astype(wide).at[rows_BS].get(mode="fill", fill_value=0).astype(dtype)
        x_BSE = all_to_all(x_BSE, along("embed", STORED), split=0, joined=2)
        if "seq_parallel" in residual.split():
            return psum_scatter(x_BSE, along("vocab"), axis=1)
        return psum(x_BSE, along("vocab"))

    return on_each_device(
        look_up,
        inputs=(partition("vocab embed", STORED), partition("batch seq")),
        outputs=partition(residual),
    )(table_VE, tokens_BS)
