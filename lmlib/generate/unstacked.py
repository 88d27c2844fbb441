"""Layers apart from each other, as generation reads them."""

from typing import Any

import jax

from lmlib.models.layer import Layer
from lmlib.models.stack import Pattern, Stack
from lmlib.parallel.axes import M


def unstacked(model: M) -> M:
    """`model` with each layer of its stacks as a segment of its own, whose weights lie by
    themselves. One loop over tokens then reads them where they are; a loop over layers in it would
    copy each layer's first."""

    def is_stack(node: Any) -> bool:
        return (
            isinstance(node, tuple)
            and len(node) > 0
            and all(isinstance(pattern, tuple) and len(pattern) > 0 for pattern in node)
            and all(isinstance(layer, Layer) for pattern in node for layer in pattern)
        )

    def layer(pattern: Pattern, i: int) -> Pattern:
        return jax.tree.map(lambda w_R: w_R[i : i + 1], pattern)

    def apart(stack: Stack) -> Stack:
        return tuple(
            (block,)
            for pattern in stack
            for i in range(jax.tree.leaves(pattern)[0].shape[0])
            for block in layer(pattern, i)
        )

    return jax.tree.map(
        lambda node: apart(node) if is_stack(node) else node, model, is_leaf=is_stack
    )
