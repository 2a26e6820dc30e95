"""One specification of a chart, and its drawing by Plotly for pages.

    Chart          axes, series, a heat map, guides: what is drawn
    Axis           title, scale and limits of one axis
    Series         points, a line or bars of one name
    Heat           a matrix of colours
    Guide          a line or a band at one value of an axis, with its name
    Panel          a chart on a page, with its title and how to read it
    plotly         a chart as a Plotly figure, in JSON values; `drawing` draws it by matplotlib

Colours are roles, such as "@ink" or "@ramp:0.25", which the page replaces by those of the light or
the dark scheme. Every ramp has one meaning:

    @ramp, @scale:ramp    depth: lightness grows with the layer, readable with any colour vision
    @scale:gap            nearness to a tie, as in the text: the stronger, the nearer
    @scale:load           load of an expert: blue below an even one, red above
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from tieline.report.words.numbers import finite

MOST_NAMED = 10
"""Largest number of layers that a legend names one by one; a bar of colours tells more."""

MOST_TICKS = 8
"""Largest number of layers that an axis names one by one."""

Symbol = Literal[
    "circle", "square", "square-open", "diamond", "diamond-open", "triangle-down", "dash", "cross"
]
SYMBOLS = {"dash": "line-ew", "cross": "x-thin"}
"""Plotly's names of symbols that it names otherwise."""


