"""Parts of a model and types of its layers, for writing config.json."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax

from lmlib.models.block import BlockBase
from lmlib.models.decoder import Decoder
from lmlib.models.families.hugging_face.settings import Settings
from lmlib.models.parts.attention import Attention

K = TypeVar("K")
FULL, SLIDING = "full_attention", "sliding_attention"


def a(kind: type[K], part: Any) -> K:
    """Returns `part`; raises ValueError if it is no `kind`, so the family cannot describe the
    model.
    """
    if not isinstance(part, kind):
        raise ValueError(f"it has a {type(part).__name__} where the family has a {kind.__name__}")
    return part


def layers(model: Decoder) -> list[BlockBase]:
    """Returns the layers in order. Each layer's arrays contain all layers of its stack."""
    return [
        a(BlockBase, layer)  # type: ignore[type-abstract]
        for pattern in a(Decoder, model).stack.patterns
        for _ in range(jax.tree.leaves(pattern)[0].shape[0])
        for layer in pattern
    ]


def attentions(model: Decoder) -> list[Attention]:
    """Returns the attention of each layer that has one; raises ValueError if no layer has."""
    mixers = [layer.attention for layer in layers(model)]
    return [each for each in mixers if isinstance(each, Attention)] or [a(Attention, mixers[0])]


def mixer(model: Decoder, kind: type[K]) -> K:
    """Returns the first layer's mixer that is a `kind`; raises ValueError if there is none."""
    mixers = [layer.attention for layer in layers(model)]
    return next((each for each in mixers if isinstance(each, kind)), None) or a(kind, mixers[0])


def of_first(kind: type[Any], value: Callable[[Any], Any]) -> Callable[[Decoder], Any]:
    """Returns a function that reads a setting of the first mixer or MLP of a kind, or `...`."""

    def read(model: Decoder) -> Any:
        every = (part for layer in layers(model) for part in (layer.attention, layer.mlp))
        return next((value(part) for part in every if isinstance(part, kind)), ...)

    return read


def attention(model: Decoder) -> Attention:
    """Returns the attention of the first layer that has it."""
    return mixer(model, Attention)


def mlp(model: Decoder, kind: type[K]) -> K:
    """Returns the first layer's feed-forward part; raises ValueError if it is not a `kind`."""
    return a(kind, layers(model)[0].mlp)


def head_dim(model: Decoder) -> int:
    """Returns the head size of the first layer with attention."""
    return int(attention(model).query.shape[-1])


def window(model: Decoder) -> int | None:
    """Returns the window of the first layer that has one."""
    return next((each.window for each in attentions(model) if each.window is not None), None)


def layer_types(settings: Settings, layers: int) -> list[str] | None:
    """Returns `FULL` or `SLIDING` for each layer; `None` if config.json does not say."""
    kinds: list[str] | None = settings.take("layer_types", None, list)
    if kinds is None or (len(kinds) == layers and all(kind in (FULL, SLIDING) for kind in kinds)):
        return kinds
    raise settings.refused(
        "layer_types", f"only {FULL!r} or {SLIDING!r} for each of {layers} layers"
    )


def types_of(model: Decoder) -> list[str]:
    """Returns the `layer_types` of a model."""
    return [FULL if each.window is None else SLIDING for each in attentions(model)]
