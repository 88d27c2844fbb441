"""The picture of a coordinate check: changes of activations and logits against models' sizes."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from lmlib.report.specifications import SCHEMA

Row = Mapping[str, Any]


def specification(rows: Sequence[Row]) -> dict[str, Any]:
    """A row of charts for each rule by width, then by depth; a chart for each thing looked at.

    Args:
      rows: {"by", "size", "rule", "looked_at", "step", "change"}: by width or depth, of which size,
        under which rule, of what, after which step, and the change. Changes that are not positive
        numbers are left out.
    """
    kinds = dict.fromkeys((row["by"], row["rule"]) for row in rows)
    return {
        "$schema": SCHEMA,
        "vconcat": [
            _charts([row for row in rows if (row["by"], row["rule"]) == kind], *kind)
            for kind in kinds
        ],
        "resolve": {"scale": {"x": "independent"}},
    }


def _charts(rows: Sequence[Row], by: str, rule: str) -> dict[str, Any]:
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
