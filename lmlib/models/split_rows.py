"""Checks that a model may be computed on rows that devices share.

The tokens of a shared row are in the order of the devices (`lmlib.row_order`). A part that uses
only the positions, segments and order of its `Context` computes the same result; a recurrence or a
convolution does not. Each class declares `rows_may_be_split = True` itself.
"""

from collections.abc import Iterator
from typing import Any

import jax

_CONTAINERS = (tuple, list, dict, type(None))


def check_rows_may_be_split(part: Any, where: str) -> None:
    """Raises ValueError if a class in `part` does not declare `rows_may_be_split = True` itself.

    `where` names the mesh axis that splits the rows: "context=2".
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
