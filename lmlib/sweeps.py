"""The points of a sweep: settings by their paths in a config.

    def sweep():
        return product(axis("optimizer.peak_lr", 1e-3, 3e-3), axis("seed", 0, 1, 2))

in an experiment's file makes the points that `python -m runner.sweep` trains. A sweep is a list of
points, and the functions here combine lists.
"""

import itertools
import random
from collections.abc import Iterable, Sequence
from typing import Any

Point = dict[str, Any]
Points = list[Point]


def axis(path: str, *values: Any) -> Points:
    """Makes a point for each of `values`, Python literals, of the parameter at `path`."""
    if not values:
        raise ValueError(f"axis({path!r}) has no values")
    return [{path: value} for value in values]


def product(*sweeps: Iterable[Point]) -> Points:
    """The Cartesian product of sweeps, which set different paths; the last one changes fastest."""
    return [_together(points) for points in itertools.product(*sweeps)]


def zipped(*sweeps: Sequence[Point]) -> Points:
    """Combines the first points of all sweeps, then the second ones, and so on.

    The sweeps have equal lengths, and set different paths.
    """
    sizes = [len(sweep) for sweep in sweeps]
    if len(set(sizes)) > 1:
        raise ValueError(f"zipped needs equally many points of each, but they have {sizes}")
    return [_together(points) for points in zip(*sweeps, strict=True)]


def chain(*sweeps: Iterable[Point]) -> Points:
    """Concatenates sweeps and removes duplicate points."""
    found: Points = []
    for point in itertools.chain(*sweeps):
        if not any(_same(point, other) for other in found):
            found.append(point)
    return found


def sample(sweep: Iterable[Point], count: int, seed: int = 0) -> Points:
    """Selects `count` different points of `sweep`, in its order, by `seed`, as in random search."""
    points = list(sweep)
    if not 0 < count <= len(points):
        raise ValueError(f"sample takes 1 to {len(points)} of these points, not {count}")
    chosen = sorted(random.Random(seed).sample(range(len(points)), count))
    return [points[place] for place in chosen]


def _together(points: Iterable[Point]) -> Point:
    whole: Point = {}
    for point in points:
        if twice := whole.keys() & point.keys():
            raise ValueError(f"{sorted(twice)[0]} is set twice; use chain for one after the other")
        whole |= point
    return whole


def _same(one: Point, other: Point) -> bool:
    """True if both points set the same values; 1 and True are different."""
    return one.keys() == other.keys() and all(repr(one[path]) == repr(other[path]) for path in one)
