"""Learned positions.

Shapes: B batch, S sequence, P position, E embed.
"""

from jaxtyping import Array, Float, PRNGKeyArray

from lmlib.models.context import Context
from lmlib.models.part import Part
from lmlib.models.weights import initial_values, normal, weight
from lmlib.parallel.layout import reshard, spec


class Positions(Part):
    """A vector for each position of a document, added to the embedding (Gehring et al. 2017,
    arXiv:1705.03122, §3.1).

    Args:
      position, embed: sizes.
    """

    rows_may_be_split = True

    table: Float[Array, "position embed"] = weight(normal(0.02), rules={"position": None})

    def __init__(self, position: int, embed: int, *, key: PRNGKeyArray):
        self.table = initial_values(self, "table", key, position=position, embed=embed)

    def __call__(self, context: Context) -> Float[Array, "b s embed"]:
        """Of the context's positions, laid out as `context.compute.residual` names."""
        rows_BSE = self.table.at[context.positions_BS].get(out_sharding=spec("batch seq embed"))
        return reshard(rows_BSE, context.compute.residual)
