"""The charts of an inspection's page: gaps, flips, jumps, experts near the threshold, load.

Each panel shows numbers of the records as they are, or gives the reason why it cannot.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tieline.analysis.inspection import Inspection, JumpMeasures, JumpSample, OwnNoise
from tieline.core.statistics import Quantiles
from tieline.measure.boundary import GapMeasures, MassProfile
from tieline.measure.measures import LayerMeasures
from tieline.measure.rounding import PrecisionFlips
from tieline.report.charts import (
    MOST_NAMED,
    Panel,
    axis,
    depth_bar,
    figure,
    layer_colour,
    note_at,
    share_axis,
)
from tieline.report.tables import short_names
from tieline.report.words.numbers import finite, percent, significant

Span = tuple[str, float, float]
"""Name of a format, its finest and its coarsest step over the layers."""

QUANTILES = Panel(
    "gap-quantiles",
    "How wide the gaps are, layer by layer",
    "A cell is the gap below which that share of the layer’s tokens lies: how far the last chosen "
    "expert’s score stands above the first one left out. The strongest colours are the tokens "
    "nearest to a tie.",
)
CDF = Panel(
    "gap-cdf",
    "Share of tokens within a given gap",
    "Follow a curve up from a gap: the height is the share of tokens whose choice would change if "
    "the two scores moved towards each other by that much.",
)
WITH_LINES = (
    " Dotted lines mark the spacing of each number format at the threshold, bars its range over "
    "the layers; where a curve is high at a line, that format makes ties."
)
WITHOUT_LINES = (
    " The spacing of number formats is not shown: it is known in units of the logits, and these "
    "routers rank other scores."
)
FORMATS = Panel(
    "flips-by-format",
    "Tokens that change an expert, by number format",
    "Each dot is a layer: the share of its tokens whose experts change when the router’s logits "
    "are rounded to that format, counted on these tokens. Dashes are the rates predicted from the "
    "gaps alone. Rounding acts on one layer at a time, with clean inputs.",
)
NOISE = Panel(
    "flips-by-noise",
    "Tokens that change an expert, by noise of the logits",
    "If you know how far two of your engines, kernels or checkpoints differ in the router’s logits "
    "(their standard deviation σ), read off how many tokens will choose other experts.",
)
JUMP = Panel(
    "gap-jump",
    "Which ties matter: gap against jump",
    "Each point is a token whose last chosen expert was swapped with the first one left out. Left "
    "is near a tie, high is a large change of the layer’s output: flips in the upper left corner "
    "happen and hurt. Filled circles are the tokens nearest to a tie, open squares a random sample "
    "of the others; exact ties stand on the left edge.",
)
LOSS = Panel(
    "jump-loss",
    "What a flip does to the loss",
    "Each point is one swap at a near-tie in one layer: how far the layer’s output moved, and by "
    "how much the loss of the whole sequence changed. Points above zero made the model worse.",
)
NOT_ASKED = "not measured: the option --loss-jumps asks for it"
NEAR = Panel(
    "near-threshold",
    "Experts within ε of the threshold",
    "K(ε) is the mean number of experts per token that score above the k-th score minus ε. It "
    "starts at k; its height above k is the price in extra experts of smoothing the choice over a "
    "band of width ε. A diamond marks the ε that costs half an expert.",
)
ORDERS = Panel(
    "tie-orders",
    "How many experts the noise of {} can mix",
    "A token has tie order n at tolerance ε if n + 1 experts score within ε of the threshold, on "
    "both sides of it. Here ε is the noise of the layer’s own gap when the whole model is rounded. "
    "Order 1 is a plain tie of two experts; higher orders are left to chance among more.",
)
ORDER_COLOURS = ("@accent", "@warn", "@ink")
"""Orders 1, 2, and from 3 on."""
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
MOST_POINTS = 3000
"""Points of all layers together; more make the page slow."""
MOST_CELLS = 24
"""Layers whose cells have room for their numbers."""


@dataclass(frozen=True)
class LayerRow:
    """One layer: its short name, its measures and its jumps where they were measured."""

    label: str
    measures: LayerMeasures
    jumps: JumpMeasures | None

    @property
    def gaps(self) -> GapMeasures | None:
        """Distribution of its gaps, where the trace has scores."""
        return self.measures.gap.value


def layer_rows(result: Inspection) -> list[LayerRow]:
    """Every layer in order of depth."""
    layers = result.measures.layers
    labels = short_names([layer.name for layer in layers])
    parts = zip(labels, layers, result.jumps, strict=True)
    return [LayerRow(label, layer, jumps.value) for label, layer, jumps in parts]


def inspection_panels(result: Inspection) -> list[Panel]:
    """Every chart in the order of reading, or the reason why it cannot be drawn."""
    layers = result.measures.layers
    gaps = [layer.gap.status for layer in layers]
    measured = [jumps.status for jumps in result.jumps]
    drawn = (
        (QUANTILES, _quantiles(result), gaps),
        (CDF, _distribution(result), gaps),
        (FORMATS, _format_flips(result), [layer.precision.status for layer in layers]),
        (NOISE, _noise_flips(result), [layer.noise.status for layer in layers]),
        (JUMP, _jump_points(result), measured),
        (LOSS, _loss_points(result), [NOT_ASKED] if "ok" in measured else measured),
        (NEAR, _near_curves(result), [layer.near.status for layer in layers]),
        (LOAD, _load_map(result), []),
    )
    panels = [p.drawn(made) if made else p.missing(statuses) for p, made, statuses in drawn]
    has_steps = bool(format_steps(layers))
    return [
        replace(p, how=p.how + (WITH_LINES if has_steps else WITHOUT_LINES))
        if p.key == CDF.key
        else p
        for p in [*panels[:-1], orders_panel(result), panels[-1]]
    ]


def orders_panel(result: Inspection) -> Panel:
    """Orders of ties at the model's own noise, or the reason why they cannot be drawn."""
    labels = {row.measures.name: row.label for row in layer_rows(result)}
    layers = [(labels[x.name], x) for x in result.noise.layers if x.name in labels]
    precision = layers[0][1].precision if layers else "rounding"
    panel = replace(ORDERS, title=ORDERS.title.format(precision))
    return panel.drawn(_orders(layers)) if layers else panel.missing([result.noise.status])


