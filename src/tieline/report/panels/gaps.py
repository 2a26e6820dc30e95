"""Where the gaps are: quantiles by layer, and the distribution against the steps of formats."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tieline.report.numbers import significant
from tieline.report.panels.panel import (
    MOST_NAMED,
    Panel,
    axis,
    depth_bar,
    figure,
    layer_colour,
    layer_labels,
    note_at,
    share_axis,
)

__all__ = [
    "format_names",
    "format_steps",
    "gap_cdf_panel",
    "gap_quantiles_panel",
    "log_range",
    "units_of",
]

Span = tuple[str, float, float]

QUANTILES = Panel(
    "gap-quantiles",
    "How wide the gaps are, layer by layer",
    "A cell is the gap below which that share of the layer’s tokens lies: the gap is how far the "
    "last chosen expert’s score stands above the first one left out. The strongest colours are the "
    "tokens nearest to a tie.",
)
CDF = Panel(
    "gap-cdf",
    "Share of tokens within a given gap",
    "Follow a curve up from a gap width: the height is the share of tokens whose choice would "
    "change if the two scores moved towards each other by that much.",
)
WITH_LINES = (
    " Dotted lines mark the spacing of each number format at the threshold, bars its range over "
    "the layers; where a curve is high at a line, that format makes ties."
)
WITHOUT_LINES = (
    " The spacing of number formats is not shown: it is known in units of the logits, and these "
    "routers rank other scores."
)
CELL = "layer %{y}<br>%{x} of tokens have a gap below %{customdata}<extra></extra>"


def gap_quantiles_panel(result: Mapping[str, Any]) -> Panel:
    """Heat map of gap quantiles: layers down, probabilities across, colour the logarithm."""
    layers, labels = result["measures"]["layers"], layer_labels(result)
    known = [(n, layer["gap"]["value"]["quantiles"]) for n, layer in _with_gaps(layers, labels)]
    if not known:
        return QUANTILES.missing([layer["gap"]["status"] for layer in layers])
    values = [quantiles["value"] for _, quantiles in known]
    floor = min((math.log10(v) for row in values for v in row if v), default=0.0) - 0.5
    logs = [[_log10(value, floor) for value in row] for row in values]
    ranges = [
        [f"{significant(v)} ({significant(a)} to {significant(b)})" for v, a, b in _rows(q)]
        for _, q in known
    ]
    few = len(known) <= 24
    heat = {
        "type": "heatmap",
        "x": [f"{100 * p:g} %" for p in known[0][1]["probabilities"]],
        "y": [name for name, _ in known],
        "z": logs,
        "customdata": ranges,
        "text": [[significant(value, 2) for value in row] for row in values] if few else None,
        "texttemplate": "%{text}" if few else None,
        "textfont": {"size": 10},
        "hovertemplate": CELL,
        "colorscale": "@scale:gap",
        "xgap": 1,
        "ygap": 1 if few else 0,
        "colorbar": _decades(logs, f"gap ({units_of(layers)})"),
    }
    layout = {
        "xaxis": axis("share of tokens with a smaller gap", type="category"),
        "yaxis": axis("layer", type="category", autorange="reversed"),
    }
    return QUANTILES.drawn(figure([heat], max(430, 110 + 20 * len(known)), **layout))


def gap_cdf_panel(result: Mapping[str, Any]) -> Panel:
    """BM_top of every layer on logarithmic axes, with the step of each format."""
    layers, labels = result["measures"]["layers"], layer_labels(result)
    known = _with_gaps(layers, labels)
    if not known:
        return CDF.missing([layer["gap"]["status"] for layer in layers])
    lines = [
        _curve(layer["gap"]["value"]["profile"], name, layer_colour(place, len(known)), len(known))
        for place, (name, layer) in enumerate(known)
    ]
    pooled = result["measures"]["model"]["gap"]["value"]
    if pooled is not None and len(known) > 1:
        lines += [{**_curve(pooled["profile"], "all", "@ink", 1), "line": _thick("@ink")}]
    spans = format_steps([layer for _, layer in known])
    low, high = log_range([layer["gap"]["value"]["profile"] for _, layer in known], spans)
    least = 0.5 / max(layer["tokens"] for _, layer in known)
    layout = {
        "xaxis": axis(f"gap ({units_of(layers)})", type="log", range=[low, high]),
        "yaxis": share_axis("share of tokens") | {"range": [math.log10(least), 0.05]},
        "shapes": [shape for span in spans for shape in _span(*span[1:])],
        "annotations": [_span_name(*name) for name in format_names(spans, low, high)],
    }
    data = [*lines, *depth_bar([name for name, _ in known])]
    how = CDF.how + (WITH_LINES if spans else WITHOUT_LINES)
    return replace(CDF, how=how).drawn(figure(data, 460, **layout))


def format_steps(layers: Sequence[Mapping[str, Any]]) -> list[Span]:
    """Name, least and largest step of each format, where gaps are in units of the logits."""
    steps: dict[str, list[float]] = {}
    for layer in layers:
        rows = layer["precision"]["value"] if layer["units"] == "logits" else None
        for row in rows or []:
            if row["step"]:
                steps.setdefault(row["precision"], []).append(row["step"])
    return [(name, min(found), max(found)) for name, found in steps.items()]


def format_names(spans: Sequence[Span], low: float, high: float) -> list[tuple[str, float, float]]:
    """Name, logarithm of the place and height of each format's label; close ones are stacked."""
    names, last, lift = [], -math.inf, 0.0
    for name, first, end in sorted(spans, key=lambda span: span[1] * span[2]):
        place = math.log10(first * end) / 2
        lift = (lift + 0.2) % 0.6 if place - last < (high - low) / 20 else 0.0
        last = place
        names.append((name.replace("_", " "), place, lift))
    return names


