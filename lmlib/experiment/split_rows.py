"""Whether a model can be computed where devices share the rows of a batch."""

from collections.abc import Iterator
from typing import Any

import equinox as eqx
import jax
from jax.sharding import Mesh

from lmlib.compute import Compute
from lmlib.models.attend import IMPLEMENTATIONS
from lmlib.models.attend.context import length_of_piece, problem
from lmlib.parallel.layout import COMPUTE, pieces


def check_split_rows(model: Any, compute: Compute, mesh: Mesh) -> None:
    """Checks that all of `model` takes tokens in the order of the devices (`lmlib.row_order`),
    which is not that of the row: what goes along a row, as a recurrence does, would be wrong.
    lmlib's own parts go by positions and segments, or by the order that the context says.

    Raises:
      ValueError: if a module is not lmlib's and has no `rows_may_be_split = True`, or a kernel of
        attention is asked for that cannot compute split rows.
    """
    axis, devices = COMPUTE["seq"], pieces(COMPUTE["seq"], mesh)
    if devices == 1:
        return
    if compute.attention not in ("auto", "blockwise"):
        reason = problem(IMPLEMENTATIONS[compute.attention], compute.context)
        if reason is not None:
            raise ValueError(
                f"attention={compute.attention!r} cannot compute rows that {axis}={devices} "
                f"splits: {reason}; use attention='auto', or {axis}=1"
            )
    for module in _modules(model):
        kind = type(module)
        if not kind.__module__.startswith("lmlib.") and not getattr(
            kind, "rows_may_be_split", False
        ):
            raise ValueError(
                f"{axis}={devices} splits rows, and their tokens do not stand in order: "
                f"{kind.__module__}.{kind.__qualname__} must say that it goes by the context's "
                f"positions and segments alone, `rows_may_be_split = True` in the class; or use "
                f"{axis}=1"
            )


def check_pieces(model: Any, sequence_length: int, compute: Compute, mesh: Mesh) -> None:
    """Checks that the kernel asked for can compute what devices have of a row: pieces of it, which
    are shorter.

    Raises:
      ValueError: if it cannot.
    """
    axis, devices = COMPUTE["seq"], pieces(COMPUTE["seq"], mesh)
    if devices == 1:
        return
    piece = length_of_piece(sequence_length, devices, "balanced")
    try:
        model.check(piece, compute)
    except ValueError as error:
        raise ValueError(
            f"{axis}={devices} cuts rows of {sequence_length} tokens into pieces of {piece}: "
            f"{error}"
        ) from error


def _modules(node: Any) -> Iterator[eqx.Module]:
    """All modules of a tree."""
    children = jax.tree.leaves(
        node, is_leaf=lambda each: each is not node and isinstance(each, eqx.Module)
    )
    if isinstance(node, eqx.Module):
        yield node
    for child in children:
        if child is not node and isinstance(child, eqx.Module):
            yield from _modules(child)
