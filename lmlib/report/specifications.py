"""Charts as Vega-Lite specifications, for the page and for PNG and SVG alike.

https://vega.github.io/vega-lite/docs/. No text of a run is part of an expression here.
"""

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
# 20k, 1.5B, 1e+20, 0.002, 100: with as many digits as the ticks of an axis need to differ.
_DIGITS = (
    "clamp(ceil(log(max(abs(domain('AXIS')[0]), abs(domain('AXIS')[1])) / "
    "(abs(span(domain('AXIS'))) || 1)) / LN10 + 2.5), 4, 15)"
)
_TICK = (
    "!datum.value ? '0' : abs(datum.value) >= 1e15 || abs(datum.value) < 1e-4 "
    "? format(datum.value, '.' + (DIGITS - 1) + '~e') : abs(datum.value) < 1e4 "
    "? format(datum.value, '.' + DIGITS + '~g') : DIGITS > 5 && abs(datum.value) < 1e8 "
    "? format(datum.value, ',.15~g') : replace(format(datum.value, '.' + DIGITS + '~s'), 'G', 'B')"
).replace("DIGITS", _DIGITS)
_OUTSIDE = "datum.greatest > above || datum.least < below"
_NO_LIMIT = 1.7e308


def curves() -> dict[str, Any]:
    """Curves over rows {curve, stretch, step, x, value, least, greatest, not_finite}.

    A row is a point of a run. The curve is the mean of its rows of each "stretch" of steps (those
    of several seeds), over the points around as far as the window reaches; the band goes from the
    least to the greatest. The mean is dashed where it is of fewer runs than elsewhere, and the line
    breaks where their number changes. Crosses mark what is not finite, triangles what is outside
    the limits "above" and "below"; "pointed_at" is a value of x. Filled in later: `data.values`,
    the window's frame, the limits, titles and scales of the axes, the domain of colours.
    """
    by_curve = {"groupby": ["curve"], "sort": [{"field": "step"}]}
    fewer = {"domain": [False, True], "range": [[1, 0], [4, 3]]}
    dashes = {"field": "fewer", "type": "nominal", "scale": fewer, "legend": None}
    return {
        "$schema": SCHEMA,
        "width": "container",
        "height": 230,
        "params": [
            {"name": "below", "value": -_NO_LIMIT},
            {"name": "above", "value": _NO_LIMIT},
            {"name": "pointed_at", "value": None},
        ],
        "data": {"values": []},
        "transform": [
            {
                "aggregate": [
                    *({"op": "mean", "field": each, "as": each} for each in ("step", "x", "value")),
                    {"op": "min", "field": "least", "as": "least"},
                    {"op": "max", "field": "greatest", "as": "greatest"},
                    {"op": "sum", "field": "not_finite", "as": "not_finite"},
                    {"op": "valid", "field": "value", "as": "runs"},
                ],
                "groupby": ["curve", "stretch"],
            },
            _calculate("inside", "datum.value > above || datum.value < below ? null : datum.value"),
            {
                "window": [
                    {"op": "mean", "field": "inside", "as": "smooth"},
                    {"op": "lag", "field": "runs", "as": "before"},
                    {"op": "lead", "field": "runs", "as": "after"},
                ],
                "frame": [0, 0],
                **by_curve,
            },
            _calculate("smooth", "isValid(datum.inside) ? datum.smooth : null"),
            _calculate("changed", "datum.runs === datum.before ? 0 : 1"),
            {"window": [{"op": "sum", "field": "changed", "as": "part"}], **by_curve},
            {
                "joinaggregate": [{"op": "max", "field": "runs", "as": "most"}],
                "groupby": ["curve"],
            },
            _calculate("fewer", "datum.runs < datum.most"),
        ],
        "encoding": {
            "x": {
                "field": "x",
                "type": _NUMBER,
                "title": "step",
                "scale": {"type": "linear", "zero": False, "nice": False},
                "axis": {
                    "labelExpr": _TICK.replace("AXIS", "x"),
                    "tickCount": 6,
                    "labelFlush": True,
                },
            },
            "y": {
                "type": _NUMBER,
                "title": None,
                "scale": {"type": "linear", "zero": False, "nice": True},
                "axis": {"labelExpr": _TICK.replace("AXIS", "y"), "tickCount": 5},
            },
            "color": {
                "field": "curve",
                "type": "nominal",
                "scale": {"domain": [], "range": list(COLOURS)},
                "legend": None,
            },
            "detail": {"field": "part", "type": "nominal"},
        },
        "layer": [
            {  # with an outline, for a spike may be less wide than a pixel
                "mark": {
                    "type": "area",
                    "fillOpacity": 0.2,
                    "stroke": {"expr": "scale('color', datum.curve)"},
                    "strokeWidth": 0.8,
                    "strokeOpacity": 0.6,
                    "clip": True,
                },
                "encoding": {"y": {"field": "least"}, "y2": {"field": "greatest"}},
            },
            {
                "mark": {"type": "line", "strokeWidth": 1, "opacity": 0.3, "clip": True},
                "encoding": {"y": {"field": "value"}, "strokeDash": dashes},
            },
            {
                "mark": {"type": "line", "strokeWidth": 1.8, "clip": True},
                "encoding": {"y": {"field": "smooth"}, "strokeDash": dashes},
            },
            _points("datum.runs != datum.before && datum.runs != datum.after", size=25),  # alone
            _marks(
                "datum.not_finite > 0",
                {"shape": "cross", "angle": 45, "size": 90},
                "6",
                {"not_finite": "NaN or infinite"},
            ),
            _marks(
                _OUTSIDE,
                {"shape": "triangle", "filled": True, "size": 60},
                "datum.greatest > above ? 6 : height - 6",
                {"value": "value", "least": "least", "greatest": "greatest"},
            ),
            {
                "data": {"values": [{}]},
                "mark": {"type": "rule", "clip": True},
                "encoding": {
                    "x": {"value": {"expr": "isValid(pointed_at) ? scale('x', pointed_at) : -9"}},
                    "y": {"value": 0},
                    "y2": {"value": "height"},
                    "color": {"value": "#8a8583"},
                    "detail": None,
                },
            },
            _points("datum.x === pointed_at", size=60),
            _hover(),
        ],
    }


