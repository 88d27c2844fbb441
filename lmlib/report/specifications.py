"""Vega-Lite specifications of charts, for the page and for PNG and SVG files.

https://vega.github.io/vega-lite/docs/. Text from runs never becomes part of an expression.
"""

from collections.abc import Mapping, Sequence
from typing import Any

VERSION = "6.4"  # Vega-Lite's
SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"  # an identifier, never fetched
# Colours of up to eight curves on the page's light and dark panels: distinct also with each kind of
# colour blindness (Machado et al. 2009), with a contrast of at least 3 (WCAG 1.4.11). More curves,
# and curves by value, take their colours from parts of inferno (light) and viridis (dark).
COLOURS = {
    "light": [
        *("#2f6db5", "#f6530f", "#830d67", "#9976fd", "#4e420a", "#c2799e", "#471bb5", "#8c594e"),
    ],
    "dark": [
        *("#7fb0e6", "#bebc01", "#f88094", "#46fd90", "#c55910", "#fbcdfb", "#0d77eb", "#9d6ca5"),
    ],
}
SEQUENTIAL = {
    "light": ["#420a68", "#67166e", "#8c2369", "#b0315b", "#d04545", "#ea632a"],
    "dark": ["#26828e", "#1f9e89", "#35b779", "#6ece58", "#b5de2b", "#fde725"],
}
_NUMBER = "quantitative"
_LEGEND = {"title": None, "symbolType": "stroke", "symbolOpacity": 1, "symbolStrokeWidth": 2}
# 20k, 1.5B, 1e+20, 0.002, 100, 2e-5: enough digits to tell the ticks of an axis apart.
_LARGEST = "max(abs(domain('AXIS')[0]), abs(domain('AXIS')[1]))"
_DIGITS = f"clamp(ceil(log({_LARGEST} / (abs(span(domain('AXIS'))) || 1)) / LN10 + 2.5), 4, 15)"
_TICK = (
    "!datum.value ? '0' : abs(datum.value) >= 1e15 || min(abs(datum.value), LARGEST / 9) < 1e-4 "
    "? format(datum.value, '.' + (DIGITS - 1) + '~e') : abs(datum.value) < 1e4 "
    "? format(datum.value, '.' + DIGITS + '~g') : DIGITS > 5 && abs(datum.value) < 1e8 "
    "? format(datum.value, ',.15~g') : replace(format(datum.value, '.' + DIGITS + '~s'), 'G', 'B')"
)
_TICK = _TICK.replace("DIGITS", _DIGITS).replace("LARGEST", _LARGEST)
_NO_LIMIT = 1.7e308


