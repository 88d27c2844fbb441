"""Curves and coordinate checks as PNG and SVG files for papers."""

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lmlib.report import specifications, tables
from lmlib.report.points import AXES
from lmlib.report.seen import Seen
from lmlib.storage.whole_file import make_folder, write_whole

_FIELDS = ("step", "x", "value", "least", "greatest", "not_finite")
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

    Raises:
      ValueError: if a metric is absent or never changes, or the axis does not exist.
      OSError: if a file cannot be written.
      ImportError: without vl-convert-python.
    """
    data = tables.data(runs)
    charts = {chart["metric"]: chart for chart in data["charts"]}
    if unknown := [name for name in metrics if name not in charts]:
        raise ValueError(f"no curve of {unknown[0]!r}; there are {', '.join(charts)}")
    if axis not in AXES:
        raise ValueError(f"no axis {axis!r}; there are {', '.join(AXES)}")
    make_folder(folder)
    written = []
    names = list(dict.fromkeys(run["group"] for run in data["runs"]))
    files = _files(charts)
    for name in metrics or charts:
        chart = charts[name]
        rows = [row for row in _rows(chart, data["runs"], axis) if row["x"] > 0 or not log_x]
        if not rows:
            tell(f"{name} has nothing to show on these axes")
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
    """Renders a Vega-Lite specification to a file in the format of its suffix.

    Raises:
      ValueError: for a suffix that is not in `ENDINGS`.
      OSError: if it cannot be written.
      ImportError: without vl-convert-python.
    """
    import vl_convert

    ending, version = Path(file).suffix, specifications.VERSION
    if ending not in ENDINGS:
        raise ValueError(f"a picture ends in {' or '.join(ENDINGS)}, not as {file} does")
    if ending == ".svg":
        svg = vl_convert.vegalite_to_svg(specification, version, allowed_base_urls=[])
        write_whole(file, svg)
    else:
        png = vl_convert.vegalite_to_png(specification, version, scale=_SCALE, allowed_base_urls=[])
        write_whole(file, png)


def coordinates(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the figure of a coordinate check, with one row of charts per rule.

    The rows by width come first, then those by depth. Each row has a chart for each observed
    quantity.

    Args:
      rows: {"by", "size", "rule", "looked_at", "step", "change"}: the scaled dimension (width or
        depth), its size, the rule, the observed quantity, the step, and the change after it.
        Changes that are not positive numbers are left out.
    """
    kinds = dict.fromkeys((row["by"], row["rule"]) for row in rows)
    return {
        "$schema": specifications.SCHEMA,
        "vconcat": [
            _of_rule([row for row in rows if (row["by"], row["rule"]) == kind], *kind)
            for kind in kinds
        ],
        "resolve": {"scale": {"x": "independent"}},
    }


def _files(names: Iterable[str]) -> dict[str, str]:
    """Maps each metric to a file name without suffix, unique even if case is ignored."""
    safe = {n: "".join(c if c.isalnum() or c in "-_." else "_" for c in n)[:100] for n in names}
    found: dict[str, str] = {}
    for name in sorted(
        safe, key=lambda name: safe[name] != name
    ):  # safe names first: they stay unchanged
        file, taken = safe[name], {each.lower() for each in found.values()}
        while file.lower() in taken:
            file += "_"
        found[name] = file
    return found


def _rows(
    chart: Mapping[str, Any], runs: Sequence[Mapping[str, str]], axis: str
) -> Iterator[dict[str, Any]]:
    """Yields the rows of `specifications.curves`, as page.js makes them."""
    for series in chart["series"]:
        curve, values = runs[series["run"]]["group"], series["value"]
        every = {"least": values, "greatest": values, "not_finite": [0] * len(values)} | series
        if axis in series:
            every["x"] = series[axis]
            for i, step in enumerate(series["step"]):
                row = {name: every[name][i] for name in _FIELDS}
                yield {"curve": curve, "stretch": (step - 1) // chart["stretch"], **row}


def _of_rule(rows: Sequence[Mapping[str, Any]], by: str, rule: str) -> dict[str, Any]:
    def logarithmic(field: str, title: str) -> dict[str, Any]:
        scale = {"type": "log", "nice": False}
        return {"field": field, "type": "quantitative", "title": title, "scale": scale}

    sizes = sorted({row["size"] for row in rows})
    names = list(dict.fromkeys(row["looked_at"] for row in rows))
    steps = {"domain": sorted({row["step"] for row in rows}), "scheme": "viridis"}
    column = {"field": "looked_at", "type": "nominal", "title": None, "sort": names}
    return {
        "title": {"text": f"{by}, {rule}", "anchor": "start"},
        "data": {"values": [row for row in rows if 0 < row["change"] < math.inf]},
        "facet": {"column": column},
        "spec": {
            "width": 150,
            "height": 120,
            "mark": {"type": "line", "point": {"size": 18}, "strokeWidth": 1.5},
            "encoding": {
                "x": logarithmic("size", by) | {"axis": {"values": sizes, "grid": False}},
                "y": logarithmic("change", "change (RMS)"),
                "color": {
                    "field": "step",
                    "type": "ordinal",
                    "scale": steps,
                    "legend": {"title": "step"},
                },
            },
        },
    }