@dataclass(frozen=True)
class Axis:
    """An axis of a chart.

    Attributes:
        title: what it shows.
        scale: "linear", "log" or "category".
        percent: whether ticks are percentages.
        limits: ends of the axis; by default those of the data.
        from_zero: whether it begins at zero.
        reverse: whether values grow downwards.
        angle: angle of the ticks' names, in degrees.
        ticks: names of the values that have a tick; by default those of the scale.
    """

    title: str
    scale: Literal["linear", "log", "category"] = "linear"
    percent: bool = False
    limits: tuple[float, float] | None = None
    from_zero: bool = False
    reverse: bool = False
    angle: int = 0
    ticks: Mapping[float, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Series:
    """Values of one name.

    Attributes:
        x: numbers or names.
        y: values; None where there is nothing to draw.
        name: name in the legend.
        colour: role of the colour.
        kind: how values are drawn.
        symbol: symbol of points.
        size: size of points, in pixels of a page.
        width: width of lines, in pixels of a page.
        dash: "" for a solid line, "dash", "dot" or "dashdot".
        opacity: 1 for opaque.
        errors: lengths of error bars above and below the values.
        in_legend: whether the legend names it.
        hover: text shown on a page at a value, in Plotly's template language.
        details: further values for the hover text.
    """

    x: Sequence[Any]
    y: Sequence[Any]
    name: str = ""
    colour: str = "@accent"
    kind: Literal["points", "line", "line+points", "bar"] = "points"
    symbol: Symbol = "circle"
    size: int = 8
    width: float = 1.75
    dash: Literal["", "dash", "dot", "dashdot"] = ""
    opacity: float = 1.0
    errors: tuple[Sequence[float], Sequence[float]] | None = None
    in_legend: bool = True
    hover: str = ""
    details: Sequence[Any] = ()


@dataclass(frozen=True)
class Heat:
    """A matrix of colours.

    Attributes:
        x: names or numbers of the columns.
        y: names of the rows.
        values: one row of numbers per row; None for an empty cell.
        colours: role of the scale, "gap" or "load".
        title: what colour means.
        ticks: names of some values.
        limits: values at the ends of the scale; by default those of the data.
        texts: text of each cell; empty for none.
        details: further texts for the hover text.
        hover: text shown on a page at a cell.
        spaces: pixels between columns and between rows.
    """

    x: Sequence[Any]
    y: Sequence[str]
    values: Sequence[Sequence[float | None]]
    colours: Literal["gap", "load"]
    title: str
    ticks: Mapping[float, str]
    limits: tuple[float, float] | None = None
    texts: Sequence[Sequence[str]] = ()
    details: Sequence[Sequence[str]] = ()
    hover: str = ""
    spaces: tuple[int, int] = (1, 1)


@dataclass(frozen=True)
class Guide:
    """A line at one value of an axis, with its name.

    Attributes:
        axis: the axis that has the value.
        at: the value.
        name: name beside the line; may be empty.
        span: ends of a pale band around it; may be None.
        colour: role of the colour.
        dash: "dash" or "dot".
        lift: height of the name over the lower end of the chart, as a share of the height.
    """

    axis: Literal["x", "y"]
    at: float
    name: str = ""
    span: tuple[float, float] | None = None
    colour: str = "@muted"
    dash: Literal["dash", "dot"] = "dot"
    lift: float = 0.0


@dataclass(frozen=True)
class Chart:
    """What is drawn, on a page and on paper alike.

    Attributes:
        x: horizontal axis.
        y: vertical axis.
        series: what is drawn, from the back to the front.
        heat: a heat map behind it; may be None.
        guides: lines with names.
        layers: names of the layers that colours of the ramp stand for, in order of depth.
        height: pixels of the page.
        stacked: whether bars are stacked.
        margin_below: pixels of the page below the axes; 0 for as many as usual.
    """

    x: Axis
    y: Axis
    series: tuple[Series, ...] = ()
    heat: Heat | None = None
    guides: tuple[Guide, ...] = ()
    layers: tuple[str, ...] = ()
    height: int = 400
    stacked: bool = False
    margin_below: int = 0


@dataclass(frozen=True)
class Panel:
    """A chart on a page with the sentence that says how to read it.

    Attributes:
        key: name of the panel in the page.
        title: heading.
        how: how to read it.
        figure: Plotly figure, as JSON values; None if there is nothing to draw.
        reason: why not.
        wide: whether it takes the whole width of the page.
        chart: the specification behind the figure, where there is one.
    """

    key: str
    title: str
    how: str
    figure: dict[str, Any] | None = None
    reason: str = ""
    wide: bool = False
    chart: Chart | None = field(default=None, repr=False)

    def drawn(self, drawing: "Chart | dict[str, Any]") -> "Panel":
        """Return the panel with this chart, or with this Plotly figure."""
        if isinstance(drawing, Chart):
            return replace(self, figure=plotly(drawing), chart=drawing)
        return replace(self, figure=drawing)

    def missing(self, statuses: Sequence[str]) -> "Panel":
        """Return the panel without a chart, with each reason of the sections that it needs once."""
        return replace(self, reason="; ".join(dict.fromkeys(s for s in statuses if s != "ok")))


def unmeasured(panels: Sequence[Panel]) -> str:
    """Return one line that names the panels without a chart and why; empty if all have one."""
    titles: dict[str, list[str]] = {}
    for panel in panels:
        if panel.figure is None:
            titles.setdefault(panel.reason or "no data", []).append(f"“{panel.title}”")
    return "; ".join(f"{', '.join(names)} ({reason})" for reason, names in titles.items())


def layer_colour(index: int, count: int) -> str:
    """Return the role of the colour of a layer, by its depth."""
    return f"@ramp:{index / (count - 1) if count > 1 else 0.5:.3f}"


def layer_axis(labels: Sequence[str]) -> Axis:
    """Return an axis of layers at 0, 1, …: all of a few have a name, some of many."""
    step = max(1, math.ceil(len(labels) / MOST_TICKS))
    return Axis("layer", ticks={float(i): labels[i] for i in range(0, len(labels), step)})


def above_zero(values: Iterable[float | None]) -> list[float | None]:
    """Return values for a logarithmic axis: None for zero and for what is not finite."""
    return [finite(value) or None for value in values]


def plotly(chart: Chart) -> dict[str, Any]:
    """Return a chart as a Plotly figure, in JSON values."""
    many = len(chart.layers) > MOST_NAMED
    data = [] if chart.heat is None else [_plotly_heat(chart.heat)]
    data += [_plotly_series(series, many) for series in chart.series]
    layout: dict[str, Any] = {"xaxis": _plotly_axis(chart.x), "yaxis": _plotly_axis(chart.y)}
    if chart.stacked:
        layout["barmode"] = "stack"
    if chart.margin_below:
        layout["margin"] = {"t": 12, "r": 16, "b": chart.margin_below, "l": 70}
    layout["shapes"] = [shape for guide in chart.guides for shape in _guide_shapes(guide)]
    layout["annotations"] = [_guide_name(guide, chart) for guide in chart.guides if guide.name]
    return figure([*data, *depth_bar(chart.layers)], chart.height, **layout)


def _plotly_axis(spec: Axis) -> dict[str, Any]:
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
        return share_axis(spec.title) | options
    if spec.percent:
        options["tickformat"] = ".2~p"
    elif spec.scale == "linear" and not spec.from_zero:
        options["exponentformat"] = "power"
    if spec.ticks:
        options |= {"tickvals": list(spec.ticks), "ticktext": list(spec.ticks.values())}
        options["dtick"] = None
    return axis(spec.title, "-" if spec.scale == "linear" else spec.scale, **options)


def _plotly_series(series: Series, many: bool) -> dict[str, Any]:
    trace: dict[str, Any] = {"name": series.name, "x": list(series.x), "y": list(series.y)}
    trace |= {"hovertemplate": series.hover} if series.hover else {"hoverinfo": "skip"}
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
    symbol = SYMBOLS.get(series.symbol, series.symbol)
    marker: dict[str, Any] = {"symbol": symbol, "size": series.size, "color": series.colour}
    if series.symbol in SYMBOLS:
        marker["line"] = {"color": series.colour, "width": 2}
    return marker | ({"opacity": series.opacity} if series.opacity < 1 else {})


def _plotly_heat(heat: Heat) -> dict[str, Any]:
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


def _guide_shapes(guide: Guide) -> list[dict[str, Any]]:
    """The band and the line of a guide."""
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


def _guide_name(guide: Guide, chart: Chart) -> dict[str, Any]:
    scale = chart.x.scale if guide.axis == "x" else chart.y.scale
    at = math.log10(guide.at) if scale == "log" else guide.at
    note = {"text": guide.name, "showarrow": False, "font": {"size": 11, "color": guide.colour}}
    if guide.axis == "x":
        where = {"yref": "paper", "textangle": -90, "xanchor": "right", "yanchor": "bottom"}
        return note | {"x": at, "y": 0.02 + guide.lift, **where}
    where = {"xref": "paper", "xanchor": "right", "yanchor": "bottom", "bgcolor": "@card"}
    return note | {"x": 1.0, "y": at, **where}


def axis(title: str, scale: str = "-", **options: Any) -> dict[str, Any]:
    """Return an axis of Plotly; "log" gets ticks at powers of ten, "-" is the scale of the data."""
    log = {"dtick": 1, "exponentformat": "power", "tickangle": 0}
    extra = log if scale == "log" else {}
    text = {"text": title, "standoff": 12}
    return {"title": text, "automargin": True, "type": scale, **extra, **options}


def share_axis(title: str) -> dict[str, Any]:
    """Return a logarithmic axis of percentages up to 5000 %, ticks at 1, 2 and 5 of a decade."""
    ticks = [digit * 10.0**power for power in range(-8, 2) for digit in (1, 2, 5)]
    text = [f"{100 * tick:g} %" for tick in ticks]
    return axis(title, scale="log", tickvals=ticks, ticktext=text, dtick=None)


def figure(data: list[dict[str, Any]], height: int = 380, **layout: Any) -> dict[str, Any]:
    """Return a Plotly figure of that height in pixels."""
    legend = {"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom", "x": 0}
    return {"data": data, "layout": {"height": height, "legend": legend, **layout}}


def depth_bar(labels: Sequence[str]) -> list[dict[str, Any]]:
    """Return a trace without points that shows which colour is which depth, for many layers."""
    last = len(labels) - 1
    if last < MOST_NAMED:
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
