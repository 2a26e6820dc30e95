"""What a flip costs: gap against jump, and jump against loss."""

import math
from collections.abc import Mapping
from typing import Any

from tieline.report.numbers import percent
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

__all__ = ["jump_panel", "loss_panel"]

JUMP = Panel(
    "gap-jump",
    "Which ties matter: gap against jump",
    "Each point is a token whose last chosen expert was swapped with the first one left out. Left "
    "is near a tie, high is a large change of the layer’s output: the upper left corner is where "
    "flips happen and hurt. Filled circles are the tokens nearest to a tie, open squares a random "
    "sample of the others; exact ties stand on the left edge.",
)
LOSS = Panel(
    "jump-loss",
    "What a flip does to the loss",
    "Each point is one swap at a near-tie in one layer: how far the layer’s output moved, and by "
    "how much the loss of the whole sequence changed. Points above zero made the model worse.",
)
NOT_ASKED = "not measured: the option --loss-jumps asks for it"
TOLD = ("gaps", "documents", "positions", "leaving", "entering")
POINT = (
    "gap %{customdata[0]:.3~g}, output moves by %{y:.2~p}<br>expert %{customdata[3]} out, "
    "%{customdata[4]} in<br>document %{customdata[1]}, position %{customdata[2]}"
    "<extra>%{fullData.name}</extra>"
)
MOST_POINTS = 3000
"""Points of all layers together; more make the page slow."""


def jump_panel(result: Mapping[str, Any]) -> Panel:
    """Scatter of gap and jump, by layer, with the line from which a tie counts as dangerous."""
    known = _measured(result)
    if not known:
        return JUMP.missing([jump["status"] for jump in result["jumps"]])
    gaps = [gap for _, jump in known for part in ("near", "random") for gap in jump[part]["gaps"]]
    floor = min((gap for gap in gaps if gap), default=1e-3) / 2
    each = max(1, MOST_POINTS // len(known) // 2)
    data = []
    for place, (label, jump) in enumerate(known):
        colour = layer_colour(place, len(known))
        others = _marks(label, colour, False, "square-open")
        nearest = _marks(label, colour, len(known) <= MOST_NAMED, "circle")
        data.append(others | _points(jump["random"], floor, each))
        data.append(nearest | _points(jump["near"], floor, each))
    limit = known[0][1]["dangerous_above"]
    layout = {
        "xaxis": axis("gap (units of the selection score)", type="log"),
        "yaxis": share_axis("relative change of the layer’s output"),
        "shapes": [_limit(limit)],
        "annotations": [_limit_name(limit)],
    }
    return JUMP.drawn(figure([*data, *depth_bar([n for n, _ in known])], 440, **layout))


def loss_panel(result: Mapping[str, Any]) -> Panel:
    """Scatter of jump and change of the loss, where that was asked for."""
    measured = _measured(result)
    known = [(label, jump["near"]) for label, jump in measured if _has_losses(jump["near"])]
    if not known:
        statuses = [jump["status"] for jump in result["jumps"]]
        return LOSS.missing([NOT_ASKED] if measured else statuses)
    data = [
        {
            **_marks(label, layer_colour(place, len(known)), len(known) <= MOST_NAMED, "circle"),
            "x": near["jumps"],
            "y": near["losses"],
            "hovertemplate": "output moved %{x:.2p}, loss %{y:+.3g} nats"
            "<extra>%{fullData.name}</extra>",
        }
        for place, (label, near) in enumerate(known)
    ]
    layout = {
        "xaxis": axis("relative change of the layer’s output", tickformat=".0%"),
        "yaxis": axis("change of the sequence’s loss (nats)"),
    }
    return LOSS.drawn(figure([*data, *depth_bar([n for n, _ in known])], 400, **layout))


def _measured(result: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    pairs = zip(layer_labels(result), result["jumps"], strict=True)
    return [(label, jump["value"]) for label, jump in pairs if jump["value"] is not None]


def _has_losses(sample: Mapping[str, Any]) -> bool:
    return any(loss is not None for loss in sample["losses"] or ())


def _marks(label: str, colour: str, named: bool, symbol: str) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": f"layer {label}",
        "legendgroup": label,
        "showlegend": named,
        "marker": {"symbol": symbol, "size": 6, "color": colour, "opacity": 0.6},
    }


def _points(sample: Mapping[str, Any], floor: float, most: int) -> dict[str, Any]:
    """Coordinates of at most so many tokens; exact ties at the floor, jumps of zero left out."""
    keep = _spread(len(sample["gaps"]), most)
    return {
        "x": [sample["gaps"][i] or floor for i in keep],
        "y": [sample["jumps"][i] or None for i in keep],
        "customdata": [[sample[name][i] for name in TOLD] for i in keep],
        "hovertemplate": POINT,
    }


def _spread(count: int, most: int) -> list[int]:
    """At most `most` of 0 ... count - 1, evenly spread, so that every range of gaps is shown."""
    step = max(1, math.ceil(count / most))
    return list(range(0, count, step))


def _limit(jump: float) -> dict[str, Any]:
    place = {"x0": 0, "x1": 1, "xref": "paper", "y0": jump, "y1": jump, "yref": "y"}
    return {"type": "line", **place, "line": {"color": "@warn", "width": 1.5, "dash": "dash"}}


def _limit_name(jump: float) -> dict[str, Any]:
    text = f"dangerous from {percent(jump)}"
    place = {"xref": "paper", "xanchor": "right", "yanchor": "bottom", "bgcolor": "@card"}
    return note_at(1.0, math.log10(jump), text, **place) | {"font": {"size": 11, "color": "@warn"}}
