"""Checks values against type annotations."""

import collections.abc
import dataclasses
import inspect
import numbers
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_NUMBERS = {int: numbers.Integral, float: numbers.Real}  # includes NumPy's numbers


def check_fields(name: str, settings: Any) -> None:
    """Checks the fields of `settings`, called `name` in errors, against their annotations."""
    kinds = typing.get_type_hints(type(settings))
    for field in dataclasses.fields(settings):
        value, kind = getattr(settings, field.name), kinds[field.name]
        if not fits(value, kind):
            path = f"{name}.{field.name}".removeprefix(".")
            raise ValueError(f"{path} must be {text_of(kind)}, got {value!r:.80}")


def fits(value: Any, annotation: Any, unknown: Callable[[Any], bool] = lambda value: False) -> bool:
    """True if `value` has the type `annotation`.

    Unknown annotations accept every value. An int fits float, a list fits a tuple of any length; a
    bool is not a number, and a str is not a sequence.

    Args:
      unknown: predicate for values, also inside containers, that are accepted unchecked.
    """
    origin, inside = typing.get_origin(annotation), typing.get_args(annotation)
    if unknown(value) or annotation is Any or annotation is inspect.Parameter.empty:
        return True
    if annotation is None:
        return value is None
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, each, unknown) for each in inside)
    if origin is typing.Literal:
        return value in inside
    if origin is typing.Annotated:
        return fits(value, inside[0], unknown)
    if origin is collections.abc.Callable:
        return callable(value)
    if annotation in (int, float):
        return isinstance(value, _NUMBERS[annotation]) and not isinstance(value, bool)
    kind = origin or annotation
    if not isinstance(kind, type):
        return True
    if isinstance(value, str) and origin is not None:
        return False
    if kind is tuple and inside[1:] == (...,):
        kind, inside = Sequence, inside[:1]  # a list is accepted too
    if not _is_instance(value, kind):
        return False
    if isinstance(value, Mapping) and len(inside) == 2:
        parts = [(key, inside[0]) for key in value] + [(part, inside[1]) for part in value.values()]
    elif isinstance(value, (list, tuple)) and kind is not tuple and len(inside) == 1:
        parts = [(part, inside[0]) for part in value]
    else:
        parts = []
    return all(fits(part, expected, unknown) for part, expected in parts)


def text_of(annotation: Any) -> str:
    """Returns the annotation as source code, without module names."""
    text = re.sub(r"(?:\w+\.)+(\w+)", r"\1", inspect.formatannotation(annotation))
    return text.replace(" | ", " or ")


def _is_instance(value: Any, kind: type) -> bool:
    try:
        return isinstance(value, kind)
    except Exception:  # a protocol that is not checkable, or an array type outside a scope
        return True
