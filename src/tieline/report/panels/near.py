"""How many experts stand near the threshold, as a function of how near."""

from collections.abc import Mapping
from typing import Any

from tieline.report.numbers import value_of
from tieline.report.panels.panel import (
    MOST_NAMED,
    Panel,
    axis,
    depth_bar,
    figure,
    layer_colour,
    layer_labels,
)

__all__ = ["near_panel"]

NEAR = Panel(
    "near-threshold",
    "Experts within ε of the threshold",
    "K(ε) is the mean number of experts per token that score above the k-th score minus ε. It "
    "starts at k; its height above k is the price in extra experts of smoothing the choice over a "
    "band of width ε. A diamond marks the ε that costs half an expert.",
)


def near_panel(result: Mapping[str, Any]) -> Panel:
    """K(ε) of every layer, with the ε of k + 1/2 experts."""
    layers = result["measures"]["layers"]
    pairs = zip(layer_labels(result), layers, strict=True)
    known = [(label, layer) for label, layer in pairs if layer["near"]["value"] is not None]
    if not known:
        return NEAR.missing([layer["near"]["status"] for layer in layers])
    data = []
    for place, (label, layer) in enumerate(known):
        colour = layer_colour(place, len(known))
        data += [_curve(label, layer, colour, len(known) <= MOST_NAMED), *_half(layer, colour)]
    layout = {
        "xaxis": axis("ε (units of the selection score)", type="log"),
        "yaxis": axis("experts per token", rangemode="normal"),
    }
    return NEAR.drawn(figure([*data, *depth_bar([n for n, _ in known])], 400, **layout))


def _curve(label: str, layer: Mapping[str, Any], colour: str, named: bool) -> dict[str, Any]:
    near = layer["near"]["value"]
    return {
        "type": "scatter",
        "mode": "lines",
        "name": f"layer {label}",
        "x": near["epsilons"],
        "y": [value_of(count) for count in near["experts"]],
        "line": {"color": colour, "width": 1.75},
        "showlegend": named,
        "hovertemplate": "%{y:.4~g} experts within %{x:.3g}<extra>%{fullData.name}</extra>",
    }


def _half(layer: Mapping[str, Any], colour: str) -> list[dict[str, Any]]:
    epsilon = value_of(layer["near"]["value"]["epsilon_half"])
    if not epsilon:
        return []
    mark = {"symbol": "diamond", "size": 9, "color": colour}
    return [
        {
            "type": "scatter",
            "mode": "markers",
            "x": [epsilon],
            "y": [layer["k"] + 0.5],
            "marker": mark,
            "showlegend": False,
            "hovertemplate": "ε = %{x:.3g} costs half an expert<extra></extra>",
        }
    ]
