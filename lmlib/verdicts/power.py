"""How often a comparison finds an effect of a given size, and how many seeds that takes.

Under an effect, the statistic of a t-test has the noncentral t distribution (Cohen 1988,
Statistical Power Analysis, §2). The power at the effect that was just seen says nothing that the
test has not said (Hoenig and Heisey 2001, The American Statistician 55): what is told of a finished
comparison is the smallest effect that it would have found.
"""

import math

from scipy import optimize, special

from lmlib.verdicts.seeds import LEAST_SEEDS, Difference

USUAL_POWER = 0.8
MOST_SEEDS = 1_000  # more are not counted


def power(beyond: float, deviation: float, seeds: int, freedom: float, error_rate: float) -> float:
    """The probability that an effect is found.

    Args:
      beyond: how far the effect is beyond the margin, in the metric's unit.
      deviation: of the difference of one pair of runs.
      seeds: of each setting.
      freedom: degrees of freedom: `seeds` - 1 if paired.
    """
    critical = -special.stdtrit(freedom, error_rate)
    shift = beyond * math.sqrt(seeds) / deviation
    if shift > 30 + critical:  # beyond what scipy's nctdtr computes
        return 1.0
    return 1.0 - float(special.nctdtr(freedom, shift, critical))


def power_of(difference: Difference, effect: float, margin: float, error_rate: float) -> float:
    """`power` of a comparison like `difference`, were the effect so large."""
    assert difference.deviation
    of = difference.deviation, difference.seeds, difference.freedom
    return power(effect - margin, *of, error_rate)


def smallest_effect(difference: Difference, margin: float, error_rate: float) -> float | None:
    """The effect that a comparison like `difference` finds with a power of 80 %; `None` if its
    seeds do not tell, or are too few to find any."""
    if difference.seeds < LEAST_SEEDS or not difference.deviation:
        return None

    def lacking(shift: float) -> float:
        return power(shift, 1.0, 1, difference.freedom, error_rate) - USUAL_POWER

    critical = -float(special.stdtrit(difference.freedom, error_rate))
    shift = optimize.brentq(lacking, 0.0, 10.0 + 3 * critical)
    return margin + shift * difference.deviation / math.sqrt(difference.seeds)


def seeds_needed(difference: Difference, margin: float, error_rate: float) -> int | None:
    """How many seeds of each setting find an effect as large as that of `difference` with a power
    of 80 %, were its deviation the true one too.

    `None`: more than 1,000; none would, since the effect is within the margin; or unknown, of fewer
    than two seeds.
    """
    beyond, deviation = abs(difference.mean) - margin, difference.deviation
    if not deviation or not beyond > 0 or not math.isfinite(beyond):
        return None
    freedom_of_one = difference.freedom / (difference.seeds - 1)

    def enough(seeds: int) -> bool:
        freedom = freedom_of_one * (seeds - 1)
        return power(beyond, deviation, seeds, freedom, error_rate) >= USUAL_POWER

    low, high = LEAST_SEEDS - 1, MOST_SEEDS
    if not enough(high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high
