"""How the tokens spread over the experts."""

import math
from collections.abc import Mapping
from typing import Any

from tieline.report.panels.panel import Panel, axis, figure, layer_labels

__all__ = ["load_panel"]

LOAD = Panel(
    "load",
    "Load of every expert",
    "Colour is an expert’s load relative to an even one: 1 is its fair share, 2 is twice that. "
    "A cross marks an expert that no token of this text chose.",
    wide=True,
)
FARTHEST = 3.0
"""Loads beyond 2^±3 of an even one share the colours at the ends."""
TICKS = {-3: "⅛ or less", -2: "¼", -1: "½", 0: "1 (even)", 1: "2", 2: "4", 3: "8 or more"}


def load_panel(result: Mapping[str, Any]) -> Panel:
    """Heat map of relative load: layers down, experts across, colour its logarithm to base 2."""
    layers, labels = result["measures"]["layers"], layer_labels(result)
    widest = max(layer["n_experts"] for layer in layers)
    heat = {
        "type": "heatmap",
        "x": list(range(widest)),
        "y": labels,
        "z": [_relative(layer, widest) for layer in layers],
        "hovertemplate": "layer %{y}, expert %{x}: 2<sup>%{z:.2f}</sup> of an even load"
        "<extra></extra>",
        "hoverongaps": False,
        "colorscale": "@scale:load",
        "zmin": -FARTHEST,
        "zmax": FARTHEST,
        "xgap": 1 if widest <= 128 else 0,
        "ygap": 1,
        "colorbar": {
            "title": {"text": "load / even load", "side": "right"},
            "thickness": 12,
            "outlinewidth": 0,
            "tickvals": list(TICKS),
            "ticktext": list(TICKS.values()),
        },
    }
    dead = [(expert, y) for y, layer in zip(labels, layers, strict=True) for expert in _dead(layer)]
    layout = {
        "xaxis": axis("expert", range=[-0.5, widest - 0.5]),
        "yaxis": axis("layer", type="category", autorange="reversed"),
    }
    return LOAD.drawn(figure([heat, _crosses(dead)], max(260, 110 + 20 * len(layers)), **layout))


def _relative(layer: Mapping[str, Any], widest: int) -> list[float | None]:
    shares, experts = layer["load"]["share"], layer["n_experts"]
    # two decimals: the many cells of a large model are most of what a page holds beside its script
    loads = [round(math.log2(share * experts), 2) if share else -FARTHEST for share in shares]
    return [*loads, *[None] * (widest - experts)]


def _dead(layer: Mapping[str, Any]) -> list[int]:
    return layer["load"]["dead"]


def _crosses(dead: list[tuple[int, str]]) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "markers",
        "x": [expert for expert, _ in dead],
        "y": [label for _, label in dead],
        "marker": {"symbol": "x-thin", "size": 8, "line": {"width": 2, "color": "@on-load"}},
        "hoverinfo": "skip",
        "showlegend": False,
    }