def _orders(layers: list[tuple[str, OwnNoise]]) -> dict[str, Any]:
    """Stacked shares of orders 1, 2, ..., by layer."""
    most = max(len(layer.orders) for _, layer in layers)
    bars = []
    for order in range(1, most):
        shares = [layer.orders[order] for _, layer in layers]
        if any(shares):
            bars.append(
                {
                    "type": "bar",
                    "name": f"order {order}" + (" or more" if order == most - 1 else ""),
                    "x": [label for label, _ in layers],
                    "y": shares,
                    "customdata": [significant(layer.epsilon) for _, layer in layers],
                    "marker": {"color": ORDER_COLOURS[min(order, len(ORDER_COLOURS)) - 1]},
                    "hovertemplate": f"layer %{{x}}: %{{y:.2~p}} of tokens have order {order} at "
                    "ε = %{customdata}<extra></extra>",
                }
            )
    layout = {
        "barmode": "stack",
        "xaxis": axis("layer", scale="category"),
        "yaxis": axis("share of tokens", tickformat=".2~p", rangemode="tozero"),
    }
    return figure(bars, 400, **layout)


def format_steps(layers: Iterable[LayerMeasures]) -> list[Span]:
    """Name, least and largest step of each format, where gaps are in units of the logits."""
    steps: dict[str, list[float]] = {}
    for layer in layers:
        rows = (layer.precision.value or ()) if layer.units == "logits" and layer.gap.value else ()
        for row in rows:
            if finite(row.step):
                steps.setdefault(row.precision, []).append(row.step)
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


def log_range(profiles: Iterable[MassProfile], spans: Sequence[Span]) -> tuple[float, float]:
    """Logarithms of the least and the largest gap that the axis must show."""
    seen = [
        gap
        for profile in profiles
        for gap, mass in zip(profile.widths, profile.mass, strict=True)
        if 0 < mass < 1
    ]
    ends = [*seen, *(step for span in spans for step in span[1:])] or [1e-3, 1.0]
    return math.log10(min(ends) / 1.6), math.log10(max(ends) * 1.6)


def units_of(layers: Iterable[LayerMeasures]) -> str:
    """What the gaps of these layers are measured in."""
    units = " or ".join(dict.fromkeys(layer.units for layer in layers))
    return units if "logits" in units else f"{units} score"


def relative_load(layer: LayerMeasures) -> list[float]:
    """log2 of each expert's load over an even one; `-FARTHEST` for experts never chosen.

    Two decimals: in a page of a large model most bytes beside the script are these.
    """
    return [
        round(math.log2(share * layer.n_experts), 2) if share else -FARTHEST
        for share in layer.load.share
    ]


