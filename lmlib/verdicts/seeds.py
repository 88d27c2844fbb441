"""The difference of a metric between two settings, judged over seeds.

The unit of replication is a run. Runs of one seed begin with the same weights and see the same
batches, so their differences vary less than they do, and the t-test is over these differences
(Student 1908). Runs of other seeds are compared by the statistic of Welch (1938), with the degrees
of freedom of the smaller number of seeds, which err no more often than is meant whatever both
variances are (Mickey and Brown 1966, Annals of Mathematical Statistics 37). By his own
approximation, three runs beside ten erred in 6 % of simulated comparisons where 5 % were meant.

Seeds are counted, and validation batches are not. All runs are measured on the same text, so that
pairing by batch changes no mean; and a million tokens measured in one run say nothing of the next
seed (Bouthillier et al. 2021, arXiv:2103.03098). `lmlib.verdicts.text` has what batches do tell.

Lower is better throughout; whoever has a metric of which higher is better negates it.
"""

import dataclasses
import math
from typing import Literal

import numpy as np
from jaxtyping import Float
from scipy import special

Verdict = Literal["better", "worse", "inconclusive"]
LEAST_SEEDS = 3  # of each setting; fewer have hardly a standard error


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
        """Whether the difference is beyond `margin`.

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
    """Of S runs and T of the baseline, of other seeds."""
    mean = float(np.mean(values_S) - np.mean(baseline_T))
    seeds = min(len(values_S), len(baseline_T))
    if seeds < 2 or not math.isfinite(mean):
        return Difference(mean, seeds, paired=False)
    one, other = (float(np.var(each, ddof=1)) for each in (values_S, baseline_T))
    error = math.sqrt(one / len(values_S) + other / len(baseline_T))
    return Difference(mean, seeds, False, math.sqrt(one + other), error, float(seeds - 1))
