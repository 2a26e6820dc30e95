"""The charts of an audit: flips beside their prediction, KL beside its floor, damage by layer."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tieline.report.numbers import short_names, value_of
from tieline.report.panels.panel import (
    MOST_NAMED,
    Panel,
    axis,
    depth_bar,
    figure,
    layer_colour,
    share_axis,
)

__all__ = ["audit_panels"]

FLIPS = Panel(
    "audit-flips",
    "Tokens that change experts",
    "Filled dots: every router perturbed by itself, on inputs of the clean run. Dashes: the same, "
    "predicted from the clean scores alone. Open diamonds: full runs, where a flip in one layer "
    "disturbs the next. Bars are two standard errors, clustered by sequence.",
    wide=True,
)
KL = Panel(
    "audit-kl",
    "Damage to the predictions",
    "Dots: KL to the clean run per token, with two standard errors. Dashes: its floor, the KL that "
    "remains when tokens that would flip get the experts of the clean run. The space between is "
    "what flips cost.",
    wide=True,
)
LAYERS = Panel(
    "audit-layers",
    "Where rounded routers do their damage",
    "Mean relative change of each layer’s output by flips of its own router, inputs clean. Layers "
    "at the top are the first to keep in float32.",
    wide=True,
)
Value = Callable[[Mapping[str, Any]], float | None]


def audit_panels(result: Mapping[str, Any]) -> list[Panel]:
    """Every chart of the page."""
    return [_flips_panel(result), _kl_panel(result), _layers_panel(result)]


def _flips_panel(result: Mapping[str, Any]) -> Panel:
    rows = result["effects"]
    marks = [
        _marks(rows, "local, counted", lambda row: value_of(row["local"]), "local"),
        _marks(rows, "local, predicted", lambda row: row["predicted"], None, "line-ew", "@ink"),
        _marks(
            rows, "full run", lambda row: value_of(row["full"]), "full", "diamond-open", "@warn"
        ),
    ]
    return FLIPS.drawn(_by_row(marks, share_axis("share of tokens, mean over layers")))


def _kl_panel(result: Mapping[str, Any]) -> Panel:
    rows = result["effects"]
    marks = [
        _marks(rows, "KL", lambda row: value_of(row["kl"]), "kl", "circle", "@warn"),
        _marks(rows, "floor", lambda row: value_of(row["kl_floor"]), None, "line-ew", "@ink"),
    ]
    return KL.drawn(_by_row(marks, axis("nats per token", type="log")))


def _layers_panel(result: Mapping[str, Any]) -> Panel:
    rows = [row for row in result["effects"] if row["keep"] is not None]
    if not rows:
        return LAYERS.missing(["no rounding of the routers was run"])
    labels, marks = short_names(result["layers"]), []
    for place, label in enumerate(labels):
        marks.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": f"layer {label}",
                "x": [str(row["level"]) for row in rows],
                "y": [value_of(row["layers"][place]["damage"]) or None for row in rows],
                "marker": {"size": 9, "color": layer_colour(place, len(labels))},
                "showlegend": len(labels) <= MOST_NAMED,
                "hovertemplate": "%{x}: %{y:.3~p}<extra>%{fullData.name}</extra>",
            }
        )
    layout = {
        "xaxis": axis("format of the routers", type="category"),
        "yaxis": share_axis("change of the layer’s output"),
    }
    return LAYERS.drawn(figure([*marks, *depth_bar(labels)], 400, **layout))


def _marks(
    rows: Sequence[Mapping[str, Any]],
    name: str,
    value: Value,
    errors: str | None,
    symbol: str = "circle",
    colour: str = "@accent",
) -> dict[str, Any]:
    """One mark per row; numbers of zero have no place on a logarithmic axis and are left out."""
    dash = symbol == "line-ew"
    drawn: dict[str, Any] = {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": [row["name"] for row in rows],
        "y": [value(row) or None for row in rows],
        "marker": {
            "symbol": symbol,
            "size": 16 if dash else 9,
            "color": colour,
            "line": {"color": colour, "width": 2},
        },
        "hovertemplate": f"%{{x}}: %{{y:.3~g}} {name}<extra></extra>",
    }
    if errors is not None:
        spread = [2 * (row[errors]["standard_error"] or 0.0) for row in rows]
        drawn["error_y"] = {"type": "data", "array": spread, "color": colour, "width": 3}
    return drawn


def _by_row(marks: list[dict[str, Any]], y: dict[str, Any]) -> dict[str, Any]:
    x = axis("", type="category", tickangle=-40)
    margin = {"t": 12, "r": 16, "b": 150, "l": 70}
    return figure(marks, 520, xaxis=x, yaxis=y, margin=margin)