def _quantiles(result: Inspection) -> dict[str, Any] | None:
    """Heat map of gap quantiles: layers down, probabilities across, colour the logarithm."""
    known = [(row.label, row.gaps.quantiles) for row in layer_rows(result) if row.gaps]
    if not known:
        return None
    values = [[finite(value) for value in quantiles.value] for _, quantiles in known]
    floor = min((math.log10(v) for row in values for v in row if v), default=0.0) - 0.5
    logs = [[None if v is None else math.log10(v) if v > 0 else floor for v in r] for r in values]
    few = len(known) <= MOST_CELLS
    heat = {
        "type": "heatmap",
        "x": [f"{100 * p:g} %" for p in known[0][1].probabilities],
        "y": [label for label, _ in known],
        "z": logs,
        "customdata": [_intervals(quantiles) for _, quantiles in known],
        "text": [[significant(value, 2) for value in row] for row in values] if few else None,
        "texttemplate": "%{text}" if few else None,
        "textfont": {"size": 10},
        "hovertemplate": "layer %{y}<br>%{x} of tokens have a gap below %{customdata}"
        "<extra></extra>",
        "colorscale": "@scale:gap",
        "xgap": 1,
        "ygap": 1 if few else 0,
        "colorbar": _decades(logs, f"gap ({units_of(result.measures.layers)})"),
    }
    layout = {
        "xaxis": axis("share of tokens with a smaller gap", scale="category"),
        "yaxis": axis("layer", scale="category", autorange="reversed"),
    }
    return figure([heat], max(430, 110 + 20 * len(known)), **layout)


def _intervals(quantiles: Quantiles) -> list[str]:
    rows = zip(quantiles.value, quantiles.low, quantiles.high, strict=True)
    return [f"{significant(v)} ({significant(a)} to {significant(b)})" for v, a, b in rows]


def _decades(rows: Sequence[Sequence[float | None]], title: str) -> dict[str, Any]:
    known = [value for row in rows for value in row if value is not None] or [0.0]
    ticks = list(range(math.floor(min(known)), math.ceil(max(known)) + 1))
    text = [f"10<sup>{tick}</sup>" if tick else "1" for tick in ticks]
    where = {"title": {"text": title, "side": "right"}, "thickness": 12, "outlinewidth": 0}
    return {**where, "tickvals": ticks, "ticktext": text}


def _distribution(result: Inspection) -> dict[str, Any] | None:
    """BM_top of every layer on logarithmic axes, with the step of each format."""
    rows = [row for row in layer_rows(result) if row.gaps]
    profiles = [row.gaps.profile for row in rows if row.gaps]
    if not rows:
        return None
    said = "gap up to %{x:.3g}: %{y:.3~p} of tokens"
    lines = [
        _curve(row.label, (place, len(rows)), p.widths, _logarithmic(p.mass), said)
        for place, (row, p) in enumerate(zip(rows, profiles, strict=True))
    ]
    pooled = result.measures.model.gap.value
    if pooled is not None and len(rows) > 1:
        whole = _curve(
            "all", (0, 1), pooled.profile.widths, _logarithmic(pooled.profile.mass), said
        )
        lines.append(whole | {"name": "all", "line": {"color": "@ink", "width": 3, "dash": "dot"}})
    spans = format_steps(row.measures for row in rows)
    low, high = log_range(profiles, spans)
    least = 0.5 / max(row.measures.tokens for row in rows)
    layout = {
        "xaxis": axis(
            f"gap ({units_of(r.measures for r in rows)})", scale="log", range=[low, high]
        ),
        "yaxis": share_axis("share of tokens") | {"range": [math.log10(least), 0.05]},
        "shapes": [shape for _, *ends in spans for shape in _span(*ends)],
        "annotations": [_span_name(*name) for name in format_names(spans, low, high)],
    }
    return figure([*lines, *depth_bar([row.label for row in rows])], 460, **layout)


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


def _format_flips(result: Inspection) -> dict[str, Any] | None:
    """Counted and predicted flip rate of every layer, by format."""
    rows = layer_rows(result)
    known = [(r.label, r.measures.precision.value) for r in rows if r.measures.precision.value]
    if not known:
        return None
    order = [row.precision for row in sorted(known[0][1], key=lambda row: finite(row.step) or 0)]
    dots, dashes = [], []
    for place, (label, found) in enumerate(known):
        by_name = {row.precision: row for row in found}
        chosen = [by_name[name] for name in order if name in by_name]
        marks, colour = _marks(label, (place, len(known))), layer_colour(place, len(known))
        dash = {"symbol": "line-ew", "size": 14, "color": colour}
        dash |= {"line": {"color": colour, "width": 2}}
        counted = _rates(chosen, (row.flip_emulated.value for row in chosen), "counted")
        predicted = _rates(chosen, (row.flip.value for row in chosen), "predicted")
        dots.append(marks | counted)
        dashes.append(marks | predicted | {"marker": dash, "showlegend": False})
    layout = {
        "xaxis": axis("number format, fine to coarse", scale="category"),
        "yaxis": share_axis("share of tokens"),
    }
    return figure([*dots, *dashes, *depth_bar([label for label, _ in known])], 400, **layout)


