"""Layers with attention between layers with a recurrence."""

from collections.abc import Callable, Sequence
from typing import Any

from jaxtyping import PRNGKeyArray

from lmlib.models.part import Part

Make = Callable[..., Part]


def mixers(
    layers: int, attention_layers: Sequence[int], attention: Make, recurrent: Make
) -> list[Make]:
    """Returns the function that makes each layer's mixer, for `transformer(attention=…)`.

    Args:
      attention_layers: indices, from 0, of the layers with attention.
      recurrent: makes the mixer of the other layers from `embed`, `residual_scale` and `key`.

    Raises:
      ValueError: if an index is not a layer's.
    """
    if wrong := [each for each in attention_layers if not 0 <= each < layers]:
        raise ValueError(f"attention_layers has {wrong[0]}, and there are {layers} layers from 0")

    # `transformer` calls every mixer like `Attention`.
    def make(embed: int, *_: Any, residual_scale: float, key: PRNGKeyArray, **__: Any) -> Part:
        return recurrent(embed, residual_scale=residual_scale, key=key)

    return [attention if each in attention_layers else make for each in range(layers)]


def every_nth(period: int, layers: int) -> tuple[int, ...]:
    """Returns the indices of every `period`-th layer."""
    if period < 1:
        raise ValueError(f"the period of layers must be at least 1, got {period}")
    return tuple(range(period - 1, layers, period))
