"""Charts as Vega-Lite specifications, for the page and for PNG and SVG alike.

https://vega.github.io/vega-lite/docs/. No text of a run is part of an expression here.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

VERSION = "6.4"  # of Vega-Lite
SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"  # a name; nothing is loaded from there
# For up to ten curves: Tableau's, which are told apart on light and on dark; then all twenty.
COLOURS = (
    "#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#b279a2", "#d4a72c", "#ff9da6",
    "#9d755d", "#8a8583", "#9ecae9", "#ffbf79", "#88d27a", "#b79a20", "#439894", "#83bcb6",
    "#f2cf5b", "#d6a5c9", "#d8b5a5", "#79706e",
)  # fmt: skip
_NUMBER = "quantitative"
_LEGEND = {"title": None, "symbolType": "stroke", "symbolOpacity": 1, "symbolStrokeWidth": 2}
# 20k, but 0.002 and 100.
_TICK = "format(datum.value, abs(datum.value) >= 10000 ? '.4~s' : '.4~g')"


def curves() -> dict[str, Any]:
    """Curves over rows {curve, x, value, least, greatest, not_finite, step, run}.

    A row is a point of a run. The curve is the mean of its rows at each "step" (those of several
    seeds), over the points around as far as the window reaches; the band goes from the least to
    the greatest. What is filled in later: `data.values`, the window's frame, titles and scales of
    the axes, the domain of colours.
    """
    at_point = ["curve", "step"]
    means = {"op": "mean"}
    return {
        "$schema": SCHEMA,
        "width": "container",
        "height": 230,
        "data": {"values": []},
        "transform": [
            {
                "aggregate": [
                    {**means, "field": "x", "as": "x"},
                    {**means, "field": "value", "as": "value"},
                    {"op": "min", "field": "least", "as": "least"},
                    {"op": "max", "field": "greatest", "as": "greatest"},
                    {"op": "sum", "field": "not_finite", "as": "not_finite"},
                    {"op": "count", "as": "runs"},
                ],
                "groupby": at_point,
            },
            {
                "window": [{**means, "field": "value", "as": "smooth"}],
                "frame": [0, 0],
                "groupby": ["curve"],
                "sort": [{"field": "step"}],
            },
            {"calculate": "isValid(datum.value) ? datum.smooth : null", "as": "smooth"},
        ],
        "encoding": {
            "x": {
                "field": "x",
                "type": _NUMBER,
                "title": "step",
                "scale": {"type": "linear", "zero": False, "nice": False},
                "axis": {"labelExpr": _TICK, "tickCount": 6, "labelFlush": True},
            },
            "color": {
                "field": "curve",
                "type": "nominal",
                "scale": {"domain": [], "range": list(COLOURS)},
                "legend": None,
            },
        },
        "layer": [
            {
                "mark": {"type": "area", "opacity": 0.2, "clip": True},
                "encoding": {"y": _y("least"), "y2": {"field": "greatest"}},
            },
            {
                "mark": {"type": "line", "strokeWidth": 1, "opacity": 0.3, "clip": True},
                "encoding": {"y": _y("value")},
            },
            {
                "mark": {"type": "line", "strokeWidth": 1.8, "clip": True},
                "encoding": {"y": _y("smooth")},
            },
            {
                "transform": [{"filter": "datum.not_finite > 0"}],
                "mark": {
                    "type": "point",
                    "shape": "cross",
                    "angle": 45,
                    "size": 90,
                },
                "encoding": {
                    "y": {"value": 6},
                    "tooltip": [
                        {"field": "curve", "title": "run"},
                        {"field": "step", "type": _NUMBER},
                        {"field": "not_finite", "title": "NaN or infinite", "type": _NUMBER},
                    ],
                },
            },
            _hover(),
        ],
    }


def _hover() -> dict[str, Any]:
    """The nearest point, and what it says."""
    numbers = {"value": "value", "smooth": "smoothed", "least": "least", "greatest": "greatest"}
    nearest = {"type": "point", "on": "pointermove", "clear": "pointerout", "nearest": True}
    return {
        "params": [{"name": "hover", "select": nearest}],
        "transform": [{"filter": "isValid(datum.smooth)"}],
        "mark": {"type": "point", "filled": True, "size": 60},
        "encoding": {
            "y": _y("smooth"),
            "opacity": {"value": 0, "condition": {"param": "hover", "empty": False, "value": 1}},
            "tooltip": [
                {"field": "curve", "title": "run"},
                {"field": "step", "type": _NUMBER, "format": ",.0f"},
                {"field": "x", "title": "x", "type": _NUMBER, "format": ",.5~r"},
                *(
                    {"field": field, "title": title, "type": _NUMBER, "format": ".5~g"}
                    for field, title in numbers.items()
                ),
            ],
        },
    }


def _y(field: str) -> dict[str, Any]:
    return {
        "field": field,
        "type": _NUMBER,
        "title": None,
        "scale": {"type": "linear", "zero": False},
        "axis": {"labelExpr": _TICK, "tickCount": 5},
    }


def logarithmic() -> dict[str, Any]:
    """What a logarithmic axis has: the scale, and for a vertical one what becomes of rows that it
    has no place for, after the mean of several seeds."""
    positive = "datum.value > 0 ? datum.value : null"
    return {
        "scale": {"type": "log", "nice": False},
        "transform": [
            {"calculate": positive, "as": "value"},
            {"calculate": "datum.least > 0 ? datum.least : datum.value", "as": "least"},
        ],
    }


def heat() -> dict[str, Any]:
    """Rows {part, order, step, value} as a map: parts of a model over steps."""
    return {
        "$schema": SCHEMA,
        "width": "container",
        "height": 15,  # of each part
        "data": {"values": []},
        "mark": {"type": "rect", "tooltip": True},
        "encoding": {
            "x": {
                "field": "step",
                "type": "ordinal",
                "axis": {"labelOverlap": True, "labelAngle": 0},
            },
            "y": {"field": "part", "type": "ordinal", "title": None, "sort": {"field": "order"}},
            "color": {
                "field": "value",
                "type": _NUMBER,
                "scale": {"type": "log", "scheme": "viridis"},
                "legend": {"title": None, "format": "~g", "gradientLength": 120},
            },
        },
    }


def bars() -> dict[str, Any]:
    """Rows {run, part, time, share, order} as a bar for each run, of parts."""
    return {
        "$schema": SCHEMA,
        "width": "container",
        "height": 26,  # of each run
        "data": {"values": []},
        "mark": "bar",
        "encoding": {
            "x": {
                "field": "share",
                "type": _NUMBER,
                "stack": True,
                "title": None,
                "scale": {"domain": [0, 1]},
                "axis": {"format": "%"},
            },
            "y": {"field": "run", "type": "nominal", "title": None, "sort": None},
            "color": {
                "field": "part",
                "type": "nominal",
                "sort": {"field": "order"},
                "scale": {"range": list(COLOURS)},
                "legend": {"orient": "bottom", "title": None},
            },
            "order": {"field": "order"},
            "tooltip": [
                {"field": "run"},
                {"field": "part", "title": "phase"},
                {"field": "time"},
                {"field": "share", "type": _NUMBER, "format": ".1%"},
            ],
        },
    }


def for_paper(
    title: str,
    unit: str,
    rows: Sequence[Mapping[str, Any]],
    curve_names: Sequence[str],
    x_title: str,
    log_x: bool = False,
    log_y: bool = False,
    smoothing: float = 0.0,
) -> dict[str, Any]:
    """`curves` filled in, with a legend and titles of its own."""
    found = copy.deepcopy(curves())
    found["data"]["values"] = list(rows)
    found["width"], found["height"] = 420, 260
    points = max(len({row["step"] for row in rows if row["curve"] == c}) for c in curve_names)
    around = int(smoothing * points / 2)
    found["transform"][1]["frame"] = [-around, around]
    found["layer"].pop()  # nobody points at paper
    if log_y:
        found["transform"][1:1] = logarithmic()["transform"]
    x, colour = found["encoding"]["x"], found["encoding"]["color"]
    x["title"], colour["scale"]["domain"] = x_title, list(curve_names)
    colour["legend"] = {**_LEGEND, "labelLimit": 400} if len(curve_names) > 1 else None
    if log_x:
        x["scale"] = logarithmic()["scale"]
    for layer in found["layer"]:
        if "field" in layer["encoding"]["y"]:
            layer["encoding"]["y"]["title"] = f"{title} ({unit})" if unit else title
            if log_y:
                layer["encoding"]["y"]["scale"] = logarithmic()["scale"]
    return found
