"""Curves and coordinate checks as PNG and SVG files for papers."""

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lmlib.report import specifications, tables
from lmlib.report.points import AXES
from lmlib.report.seen import Seen
from lmlib.storage.atomic_file import make_folder, write_atomically

ENDINGS = (".svg", ".png")
_SCALE = 3.0  # PNG scale: about 300 dpi for a chart 12 cm wide


def write_pictures(
    runs: Sequence[Seen],
    folder: str | os.PathLike[str],
    metrics: Sequence[str] = (),
    axis: str = "step",
    log_x: bool = False,
    log_y: bool = False,
    smoothing: float = 0.0,
    full_range: bool = False,
    tell: Callable[[str], None] = lambda text: None,
) -> list[Path]:
    """Writes METRIC.svg and METRIC.png for each metric; returns the files.

    Runs that differ only in seeds are one curve: their mean, with a band from the smallest to the
    largest.

    Args:
      metrics: names; by default all metrics that change.
      axis: one of `AXES`.
      smoothing: the width of the smoothing window as a fraction of the points, 0.05 for 5 %.
      full_range: True draws outliers too; otherwise triangles mark them.
      tell: called with the path of each file.

    Raises ValueError if a metric is absent or never changes, or the axis does not exist.
    """
    data = tables.data(runs)
    charts = {chart["metric"]: chart for chart in data["charts"]}
    if unknown := [name for name in metrics if name not in charts]:
        raise ValueError(f"no curve of {unknown[0]!r}; there are {', '.join(charts)}")
    if axis not in AXES:
        raise ValueError(f"no axis {axis!r}; there are {', '.join(AXES)}")
    make_folder(folder)
    written, files = [], _files(charts)
    names = list(dict.fromkeys(run["group"] for run in data["runs"]))
    for name in metrics or charts:
        chart = charts[name]
        rows = [row for row in _rows(chart, data["runs"], axis) if row["x"] > 0 or not log_x]
        if not rows:
            tell(f"{name} has no points on these axes")
            continue
        limits = () if full_range else chart["limits"]
        specification = specifications.for_paper(
            name, chart["unit"], rows, names, AXES[axis].title, log_x, log_y, smoothing, limits
        )
        for ending in ENDINGS:
            written.append(Path(folder, files[name] + ending))
            write_picture(specification, written[-1])
            tell(str(written[-1]))
    return written


def write_picture(specification: dict[str, Any], file: str | os.PathLike[str]) -> None:
    """Renders a Vega-Lite specification to a file whose suffix is in `ENDINGS`."""
    import vl_convert

    ending, version = Path(file).suffix, specifications.VERSION
    if ending not in ENDINGS:
        raise ValueError(f"the name of a picture ends in {' or '.join(ENDINGS)}, not as in {file}")
    if ending == ".svg":
        write_atomically(
            file, vl_convert.vegalite_to_svg(specification, version, allowed_base_urls=[])
        )
    else:
        png = vl_convert.vegalite_to_png(specification, version, scale=_SCALE, allowed_base_urls=[])
        write_atomically(file, png)


def coordinates(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the figure of a coordinate check: a row of charts per rule, one per quantity.

    `rows` are {"by", "size", "rule", "looked_at", "step", "change"}: "width" or "depth", its size,
    the rule, the observed quantity, the step, and the change after it. Changes that are not
    positive numbers are left out.
    """
    scale, log = specifications.by, {"type": "log", "nice": False}
    charts = []
    for by, rule in dict.fromkeys((row["by"], row["rule"]) for row in rows):
        own = [row for row in rows if (row["by"], row["rule"]) == (by, rule)]
        axis = {"values": sorted({row["size"] for row in own}), "grid": False}
        steps = {"domain": sorted({row["step"] for row in own}), "scheme": "viridis"}
        names = list(dict.fromkeys(row["looked_at"] for row in own))
        encoding = {
            "x": scale("size", title=by, scale=log, axis=axis),
            "y": scale("change", title="change (RMS)", scale=log),
            "color": scale("step", "ordinal", scale=steps, legend={"title": "step"}),
        }
        mark = {"type": "line", "point": {"size": 18}, "strokeWidth": 1.5}
        charts.append(
            {
                "title": {"text": f"{by}, {rule}", "anchor": "start"},
                "data": {"values": [row for row in own if 0 < row["change"] < math.inf]},
                "facet": {"column": scale("looked_at", "nominal", title=None, sort=names)},
                "spec": {"width": 150, "height": 120, "mark": mark, "encoding": encoding},
            }
        )
    resolve = {"scale": {"x": "independent"}}
    return {"$schema": specifications.SCHEMA, "vconcat": charts, "resolve": resolve}


def _files(names: Iterable[str]) -> dict[str, str]:
    """Maps each metric to a file name without suffix, unique even if case is ignored."""
    safe = {name: re.sub(r"[^\w.-]", "_", name)[:100] for name in names}
    found: dict[str, str] = {}
    taken: set[str] = set()
    for name in sorted(safe, key=lambda name: safe[name] != name):  # safe names stay unchanged
        file = safe[name]
        while file.lower() in taken:
            file += "_"
        taken.add(file.lower())
        found[name] = file
    return found


def _rows(
    chart: Mapping[str, Any], runs: Sequence[Mapping[str, str]], axis: str
) -> Iterator[dict[str, Any]]:
    """Yields the rows of `specifications.curves`, as page.js makes them."""
    for series in chart["series"]:
        if axis not in series:
            continue
        curve, values = runs[series["run"]]["group"], series["value"]
        lists = {"least": values, "greatest": values, "not_finite": [0] * len(values), **series}
        names = ("step", "value", "least", "greatest", "not_finite")
        fields = {"x": series[axis], **{name: lists[name] for name in names}}
        for row in zip(*fields.values(), strict=True):
            found = dict(zip(fields, row, strict=True))
            yield {"curve": curve, "stretch": (found["step"] - 1) // chart["stretch"], **found}
