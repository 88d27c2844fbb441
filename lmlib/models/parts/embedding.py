"""Embedded tokens, and learned positions.

Shapes: B batch, S sequence, V vocab, P position, E embed.
"""

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32, PRNGKeyArray

from lmlib.models.forward_context import ForwardContext
from lmlib.models.part import Part
from lmlib.models.weights import fill, normal, weight
from lmlib.parallel import collectives
from lmlib.parallel.collectives import all_gather, all_to_all, psum, shard_map
from lmlib.parallel.layout import STORED, mesh_axes_for, partition, reshard, spec


def embedded(
    table_VE: Float[Array, "vocab embed"],
    tokens_BS: Int32[Array, "b s"],
    dtype: DTypeLike,
    residual: str,
) -> Float[Array, "b s embed"]:
    """The rows `tokens_BS` of the table, in `dtype`, in the layout that `residual` names.

    The stored table stays in place. Each device looks up the tokens of all devices along `fsdp` in
    its own columns, and an all-to-all assembles the rows. Parts of the vocabulary give zeros for
    other tokens, and are summed over `tensor`. A token's gradient is summed in float32 or wider.
    """
    wide = jnp.promote_types(dtype, jnp.float32)

    def look_up(table_VE: Array, tokens_BS: Array) -> Array:
        tokens_BS = all_gather(tokens_BS, mesh_axes_for("embed", STORED), axis=0)
        V = table_VE.shape[0]
        rows_BS = tokens_BS - V * collectives.axis_index(mesh_axes_for("vocab"))
        rows_BS = jnp.where(rows_BS < 0, V, rows_BS)  # negative indices would count from the end
        x_BSE = table_VE.astype(wide).at[rows_BS].get(mode="fill", fill_value=0).astype(dtype)
        x_BSE = all_to_all(x_BSE, mesh_axes_for("embed", STORED), split=0, joined=2)
        if "seq_parallel" in residual.split():
            return collectives.psum_scatter(x_BSE, mesh_axes_for("vocab"), axis=1)
        return psum(x_BSE, mesh_axes_for("vocab"))

    return shard_map(
        look_up,
        inputs=(partition("vocab embed", STORED), partition("batch seq")),
        outputs=partition(residual),
    )(table_VE, tokens_BS)


class Positions(Part):
    """A learned vector for each position of a document (arXiv:1705.03122, §3.1)."""

    rows_may_be_split = True

    table: Float[Array, "position embed"] = weight(normal(0.02), rules={"position": None})

    def __init__(self, position: int, embed: int, *, key: PRNGKeyArray):
        fill(self, key, position=position, embed=embed)

    def __call__(self, context: ForwardContext) -> Float[Array, "b s embed"]:
        """The vectors for the context's positions, in the layout of `context.compute.residual`."""
        rows_BSE = self.table.at[context.positions_BS].get(out_sharding=spec("batch seq embed"))
        return reshard(rows_BSE, context.compute.residual)
