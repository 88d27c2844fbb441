"""Layers apart from each other, as generation reads them."""

from typing import Any

import jax

from lmlib.models.stack import Stack
from lmlib.parallel.axes import M


def unstacked(model: M) -> M:
    """`model` with each layer of its stacks as a pattern of its own; see `Stack.apart`."""

    def is_stack(node: Any) -> bool:
        return isinstance(node, Stack)

    return jax.tree.map(
        lambda node: node.apart() if is_stack(node) else node, model, is_leaf=is_stack
    )
