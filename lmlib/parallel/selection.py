"""Selection of weights by patterns of their paths, or by the names of their axes."""

import difflib
import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any

from lmlib.parallel.axes import Weight, map_weights

_SHOWN = 3


class SelectionError(ValueError):
    """A pattern or an axis that matches no weight, or a weight that is selected twice."""


def named_weights(model: Any) -> dict[str, Weight]:
    """The weights of a model by their paths, in order. Arrays may be shapes."""
    found: dict[str, Weight] = {}
    map_weights(lambda weight, _: found.update({weight.path: weight}), model)
    return found


def selected(
    weights: Mapping[str, Weight], paths: Sequence[str], axes: Sequence[str]
) -> dict[str, Weight]:
    """Selects the weights whose path matches one of `paths`, or that have one of `axes`.

    Args:
      paths: shell-style patterns: "stack.*.attention.query"; "*" also matches dots.
      axes: names, such as "vocab".

    Raises:
      SelectionError: if one of them matches no weight, with similar names.
    """
    found: dict[str, Weight] = {}
    for pattern in _listed("paths", paths):
        matching = fnmatch.filter(weights, pattern)
        if not matching:
            raise SelectionError(f"no weight's path matches {pattern!r}; {_near(pattern, weights)}")
        found |= {path: weights[path] for path in matching}
    known = {axis: None for weight in weights.values() for axis in weight.axes if axis}
    for axis in _listed("axes", axes):
        if axis not in known:
            raise SelectionError(f"no weight has an axis {axis!r}; there are {', '.join(known)}")
        found |= {path: weight for path, weight in weights.items() if axis in weight.axes}
    return found


def _listed(name: str, values: Sequence[str]) -> Sequence[str]:
    if isinstance(values, str):
        raise SelectionError(f"{name} must be a tuple of texts: write ({values!r},)")
    return values


def _near(pattern: str, weights: Mapping[str, Weight]) -> str:
    """Text with the paths that are most similar to a pattern, compared by its named parts."""
    wanted = [part for part in pattern.split(".") if part.strip("*?0123456789")]

    def likeness(path: str) -> float:
        parts = path.split(".")
        return sum(
            max(difflib.SequenceMatcher(None, part.strip("*"), one).ratio() for one in parts)
            for part in wanted
        )

    near = sorted(weights, key=likeness, reverse=True)[:_SHOWN]
    return f"near it are {', '.join(near)}"
