"""Differences of a metric between two settings, judged over seeds.

The unit of replication is a run. Runs with the same seed begin with the same weights and see the
same batches, so their differences vary less than the runs, and the paired t-test uses these
differences (Student 1908). Runs with different seeds are compared by the statistic of Welch (1938).
Its degrees of freedom are taken from the smaller number of seeds, which keeps the error rate for
any two variances (Mickey and Brown 1966, Annals of Mathematical Statistics 37). With Welch's own
approximation, three runs against ten erred in 6 % of simulated comparisons at a nominal 5 %.

Validation batches don't count as replicates: a million tokens measured in one run say nothing about
the next seed (Bouthillier et al. 2021, arXiv:2103.03098). `lmlib.verdicts.text` uses batches.

Under an effect, the statistic of a t-test has the noncentral t distribution (Cohen 1988,
Statistical Power Analysis, §2). The power at the observed effect adds nothing to the test (Hoenig
and Heisey 2001, The American Statistician 55), so a finished comparison reports the smallest effect
that it would have found.

Lower is better throughout; metrics for which higher is better are negated.
"""

import bisect
import dataclasses
import math
from typing import Literal

import numpy as np
from jaxtyping import Float
from scipy import optimize, special

Verdict = Literal["better", "worse", "inconclusive"]
LEAST_SEEDS = 3  # per setting; the standard error of fewer is too uncertain
MOST_SEEDS = 1_000  # upper limit of the search
USUAL_POWER = 0.8


@dataclasses.dataclass(frozen=True)
class Difference:
    """A setting's metric minus the baseline's, over seeds.

    Args:
      mean: in the metric's unit.
      seeds: of each of both; the smaller number if they differ.
      paired: True if it is over pairs of runs with the same seed.
      deviation: standard deviation of the difference of one pair of runs; `None` for fewer than two
        seeds or a mean that is not finite.
      standard_error: of the mean; `None` in the same cases.
      freedom: degrees of freedom of the standard error.
    """

    mean: float
    seeds: int
    paired: bool
    deviation: float | None = None
    standard_error: float | None = None
    freedom: float = 0.0

    def verdict(self, margin: float, error_rate: float) -> Verdict:
        """Returns the verdict on a difference beyond `margin`.

        A one-sided t-test with `error_rate` says "better" if it rejects that the difference is
        -margin or more, and "worse" if it rejects that it is margin or less. Without an effect,
        each is said at most at the rate `error_rate`.
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
        """Returns an interval whose ends each miss with probability `error_rate`.

        `None` without a standard error.
        """
        if self.standard_error is None:
            return None
        reach = -float(special.stdtrit(self.freedom, error_rate)) * self.standard_error
        return self.mean - reach, self.mean + reach


def paired_difference(differences_S: Float[np.ndarray, "S"]) -> Difference:
    """Returns the difference over S seeds, from the difference of each seed's pair of runs."""
    seeds, mean = len(differences_S), float(np.mean(differences_S))
    if seeds < 2 or not math.isfinite(mean):
        return Difference(mean, seeds, paired=True)
    deviation = float(np.std(differences_S, ddof=1))
    return Difference(mean, seeds, True, deviation, deviation / math.sqrt(seeds), float(seeds - 1))


def unpaired_difference(
    values_S: Float[np.ndarray, "S"], baseline_T: Float[np.ndarray, "T"]
) -> Difference:
    """Returns the difference between S runs and T runs of the baseline with other seeds."""
    mean = float(np.mean(values_S) - np.mean(baseline_T))
    seeds = min(len(values_S), len(baseline_T))
    if seeds < 2 or not math.isfinite(mean):
        return Difference(mean, seeds, paired=False)
    one, other = (float(np.var(each, ddof=1)) for each in (values_S, baseline_T))
    error = math.sqrt(one / len(values_S) + other / len(baseline_T))
    return Difference(mean, seeds, False, math.sqrt(one + other), error, float(seeds - 1))


def power(beyond: float, deviation: float, seeds: int, freedom: float, error_rate: float) -> float:
    """Returns the probability that an effect is found.

    Args:
      beyond: distance of the effect beyond the margin, in the metric's unit.
      deviation: standard deviation of the difference of one pair of runs.
      seeds: of each setting.
      freedom: degrees of freedom: `seeds` - 1 if paired.
    """
    critical = -special.stdtrit(freedom, error_rate)
    shift = beyond * math.sqrt(seeds) / deviation
    if shift > 30 + critical:  # outside the range of scipy's nctdtr
        return 1.0
    return 1.0 - float(special.nctdtr(freedom, shift, critical))


def smallest_effect(difference: Difference, margin: float, error_rate: float) -> float | None:
    """Returns the smallest effect that a comparison like `difference` finds with a power of 80 %.

    `None` if the seeds give no standard error, or are too few to find any effect.
    """
    if difference.seeds < LEAST_SEEDS or not difference.deviation:
        return None

    def lacking(shift: float) -> float:
        return power(shift, 1.0, 1, difference.freedom, error_rate) - USUAL_POWER

    critical = -float(special.stdtrit(difference.freedom, error_rate))
    shift = optimize.brentq(lacking, 0.0, 10.0 + 3 * critical)
    return margin + shift * difference.deviation / math.sqrt(difference.seeds)


def seeds_needed(difference: Difference, margin: float, error_rate: float) -> int | None:
    """Returns the seeds of each setting needed to find an effect of the size of `difference`.

    The power is 80 %, and the deviation is taken to be the true one. `None` if more than 1,000
    would be needed, if the effect is within the margin so that no number suffices, or if there are
    fewer than two seeds.
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
