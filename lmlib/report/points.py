"""The points of curves: axis values at each step of a run, and thinned series.

Shape suffixes: N measurements, P points, each for a stretch of steps.
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
    "flops": Axis("FLOPs", "model FLOPs so far, forward and backward: the sum of step_flops"),
    "seconds": Axis(
        "wall time (s)",
        "since the run first began, with pauses: the time of the steps so far over the goodput",
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
        # The wall time is the time spent on new steps, without waits for data, over the goodput.
        steps_N, seconds_N = series["step_seconds"]
        made_N = _finite(seconds_N)
        if "data_wait_seconds" in series:
            made_N = made_N - _finite(at(series["data_wait_seconds"], steps_N))
        made_N = np.cumsum(np.maximum(made_N, 0.0))
        if "goodput" in series:
            goodput_N = np.nan_to_num(at(series["goodput"], steps_N), nan=1.0)
            made_N = made_N / np.clip(goodput_N, 1e-6, 1.0)
        found["seconds"] = _rising(Series(steps_N, made_N))
    return found


def at(axis: Series, steps_N: np.ndarray) -> np.ndarray:
    """Interpolates an axis linearly at the given steps."""
    return np.interp(steps_N, axis.steps_N, axis.values_N)


class Points(NamedTuple):
    """A thinned series: for each point the index of its first measurement, and their number.

    Mean, least and greatest are of the finite measurements, or NaN; `not_finite_P` counts others.
    """

    first_P: Int[np.ndarray, "P"]
    count_P: Int[np.ndarray, "P"]
    mean_P: Float[np.ndarray, "P"]
    least_P: Float[np.ndarray, "P"]
    greatest_P: Float[np.ndarray, "P"]
    not_finite_P: Int[np.ndarray, "P"]

    def mean_of(self, other_N: np.ndarray) -> np.ndarray:
        """Returns the mean of another quantity over the measurements of each point."""
        return np.add.reduceat(np.asarray(other_N, np.float64), self.first_P) / self.count_P


def steps_per_point(series: Series, most: int) -> int:
    """Returns the number of steps per point that gives at most `most` points, 1 if all fit."""
    if len(series.steps_N) <= most:
        return 1
    span = int(series.steps_N[-1]) - int(series.steps_N[0]) + 1
    # One stretch fewer: the first and the last may be cut.
    return max(1, -(-span // max(1, most - 1)))


def downsample(series: Series, steps: int) -> Points:
    """Averages a series over stretches of steps.

    Each point covers the steps from k·`steps` + 1 to (k + 1)·`steps`, for an integer k, so that the
    points of several runs cover the same steps.
    """
    first_P = np.flatnonzero(np.diff((series.steps_N - 1) // steps, prepend=-2))
    values_N = np.where(np.isfinite(series.values_N), series.values_N, np.nan)
    count_P = np.add.reduceat(np.ones(len(values_N), np.int64), first_P)
    not_finite_P = np.add.reduceat(np.isnan(values_N).astype(np.int64), first_P)
    least_P, greatest_P = (each.reduceat(values_N, first_P) for each in (np.fmin, np.fmax))
    with np.errstate(invalid="ignore", over="ignore"):
        mean_P = np.add.reduceat(np.nan_to_num(values_N), first_P) / (count_P - not_finite_P)
    # A mean that overflowed is clipped to the measured range.
    return Points(
        *(first_P, count_P, np.clip(mean_P, least_P, greatest_P), least_P, greatest_P),
        not_finite_P,
    )


def _finite(values_N: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(values_N), values_N, 0.0)


def _rising(series: Series) -> Series:
    return Series(series.steps_N, np.maximum.accumulate(_finite(series.values_N)))
