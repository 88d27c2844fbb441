"""The curves of a page as JSON: one thinned series for each metric and run.

    {"metric", "title", "group", "range", "whole", "unit", "text", "stretch", "limits",
     "series": [{"run", "step", "tokens", …, "value", "least", "greatest", "not_finite"}]}

On a page, "step", "tokens" and other axes are places in a list of axis values (see `shared`).

Each list in a series has one entry per point; `null` stands for a number that is not finite.
"least", "greatest" and "not_finite" are left out where they add nothing. "limits" are the smallest
and the largest value shown without "full range"; `null` means no limit. "whole" is true if all
values are integers. "range" has the smallest and the largest value.
"""

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from lmlib.metrics.meanings import EVALUATION, meaning, title
from lmlib.report.points import AXES, at, axes, downsample, steps_per_point
from lmlib.report.seen import Seen
from lmlib.runs.series import Series

POINTS = 4000  # per chart, all runs together
FEWEST, MOST = 100, 1000  # per run
_PER_PART = ("grad_norm", "weight_norm", "output_rms")
# The largest distance of a drawn value from the interquartile range of all values: in widths of
# that range, and relative to its magnitudes.
_FAR, _LARGE = 20, 10
# Stricter for metrics that compilation makes extreme in the first steps of a start.
_COMPILED = ("step_seconds", "tokens_per_second", "mfu")
_NEAR, _SMALL = 3, 0.5
# Charts whose values differ by less than this fraction are folded, except in the first two groups.
_DULL = 0.005
DULL = "Nearly constant"
_NOT_DRAWN = ("step", "tokens", "step_flops")  # axes, or covered by other charts
# The groups of charts in their order, and the metrics in theirs.
_GROUPS = ("Loss", "Model and objective", "Optimization", "Speed", "System", DULL)
_FIRST = ("loss", "evaluation_loss", "evaluation_bits_per_byte")
_OBJECTIVES = (  # and their evaluations, after them
    *("cross_entropy", "divergence", "reward_accuracy", "reward_margin", "chosen_reward"),
    *("rejected_reward", "chosen_log_probability", "rejected_log_probability", "chosen_logit"),
    *("rejected_logit", "token_accuracy", "chosen_tokens", "rejected_tokens"),
)
_UPDATE = ("learning_rate", "grad_norm", "update_norm", "parameter_norm")
_SPEED = ("tokens_per_second", "mfu", "goodput", "step_seconds", "data_wait_seconds")
_SYSTEM = (
    *("process_memory_bytes", "device_memory_bytes", "peak_memory_bytes"),
    *("cpu_cores", "gpu_utilization"),
)


