"""What flips: by rounding to a number format, and by noise of the logits."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tieline.report.numbers import significant, value_of
from tieline.report.panels.panel import (
    MOST_NAMED,
    Panel,
    axis,
    depth_bar,
    figure,
    layer_colour,
    layer_labels,
    share_axis,
)

__all__ = ["format_flips_panel", "noise_flips_panel"]

FORMATS = Panel(
    "flips-by-format",
    "Tokens that change an expert, by number format",
    "Each dot is a layer: the share of its tokens whose chosen experts change when the router’s "
    "logits are rounded to that format, counted on these tokens. Dashes are the rates predicted "
    "from the gaps alone. Rounding acts on one layer at a time, with clean inputs.",
)
NOISE = Panel(
    "flips-by-noise",
    "Tokens that change an expert, by noise of the logits",
    "If you know how far two of your engines, kernels or checkpoints differ in the router’s logits "
    "(their standard deviation σ), read off how many tokens will choose other experts.",
)
Rate = Callable[[Mapping[str, Any]], Mapping[str, Any]]


def format_flips_panel(result: Mapping[str, Any]) -> Panel:
    """Counted and predicted flip rate of every layer, by format."""
    known = _answered(result, "precision")
    if not known:
        return FORMATS.missing(_statuses(result, "precision"))
    order = sorted(known[0][1], key=lambda row: row["step"] or 0)
    names = [row["precision"].replace("_", " ") for row in order]
    dots, dashes = [], []
    for place, (label, rows) in enumerate(known):
        by_name = {row["precision"]: row for row in rows}
        rows = [by_name[row["precision"]] for row in order if row["precision"] in by_name]
        colour, named = layer_colour(place, len(known)), len(known) <= MOST_NAMED
        dots.append(_series(rows, names, label, colour, named, "flip_emulated", "circle"))
        dashes.append(_series(rows, names, label, colour, False, "flip", "line-ew"))
    layout = {
        "xaxis": axis("number format, fine to coarse", type="category"),
        "yaxis": share_axis("share of tokens"),
    }
    return FORMATS.drawn(figure([*dots, *dashes, *depth_bar([n for n, _ in known])], 400, **layout))


def noise_flips_panel(result: Mapping[str, Any]) -> Panel:
    """Exact flip probability of these tokens against σ, layer by layer."""
    known = _answered(result, "noise")
    if not known:
        return NOISE.missing(_statuses(result, "noise"))
    lines = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": f"layer {label}",
            "x": [row["sigma"] for row in rows],
            "y": [value_of(row["flip"]) or None for row in rows],
            "line": {"color": layer_colour(place, len(known)), "width": 1.75},
            "marker": {"size": 5},
            "showlegend": len(known) <= MOST_NAMED,
            "hovertemplate": "σ = %{x:.3g}: %{y:.3~p} flip<extra>%{fullData.name}</extra>",
        }
        for place, (label, rows) in enumerate(known)
    ]
    layout = {
        "xaxis": axis("σ of the noise (logits)", type="log"),
        "yaxis": share_axis("share of tokens"),
    }
    return NOISE.drawn(figure([*lines, *depth_bar([n for n, _ in known])], 400, **layout))


def _series(
    rows: Sequence[Mapping[str, Any]],
    names: Sequence[str],
    label: str,
    colour: str,
    named: bool,
    field: str,
    symbol: str,
) -> dict[str, Any]:
    """Marks of one layer; rates of zero have no place on a logarithmic axis and are left out."""
    how = "counted" if field == "flip_emulated" else "predicted"
    line = {"color": colour, "width": 2 if how == "predicted" else 0}
    return {
        "type": "scatter",
        "mode": "markers",
        "name": f"layer {label}",
        "legendgroup": label,
        "showlegend": named,
        "x": list(names),
        "y": [value_of(row[field]) or None for row in rows],
        "customdata": [f"step {significant(row['step'])}" for row in rows],
        "marker": {"symbol": symbol, "size": 8 if symbol == "circle" else 14, "color": colour}
        | {"line": line},
        "hovertemplate": f"%{{x}} (%{{customdata}}): %{{y:.3~p}} {how}"
        "<extra>%{fullData.name}</extra>",
    }


def _answered(result: Mapping[str, Any], section: str) -> list[tuple[str, Any]]:
    layers = zip(layer_labels(result), result["measures"]["layers"], strict=True)
    return [(label, layer[section]["value"]) for label, layer in layers if layer[section]["value"]]


def _statuses(result: Mapping[str, Any], section: str) -> list[str]:
    return [layer[section]["status"] for layer in result["measures"]["layers"]]
