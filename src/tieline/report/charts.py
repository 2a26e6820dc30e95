"""One specification of a chart, drawn by Plotly on pages and by matplotlib on paper.

Colours are roles, such as "@ink" or "@ramp:0.25", which the page replaces by those of the light or
the dark scheme. Every ramp has one meaning:

    @ramp, @scale:ramp    depth: lightness grows with the layer, readable with any colour vision
    @scale:gap            nearness to a tie, as in the text: the stronger, the nearer
    @scale:load           load of an expert: blue below an even one, red above
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tieline.report.words.numbers import finite

MAX_LAYER_TICKS = 8
"""Largest number of layers that an axis names one by one."""

Symbol = Literal[
    "circle", "square", "square-open", "diamond", "diamond-open", "triangle-down", "dash", "cross"
]


@dataclass(frozen=True)
class Axis:
    """An axis of a chart.

    Attributes:
        title: quantity and unit.
        scale: "linear", "log" or "category".
        percent: whether ticks are percentages.
        limits: ends of the axis; by default the range of the data.
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
    """Points, a line or bars under one name.

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
        hover: text shown on a page at a value, in Plotly's template language; "%{y:percent}" is
            a value of a percent axis.
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
        title: quantity that the colour shows.
        ticks: names of some values.
        limits: values at the ends of the scale; by default the range of the data.
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
    """A chart, drawn on pages by Plotly and on paper by matplotlib.

    Attributes:
        x: horizontal axis.
        y: vertical axis.
        series: what is drawn, from the back to the front.
        heat: a heat map behind it; may be None.
        guides: lines with names.
        layers: names of the layers that the ramp's colours stand for, in order of depth.
        height: pixels of the page.
        stacked: whether bars are stacked.
        margin_below: pixels of the page below the axes; 0 for the default.
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


def layer_colour(index: int, count: int) -> str:
    """Return the colour role of layer `index` of `count`."""
    return f"@ramp:{index / (count - 1) if count > 1 else 0.5:.3f}"


def layer_axis(labels: Sequence[str]) -> Axis:
    """Return an axis of layers at 0, 1, … with at most about `MAX_LAYER_TICKS` names."""
    step = max(1, math.ceil(len(labels) / MAX_LAYER_TICKS))
    return Axis("layer", ticks={float(i): labels[i] for i in range(0, len(labels), step)})


def above_zero(values: Iterable[float | None]) -> list[float | None]:
    """Return values for a logarithmic axis: None in place of zero, infinity, NaN and None."""
    return [finite(value) or None for value in values]
