"""Long series made short: each point stands for a stretch of steps, and says what that hides.

N measurements, P points.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from lmlib.runs.series import Series


class Points(NamedTuple):
    """A series, thinned. A point without a finite value has NaN for its mean, least and greatest.

    Attributes:
      first_P: the index of the first measurement of each point.
      count_P: how many measurements it stands for.
      mean_P, least_P, greatest_P: of those that are finite.
      not_finite_P: how many are NaN or infinite.
    """

    first_P: Int[np.ndarray, "P"]
    count_P: Int[np.ndarray, "P"]
    mean_P: Float[np.ndarray, "P"]
    least_P: Float[np.ndarray, "P"]
    greatest_P: Float[np.ndarray, "P"]
    not_finite_P: Int[np.ndarray, "P"]

    def mean_of(self, other_N: np.ndarray) -> np.ndarray:
        """The mean of another number of the same measurements, for each point."""
        if not len(self.first_P):
            return np.zeros(0)
        return np.add.reduceat(np.asarray(other_N, np.float64), self.first_P) / self.count_P


def stretch(series: Series, most: int) -> int:
    """The steps that a point stands for, so that there are at most `most` points: 1 for a short
    series."""
    if len(series.steps_N) <= most:
        return 1
    span = int(series.steps_N[-1]) - int(series.steps_N[0]) + 1
    # One stretch fewer: the first and the last may be cut.
    return max(1, -(-span // max(1, most - 1)))


def thinned(series: Series, steps: int) -> Points:
    """Each point stands for the steps from k·`steps` + 1 to (k + 1)·`steps`, for an integer k, so
    that points of several runs are of the same steps."""
    stretch_N = (series.steps_N - 1) // steps
    begins_N = np.ones(len(stretch_N), bool)
    begins_N[1:] = stretch_N[1:] != stretch_N[:-1]
    first_P = np.flatnonzero(begins_N)
    if not len(first_P):
        nothing = np.zeros(0)
        return Points(first_P, first_P, nothing, nothing, nothing, first_P)
    finite_N = np.isfinite(series.values_N)
    count_P = np.add.reduceat(np.ones(len(stretch_N), np.int64), first_P)
    finite_P = np.add.reduceat(finite_N.astype(np.int64), first_P)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        sum_P = np.add.reduceat(np.where(finite_N, series.values_N, 0.0), first_P)
        mean_P = np.where(finite_P > 0, sum_P / finite_P, np.nan)
    # Neither NaN nor a mean that overflowed may leave what was measured.
    least_P = np.minimum.reduceat(np.where(finite_N, series.values_N, np.inf), first_P)
    greatest_P = np.maximum.reduceat(np.where(finite_N, series.values_N, -np.inf), first_P)
    least_P = np.where(finite_P > 0, least_P, np.nan)
    greatest_P = np.where(finite_P > 0, greatest_P, np.nan)
    mean_P = np.clip(mean_P, least_P, greatest_P)
    return Points(first_P, count_P, mean_P, least_P, greatest_P, count_P - finite_P)
