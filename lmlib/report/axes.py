"""What curves are drawn against: steps, tokens, FLOPs and wall time, at each step of a run.

N steps of the run.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from lmlib.runs.series import Series


class Axis(NamedTuple):
    """`title` has the unit."""

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
    """Each of `AXES` that the metrics of a run give, none of them falling."""
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
    """The value of an axis at some steps; between two that are known, a straight line."""
    return np.interp(steps_N, axis.steps_N, axis.values_N)


def _wall_time(series: Mapping[str, Series]) -> Series:
    """Goodput is the time of new steps over the wall time, so this is its inverse."""
    seconds = series["step_seconds"]
    spent_N = _finite(seconds.values_N)
    if "data_wait_seconds" in series:  # which is no time of steps to goodput
        waits = series["data_wait_seconds"]
        spent_N = spent_N - np.interp(seconds.steps_N, waits.steps_N, _finite(waits.values_N))
    made_N = np.cumsum(np.maximum(spent_N, 0.0))
    if "goodput" not in series:
        return Series(seconds.steps_N, made_N)
    goodput_N = np.nan_to_num(at(series["goodput"], seconds.steps_N), nan=1.0)
    return Series(seconds.steps_N, made_N / np.clip(goodput_N, 1e-6, 1.0))


def _finite(values_N: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(values_N), values_N, 0.0)


def _rising(series: Series) -> Series:
    return Series(series.steps_N, np.maximum.accumulate(_finite(series.values_N)))