def curves() -> dict[str, Any]:
    """Returns a chart for rows {curve, stretch, step, x, value, least, greatest, not_finite}.

    A curve is the mean of its rows (seeds) in each "stretch" of steps, smoothed over a window, with
    a band from minimum to maximum. It is dashed where fewer runs have a value, and breaks where
    their number changes. Crosses mark values that are not finite, triangles values beyond "above"
    and "below". Filled in later: `data.values`, the window's frame, the limits, the titles and
    scales of axes, and the domain and range of colours. "x_min" to "y_max" are the ends of zoomed
    axes, "dragged" has two places in pixels.
    """
    ends = ("x_min", "x_max", "y_min", "y_max", "dragged", "pointed_at")
    parameters = {"below": -_NO_LIMIT, "above": _NO_LIMIT, **dict.fromkeys(ends)}
    runs = {"groupby": ["curve"], "sort": [{"field": "step"}]}
    moved = {"on": "pointermove", "clear": "pointerout", "nearest": True}
    nearest = {"type": "point", "fields": ["x"], **moved}
    dashes = {"domain": [False, True], "range": [[1, 0], [4, 3]]}
    dashed = {"strokeDash": by("fewer", "nominal", scale=dashes, legend=None)}
    band = {"y2": {"field": "greatest"}}
    numbers = {"value": "value", "least": "min", "greatest": "max"}
    not_finite = {"not_finite": "NaN or infinite"}
    linear = {"type": "linear", "zero": False}
    colours: dict[str, Any] = {"domain": []}
    x_axis = {"labelExpr": _TICK.replace("AXIS", "x"), "tickCount": 6, "labelFlush": True}
    y_axis = {"labelExpr": _TICK.replace("AXIS", "y"), "tickCount": 5}
    at = {"expr": "isValid(pointed_at) ? scale('x', pointed_at) : -9"}
    across = {"y": 0, "y2": "height", "color": "#8a8583"}
    dragged = [{"expr": f"dragged ? dragged[{i}] : -9"} for i in (0, 1)]
    outline = {"stroke": {"expr": "scale('color', datum.curve)"}, "strokeWidth": 0.8}
    return _chart(
        230,
        params=[{"name": name, "value": value} for name, value in parameters.items()],
        transform=[
            {
                "aggregate": [
                    *(_op("mean", each) for each in ("step", "x", "value")),
                    *(_op("min", "least"), _op("max", "greatest"), _op("sum", "not_finite")),
                    _op("valid", "value", "runs"),
                ],
                "groupby": ["curve", "stretch"],
            },
            _calculate("inside", "datum.value > above || datum.value < below ? null : datum.value"),
            {
                "window": [
                    _op("mean", "inside", "smooth"),
                    *(_op("lag", "runs", "before"), _op("lead", "runs", "after")),
                ],
                "frame": [0, 0],
                **runs,
            },
            _calculate("smooth", "isValid(datum.inside) ? datum.smooth : null"),
            _calculate("changed", "datum.runs === datum.before ? 0 : 1"),
            {"window": [_op("sum", "changed", "part")], **runs},
            {"joinaggregate": [_op("max", "runs", "most")], "groupby": ["curve"]},
            _calculate("fewer", "datum.runs < datum.most"),
        ],
        encoding={
            "x": by("x", title="step", scale={**linear, "nice": False}, axis=x_axis),
            "y": {
                "type": _NUMBER,
                "title": None,
                "scale": {**linear, "nice": True},
                "axis": y_axis,
            },
            "color": by("curve", "nominal", scale=colours, legend=None),
            "detail": by("part", "nominal"),
        },
        layer=[
            # Draw the outline, since a spike may be narrower than a pixel.
            _marks("area", "least", band, fillOpacity=0.2, strokeOpacity=0.6, **outline),
            _marks("line", "value", dashed, strokeWidth=1, opacity=0.3),
            _marks("line", "smooth", dashed, strokeWidth=1.8),
            # Isolated points.
            _points("datum.runs != datum.before && datum.runs != datum.after", size=25),
            _at_edge("datum.not_finite > 0", "6", not_finite, shape="cross", angle=45, size=90),
            _at_edge(
                "datum.greatest > above || datum.least < below",
                "datum.greatest > above ? 6 : height - 6",
                numbers,
                **{"shape": "triangle", "filled": True, "size": 60},
            ),
            _drawn("rule", x=at, **across),
            _drawn("rect", x=dragged[0], x2=dragged[1], opacity=0.25, **across),
            _points("datum.x === pointed_at", size=60),
            # The nearest point. page.js gives its tooltip: Vega-Lite's says "undefined" for texts.
            {**_points("true", opacity=0), "params": [{"name": "hover", "select": nearest}]},
        ],
    )


def _chart(height: int, **more: Any) -> dict[str, Any]:
    size = {"width": "container", "height": height}
    return {"$schema": SCHEMA, **size, "data": {"values": []}, **more}


def by(field: str, kind: str = _NUMBER, **more: Any) -> dict[str, Any]:
    return {"field": field, "type": kind, **more}


def _op(op: str, field: str, name: str = "") -> dict[str, str]:
    return {"op": op, "field": field, "as": name or field}


def _calculate(field: str, expression: str) -> dict[str, str]:
    return {"calculate": expression, "as": field}


