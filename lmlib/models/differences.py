"""Differences between two models: shapes of weights, settings and parts."""

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax

# Settings that only affect initial values: models with the same weights compute the same.
_OF_INITIAL_VALUES = {"embedding_deviation", "residual_scale", "initial", "initial_first"}


class Difference(NamedTuple):
    """One difference between two models, with both sides as text.

    `where` is its path in both models. `of_weights` is True if their weights do not fit each other.
    """

    where: str
    one: str
    other: str
    of_weights: bool


def differences(one: Any, other: Any, where: str = "") -> Iterator[Difference]:
    """Yields all differences between two models, whose arrays may be shapes.

    Ignores values of arrays and settings of initial values.
    """
    parts, others = _parts(one), _parts(other)
    if type(one) is type(other) and parts and parts.keys() == others.keys():
        for name in (name for name in parts if name not in _OF_INITIAL_VALUES):
            yield from differences(parts[name], others[name], f"{where}.{name}".removeprefix("."))
    elif _compared(one) != _compared(other):
        yield Difference(where, _text(one), _text(other), _has_weights(one) or _has_weights(other))


def _parts(value: Any) -> dict[str, Any]:
    """The fields of a module or of settings, or the elements of a tuple; empty for other values."""
    if isinstance(value, tuple | list):
        return {str(index): part for index, part in enumerate(value)}
    if dataclasses.is_dataclass(value) and not hasattr(value, "shape"):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return {}


def _compared(value: Any) -> Any:
    return value.shape if hasattr(value, "shape") else value


def _has_weights(value: Any) -> bool:
    return any(hasattr(leaf, "shape") for leaf in jax.tree.leaves(value))


def _text(value: Any) -> str:
    if hasattr(value, "shape"):
        return f"{value.dtype}{list(value.shape)}"
    if isinstance(value, tuple | list):
        return f"{len(value)} parts"
    return getattr(value, "__qualname__", type(value).__name__ if _parts(value) else repr(value))
