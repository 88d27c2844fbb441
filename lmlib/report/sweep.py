"""The answer of a sweep: its settings as scales, and the final loss against each of them.

Positions on a scale are from 0 to 1; the page takes the colours of curves from them.
"""

import collections
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from lmlib.metrics.meanings import title
from lmlib.report.curves import limits
from lmlib.report.seen import Seen
from lmlib.report.specifications import SCHEMA, by, curves
from lmlib.runs.run import difference
from lmlib.runs.settings import last_name, shortest_names, value_of
from lmlib.terminal.text import shown

_METRICS = ("validation_loss", "validation_bits_per_byte")
_MOST = 12  # settings
_TICKS = 8  # a scale with more values has round ticks
_DECADE = 10
_COLOUR = {"color": by("colour", "nominal", scale=None)}
_SAID = {"tooltip": [by("run", "nominal"), by("loss", "nominal")]}
_RATE = re.compile(r"(?:.*_)?(?:lr|rate)")
_MODULES = re.compile(r"^[A-Za-z_][\w.]*\.(?=\w)")  # of a class or function


def data(runs: Sequence[Seen]) -> dict[str, Any]:
    """Returns the part of the page's data that is about settings."""
    swept = settings(runs) if len(runs) > 1 else []
    return {"swept": swept, "answer": answer(runs, swept) if swept else None}


def settings(runs: Sequence[Seen]) -> list[dict[str, Any]]:
    """Returns the settings in which `runs` differ, except seeds, as scales of the page.

    Settings whose values determine each other, as those of `zipped` axes, are one: "also" has the
    names of the others. "values" and "at", the positions, have an entry per run.
    """
    differing = difference(each.run for each in runs)
    found: dict[tuple[int, ...], dict[str, Any]] = {}  # by the runs that share values
    names = shortest_names(differing)
    for path, texts in differing.items():
        if (last := last_name(path)) == "seed":
            continue
        kinds, name = tuple(_numbers(texts)), shown(names[path])
        if kinds in found:
            found[kinds]["also"].append(name)
        else:
            found[kinds] = {"name": name, "path": shown(path), "also": [], **_scale(last, texts)}
    return list(found.values())[:_MOST]


