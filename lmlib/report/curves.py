"""The curves of a page: for each metric those of each run, thinned, as JSON.

    {"runs": [{"name", "group"}],
     "charts": [{"metric", "unit", "text", "stretch", "limits",
                 "series": [{"run", "step", "tokens", …,
                             "value", "least", "greatest", "not_finite"}]}],
     "layers": …}

Lists of a series are of its points; `null` is no finite number. "least", "greatest" and
"not_finite" are left out where they say nothing. "limits" are the least and the greatest value that
is shown unless all are asked for; `null` where all are.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lmlib.metrics.meanings import EVALUATION, meaning
from lmlib.report.axes import AXES, at, axes
from lmlib.report.thinning import stretch, thinned
from lmlib.runs.series import Series

POINTS = 4000  # of a chart, all runs together
FEWEST, MOST = 100, 1000  # of a run
PER_PART = ("grad_norm", "weight_norm", "output_rms")
_DIGITS = 6  # of a value that is drawn
_DIGITS_OF_AXES = 12  # of what is no integer: steps that follow each other must stay apart
# A value that is drawn is at most so many times as far from the middle half of all values as that
# half is wide, or so many times as far as that is large.
_FAR, _LARGE = 20, 10
# Numbers that are axes, or that others say better.
_NOT_DRAWN = {"step", "tokens", "step_flops"}
_FIRST = (
    "loss",
    "evaluation_loss",
    "evaluation_bits_per_byte",
)
_LAST = ("learning_rate", "grad_norm", "update_norm", "parameter_norm")
_OF_SPEED = (
    "tokens_per_second",
    "mfu",
    "goodput",
    "step_seconds",
    "data_wait_seconds",
    "peak_memory_bytes",
)


@dataclasses.dataclass(frozen=True)
class Measured:
    """A run's numbers, and its name on the page."""

    name: str
    series: Mapping[str, Series]


def charts(runs: Sequence[Measured], units: Mapping[str, str]) -> list[dict[str, Any]]:
    """A chart for each metric that changes in any of `runs`, in the order of the page.

    Args:
      units: of metrics, where the runs say others than `lmlib/metrics/meanings.py`.
    """
    most = min(MOST, max(FEWEST, POINTS // max(1, len(runs))))
    against = [axes(run.series) for run in runs]
    return [_chart(name, runs, against, most, units) for name in drawn(runs)]


def drawn(runs: Sequence[Measured]) -> list[str]:
    """The metrics that have a chart, in the order of the page."""
    names = dict.fromkeys(name for run in runs for name in run.series)
    found = [name for name in names if name not in _NOT_DRAWN and not is_of_part(name)]
    return sorted((name for name in found if not _constant(name, runs)), key=_order)


def constants(runs: Sequence[Measured]) -> dict[str, float]:
    """The metrics that have one value in all steps of all `runs`."""
    names = dict.fromkeys(name for run in runs for name in run.series)
    return {
        name: next(run.series[name].values_N[0] for run in runs if name in run.series)
        for name in names
        if name not in _NOT_DRAWN and not is_of_part(name) and _constant(name, runs)
    }


def layers(run: Measured) -> list[dict[str, Any]]:
    """For each statistic of the parts of a model what each part had, step by step."""
    found = []
    for statistic in PER_PART:
        names = [name for name in run.series if name.startswith(f"{statistic}/")]
        if not names:
            continue
        known = meaning(names[0])
        rows = []
        for order, name in enumerate(sorted(names, key=_depth)):
            series = run.series[name]
            points = thinned(series, stretch(series, FEWEST))
            part = name.partition("/")[2]
            for first, value in zip(points.first_P, points.mean_P, strict=True):
                step = int(series.steps_N[first])
                rows.append({"part": part, "order": order, "step": step, "value": _json(value)})
        found.append({"statistic": statistic, "text": known.text if known else "", "rows": rows})
    return found


def is_of_part(name: str) -> bool:
    return name.partition("/")[0] in PER_PART and "/" in name


def _chart(
    name: str,
    runs: Sequence[Measured],
    against: Sequence[Mapping[str, Series]],
    most: int,
    units: Mapping[str, str],
) -> dict[str, Any]:
    known = meaning(name)
    found = {number: run.series[name] for number, run in enumerate(runs) if name in run.series}
    steps = max(stretch(series, most) for series in found.values())
    return {
        "metric": name,
        "unit": units.get(name, known.unit if known else ""),
        "text": known.text if known else "",
        "stretch": steps,
        "limits": [_json(limit) for limit in limits([each.values_N for each in found.values()])],
        "series": [
            {"run": number, **_points(series, steps, against[number])}
            for number, series in found.items()
        ],
    }


def _points(series: Series, steps: int, against: Mapping[str, Series]) -> dict[str, list[Any]]:
    points = thinned(series, steps)
    found = {
        axis: [
            _json(value, _DIGITS_OF_AXES)
            for value in points.mean_of(at(against[axis], series.steps_N))
        ]
        for axis in AXES
        if axis in against
    }
    found["value"] = [_json(value) for value in points.mean_P]
    if steps > 1:
        found["least"] = [_json(value) for value in points.least_P]
        found["greatest"] = [_json(value) for value in points.greatest_P]
    if points.not_finite_P.any():
        found["not_finite"] = points.not_finite_P.tolist()
    return found


def limits(values: Sequence[np.ndarray]) -> tuple[float, float]:
    """The least and the greatest of `values` that is drawn, so that few that are far from the rest
    do not make a flat line of it; NaN where none is that far."""
    found_N = np.concatenate(values)
    found_N = np.sort(found_N[np.isfinite(found_N)])
    count = len(found_N)
    if count < 3:
        return np.nan, np.nan
    low, high = found_N[(count + 2) // 4], found_N[3 * (count - 1) // 4]  # the middle half
    with np.errstate(over="ignore"):
        reach = max(_FAR * (high - low), _LARGE * max(abs(low), abs(high)))
        below, above = np.sum(found_N < low - reach), np.sum(found_N > high + reach)
    least, greatest = found_N[below], found_N[count - 1 - above]
    if max(below, above) > max(1, count // 8) or least == greatest:
        return np.nan, np.nan
    return least if below else np.nan, greatest if above else np.nan


def _json(value: float, digits: int = _DIGITS) -> float | int | None:
    if not np.isfinite(value):
        return None
    if digits > _DIGITS and float(value).is_integer() and abs(value) < 1e15:
        return int(value)
    short = float(f"{value:.{digits}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def _constant(name: str, runs: Sequence[Measured]) -> bool:
    """Whether a metric was measured again, and never changed."""
    values = [run.series[name].values_N for run in runs if name in run.series]
    firsts = {float(each[0]) for each in values}
    again = max(map(len, values)) > 1
    return again and len(firsts) == 1 and all(np.all(each == each[0]) for each in values)


def _order(name: str) -> tuple[int, int, str]:
    """Losses, what else is validated, what others report, the update, speed."""
    if name in _FIRST:
        return 0, _FIRST.index(name), name
    if name.startswith(EVALUATION):
        return 1, 0, name
    if name in _LAST:
        return 3, _LAST.index(name), name
    if name in _OF_SPEED:
        return 4, _OF_SPEED.index(name), name
    return (2 if meaning(name) is None else 5), 0, name


def _depth(name: str) -> tuple[int, int, str]:
    """The embedding, the layers by their numbers, what comes after."""
    part = name.partition("/")[2]
    number = re.fullmatch(r"layer (\d+)", part)
    if number:
        return 1, int(number[1]), part
    return (0 if part.startswith("embed") else 2), 0, part