def log_range(profiles: Sequence[Mapping[str, Any]], spans: Sequence[Span]) -> tuple[float, float]:
    """Logarithms of the least and the largest gap that the axis must show."""
    seen = [
        width
        for profile in profiles
        for width, mass in zip(profile["widths"], profile["mass"], strict=True)
        if 0 < mass < 1
    ]
    ends = [*seen, *(step for span in spans for step in span[1:])] or [1e-3, 1.0]
    return math.log10(min(ends) / 1.6), math.log10(max(ends) * 1.6)


def _curve(profile: Mapping[str, Any], name: str, colour: str, layers: int) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name if name == "all" else f"layer {name}",
        "x": profile["widths"],
        "y": [mass or None for mass in profile["mass"]],
        "line": {"color": colour, "width": 1.75},
        "showlegend": layers <= MOST_NAMED,
        "hovertemplate": "gap up to %{x:.3g}: %{y:.3~p} of tokens<extra>%{fullData.name}</extra>",
    }


def _thick(colour: str) -> dict[str, Any]:
    return {"color": colour, "width": 3, "dash": "dot"}


def _span(low: float, high: float) -> list[dict[str, Any]]:
    """A pale bar from the finest layer to the coarsest, and a line in its middle."""
    middle = math.sqrt(low * high)
    place = {"xref": "x", "y0": 0, "y1": 1, "yref": "paper", "layer": "below"}
    line = {"color": "@muted", "width": 1, "dash": "dot"}
    bar = {"type": "rect", "x0": low, "x1": high, "fillcolor": "@band", "line": {"width": 0}}
    return [place | bar, place | {"type": "line", "x0": middle, "x1": middle, "line": line}]


def _span_name(name: str, place: float, lift: float) -> dict[str, Any]:
    style = {"yref": "paper", "textangle": -90, "xanchor": "right", "yanchor": "bottom"}
    return note_at(place, 0.02 + lift, name, **style)


def _decades(rows: Sequence[Sequence[float | None]], title: str) -> dict[str, Any]:
    known = [value for row in rows for value in row if value is not None] or [0.0]
    ticks = list(range(math.floor(min(known)), math.ceil(max(known)) + 1))
    text = [f"10<sup>{tick}</sup>" if tick else "1" for tick in ticks]
    where = {"title": {"text": title, "side": "right"}, "thickness": 12, "outlinewidth": 0}
    return {**where, "tickvals": ticks, "ticktext": text}


def _with_gaps(
    layers: Sequence[Mapping[str, Any]], labels: Sequence[str]
) -> list[tuple[str, Mapping[str, Any]]]:
    both = zip(labels, layers, strict=True)
    return [(name, layer) for name, layer in both if layer["gap"]["value"] is not None]


def _rows(quantiles: Mapping[str, Any]) -> zip:
    return zip(quantiles["value"], quantiles["low"], quantiles["high"], strict=True)


def units_of(layers: Sequence[Mapping[str, Any]]) -> str:
    """What the gaps of these layers are measured in."""
    units = " or ".join(dict.fromkeys(layer["units"] for layer in layers))
    return units if "logits" in units else f"{units} score"


def _log10(value: float | None, floor: float) -> float | None:
    """Logarithm for the colour; exact ties get the strongest one."""
    if value is None:
        return None
    return math.log10(value) if value > 0 else floor
