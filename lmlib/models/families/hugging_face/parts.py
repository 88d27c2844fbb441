"""Parts of a model, from which a family writes a config.json, and the types of its layers."""

from typing import Any, TypeVar

import jax

from lmlib.models.block import TwoParts
from lmlib.models.decoder import Decoder
from lmlib.models.families.hugging_face.settings import Settings
from lmlib.models.parts.attention import Attention

K = TypeVar("K")
FULL, SLIDING = "full_attention", "sliding_attention"


def a(kind: type[K], part: Any) -> K:
    """`part`, which is a `kind`.

    Raises:
      ValueError: if it is not: the family has no such model.
    """
    if not isinstance(part, kind):
        raise ValueError(f"it has a {type(part).__name__} where the family has a {kind.__name__}")
    return part


def layers(model: Decoder) -> list[TwoParts]:
    """The layers in order. The arrays of each hold all layers of its stack.

    Raises:
      ValueError: as `a`.
    """
    return [
        a(TwoParts, layer)  # type: ignore[type-abstract]
        for pattern in a(Decoder, model).stack.patterns
        for _ in range(jax.tree.leaves(pattern)[0].shape[0])
        for layer in pattern
    ]


def attentions(model: Decoder) -> list[Attention]:
    """The attention of each layer; raises ValueError as `a` does."""
    return [a(Attention, layer.attention) for layer in layers(model)]


def attention(model: Decoder) -> Attention:
    """The attention of the first layer."""
    return attentions(model)[0]


def mlp(model: Decoder, kind: type[K]) -> K:
    """The feed-forward part of the first layer, which is a `kind`; raises ValueError as `a`."""
    return a(kind, layers(model)[0].mlp)


def head_dim(model: Decoder) -> int:
    """The size of a head in the first layer."""
    return int(attention(model).query.shape[-1])


def window(model: Decoder) -> int | None:
    """The first window that a layer has."""
    return next((each.window for each in attentions(model) if each.window is not None), None)


def layer_types(settings: Settings, layers: int) -> list[str] | None:
    """`FULL` or `SLIDING` of each layer; `None` where config.json does not say.

    Raises:
      FolderError: if it says something else.
    """
    kinds: list[str] | None = settings.take("layer_types", None, list)
    if kinds is None or (len(kinds) == layers and all(kind in (FULL, SLIDING) for kind in kinds)):
        return kinds
    raise settings.refused(
        "layer_types", f"only {FULL!r} or {SLIDING!r} for each of {layers} layers"
    )


def types_of(model: Decoder) -> list[str]:
    """`layer_types` of a model."""
    return [FULL if each.window is None else SLIDING for each in attentions(model)]