def _rates(
    rows: Sequence[PrecisionFlips], values: Iterable[float | None], how: str
) -> dict[str, Any]:
    return {
        "x": [row.precision.replace("_", " ") for row in rows],
        "y": _logarithmic(values),
        "customdata": [f"step {significant(row.step)}" for row in rows],
        "hovertemplate": f"%{{x}} (%{{customdata}}): %{{y:.3~p}} {how}"
        "<extra>%{fullData.name}</extra>",
    }


def _noise_flips(result: Inspection) -> dict[str, Any] | None:
    """Exact flip probability of these tokens against σ, layer by layer."""
    rows = [(r.label, r.measures.noise.value) for r in layer_rows(result)]
    known = [(label, found) for label, found in rows if found]
    if not known:
        return None
    dotted = {"mode": "lines+markers", "marker": {"size": 5}}
    said = "σ = %{x:.3g}: %{y:.3~p} flip"
    lines = []
    for place, (label, found) in enumerate(known):
        sigmas, rates = [row.sigma for row in found], _logarithmic(row.flip.value for row in found)
        lines.append(_curve(label, (place, len(known)), sigmas, rates, said) | dotted)
    layout = {
        "xaxis": axis("σ of the noise (logits)", scale="log"),
        "yaxis": share_axis("share of tokens"),
    }
    return figure([*lines, *depth_bar([label for label, _ in known])], 400, **layout)


def _jump_points(result: Inspection) -> dict[str, Any] | None:
    """Scatter of gap and jump, by layer, with the line from which a tie counts as dangerous."""
    known = [(row.label, row.jumps) for row in layer_rows(result) if row.jumps]
    if not known:
        return None
    gaps = [g for _, jumps in known for part in (jumps.near, jumps.random) for g in part.gaps]
    floor = min((gap for gap in gaps if gap), default=1e-3) / 2
    most = max(1, MOST_POINTS // len(known) // 2)
    data = []
    for place, (label, jumps) in enumerate(known):
        depth = (place, len(known))
        others = _marks(label, depth, "square-open", 6) | {"showlegend": False}
        data.append(others | _points(jumps.random, floor, most))
        data.append(_marks(label, depth, "circle", 6) | _points(jumps.near, floor, most))
    layout = _limit(known[0][1].dangerous_above) | {
        "xaxis": axis("gap (units of the selection score)", scale="log"),
        "yaxis": share_axis("relative change of the layer’s output"),
    }
    return figure([*data, *depth_bar([label for label, _ in known])], 440, **layout)


def _points(sample: JumpSample, floor: float, most: int) -> dict[str, Any]:
    """At most so many tokens, evenly spread; exact ties at the floor, jumps of zero left out."""
    facts = (sample.gaps, sample.documents, sample.positions, sample.leaving, sample.entering)
    step = max(1, math.ceil(len(sample.gaps) / most))
    return {
        "x": [gap or floor for gap in sample.gaps[::step]],
        "y": _logarithmic(sample.jumps[::step]),
        "customdata": [list(told) for told in zip(*facts, strict=True)][::step],
        "hovertemplate": "gap %{customdata[0]:.3~g}, output moves by %{y:.2~p}<br>expert "
        "%{customdata[3]} out, %{customdata[4]} in<br>document %{customdata[1]}, position "
        "%{customdata[2]}<extra>%{fullData.name}</extra>",
    }


def _limit(jump: float) -> dict[str, Any]:
    """A line where jumps begin to be dangerous, and its name."""
    place = {"x0": 0, "x1": 1, "xref": "paper", "y0": jump, "y1": jump, "yref": "y"}
    line = {"type": "line", **place, "line": {"color": "@warn", "width": 1.5, "dash": "dash"}}
    where = {"xref": "paper", "xanchor": "right", "yanchor": "bottom", "bgcolor": "@card"}
    font = {"font": {"size": 11, "color": "@warn"}}
    name = note_at(1.0, math.log10(jump), f"dangerous from {percent(jump)}", **where) | font
    return {"shapes": [line], "annotations": [name]}


def _loss_points(result: Inspection) -> dict[str, Any] | None:
    """Scatter of jump and change of the loss, where that was asked for."""
    samples = [(row.label, row.jumps.near) for row in layer_rows(result) if row.jumps]
    known = [(n, near) for n, near in samples if any(x is not None for x in near.losses or ())]
    if not known:
        return None
    data = [
        _marks(label, (place, len(known)), "circle", 6)
        | {"x": list(near.jumps), "y": list(near.losses or ())}
        | {
            "hovertemplate": "output moved %{x:.2p}, loss %{y:+.3g} nats"
            "<extra>%{fullData.name}</extra>"
        }
        for place, (label, near) in enumerate(known)
    ]
    layout = {
        "xaxis": axis("relative change of the layer’s output", tickformat=".0%"),
        "yaxis": axis("change of the sequence’s loss (nats)"),
    }
    return figure([*data, *depth_bar([label for label, _ in known])], 400, **layout)


def _near_curves(result: Inspection) -> dict[str, Any] | None:
    """K(ε) of every layer, with the ε of k + 1/2 experts."""
    known = [(r, r.measures.near.value) for r in layer_rows(result) if r.measures.near.value]
    if not known:
        return None
    data = []
    for place, (row, near) in enumerate(known):
        experts = [finite(count.value) for count in near.experts]
        said = "%{y:.4~g} experts within %{x:.3g}"
        data.append(_curve(row.label, (place, len(known)), near.epsilons, experts, said))
        half = finite(near.epsilon_half.value)
        if half:
            data.append(_half_mark(half, row.measures.k, layer_colour(place, len(known))))
    layout = {
        "xaxis": axis("ε (units of the selection score)", scale="log"),
        "yaxis": axis("experts per token", rangemode="normal"),
    }
    return figure([*data, *depth_bar([row.label for row, _ in known])], 400, **layout)


def _half_mark(epsilon: float, k: int, colour: str) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "markers",
        "x": [epsilon],
        "y": [k + 0.5],
        "marker": {"symbol": "diamond", "size": 9, "color": colour},
        "showlegend": False,
        "hovertemplate": "ε = %{x:.3g} costs half an expert<extra></extra>",
    }


