"""The points of curves: axis values at each step of a run, and thinned series.

Shape suffixes: N measurements, P points, each of which covers a stretch of steps.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from lmlib.runs.series import Series


class Axis(NamedTuple):
    """An axis of charts; `title` includes the unit."""

    title: str
    text: str


AXES = {
    "step": Axis("step", "batches seen"),
    "tokens": Axis("tokens", "target tokens that counted, so far"),
    "flops": Axis("FLOPs", "the model's, forward and backward, so far: the sum of step_flops"),
    "seconds": Axis(
        "wall time (s)",
        "since the run first began, pauses included: the time of steps so far over the goodput",
    ),
}


def axes(series: Mapping[str, Series]) -> dict[str, Series]:
    """Returns each of `AXES` that a run's metrics provide; their values never decrease."""
    found = {"step": series["step"]} if "step" in series else {}
    if "tokens" in series:
        found["tokens"] = _rising(series["tokens"])
    if "step_flops" in series:
        flops = series["step_flops"]
        found["flops"] = Series(flops.steps_N, np.cumsum(_finite(flops.values_N)))
    if "step_seconds" in series:
        found["seconds"] = _rising(_wall_time(series))
    return found


def at(axis: Series, steps_N: np.ndarray) -> np.ndarray:
    """Interpolates an axis linearly at the given steps."""
    return np.interp(steps_N, axis.steps_N, axis.values_N)


def _wall_time(series: Mapping[str, Series]) -> Series:
    """Returns the wall time at each step, derived from goodput.

    Goodput is the time spent on new steps divided by the wall time.
    """
    seconds = series["step_seconds"]
    spent_N = _finite(seconds.values_N)
    if "data_wait_seconds" in series:  # goodput does not count it as step time
        waits = series["data_wait_seconds"]
        spent_N = spent_N - np.interp(seconds.steps_N, waits.steps_N, _finite(waits.values_N))
    made_N = np.cumsum(np.maximum(spent_N, 0.0))
    if "goodput" not in series:
        return Series(seconds.steps_N, made_N)
    goodput_N = np.nan_to_num(at(series["goodput"], seconds.steps_N), nan=1.0)
    return Series(seconds.steps_N, made_N / np.clip(goodput_N, 1e-6, 1.0))


class Points(NamedTuple):
    """A thinned series. A point without a finite value has NaN as mean, least and greatest.

    Attributes:
      first_P: the index of the first measurement of each point.
      count_P: the number of measurements in each point.
      mean_P, least_P, greatest_P: over the finite measurements.
      not_finite_P: the number of NaN or infinite measurements.
    """

    first_P: Int[np.ndarray, "P"]
    count_P: Int[np.ndarray, "P"]
    mean_P: Float[np.ndarray, "P"]
    least_P: Float[np.ndarray, "P"]
    greatest_P: Float[np.ndarray, "P"]
    not_finite_P: Int[np.ndarray, "P"]

    def mean_of(self, other_N: np.ndarray) -> np.ndarray:
        """Returns the mean of another quantity over the measurements of each point."""
        if not len(self.first_P):
            return np.zeros(0)
        return np.add.reduceat(np.asarray(other_N, np.float64), self.first_P) / self.count_P


def stretch(series: Series, most: int) -> int:
    """Returns the number of steps per point that gives at most `most` points.

    It is 1 for a short series.
    """
    if len(series.steps_N) <= most:
        return 1
    span = int(series.steps_N[-1]) - int(series.steps_N[0]) + 1
    # One stretch fewer: the first and the last may be cut.
    return max(1, -(-span // max(1, most - 1)))


def thinned(series: Series, steps: int) -> Points:
    """Averages a series over stretches of steps.

    Each point covers the steps from k·`steps` + 1 to (k + 1)·`steps`, for an integer k, so that the
    points of several runs cover the same steps.
    """
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
    # A mean that overflowed is clipped to the measured range.
    least_P = np.minimum.reduceat(np.where(finite_N, series.values_N, np.inf), first_P)
    greatest_P = np.maximum.reduceat(np.where(finite_N, series.values_N, -np.inf), first_P)
    least_P = np.where(finite_P > 0, least_P, np.nan)
    greatest_P = np.where(finite_P > 0, greatest_P, np.nan)
    mean_P = np.clip(mean_P, least_P, greatest_P)
    return Points(first_P, count_P, mean_P, least_P, greatest_P, count_P - finite_P)


def _finite(values_N: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(values_N), values_N, 0.0)


def _rising(series: Series) -> Series:
    return Series(series.steps_N, np.maximum.accumulate(_finite(series.values_N)))
