"""Effective speedup: the factor of compute that the baseline needs for another setting's loss.

The baseline's own curve, L = E + B/D^β over its tokens D, turns a difference into a factor. It goes
through the final losses of runs of several lengths, or else through one run's validation losses.
Those are too high before the learning rate has decayed, which biases the speedup towards 1
(Hoffmann et al. 2022, arXiv:2203.15556, appendix B).
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from lmlib.verdicts.power_law import INTERVAL, Fit, PowerLaw
from lmlib.verdicts.seeds import Difference

FARTHEST = 2.0  # extrapolation limit, as a factor at both ends of the curve
LEAST_POINTS = 4  # of a curve, at distinct numbers of tokens
_LEAST_GOAL = 1e-300  # of the excess over the floor, if the goal is below the floor


@dataclasses.dataclass(frozen=True)
class Curve:
    """Points (tokens, loss) of the baseline, with `whole_schedules` each the end of a run."""

    points: Sequence[tuple[float, float]]
    whole_schedules: bool

    @property
    def problem(self) -> str | None:
        """The reason why no law can be fitted to it; `None` if one can."""
        lengths = len({tokens for tokens, _ in self.points})
        if lengths >= LEAST_POINTS and all(0 < loss < math.inf for _, loss in self.points):
            return None
        return (
            f"the baseline has finite losses at {lengths} numbers of tokens, but its curve needs "
            f"{LEAST_POINTS}. Train baseline runs of more lengths, or evaluate more often."
        )


@dataclasses.dataclass(frozen=True)
class Speedup:
    """The baseline's tokens for the same loss over the tokens it has seen, with a 90 % interval.

    All are clipped to `least` and `most`, the limits of the curve.
    """

    factor: float
    low: float
    high: float
    least: float
    most: float
    whole_schedules: bool


def speedup(curve: Curve, tokens: float, difference: Difference) -> Speedup:
    """Returns the speedup of a setting whose loss differs from the baseline's by `difference`.

    The baseline has seen `tokens`, and its `curve` has no `problem`. The errors of both are
    independent: distances to the ends of their intervals, in logarithms, are added in quadrature
    (Zou and Donner 2008, Statistics in Medicine 27, 1693).
    """
    tokens_R, losses_R = np.array(curve.points, float).T
    fit = Fit(tokens_R[:, None], losses_R)
    least, most = min(tokens_R) / FARTHEST / tokens, FARTHEST * max(tokens_R) / tokens

    def logarithm(law: PowerLaw, difference: float) -> float:
        # Relative to the law's own loss at these tokens, so that equal losses give a factor of 1.
        excess = law.scales_K[0] * tokens ** -law.exponents_K[0]
        goal = max(1 + difference / excess, _LEAST_GOAL)
        return float(-math.log(goal) / law.exponents_K[0])

    middle = logarithm(fit.law, difference.mean)
    down = up = 0.0
    if (ends := difference.interval((1 - INTERVAL) / 2)) is not None:
        by_curve = fit.interval(lambda law: logarithm(law, difference.mean))
        by_difference = [logarithm(fit.law, end) for end in reversed(ends)]
        down, up = np.hypot(np.subtract(by_curve, middle), np.subtract(by_difference, middle))
    logarithms = np.clip([middle, middle - down, middle + up], math.log(least), math.log(most))
    factor, low, high = np.exp(logarithms).tolist()
    return Speedup(factor, low, high, least, most, curve.whole_schedules)
