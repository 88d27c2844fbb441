"""The picture of a coordinate check: changes of what models compute, against their sizes."""

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lmlib.report import specifications
from lmlib.report.pictures import SCALE
from lmlib.storage.whole_file import write_whole

ENDINGS = (".png", ".svg")
Row = Mapping[str, Any]


def write_coordinates(rows: Sequence[Row], file: str | os.PathLike[str]) -> None:
    """Writes a PNG or an SVG.

    Args:
      rows: {"by", "size", "rule", "looked_at", "step", "change"}: by width or depth, of which size,
        under which rule, of what, after which step, and the change. Changes that are not positive
        numbers are left out.
      file: its ending says which.

    Raises:
      ValueError: for another ending.
      OSError: if it cannot be written.
      ImportError: without vl-convert-python.
    """
    import vl_convert

    if Path(file).suffix not in ENDINGS:
        raise ValueError(f"a picture ends in {' or '.join(ENDINGS)}, not as {file} does")
    made, version = specification(rows), specifications.VERSION
    if Path(file).suffix == ".svg":
        write_whole(file, vl_convert.vegalite_to_svg(made, version, allowed_base_urls=[]))
        return
    png = vl_convert.vegalite_to_png(made, version, scale=SCALE, allowed_base_urls=[])
    write_whole(file, png)


def specification(rows: Sequence[Row]) -> dict[str, Any]:
    """A row of charts for each rule by width, then by depth; a chart for each thing looked at."""
    kinds = dict.fromkeys((row["by"], row["rule"]) for row in rows)
    return {
        "$schema": specifications.SCHEMA,
        "vconcat": [
            _charts([row for row in rows if (row["by"], row["rule"]) == kind], *kind)
            for kind in kinds
        ],
        "resolve": {"scale": {"x": "independent"}},
    }


def _charts(rows: Sequence[Row], by: str, rule: str) -> dict[str, Any]:
    def logarithmic(field: str, title: str | None, **more: Any) -> dict[str, Any]:
        scale = {"type": "log", "nice": False} | more
        return {"field": field, "type": "quantitative", "title": title, "scale": scale}

    sizes = sorted({row["size"] for row in rows})
    names = list(dict.fromkeys(row["looked_at"] for row in rows))
    steps = sorted({row["step"] for row in rows})
    size = logarithmic("size", by) | {"axis": {"values": sizes, "grid": False}}
    return {
        "title": {"text": f"{by}, {rule}", "anchor": "start"},
        "data": {"values": [row for row in rows if 0 < row["change"] < math.inf]},
        "facet": {
            "column": {"field": "looked_at", "type": "nominal", "title": None, "sort": names}
        },
        "spec": {
            "width": 150,
            "height": 120,
            "mark": {"type": "line", "point": {"size": 18}, "strokeWidth": 1.5},
            "encoding": {
                "x": size,
                "y": logarithmic("change", "change (RMS)"),
                "color": {
                    "field": "step",
                    "type": "ordinal",
                    "scale": {"domain": steps, "scheme": "viridis"},
                    "legend": {"title": "step"},
                },
            },
        },
    }