def charts(runs: Sequence[Seen]) -> list[dict[str, Any]]:
    """Returns a chart for each metric that changes in any of `runs`, in the order of the page."""
    most = min(MOST, max(FEWEST, POINTS // max(1, len(runs))))
    against = [axes(run.series) for run in runs]
    found = []
    for name in drawn(runs):
        of = {number: run.series[name] for number, run in enumerate(runs) if name in run.series}
        known, *others = dict.fromkeys(runs[number].meaning(name) for number in of)
        if others:  # of other objectives
            units = dict.fromkeys(each.unit for each in (known, *others))
            known = known._replace(title=title(name), unit=" or ".join(filter(None, units)))
        values_N = np.concatenate([each.values_N for each in of.values()])
        finite_N = values_N[np.isfinite(values_N)]
        ends = (finite_N.min(), finite_N.max()) if len(finite_N) else (np.nan, np.nan)
        steps = max(steps_per_point(series, most) for series in of.values())
        found.append(
            {
                "metric": name,
                "title": known.title,
                "group": DULL if _dull(name, values_N, runs) else _GROUPS[_order(name)[0]],
                "range": _json(ends),
                "whole": bool(np.all(finite_N == np.round(finite_N))),
                "unit": known.unit,
                "text": known.text,
                "stretch": steps,
                "limits": _json(limits(values_N, compiled=name in _COMPILED)),
                "series": [
                    {"run": number, **_points(series, steps, against[number])}
                    for number, series in of.items()
                ],
            }
        )
    return sorted(found, key=lambda chart: _GROUPS.index(chart["group"]))


def shared(charts: Sequence[Mapping[str, Any]]) -> list[tuple[int | float | None, ...]]:
    """Replaces the axis values of all series by their place in a list without repeats.

    Returns that list.
    """
    found: dict[tuple[int | float | None, ...], int] = {}
    for chart in charts:
        for series in chart["series"]:
            for axis in AXES & series.keys():
                series[axis] = found.setdefault(tuple(series[axis]), len(found))
    return [*found]


def drawn(runs: Sequence[Seen]) -> list[str]:
    """Returns the metrics that have a chart, in the order of the page."""
    return sorted((name for name, value in _names(runs) if value is None), key=_order)


def constants(runs: Sequence[Seen]) -> dict[str, float]:
    """Returns the metrics that keep one value in all steps of all `runs`."""
    return {name: value for name, value in _names(runs) if value is not None}


def layers(run: Seen) -> list[dict[str, Any]]:
    """Returns the statistics of each part of a model, step by step."""
    found = []
    for statistic in _PER_PART:
        names = [name for name in run.series if name.startswith(f"{statistic}/")]
        rows = []
        for order, name in enumerate(sorted(names, key=_depth)):
            points = downsample(run.series[name], steps_per_point(run.series[name], FEWEST))
            steps = run.series[name].steps_N[points.first_P].tolist()
            for step, value in zip(steps, _json(points.mean_P), strict=True):
                part = name.partition("/")[2]
                rows.append({"part": part, "order": order, "step": step, "value": value})
        if rows:
            text = run.meaning(names[0]).text
            found.append({"statistic": statistic, "text": text, "rows": rows})
    return found


def limits(values_N: np.ndarray, compiled: bool = False) -> tuple[float, float]:
    """Returns the smallest and the largest of `values_N` to draw without "full range".

    A few outliers then do not flatten the curve; with `compiled` they may be nearer and more. NaN
    for a side without outliers.
    """
    far, large, fraction = (_NEAR, _SMALL, 4) if compiled else (_FAR, _LARGE, 8)
    found_N = np.sort(values_N[np.isfinite(values_N)])
    count = len(found_N)
    if count < 3:
        return np.nan, np.nan
    low, high = found_N[(count + 2) // 4], found_N[3 * (count - 1) // 4]  # the interquartile range
    with np.errstate(over="ignore"):
        reach = max(far * (high - low), large * max(abs(low), abs(high)))
        below, above = np.sum(found_N < low - reach), np.sum(found_N > high + reach)
    least, greatest = found_N[below], found_N[count - 1 - above]
    if max(below, above) > max(1, count // fraction) or least == greatest:
        return np.nan, np.nan
    return least if below else np.nan, greatest if above else np.nan


def _dull(name: str, values_N: np.ndarray, runs: Sequence[Seen]) -> bool:
    """Returns whether a metric hardly changes: `_DULL` of its size, or of a step's time."""
    if _order(name)[0] not in (2, 3) or not np.isfinite(values_N).all():
        return False
    size = np.abs(values_N).max()
    if name == "data_wait_seconds":
        steps = [
            run.series["step_seconds"].values_N for run in runs if "step_seconds" in run.series
        ]
        return bool(steps and size <= _DULL * np.nanmedian(np.concatenate(steps)))
    return len(values_N) > len(runs) and bool(np.ptp(values_N) <= _DULL * size)


def _names(runs: Sequence[Seen]) -> Iterator[tuple[str, float | None]]:
    """Yields each metric of the whole model that is not an axis.

    The value comes with it if it was measured more than once and never changed.
    """
    for name in dict.fromkeys(name for run in runs for name in run.series):
        if name in _NOT_DRAWN or name.startswith(tuple(f"{each}/" for each in _PER_PART)):
            continue
        values = [run.series[name].values_N for run in runs if name in run.series]
        first, again = float(values[0][0]), max(map(len, values)) > 1
        yield name, first if again and all(np.all(each == first) for each in values) else None


def _points(series: Series, steps: int, against: Mapping[str, Series]) -> dict[str, list[Any]]:
    points = downsample(series, steps)
    found: dict[str, list[Any]] = {
        # All digits of an axis: neighbouring steps must stay distinct.
        axis: _json(points.mean_of(at(against[axis], series.steps_N)), 15)
        for axis in AXES
        if axis in against
    }
    found["value"] = _json(points.mean_P)
    if steps > 1:
        ends = points.least_P, points.greatest_P
        with np.errstate(all="ignore"):  # the digits of a hundredth of the band's height
            digits_P = np.log10(np.maximum(*np.abs(ends)) / (points.greatest_P - points.least_P))
        digits_P = np.nan_to_num(np.ceil(digits_P) + 2, nan=6, posinf=6, neginf=6).clip(2, 6)
        found |= dict(zip(("least", "greatest"), (_json(x, digits_P) for x in ends), strict=True))
    if points.not_finite_P.any():
        found["not_finite"] = points.not_finite_P.tolist()
    return found


def _json(values: Iterable[float], digits: int | Iterable[float] = 6) -> list[int | float | None]:
    """Returns `values` rounded to `digits`, in as few characters as JSON has for them."""
    each_digits = itertools.repeat(digits) if isinstance(digits, int) else digits
    texts = (f"{each:.{int(n)}g}" for each, n in zip(values, each_digits, strict=False))
    found = (float(text) for text in texts)
    return [
        None if not math.isfinite(x) else int(x) if x.is_integer() and abs(x) < 1e15 else x
        for x in found
    ]


def _order(name: str) -> tuple[int, int, str]:
    for place, names in ((0, _FIRST), (2, _UPDATE), (3, _SPEED), (4, _SYSTEM)):
        if name in names:
            return place, names.index(name), name
    if (base := name.partition("/")[0].removeprefix(EVALUATION)) in _OBJECTIVES:
        return 0, len(_FIRST) + 2 * _OBJECTIVES.index(base) + name.startswith(EVALUATION), name
    place = 0 if name.startswith(EVALUATION) else 1 if meaning(name) is None else 2
    return place, len(_UPDATE), name


def _depth(name: str) -> tuple[int, int, str]:
    """Sort key: the embedding first, then the layers by number, then the other parts."""
    part = name.partition("/")[2]
    if number := re.fullmatch(r"layer (\d+)", part):
        return 1, int(number[1]), part
    return (0 if part.startswith("embed") else 2), 0, part