def _calculate(field: str, expression: str) -> dict[str, str]:
    return {"calculate": expression, "as": field}


def _points(where: str, **mark: Any) -> dict[str, Any]:
    """The points of the curves `where` something is."""
    return {
        "transform": [{"filter": f"isValid(datum.smooth) && ({where})"}],
        "mark": {"type": "point", "filled": True, "opacity": 1, "clip": True, **mark},
        "encoding": {"y": {"field": "smooth"}},
    }


def _marks(where: str, mark: Any, y: str, numbers: Mapping[str, str]) -> dict[str, Any]:
    """Marks `where` something is that has no place among the curves, `y` pixels from the top."""
    shown = {"step": "step", **numbers}
    tooltip = [
        {"field": "curve", "type": "nominal", "title": "run"},
        *({"field": k, "type": _NUMBER, "title": v, "format": ",.12~g"} for k, v in shown.items()),
    ]
    return {
        "transform": [{"filter": where}],
        "mark": {"type": "point", "opacity": 1, **mark},
        "encoding": {"y": {"value": {"expr": y}}, "tooltip": tooltip},
    }


def _hover() -> dict[str, Any]:
    """The nearest point. Its tooltip is page.js's, since Vega-Lite's says "undefined" for texts."""
    nearest = {"type": "point", "on": "pointermove", "clear": "pointerout", "nearest": True}
    params = [{"name": "hover", "select": {**nearest, "fields": ["x"]}}]
    return {**_points("true", opacity=0), "params": params}


def logarithmic() -> dict[str, Any]:
    """What a logarithmic axis has: the scale, and for a vertical one what becomes of rows that it
    has no place for, after the mean of several seeds."""
    return {
        "scale": {"type": "log", "nice": False},
        "transform": [
            _calculate("value", "datum.value > 0 ? datum.value : null"),
            _calculate("least", "datum.least > 0 ? datum.least : datum.value"),
            _calculate("greatest", "datum.greatest > 0 ? datum.greatest : null"),
            _calculate("runs", "datum.value > 0 ? datum.runs : 0"),
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
    limits: Sequence[float | None] = (None, None),
) -> dict[str, Any]:
    """`curves` filled in as page.js does, with a legend and titles of its own."""
    found = curves()
    found["data"]["values"] = list(rows)
    found["width"], found["height"] = 420, 260
    points = max(len({row["step"] for row in rows if row["curve"] == c}) for c in curve_names)
    around = int(smoothing * points / 2)
    found["transform"][2]["frame"] = [-around, around]
    found["layer"].pop()  # nobody points at paper
    x, y, colour = (found["encoding"][each] for each in ("x", "y", "color"))
    x["title"], y["title"] = x_title, f"{title} ({unit})" if unit else title
    colour["scale"]["domain"] = list(curve_names)
    colour["legend"] = {**_LEGEND, "labelLimit": 400} if len(curve_names) > 1 else None
    if log_x:
        x["scale"] = logarithmic()["scale"]
    if log_y:
        y["scale"] = logarithmic()["scale"]
        found["transform"][1:1] = logarithmic()["transform"]
    if unit == "B":  # bytes
        y["axis"]["labelExpr"] = y["axis"]["labelExpr"].replace("'B'", "'G'")
    for limit, parameter, end in zip(limits, found["params"], ("Min", "Max"), strict=False):
        if limit is not None and (limit > 0 or not log_y):
            parameter["value"] = y["scale"][f"domain{end}"] = limit
    return found
