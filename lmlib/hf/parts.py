"""A model's parts, as a family's `settings` reads them."""

from typing import Any, TypeVar

import jax

from lmlib.models.block import Block
from lmlib.models.decoder import Decoder
from lmlib.models.parts.attention import Attention

K = TypeVar("K")


def a(kind: type[K], part: Any) -> K:
    """`part`, which is a `kind`.

    Raises:
      ValueError: if it is not: the family has no such model.
    """
    if not isinstance(part, kind):
        raise ValueError(f"it has a {type(part).__name__} where the family has a {kind.__name__}")
    return part


def layers(model: Decoder, kind: type[K]) -> list[K]:
    """The layers in order, each a `kind`. Its arrays are those of all layers of its stack.

    Raises:
      ValueError: as `a`.
    """
    return [
        a(kind, layer)
        for pattern in a(Decoder, model).stack.patterns
        for _ in range(jax.tree.leaves(pattern)[0].shape[0])
        for layer in pattern
    ]


def attentions(model: Decoder, kind: type[Any] = Block) -> list[Attention]:
    """Of each layer, which is a `kind` and has an `attention`.

    Raises:
      ValueError: as `a`.
    """
    return [a(Attention, layer.attention) for layer in layers(model, kind)]


def head_dim(model: Decoder, kind: type[Any] = Block) -> int:
    """Of the first layer, as `attentions` has it."""
    return attentions(model, kind)[0].query.shape[-1]
