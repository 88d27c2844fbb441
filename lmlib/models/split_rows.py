"""Checks that a model may be computed on rows that devices share.

The tokens of a shared row are in the order of the devices (`lmlib.row_order`), not in the order of
the text. A part that uses only the positions, segments and order of its `Context` computes the same
result. A part that runs along the row, such as a recurrence or a convolution, computes a wrong one.
Each class declares that it may run so: `rows_may_be_split = True`. Without a declaration, rows may
not be split. A subclass does not inherit the declaration, because it may compute something else.
"""

from collections.abc import Iterator
from typing import Any

import jax

_CONTAINERS = (tuple, list, dict, type(None))


def check_rows_may_be_split(part: Any, where: str) -> None:
    """Checks that `part`, and every module in it, may be computed on split rows.

    Args:
      part: a model, or anything else that sees the tokens of a row.
      where: the mesh axis that splits the rows, for the error: "context=2".

    Raises:
      ValueError: if a class does not declare `rows_may_be_split = True` itself.
    """
    for kind in dict.fromkeys(type(node) for node in _nodes(part)):
        if not vars(kind).get("rows_may_be_split", False):
            raise ValueError(
                f"{where} splits rows, and their tokens do not stand in the order of the text: "
                f"{kind.__module__}.{kind.__qualname__} must say that it uses the context's "
                f"positions, segments and order alone, `rows_may_be_split = True` in the class "
                f"itself (a subclass does not inherit it); or use context=1"
            )


def _nodes(node: Any) -> Iterator[Any]:
    """`node` and all nodes below it, except arrays and plain containers."""
    if type(node) not in _CONTAINERS and not hasattr(node, "shape"):
        yield node
    for child in jax.tree.leaves(node, is_leaf=lambda each: each is not node):
        if child is not node:
            yield from _nodes(child)
