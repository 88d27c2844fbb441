"""Differences of a metric between two settings, judged over seeds. Lower is better.

Runs with the same seed are compared in pairs (Student 1908), other runs by the statistic of Welch
(1938). The latter takes the degrees of freedom of the smaller number of seeds, which bounds the
error rate for any two variances (Mickey and Brown 1966, Annals of Mathematical Statistics 37);
Welch's own erred in 6 % of simulated comparisons of three runs with ten, at a nominal 5 %.
Validation batches don't count as samples: they don't predict the next seed (Bouthillier et al.
2021, arXiv:2103.03098).
"""

import dataclasses
import math
from typing import Any, Literal

import numpy as np
from jaxtyping import Float
from scipy import special

Outcome = Literal["better", "worse", "inconclusive"]
LEAST_SEEDS = 3  # per setting; the standard error of fewer is too uncertain
MOST_SEEDS = 1_000  # upper limit of the search
USUAL_POWER = 0.8


@dataclasses.dataclass(frozen=True)
class Difference:
    """A setting's metric minus the baseline's, over seeds.

    `seeds` is the smaller number of both; the degrees of freedom are one fewer. `deviation` is the
    standard deviation for one pair of runs and `standard_error` the error of the mean; both are
    `None` for fewer than two seeds or a mean that is not finite.
    """

    mean: float
    seeds: int
    paired: bool
    deviation: float | None = None
    standard_error: float | None = None

    def verdict(self, margin: float, error_rate: float) -> Outcome:
        """Judges a difference beyond `margin` by one-sided t-tests.

        "better" rejects that the difference is -margin or more, "worse" that it is margin or less.
        Without an effect, the rate of each is at most `error_rate`.
        """
        if self.seeds < LEAST_SEEDS or not self.standard_error or abs(self.mean) <= margin:
            return "inconclusive"
        t = (abs(self.mean) - margin) / self.standard_error
        if special.stdtr(self.seeds - 1, -t) > error_rate:
            return "inconclusive"
        return "better" if self.mean < 0 else "worse"

    def interval(self, error_rate: float) -> tuple[float, float] | None:
        """Returns an interval whose ends each miss with probability `error_rate`."""
        if self.standard_error is None:
            return None
        reach = float(_critical(self.seeds, error_rate)) * self.standard_error
        return self.mean - reach, self.mean + reach


def paired_difference(differences_S: Float[np.ndarray, "S"]) -> Difference:
    """Returns the difference over S seeds, from the difference of each pair of runs."""
    return _difference(np.mean(differences_S), True, differences_S)


def unpaired_difference(
    values_S: Float[np.ndarray, "S"], baseline_T: Float[np.ndarray, "T"]
) -> Difference:
    """Returns the difference between S runs and T runs of the baseline with other seeds."""
    return _difference(np.mean(values_S) - np.mean(baseline_T), False, values_S, baseline_T)


def _difference(mean: float, paired: bool, *samples: np.ndarray) -> Difference:
    seeds = min(map(len, samples))
    if seeds < 2 or not math.isfinite(mean):
        return Difference(float(mean), seeds, paired)
    variances = [float(np.var(each, ddof=1)) for each in samples]
    of_mean = [each / len(sample) for each, sample in zip(variances, samples, strict=True)]
    deviation, error = math.sqrt(sum(variances)), math.sqrt(sum(of_mean))
    return Difference(float(mean), seeds, paired, deviation, error)


def _critical(seeds: Any, error_rate: float) -> Any:
    return -special.stdtrit(seeds - 1, error_rate)


def power(beyond: float, deviation: float, seeds: Any, error_rate: float) -> Any:
    """Returns the probability that an effect is found, for a number of seeds or an array of them.

    The effect is larger than the margin by `beyond`. The statistic has the noncentral t
    distribution (Cohen 1988, Statistical Power Analysis, §2).
    """
    critical, shift = _critical(seeds, error_rate), beyond * np.sqrt(seeds) / deviation
    within = np.minimum(shift, 30 + critical)  # the range of scipy's nctdtr; beyond it 1 remains
    return 1.0 - special.nctdtr(seeds - 1, within, critical)


def smallest_effect(difference: Difference, margin: float, error_rate: float) -> float | None:
    """Returns the smallest effect that a comparison like `difference` finds with a power of 80 %.

    `None` for too few seeds. The power at the observed effect would add nothing to the test (Hoenig
    and Heisey 2001, The American Statistician 55).
    """
    seeds, deviation = difference.seeds, difference.deviation
    if seeds < LEAST_SEEDS or not deviation:
        return None
    shift = special.nctdtrinc(seeds - 1, 1 - USUAL_POWER, _critical(seeds, error_rate))
    return margin + float(shift) * deviation / math.sqrt(seeds)


def seeds_needed(difference: Difference, margin: float, error_rate: float) -> int | None:
    """Returns the seeds of each setting needed to find an effect of the size of `difference`.

    The power is 80 %, and the deviation is taken to be the true one. `None` for more than 1,000
    seeds, and for an effect within the margin.
    """
    beyond, deviation = abs(difference.mean) - margin, difference.deviation
    if not deviation or not 0 < beyond < math.inf:
        return None
    counts = np.arange(LEAST_SEEDS, MOST_SEEDS + 1)
    enough = counts[power(beyond, deviation, counts, error_rate) >= USUAL_POWER]
    return int(enough[0]) if len(enough) else None