def _marks(kind: str, y: str, encoding: Any = (), **mark: Any) -> dict[str, Any]:
    mark = {"type": kind, "clip": True, **mark}
    return {"mark": mark, "encoding": {"y": {"field": y}, **dict(encoding)}}


def _drawn(kind: str, **places: Any) -> dict[str, Any]:
    """Returns a layer with one mark that does not depend on the rows."""
    encoding = {**{name: {"value": place} for name, place in places.items()}, "detail": None}
    mark = {"type": kind, "clip": True}
    return {"data": {"values": [{}]}, "mark": mark, "encoding": encoding}


def _points(where: str, **mark: Any) -> dict[str, Any]:
    """Returns a layer with the points of the curves that satisfy the expression `where`."""
    shown = {"transform": [{"filter": f"isValid(datum.smooth) && ({where})"}]}
    return shown | _marks("point", "smooth", **{"filled": True, "opacity": 1, **mark})


def _at_edge(where: str, y: str, numbers: Mapping[str, str], **mark: Any) -> dict[str, Any]:
    """Returns marks `y` pixels from the top for the points that satisfy the expression `where`."""
    shown = {"step": "step", **numbers}.items()
    tooltip = [by(field, title=title, format=",.12~g") for field, title in shown]
    return {
        "transform": [
            {"filter": f"({where}) && (!isValid(x_min) || inrange(datum.x, [x_min, x_max]))"}
        ],
        "mark": {"type": "point", "opacity": 1, **mark},
        "encoding": {
            "y": {"value": {"expr": y}},
            "tooltip": [by("curve", "nominal", title="run"), *tooltip],
        },
    }


def logarithmic() -> dict[str, Any]:
    """Returns the scale of a logarithmic axis, and the transforms for a vertical one."""
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
    """Returns a heat map of rows {part, order, step, value}: parts of a model over steps."""
    legend = {"title": None, "format": "~g", "gradientLength": 120}
    return _chart(
        15,  # pixels per part
        mark={"type": "rect", "tooltip": True},
        encoding={
            "x": by("step", "ordinal", axis={"labelOverlap": True, "labelAngle": 0}),
            "y": by("part", "ordinal", title=None, sort={"field": "order"}),
            "color": by("value", scale={"type": "log", "scheme": "viridis"}, legend=legend),
        },
    )


def bars() -> dict[str, Any]:
    """Returns a stacked bar for each run from rows {run, part, time, share, order}."""
    scale, axis = {"domain": [0, 1]}, {"format": "%"}
    colour = {"legend": {"orient": "bottom", "title": None}}
    return _chart(
        26,  # pixels per run
        mark="bar",
        encoding={
            "x": by("share", stack=True, title=None, scale=scale, axis=axis),
            "y": by("run", "nominal", title=None, sort=None),
            "color": by("part", "nominal", sort={"field": "order"}, **colour),
            "order": {"field": "order"},
            "tooltip": [
                *(by("run", "nominal"), by("part", "nominal", title="phase")),
                *(by("time", "nominal"), by("share", format=".1%")),
            ],
        },
    )


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
    """Returns `curves` filled in as page.js does, with a legend and titles."""
    found = curves()
    found["data"]["values"] = list(rows)
    found["width"], found["height"] = 420, 260
    points = max(len({row["step"] for row in rows if row["curve"] == c}) for c in curve_names)
    around = int(smoothing * points / 2)
    found["transform"][2]["frame"] = [-around, around]
    found["layer"].pop()  # no pointer on paper
    x, y, colour = (found["encoding"][each] for each in ("x", "y", "color"))
    x["title"], y["title"] = x_title, f"{title} ({unit})" if unit else title
    few = len(curve_names) <= len(COLOURS["light"])
    scheme = {"name": "inferno", "extent": [0.2, 0.65]}
    colours = {"range": COLOURS["light"]} if few else {"scheme": scheme}
    colour["scale"] = {"domain": list(curve_names), **colours}
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
