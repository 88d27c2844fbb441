"""Successive halving (Jamieson & Talwalkar 2016, arXiv:1502.07943): the worse half stops early.

Every point keeps the schedule of its full run, so points that learn slowly at first, with a small
learning rate or a long warm-up, are at a disadvantage. A stopped point keeps its checkpoint.
"""

import math
from collections.abc import Callable, Mapping, Sequence

from runner.errors import ConfigError
from runner.sweep.folder import Point

LOSS_STEPS = 50  # steps whose mean loss is compared


def parsed_rungs(text: str) -> list[float]:
    """Parses fractions such as "0.25,0.5"; raises ConfigError unless they rise between 0 and 1."""
    try:
        rungs = [float(each) for each in text.split(",")]
    except ValueError:
        rungs = []
    rising = all(one < other for one, other in zip([0.0, *rungs], [*rungs, 1.0], strict=True))
    if not rungs or not rising:
        raise ConfigError(
            f"--halving={text}: give rising fractions of the steps, between 0 and 1, after which "
            "the better half continues, as in 0.25,0.5"
        )
    return rungs


def halved(
    points: Sequence[Point],
    steps: Callable[[Point], int],
    rungs: Sequence[float],
    train: Callable[[Sequence[Point], Callable[[Point], int]], bool],
    tell: Callable[[str], None],
) -> list[Point]:
    """Trains with halving; returns the points that remain, or none if `train` was interrupted.

    `steps` returns the steps of a point's full run, and `train` trains points up to their step.
    """
    left = list(points)
    for fraction in rungs:
        until = {each.name: max(1, round(fraction * steps(each))) for each in points}

        def last(point: Point, until: Mapping[str, int] = until) -> int:
            return until[point.name]

        behind = [each for each in left if _loss(each, until[each.name]) is None]
        if not train(behind, last):
            return []
        losses = {each.name: _loss(each, until[each.name]) for each in left}
        compared = [each for each in left if losses[each.name] is not None]
        compared.sort(key=lambda each: losses[each.name] or 0.0)
        kept = math.ceil(len(compared) / 2)
        tell(f"after {fraction:.4g} of the steps the better {kept} of {len(compared)} go on")
        left = compared[:kept]
    return left


def _loss(point: Point, step: int) -> float | None:
    """Returns the mean loss of the last steps up to `step`; infinity if it is not finite.

    Returns `None` if the run did not reach that step.
    """
    lines = point.run.metrics
    if not lines or lines[-1]["step"] < step:
        return None
    losses = [line["loss"] for line in lines if step - LOSS_STEPS < line["step"] <= step]
    mean = sum(losses) / len(losses)
    return mean if math.isfinite(mean) else math.inf
