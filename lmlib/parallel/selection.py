"""Weights that are meant by patterns of their paths, or by the names of their axes."""

import difflib
import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any

from lmlib.parallel.axes import Weight, map_weights

_SHOWN = 3


class SelectionError(ValueError):
    """A pattern or an axis that no weight has, or a weight that is meant twice."""


def named_weights(model: Any) -> dict[str, Weight]:
    """The weights of a model, whose arrays may be shapes, by their paths and in order."""
    found: dict[str, Weight] = {}
    map_weights(lambda weight, _: found.update({weight.path: weight}), model)
    return found


def selected(
    weights: Mapping[str, Weight], paths: Sequence[str], axes: Sequence[str]
) -> dict[str, Weight]:
    """Those of `weights` whose path one of `paths` matches, or that have one of `axes`.

    Args:
      paths: patterns as a shell has them: "stack.*.attention.query"; "*" stands for dots too.
      axes: names, such as "vocab".

    Raises:
      SelectionError: if one of them means no weight, naming what comes near it.
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
    """Paths that come near a pattern, compared by the parts that it names."""
    wanted = [part for part in pattern.split(".") if part.strip("*?0123456789")]

    def likeness(path: str) -> float:
        parts = path.split(".")
        return sum(
            max(difflib.SequenceMatcher(None, part.strip("*"), one).ratio() for one in parts)
            for part in wanted
        )

    near = sorted(weights, key=likeness, reverse=True)[:_SHOWN]
    return f"near it are {', '.join(near)}"
