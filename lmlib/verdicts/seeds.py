"""The difference of a metric between two settings, judged over seeds.

The unit of replication is a run. Runs of one seed begin with the same weights and see the same
batches, so their differences vary less than the runs, and the t-test is over these differences
(Student 1908). Runs of other seeds are compared by the statistic of Welch (1938), with the degrees
of freedom of the smaller number of seeds, which keeps the error rate for any two variances (Mickey
and Brown 1966, Annals of Mathematical Statistics 37). By Welch's own approximation, three runs
beside ten erred in 6 % of simulated comparisons where 5 % were meant.

Seeds are counted, and validation batches are not: a million tokens measured in one run say nothing
about the next seed (Bouthillier et al. 2021, arXiv:2103.03098). `lmlib.verdicts.text` uses batches.

Under an effect, the statistic of a t-test has the noncentral t distribution (Cohen 1988,
Statistical Power Analysis, §2). The power at the effect that was just seen says nothing that the
test has not said (Hoenig and Heisey 2001, The American Statistician 55): a finished comparison says
the smallest effect that it would have found.

Lower is better throughout; a metric of which higher is better is negated.
"""

import bisect
import dataclasses
import math
from typing import Literal

import numpy as np
from jaxtyping import Float
from scipy import optimize, special

Verdict = Literal["better", "worse", "inconclusive"]
LEAST_SEEDS = 3  # of each setting; fewer have hardly a standard error
MOST_SEEDS = 1_000  # more are not counted
USUAL_POWER = 0.8


@dataclasses.dataclass(frozen=True)
class Difference:
    """A setting's metric minus the baseline's, over seeds.

    Args:
      mean: in the metric's unit.
      seeds: of each of both; of unequal numbers the smaller.
      paired: whether it is over runs of the same seeds.
      deviation: of the difference of one pair of runs; `None` of fewer than two, and of a mean that
        is not finite.
      standard_error: of the mean; `None` alike.
      freedom: degrees of freedom of the standard error.
    """

    mean: float
    seeds: int
    paired: bool
    deviation: float | None = None
    standard_error: float | None = None
    freedom: float = 0.0

    def verdict(self, margin: float, error_rate: float) -> Verdict:
        """The verdict on a difference beyond `margin`.

        A one-sided t-test with `error_rate` says "better" if it refutes that the difference is
        -margin or more, and "worse" if it refutes that it is margin or less. Without an effect
        each is said at most as often as `error_rate`.
        """
        if self.seeds < LEAST_SEEDS or not self.standard_error:
            return "inconclusive"
        if abs(self.mean) <= margin:
            return "inconclusive"
        t = (abs(self.mean) - margin) / self.standard_error
        if special.stdtr(self.freedom, -t) > error_rate:
            return "inconclusive"
        return "better" if self.mean < 0 else "worse"

    def interval(self, error_rate: float) -> tuple[float, float] | None:
        """Each end is wrong with `error_rate`; `None` without a standard error."""
        if self.standard_error is None:
            return None
        reach = -float(special.stdtrit(self.freedom, error_rate)) * self.standard_error
        return self.mean - reach, self.mean + reach


def paired_difference(differences_S: Float[np.ndarray, "S"]) -> Difference:
    """Over S seeds, each with its own difference."""
    seeds, mean = len(differences_S), float(np.mean(differences_S))
    if seeds < 2 or not math.isfinite(mean):
        return Difference(mean, seeds, paired=True)
    deviation = float(np.std(differences_S, ddof=1))
    return Difference(mean, seeds, True, deviation, deviation / math.sqrt(seeds), float(seeds - 1))


def unpaired_difference(
    values_S: Float[np.ndarray, "S"], baseline_T: Float[np.ndarray, "T"]
) -> Difference:
    """The difference between S runs and T runs of the baseline with other seeds."""
    mean = float(np.mean(values_S) - np.mean(baseline_T))
    seeds = min(len(values_S), len(baseline_T))
    if seeds < 2 or not math.isfinite(mean):
        return Difference(mean, seeds, paired=False)
    one, other = (float(np.var(each, ddof=1)) for each in (values_S, baseline_T))
    error = math.sqrt(one / len(values_S) + other / len(baseline_T))
    return Difference(mean, seeds, False, math.sqrt(one + other), error, float(seeds - 1))


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

    counts = range(LEAST_SEEDS, MOST_SEEDS + 1)
    place = bisect.bisect_left(counts, True, key=enough)
    return counts[place] if place < len(counts) else None
