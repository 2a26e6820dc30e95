"""What all charts of pages share: the record of a panel, axes, and how layers are told apart.

A figure is a Plotly figure as plain JSON. Its colours are roles, such as "@ink" or "@ramp:0.25",
which the page replaces by those of the light or the dark scheme. Every ramp has one meaning:

    @ramp, @scale:ramp    depth: lightness grows with the layer, readable with any colour vision
    @scale:gap            nearness to a tie, as in the text: the stronger, the nearer
    @scale:load           load of an expert: blue below an even one, red above
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

MOST_NAMED = 10
"""Largest number of layers that a legend names one by one; a bar of colours tells more."""


@dataclass(frozen=True)
class Panel:
    """A chart with the sentence that says how to read it.

    Attributes:
        key: name of the panel in the page.
        title: heading.
        how: how to read it.
        figure: Plotly figure, as JSON values; None if there is nothing to draw.
        reason: why not.
        wide: whether it takes the whole width of the page.
    """

    key: str
    title: str
    how: str
    figure: dict[str, Any] | None = None
    reason: str = ""
    wide: bool = False

    def drawn(self, drawing: dict[str, Any]) -> "Panel":
        """The panel with this chart."""
        return replace(self, figure=drawing)

    def missing(self, statuses: Sequence[str]) -> "Panel":
        """The panel without a chart, with each reason of the sections that it needs once."""
        return replace(self, reason="; ".join(dict.fromkeys(s for s in statuses if s != "ok")))


def unmeasured(panels: Sequence[Panel]) -> str:
    """One line that names the panels without a chart and why; empty if all have one."""
    titles: dict[str, list[str]] = {}
    for panel in panels:
        if panel.figure is None:
            titles.setdefault(panel.reason or "no data", []).append(f"“{panel.title}”")
    return "; ".join(f"{', '.join(named)} ({reason})" for reason, named in titles.items())


def layer_colour(place: int, count: int) -> str:
    """Role of the colour of a layer, by its depth."""
    return f"@ramp:{place / (count - 1) if count > 1 else 0.5:.3f}"


def axis(title: str, scale: str = "-", **options: Any) -> dict[str, Any]:
    """An axis with its title; "log" gets ticks at powers of ten, "-" is the scale of the data."""
    log = {"dtick": 1, "exponentformat": "power", "tickangle": 0}
    extra = log if scale == "log" else {}
    words = {"text": title, "standoff": 12}
    return {"title": words, "automargin": True, "type": scale, **extra, **options}


def share_axis(title: str) -> dict[str, Any]:
    """A logarithmic axis of percentages up to 5000 %, ticks at 1, 2 and 5 of every decade."""
    ticks = [digit * 10.0**power for power in range(-8, 2) for digit in (1, 2, 5)]
    text = [f"{100 * tick:g} %" for tick in ticks]
    return axis(title, scale="log", tickvals=ticks, ticktext=text, dtick=None)


def figure(data: list[dict[str, Any]], height: int = 380, **layout: Any) -> dict[str, Any]:
    """A figure of that height in pixels."""
    legend = {"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom", "x": 0}
    return {"data": data, "layout": {"height": height, "legend": legend, **layout}}


def depth_bar(labels: Sequence[str]) -> list[dict[str, Any]]:
    """A trace without points that shows which colour is which depth, for many layers."""
    last = len(labels) - 1
    if last < MOST_NAMED:
        return []
    places = (0, last // 2, last)
    bar = {
        "title": {"text": "layer", "side": "right"},
        "thickness": 10,
        "outlinewidth": 0,
        "tickvals": list(places),
        "ticktext": [labels[place] for place in places],
    }
    colours = {"color": [0], "cmin": 0, "cmax": last, "colorscale": "@scale:ramp"}
    empty = {"type": "scatter", "x": [None], "y": [None], "mode": "markers", "hoverinfo": "skip"}
    return [
        empty | {"marker": {**colours, "showscale": True, "colorbar": bar}, "showlegend": False}
    ]


def note_at(x: float, y: float, text: str, **options: Any) -> dict[str, Any]:
    """Small text at a point, in the axes' coordinates (logarithms on logarithmic axes)."""
    font = {"size": 11, "color": "@muted"}
    return {"x": x, "y": y, "text": text, "showarrow": False, "font": font, **options}
