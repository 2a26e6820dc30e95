"""The charts of a comparison."""

from collections.abc import Mapping
from typing import Any

from tieline.report.diff_table import diff_labels
from tieline.report.panels.panel import Panel, axis, figure

__all__ = ["draw_diff_panels"]

RATES = Panel(
    "diff-rates",
    "Tokens that choose other experts, layer by layer",
    "Each dot is the share of tokens whose set of experts differs between A and B, with its 95 % "
    "interval. Tokens of one document are alike, and the interval knows it.",
)
CAUSES = Panel(
    "diff-causes",
    "Near-ties, or something else?",
    "Flips inside the tie band are what the noise of the scores explains: the experts that changed "
    "places stood within six times the median difference of the scores. The others are not "
    "explained by the margin; in tokens that had flipped before, that flip may be the cause.",
)
DEPTH = Panel(
    "diff-depth",
    "How the difference grows with depth",
    "The share of tokens that have flipped in this layer or before, beside what it would be if "
    "layers flipped independently of each other.",
)
AFTER = Panel(
    "diff-after",
    "Does a flip bring others?",
    "Flip rate of tokens that have flipped in an earlier layer, and of those that have not. Where "
    "the first is higher, flips compound.",
)
WEIGHT = Panel(
    "diff-weight",
    "Combine weight that goes to other experts",
    "0 % means that both combine the same experts alike, 100 % that no weight stays where it was.",
    wide=True,
)


def draw_diff_panels(result: Mapping[str, Any]) -> list[Panel]:
    """Every chart, or the reason why it cannot be drawn."""
    return [draw(result) for draw in (_rates, _causes, _depth, _after, _weight)]


def _rates(result: Mapping[str, Any]) -> Panel:
    rates = [layer["flip"] for layer in result["layers"]]
    dots = _points(result, "flip rate", rates, "@accent") | {
        "error_y": {
            "type": "data",
            "symmetric": False,
            "array": [r["high"] - r["value"] for r in rates],
            "arrayminus": [r["value"] - r["low"] for r in rates],
            "thickness": 1.5,
            "color": "@accent",
        },
        "showlegend": False,
    }
    return RATES.drawn(figure([dots], 380, **_layout("share of tokens")))


def _causes(result: Mapping[str, Any]) -> Panel:
    causes = [layer["attribution"] for layer in result["layers"]]
    if not any(causes):
        return CAUSES.missing([layer["attribution_status"] for layer in result["layers"]])
    kinds = (
        ("inside the tie band", lambda x: x["inside"], "@accent"),
        (
            "unexplained, after an earlier flip",
            lambda x: x["unexplained"] - x["unexplained_first"],
            "@notice",
        ),
        ("unexplained, first flip of the token", lambda x: x["unexplained_first"], "@warn"),
    )
    labels = diff_labels(result)
    bars = [
        {
            "type": "bar",
            "name": name,
            "x": labels,
            "y": [None if cause is None else count(cause) for cause in causes],
            "marker": {"color": colour},
            "hovertemplate": f"layer %{{x}}: %{{y:,}} flips {name}<extra></extra>",
        }
        for name, count, colour in kinds
    ]
    layout = {"xaxis": _layers(), "yaxis": axis("flips", rangemode="tozero"), "barmode": "stack"}
    return CAUSES.drawn(figure(bars, 400, **layout))


def _depth(result: Mapping[str, Any]) -> Panel:
    steps, labels = result["tokens"]["depth"], diff_labels(result)
    lines = [
        _line(labels, [step["cumulative"] for step in steps], "flipped so far", "@accent"),
        _line(labels, [s["independent"] for s in steps], "if layers were independent", "@muted")
        | {"line": {"color": "@muted", "width": 1.75, "dash": "dash"}},
    ]
    return DEPTH.drawn(figure(lines, 400, **_layout("share of tokens")))


def _after(result: Mapping[str, Any]) -> Panel:
    steps = result["tokens"]["depth"]
    if not any(step["after"]["total"] for step in steps):
        return AFTER.missing(["no token flips before the last layer"])
    dots = [
        _points(result, "without an earlier flip", [step["fresh"] for step in steps], "@accent"),
        _points(result, "after an earlier flip", [step["after"] for step in steps], "@warn")
        | {"marker": {"symbol": "diamond", "size": 9, "color": "@warn"}},
    ]
    return AFTER.drawn(figure(dots, 400, **_layout("flip rate")))


def _weight(result: Mapping[str, Any]) -> Panel:
    layers, labels = result["layers"], diff_labels(result)
    if not any(layer["weight"] for layer in layers):
        return WEIGHT.missing([layer["weight_status"] for layer in layers])
    lines = [
        _line(
            labels,
            [None if layer["weight"] is None else layer["weight"][field] for layer in layers],
            name,
            colour,
        )
        for field, name, colour in (
            ("mean", "mean over tokens", "@accent"),
            ("p99", "99th percentile", "@warn"),
        )
    ]
    return WEIGHT.drawn(figure(lines, 380, **_layout("share of the weight")))


def _points(
    result: Mapping[str, Any], name: str, rates: list[Mapping[str, Any]], colour: str
) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": diff_labels(result),
        "y": [rate["value"] for rate in rates],
        "customdata": [f"{rate['count']:,} of {rate['total']:,}" for rate in rates],
        "marker": {"size": 8, "color": colour},
        "hovertemplate": f"layer %{{x}}: %{{y:.3~p}}, %{{customdata}}, {name}<extra></extra>",
    }


def _line(labels: list[str], values: list[float | None], name: str, colour: str) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": name,
        "x": labels,
        "y": values,
        "line": {"color": colour, "width": 1.75},
        "marker": {"size": 6, "color": colour},
        "hovertemplate": f"layer %{{x}}: %{{y:.3~p}} {name}<extra></extra>",
    }


def _layers() -> dict[str, Any]:
    return axis("layer of A", type="category")


def _layout(title: str) -> dict[str, Any]:
    return {"xaxis": _layers(), "yaxis": axis(title, tickformat=".2~p", rangemode="tozero")}
