"""Charts drawn by Plotly, as JSON values, for pages.

    plotly_figure      a chart as a Plotly figure
    plotly_depth_bar   the colour bar of many layers

Colours are roles, such as "@ink" or "@ramp:0.25" (`tieline.report.charts`), which the page's script
replaces.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tieline.report.charts import Axis, Chart, Guide, Heat, Series
from tieline.report.words.numbers import percent

MAX_LEGEND_LAYERS = 10
"""Largest number of layers that a legend lists; a colour bar replaces it for more."""

PLOTLY_SYMBOLS = {"dash": "line-ew", "cross": "x-thin"}
"""Plotly's names of the symbols that it calls differently."""


def plotly_figure(chart: Chart) -> dict[str, Any]:
    """Return a chart as a Plotly figure, in JSON values."""
    chart = _with_percentages(chart)
    many = len(chart.layers) > MAX_LEGEND_LAYERS
    data = [] if chart.heat is None else [_plotly_heat(chart.heat)]
    data += [_plotly_series(series, many) for series in chart.series]
    layout: dict[str, Any] = {"xaxis": _plotly_axis(chart.x), "yaxis": _plotly_axis(chart.y)}
    if chart.stacked:
        layout["barmode"] = "stack"
    if chart.margin_below:
        layout["margin"] = {"t": 12, "r": 16, "b": chart.margin_below, "l": 70}
    layout["shapes"] = [shape for guide in chart.guides for shape in _plotly_guide_shapes(guide)]
    layout["annotations"] = [
        _plotly_guide_name(guide, chart) for guide in chart.guides if guide.name
    ]
    layout["legend"] = {
        "orientation": "h",
        "yref": "container",
        "y": 0,
        "yanchor": "bottom",
        "x": 0,
    }
    data += plotly_depth_bar(chart.layers)
    return {"data": data, "layout": {"height": chart.height, **layout}}


def _with_percentages(chart: Chart) -> Chart:
    """Return the chart with shares on percent axes times 100: Plotly would write 4% for 0.04."""
    x, y = (100.0 if axis.percent else 1.0 for axis in (chart.x, chart.y))
    if x == y == 1:
        return chart
    return replace(
        chart,
        x=replace(chart.x, limits=_scaled(chart.x.limits, x)),
        y=replace(chart.y, limits=_scaled(chart.y.limits, y)),
        series=tuple(
            replace(
                series,
                x=_scaled(series.x, x),
                y=_scaled(series.y, y),
                errors=series.errors and tuple(_scaled(lengths, y) for lengths in series.errors),
            )
            for series in chart.series
        ),
        guides=tuple(
            replace(guide, at=guide.at * factor, span=_scaled(guide.span, factor))
            for guide in chart.guides
            for factor in [x if guide.axis == "x" else y]
        ),
    )


def _scaled(values: Any, factor: float) -> Any:
    """Return the numbers times a factor, as a tuple; None stays None."""
    if values is None or factor == 1:
        return values
    return tuple(value if value is None else factor * value for value in values)


def _plotly_axis(spec: Axis) -> dict[str, Any]:
    """Return a Plotly axis with title, limits and ticks."""
    options: dict[str, Any] = {}
    if spec.limits is not None:
        ends = map(math.log10, spec.limits) if spec.scale == "log" else spec.limits
        options["range"] = list(ends)
    if spec.from_zero:
        options["rangemode"] = "tozero"
    if spec.reverse:
        options["autorange"] = "reversed"
    if spec.angle:
        options["tickangle"] = spec.angle
    if spec.percent and spec.scale == "log":
        return _plotly_percent_axis(spec.title) | options
    if spec.percent:
        options |= {"tickformat": ".3~r", "ticksuffix": " %"}
    elif spec.scale == "linear" and not spec.from_zero:
        options["exponentformat"] = "power"
    if spec.ticks:
        options |= {"tickvals": list(spec.ticks), "ticktext": list(spec.ticks.values())}
        options["dtick"] = None
    return _titled_plotly_axis(spec.title, "-" if spec.scale == "linear" else spec.scale, **options)


def _plotly_series(series: Series, many: bool) -> dict[str, Any]:
    """Return a series as a Plotly trace; with `many` layers the legend omits them."""
    trace: dict[str, Any] = {"name": series.name, "x": list(series.x), "y": list(series.y)}
    hover = series.hover.replace(":percent}", ":.3~r} %")
    trace |= {"hovertemplate": hover} if hover else {"hoverinfo": "skip"}
    trace["showlegend"] = series.in_legend and not (many and series.colour.startswith("@ramp"))
    if series.details:
        trace["customdata"] = list(series.details)
    if series.kind == "bar":
        return trace | {"type": "bar", "marker": {"color": series.colour}}
    modes = {"points": "markers", "line": "lines", "line+points": "lines+markers"}
    trace |= {"type": "scatter", "mode": modes[series.kind]}
    if series.kind != "points":
        dash = {"dash": series.dash} if series.dash else {}
        trace["line"] = {"color": series.colour, "width": series.width, **dash}
    if series.kind != "line":
        trace["marker"] = _plotly_marker(series)
    if series.opacity < 1 and series.kind == "line":
        trace["opacity"] = series.opacity
    if series.errors is not None:
        above, below = (list(lengths) for lengths in series.errors)
        errors = {"type": "data", "symmetric": False, "array": above, "arrayminus": below}
        trace["error_y"] = errors | {"color": series.colour, "width": 3, "thickness": 1.5}
    return trace


