"""How much more compute the baseline would need for another setting's loss: its effective speedup.

A difference of 0.02 nats is large late in training and small early. The baseline's own curve,
L = E + B/D^β over its tokens D, turns a difference into a factor of compute. There are two curves:

- through the final losses of baseline runs of several lengths, each with its whole schedule: the
  right one;
- through one run's validation while it trained. Before the learning rate has decayed, its losses
  are higher than the final losses of shorter runs, and they fall faster towards the end. The
  speedup comes out nearer to 1 than it is (Hoffmann et al. 2022, arXiv:2203.15556, appendix B).

A factor is read between half the least and twice the most tokens of the curve, no further.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from lmlib.verdicts.power_law import INTERVAL, Fit, PowerLaw
from lmlib.verdicts.seeds import Difference

FARTHEST = 2.0  # times the most tokens of a curve, and a part of its least
LEAST_POINTS = 4  # of a curve, at different numbers of tokens
_LEAST_GOAL = 1e-300  # of the excess over the floor, for a goal below it


@dataclasses.dataclass(frozen=True)
class Curve:
    """Losses of the baseline over tokens.

    Args:
      tokens_R, losses_R: of each point.
      whole_schedules: whether each point is the end of a run of its own length.
    """

    tokens_R: Float[np.ndarray, "R"]
    losses_R: Float[np.ndarray, "R"]
    whole_schedules: bool

    @classmethod
    def through(cls, points: Sequence[tuple[float, float]], whole_schedules: bool) -> "Curve":
        """The curve through (tokens, loss) of any number of runs."""
        tokens_R, losses_R = np.array(points, float).reshape(-1, 2).T
        return cls(tokens_R, losses_R, whole_schedules)

    @property
    def problem(self) -> str | None:
        """Why no law can be fitted to it; `None` if one can."""
        lengths = len(set(self.tokens_R.tolist()))
        if lengths >= LEAST_POINTS and np.isfinite(self.losses_R).all() and min(self.losses_R) > 0:
            return None
        return (
            f"the baseline has finite losses at {lengths} numbers of tokens, and its curve needs "
            f"{LEAST_POINTS}: give runs of as many lengths, or evaluate more often"
        )


@dataclasses.dataclass(frozen=True)
class Speedup:
    """The tokens that the baseline would need, over those it has seen, with a 90 % interval.

    Ends beyond `least` or `most`, to which the curve is read, are those.
    """

    factor: float
    low: float
    high: float
    least: float
    most: float
    whole_schedules: bool


def speedup(curve: Curve, tokens: float, difference: Difference) -> Speedup:
    """The speedup of a setting whose loss differs from the baseline's by `difference`.

    Args:
      curve: without a `problem`.
      tokens: that the baseline has seen.

    The errors of the curve and of the difference are independent: the distances of the ends of
    their intervals from the factor, in logarithms, are added by their squares (Zou and Donner 2008,
    Statistics in Medicine 27, 1693).
    """
    fit = Fit(curve.tokens_R[:, None], curve.losses_R)
    least = min(curve.tokens_R) / FARTHEST / tokens
    most = FARTHEST * max(curve.tokens_R) / tokens

    def logarithm(law: PowerLaw, difference: float) -> float:
        # Measured from the law's own loss there, so that equal losses give a factor of 1.
        excess = law.scales_K[0] * tokens ** -law.exponents_K[0]
        goal = max(1 + difference / excess, _LEAST_GOAL)
        return float(-math.log(goal) / law.exponents_K[0])

    def read(logarithm: float) -> float:
        return float(np.exp(np.clip(logarithm, np.log(least), np.log(most))))

    middle = low = high = logarithm(fit.law, difference.mean)
    ends = difference.interval((1 - INTERVAL) / 2)
    if ends is not None:
        by_curve = fit.interval(lambda law: logarithm(law, difference.mean))
        by_difference = [logarithm(fit.law, end) for end in reversed(ends)]
        down, up = np.hypot(np.subtract(by_curve, middle), np.subtract(by_difference, middle))
        low, high = middle - down, middle + up
    return Speedup(read(middle), read(low), read(high), least, most, curve.whole_schedules)
