"""How much more compute the baseline would need for another setting's loss: its effective speedup.

A difference in loss means little by itself: 0.02 nats are much late in training and nothing early.
The baseline's own curve, L = E + B/D^β over its tokens D, turns it into a factor of compute. There
are two such curves:

- of final losses of baseline runs of several lengths, each with its whole schedule: the curve that
  is meant;
- of one length, as validation measured it while it trained. Before the learning rate has decayed,
  its losses are higher than those of shorter runs with whole schedules, and they fall faster
  towards the end. Less compute than the run's is then overestimated and more is underestimated: the
  speedup is nearer to 1 than it is. (Hoffmann et al. 2022, arXiv:2203.15556, appendix B, have what
  becomes of losses in mid-schedule.)

A factor is read between half the least and twice the most tokens of the curve, no further.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float
from scipy import special

from lmlib.verdicts.power_law import PowerLaw, fit_power_law, resampled_fits
from lmlib.verdicts.scaling_law import interval
from lmlib.verdicts.seeds import Difference

FARTHEST = 2.0  # times the most tokens of a curve, and a part of its least
LEAST_POINTS = 4  # of a curve, at different numbers of tokens
RESAMPLES = 200


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


def speedup(
    curve: Curve, tokens: float, difference: Difference, resamples: int = RESAMPLES
) -> Speedup:
    """Of a setting whose loss differs from the baseline's by `difference`.

    Args:
      curve: without a `problem`.
      tokens: that the baseline has seen.

    The interval is of a bootstrap over the curve's errors, and over the difference's as its t
    distribution has them.
    """
    x_RK = curve.tokens_R[:, None]
    law = fit_power_law(x_RK, curve.losses_R)
    least = min(curve.tokens_R) / FARTHEST / tokens
    most = FARTHEST * max(curve.tokens_R) / tokens

    def factor(law: PowerLaw, difference: float) -> float:
        # Of the loss that the law itself has there, so that no difference is no speedup.
        here = float(law.loss(np.array([[tokens]]))[0])
        excess, goal = here - law.floor, here + difference - law.floor
        if goal <= 0:
            return most
        log_factor = np.log(excess / goal) / law.exponents_K[0]
        return float(np.exp(np.clip(log_factor, np.log(least), np.log(most))))

    middle = factor(law, difference.mean)
    low = high = middle
    if difference.standard_error is not None:
        laws = resampled_fits(x_RK, curve.losses_R, law, resamples)
        quantiles = (np.arange(resamples) + 0.5) / resamples
        order = np.random.default_rng(0).permutation(resamples)
        errors = difference.standard_error * special.stdtrit(difference.freedom, quantiles)[order]
        drawn = [factor(law, difference.mean + e) for law, e in zip(laws, errors, strict=True)]
        low, high = interval(np.array(drawn))
    return Speedup(middle, low, high, least, most, curve.whole_schedules)


def joined(points: Sequence[tuple[float, float]], whole_schedules: bool) -> Curve:
    """A curve of (tokens, loss) of any number of runs."""
    tokens_R, losses_R = np.array(points, float).reshape(-1, 2).T
    return Curve(tokens_R, losses_R, whole_schedules)