def _load_map(result: Inspection) -> dict[str, Any]:
    """Heat map of relative load: layers down, experts across, colour its logarithm to base 2."""
    rows = layer_rows(result)
    widest = max(row.measures.n_experts for row in rows)
    loads = [relative_load(row.measures) for row in rows]
    heat = {
        "type": "heatmap",
        "x": list(range(widest)),
        "y": [row.label for row in rows],
        "z": [[*load, *[None] * (widest - len(load))] for load in loads],
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
    layout = {
        "xaxis": axis("expert", range=[-0.5, widest - 0.5]),
        "yaxis": axis("layer", scale="category", autorange="reversed"),
    }
    return figure([heat, _crosses(rows)], max(260, 110 + 20 * len(rows)), **layout)


def _crosses(rows: Sequence[LayerRow]) -> dict[str, Any]:
    dead = [(expert, row.label) for row in rows for expert in row.measures.load.dead]
    return {
        "type": "scatter",
        "mode": "markers",
        "x": [expert for expert, _ in dead],
        "y": [label for _, label in dead],
        "marker": {"symbol": "x-thin", "size": 8, "line": {"width": 2, "color": "@on-load"}},
        "hoverinfo": "skip",
        "showlegend": False,
    }


def _curve(
    label: str, depth: tuple[int, int], x: Sequence[float], y: Sequence[float | None], said: str
) -> dict[str, Any]:
    """The line of one layer; `depth` is its place among how many."""
    return {
        "type": "scatter",
        "mode": "lines",
        "name": f"layer {label}",
        "x": list(x),
        "y": list(y),
        "line": {"color": layer_colour(*depth), "width": 1.75},
        "showlegend": depth[1] <= MOST_NAMED,
        "hovertemplate": f"{said}<extra>%{{fullData.name}}</extra>",
    }


def _marks(
    label: str, depth: tuple[int, int], symbol: str = "circle", size: int = 8
) -> dict[str, Any]:
    """The style of one layer's points; `depth` is its place among how many."""
    marker = {"symbol": symbol, "size": size, "color": layer_colour(*depth)}
    return {
        "type": "scatter",
        "mode": "markers",
        "name": f"layer {label}",
        "legendgroup": label,
        "showlegend": depth[1] <= MOST_NAMED,
        "marker": marker | ({"opacity": 0.6} if size < 8 else {}),
    }


def _logarithmic(values: Iterable[float | None]) -> list[float | None]:
    """Values for a logarithmic axis, on which zero has no place."""
    return [finite(value) or None for value in values]