def _plotly_marker(series: Series) -> dict[str, Any]:
    """Return symbol, size and colour of the points of a series."""
    symbol = PLOTLY_SYMBOLS.get(series.symbol, series.symbol)
    marker: dict[str, Any] = {"symbol": symbol, "size": series.size, "color": series.colour}
    if series.symbol in PLOTLY_SYMBOLS:
        marker["line"] = {"color": series.colour, "width": 2}
    return marker | ({"opacity": series.opacity} if series.opacity < 1 else {})


def _plotly_heat(heat: Heat) -> dict[str, Any]:
    """Return a heat map with its colour bar."""
    limits = {} if heat.limits is None else {"zmin": heat.limits[0], "zmax": heat.limits[1]}
    texts: dict[str, Any] = {}
    if heat.texts:
        rows = [list(row) for row in heat.texts]
        texts = {"text": rows, "texttemplate": "%{text}", "textfont": {"size": 10}}
    bar = {"title": {"text": heat.title, "side": "right"}, "thickness": 12, "outlinewidth": 0}
    ticks = {"tickvals": list(heat.ticks), "ticktext": list(heat.ticks.values())}
    details = {"customdata": [list(row) for row in heat.details]} if heat.details else {}
    return {
        "type": "heatmap",
        "x": list(heat.x),
        "y": list(heat.y),
        "z": [list(row) for row in heat.values],
        "hovertemplate": heat.hover,
        "hoverongaps": False,
        "colorscale": f"@scale:{heat.colours}",
        "xgap": heat.spaces[0],
        "ygap": heat.spaces[1],
        "colorbar": bar | ticks,
        **limits,
        **texts,
        **details,
    }


def _plotly_guide_shapes(guide: Guide) -> list[dict[str, Any]]:
    """Return the shapes of a guide: its band, if any, and its line."""
    if guide.axis == "y":
        line = {"color": guide.colour, "width": 1.5, "dash": guide.dash}
        ends = {"x0": 0, "x1": 1, "xref": "paper", "y0": guide.at, "y1": guide.at, "yref": "y"}
        return [{"type": "line", **ends, "line": line}]
    across = {"xref": "x", "y0": 0, "y1": 1, "yref": "paper", "layer": "below"}
    line = {"color": guide.colour, "width": 1, "dash": guide.dash}
    shapes = [across | {"type": "line", "x0": guide.at, "x1": guide.at, "line": line}]
    if guide.span is not None:
        low, high = guide.span
        band = {"type": "rect", "x0": low, "x1": high, "fillcolor": "@band", "line": {"width": 0}}
        shapes.insert(0, across | band)
    return shapes


def _plotly_guide_name(guide: Guide, chart: Chart) -> dict[str, Any]:
    """Return the annotation with the name of a guide, beside its line."""
    scale = chart.x.scale if guide.axis == "x" else chart.y.scale
    position = math.log10(guide.at) if scale == "log" else guide.at
    note = {"text": guide.name, "showarrow": False, "font": {"size": 11, "color": guide.colour}}
    if guide.axis == "x":
        where = {"yref": "paper", "textangle": -90, "xanchor": "right", "yanchor": "bottom"}
        return note | {"x": position, "y": 0.02 + guide.lift, **where}
    where = {"xref": "paper", "xanchor": "right", "yanchor": "bottom", "bgcolor": "@card"}
    return note | {"x": 1.0, "y": position, **where}


def _titled_plotly_axis(title: str, scale: str = "-", **options: Any) -> dict[str, Any]:
    """Return a Plotly axis; "log" has ticks at powers of ten, "-" lets Plotly choose the scale."""
    log = {"dtick": 1, "exponentformat": "power", "tickangle": 0}
    extra = log if scale == "log" else {}
    text = {"text": title, "standoff": 12}
    return {"title": text, "automargin": True, "type": scale, **extra, **options}


def _plotly_percent_axis(title: str) -> dict[str, Any]:
    """Return a logarithmic axis of percentages up to 5000 %, ticks at 1, 2 and 5 per decade."""
    ticks = [digit * 10.0**power for power in range(-8, 2) for digit in (1, 2, 5)]
    text = [percent(tick, trim=True, least=0.0) for tick in ticks]
    values = [100 * tick for tick in ticks]
    return _titled_plotly_axis(title, scale="log", tickvals=values, ticktext=text, dtick=None)


def plotly_depth_bar(labels: Sequence[str]) -> list[dict[str, Any]]:
    """Return an empty trace whose colour bar names the layers; no trace for few layers."""
    last = len(labels) - 1
    if last < MAX_LEGEND_LAYERS:
        return []
    indices = (0, last // 2, last)
    bar = {
        "title": {"text": "layer", "side": "right"},
        "thickness": 10,
        "outlinewidth": 0,
        "tickvals": list(indices),
        "ticktext": [labels[index] for index in indices],
    }
    colours = {"color": [0], "cmin": 0, "cmax": last, "colorscale": "@scale:ramp"}
    empty = {"type": "scatter", "x": [None], "y": [None], "mode": "markers", "hoverinfo": "skip"}
    return [
        empty | {"marker": {**colours, "showscale": True, "colorbar": bar}, "showlegend": False}
    ]