def answer(runs: Sequence[Seen], swept: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Returns the final loss of `runs` by the settings `swept`; `None` without two finished groups.

    "values" have an entry per run: `None` without a finite loss; then "failed" is true if it
    diverged. "at" are positions up to "limit", beyond which a loss is an outlier. "lines" has a
    list for each setting, with an entry per run: runs with the same number differ in this setting
    and seeds. "best" is the group with the lowest mean over its seeds, and "parallel" has all
    groups, the best first.
    """
    metric, unit, finals = _finals(runs)
    failed = [
        each.run.state.name == "diverged" or not math.isfinite(finals.get(i, 0.0))
        for i, each in enumerate(runs)
    ]
    members = collections.defaultdict(list)
    for i, each in enumerate(runs):
        if i in finals or failed[i]:
            members[each.group].append(i)
    groups = [
        (float(np.mean([finals[i] for i in those])), those)
        for those in members.values()
        if not any(failed[i] for i in those)
    ]
    if not swept or not groups or len(members) < 2:
        return None
    groups.sort(key=lambda each: each[0])
    finite_N = np.array([finals[i] for i in finals if not failed[i]])
    least, limit = finite_N.min(), limits(finite_N, compiled=True)[1]
    greatest = finite_N.max() if math.isnan(limit) else limit

    def at(value: float) -> float:
        return float(min(1.0, (value - least) / ((greatest - least) or 1.0)))

    values = [None if failed[i] else finals.get(i) for i in range(len(runs))]
    mean, (first, *more) = groups[0]
    return {
        "title": title(metric),
        "unit": shown(unit),
        "values": values,
        "failed": failed,
        "at": [None if value is None else at(value) for value in values],
        "limit": None if math.isnan(limit) else float(limit),
        "lines": [
            _numbers(
                tuple(each["values"][i] for each in swept if each is not own)
                for i in range(len(runs))
            )
            for own in swept
        ],
        "best": {"run": first, "value": mean},
        "text": _text(
            *(runs, swept, first),
            f"{title(metric).lower()} {mean:.4f} {shown(unit)}".strip(),
            1 + len(more),
        ),
        "parallel": [{"run": i, "value": mean, "at": at(mean)} for mean, (i, *_) in groups]
        if len(swept) > 2
        else [],
        "ends": [f"{least:.4g}", "≥ " * bool(greatest == limit) + f"{greatest:.4g}"],
    }


def against() -> dict[str, Any]:
    """Returns a chart of the final loss against a setting.

    Rows are {x, value, failed, outlier, line, colour, line_colour, run, loss}. The last layer has
    rows {x, value, text, colour} of the best. Lines join the means over seeds. Crosses mark runs
    that diverged, triangles losses beyond the limit. Filled in later: rows, and the scale and ticks
    of x.
    """
    encoding = {axis: curves()["encoding"][axis] for axis in "xy"}
    x, y = encoding["x"], encoding["y"]
    x["title"], x["axis"]["tickCount"], x["axis"]["labelOverlap"] = None, 5, True
    y["field"], y["scale"]["padding"] = "value", 12
    names = {"mean": ("value", "value"), "valid": ("value", "valid"), "count": (None, "count")}
    same = [{"op": op, "field": field, "as": name} for op, (field, name) in names.items()]
    means = [
        {"aggregate": same, "groupby": ["x", "line", "line_colour"]},
        {"filter": "datum.valid === datum.count"},
    ]
    joined = {"color": by("line_colour", "nominal", scale=None), "detail": by("line", "nominal")}
    points = {"type": "point", "filled": True, "opacity": 0.9, "size": 45, "clip": True}
    cross = {**points, "filled": False, "shape": "cross", "angle": 45, "size": 90}
    ring = {"mark": {**points, "filled": False, "size": 190, "strokeWidth": 2}}
    text = {"type": "text", "baseline": "top", "dy": 10, "fontWeight": "bold"}
    edge = {"y": {"value": 6}, **_COLOUR, **_SAID}
    return _chart(
        190,
        encoding,
        _layer({"type": "line", "clip": True, "strokeWidth": 1.5}, joined, *means),
        _layer(points, {**_COLOUR, **_SAID}, {"filter": "isValid(datum.value)"}),
        _layer(cross, edge, {"filter": "datum.failed"}),
        _layer({**points, "shape": "triangle", "size": 60}, edge, {"filter": "datum.outlier"}),
        {
            "data": {"values": []},
            "encoding": _COLOUR,
            "layer": [ring, _layer(text, {"text": by("text", "nominal")})],
        },
    )


def parallel() -> dict[str, Any]:
    """Returns parallel coordinates of rows {line, axis, order, at, good, best, colour, run, loss}.

    "good" is 1 for the best line and 0 for the worst. The last layer has the rows {axis, at, text}
    of the ticks, with an outline. Filled in later: rows, the order of the axes, and the text's
    colours.
    """
    x = by("axis", "nominal", title=None, sort=None)
    x["axis"] = {"orient": "top", "labelAngle": 0, "labelLimit": 110, "labelPadding": 8}
    x["axis"] |= {"grid": True, "ticks": False, "domain": False}
    text = {"type": "text", "align": "right", "dx": -7}
    y = by("at", scale={"domain": [-0.04, 1.04], "nice": False}, axis=None)
    strength = {
        "detail": by("line", "nominal"),
        "opacity": by("good", scale={"domain": [0, 1], "range": [0.15, 0.9]}, legend=None),
        "strokeWidth": {"condition": {"test": "datum.best", "value": 4}, "value": 1.3},
        "order": by("order"),
    }
    points = {"type": "point", "filled": True, "size": 30, "opacity": 1}
    return _chart(
        230,
        {"x": x, "y": y},
        _layer({"type": "line"}, {**_COLOUR, **strength}),
        _layer(points, {**_COLOUR, **_SAID}),
        {
            "data": {"values": []},
            "encoding": {"text": by("text", "nominal")},
            "layer": [{"mark": {**text, "strokeWidth": 4}}, {"mark": text}],
        },
    )


def _chart(height: int, encoding: Any, *layer: Any) -> dict[str, Any]:
    base = {"$schema": SCHEMA, "width": "container", "height": height, "data": {"values": []}}
    return {**base, "encoding": encoding, "layer": list(layer)}


def _layer(mark: Any, encoding: Any, *transform: Any) -> dict[str, Any]:
    return {"transform": list(transform), "mark": mark, "encoding": encoding}


def _scale(name: str, texts: Sequence[str | None]) -> dict[str, Any]:
    """Returns the scale of a setting named `name` with the value `texts` of each run."""
    numbers = [number for text in texts if (number := _number(text)) is not None]
    distinct_V = np.unique(numbers)
    if len(numbers) == len(texts) and len(distinct_V) > 1:
        scale, moved_V = _numeric(name, distinct_V)
        at_V = (moved_V - moved_V[0]) / (moved_V[-1] - moved_V[0] or 1.0)
        at = dict(zip(distinct_V.tolist(), at_V.tolist(), strict=True))
        few = len(distinct_V) <= _TICKS and np.diff(at_V).min() > 0.04
        return {
            "numeric": True,
            "scale": {"nice": False, "padding": 14, **scale},
            "ticks": distinct_V.tolist() if few else _powers(distinct_V, scale["type"]),
            "values": numbers,
            "at": [at[number] for number in numbers],
        }
    names = ["—" if text is None else shown(str(value_of(text))) for text in texts]
    if len(short := {each: _MODULES.sub("", each) for each in names}) == len({*short.values()}):
        names = [short[each] for each in names]
    known = dict.fromkeys(names)
    last = max(1, len(known) - 1)
    by_value = sorted(known, key=lambda name: math.inf if (x := _number(name)) is None else x)
    order = {name: i / last for i, name in enumerate(by_value)}
    return {
        "numeric": False,
        "scale": {"type": "point", "padding": 0.5, "domain": list(order)},
        "ticks": list(order),
        "values": names,
        "at": [order[name] for name in names],
    }


def _numeric(name: str, distinct_V: np.ndarray) -> tuple[dict[str, Any], np.ndarray]:
    """Returns the type of the scale, and its values where they are linear.

    Logarithmic for rates, and for values that span a decade or grow by factors; also if the
    smallest of them is zero.
    """
    from_zero = distinct_V[0] == 0 and len(distinct_V) > 2
    positive_V = distinct_V[1:] if from_zero else distinct_V
    if positive_V[0] <= 0:
        return {"type": "linear", "zero": False}, distinct_V
    wide = positive_V[-1] >= _DECADE * positive_V[0]
    factors = _unevenness(np.log(positive_V)) < _unevenness(positive_V) / 1.01
    if not (wide or factors or _RATE.fullmatch(name)):
        return {"type": "linear", "zero": False}, distinct_V
    if from_zero:
        constant = float(positive_V[0])
        return {"type": "symlog", "constant": constant}, np.log1p(distinct_V / constant)
    return {"type": "log"}, np.log(distinct_V)


def _powers(distinct_V: np.ndarray, kind: str) -> list[float] | None:
    """Returns the ticks 1, 10, 100 … of a logarithmic scale of many values; `None` for others."""
    if kind != "log" or distinct_V[-1] < _DECADE**2 * distinct_V[0]:
        return None
    ends = (math.log10(distinct_V[0]), math.log10(distinct_V[-1]))
    return [float(f"1e{k}") for k in range(math.ceil(ends[0]), math.floor(ends[1]) + 1)]


def _unevenness(moved_V: np.ndarray) -> float:
    """Returns the largest distance between neighbours over the smallest."""
    gaps = np.diff(moved_V)
    return float(gaps.max() / max(gaps.min(), 1e-300)) if len(gaps) else 1.0


def _number(text: str | None) -> float | None:
    """Returns the finite number written in `text`, or `None`."""
    value = value_of("None" if text is None else text)
    return float(value) if type(value) in (int, float) and abs(value) < 1e300 else None


def _numbers(keys: Iterable[Any]) -> list[int]:
    """Returns for each of `keys` a number, the same for equal ones."""
    known: dict[Any, int] = {}
    return [known.setdefault(key, len(known)) for key in keys]


def _finals(runs: Sequence[Seen]) -> tuple[str, str, dict[int, float]]:
    """Returns the metric by which finished runs can be compared, its unit and values.

    The values are by the number of the run. The metric is the training loss if none was validated.
    """
    from lmlib.verdicts.finished import finished_runs  # imports SciPy

    validated = any("validation_loss" in each.run.final for each in runs)
    for metric in _METRICS if validated else ("training_loss",):
        try:
            finished, _ = finished_runs((each.run for each in runs), metric)
        except ValueError:
            continue
        by_path = {each.run.path: each.value for each in finished}
        found = {i: by_path[x.run.path] for i, x in enumerate(runs) if x.run.path in by_path}
        return metric, finished[0].unit, found
    return "", "", {}


def _text(
    runs: Sequence[Seen], swept: Sequence[Mapping[str, Any]], best: int, loss: str, seeds: int
) -> str:
    text = f"Best: {runs[best].group}, {loss}" + f", the mean of {seeds} seeds" * (seeds > 1) + "."
    for each in swept:
        at, count = each["at"][best], len(set(each["values"]))
        if each["numeric"] and count > 2 and at in (0, 1) and each["values"][best]:
            end = "largest" if at else "smallest"
            text += f" The best {each['name']} is the {end} one tried."
    return text
