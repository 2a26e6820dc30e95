"""The figures of an inspection, by matplotlib: for papers, slides and notebooks.

routing   distribution of the gap beside experts near the threshold, for papers
gaps      distribution of the gap per layer, with the step of each number format
near      experts within ε of the threshold, per layer
flips     share of tokens that change an expert, by number format
jumps     gap against jump at near-ties
load      load of every expert
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from tieline.analysis.inspection import Inspection
from tieline.core.errors import TraceError, require
from tieline.report.drawing import (
    INK,
    LOAD,
    WARN,
    canvas,
    layer_colours,
    name_layers,
    percent_axis,
    small_canvas,
)
from tieline.report.inspection_charts import (
    FARTHEST,
    TICKS,
    LayerRow,
    format_names,
    format_steps,
    layer_rows,
    log_range,
    relative_load,
    units_of,
)
from tieline.report.words.numbers import finite, percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def inspection_figures(result: Inspection) -> "dict[str, Callable[[], Figure]]":
    """Every figure by name; one that the result cannot give raises `TraceError` when drawn."""
    return {
        "routing": lambda: canvas(partial(_draw_routing, result), columns=2),
        "gaps": lambda: small_canvas(partial(_draw_gaps, _known_gaps(result))),
        "near": lambda: small_canvas(partial(_draw_near, _known_gaps(result))),
        "flips": lambda: small_canvas(partial(_draw_flips, result)),
        "jumps": lambda: small_canvas(partial(_draw_jumps, result)),
        "load": lambda: canvas(
            partial(_draw_load, result), height=min(9.0, 1.2 + 0.2 * len(result.measures.layers))
        ),
    }


def _known_gaps(result: Inspection) -> list[LayerRow]:
    rows = layer_rows(result)
    known = [row for row in rows if row.gaps]
    status = rows[0].measures.gap.status
    require(bool(known), f"no figure without gaps: {status}", TraceError)
    return known


def _draw_routing(result: Inspection, left: "Axes", right: "Axes") -> None:
    known = _known_gaps(result)
    _draw_gaps(known, left, named=False)
    _draw_near(known, right)


def _draw_gaps(known: Sequence[LayerRow], axes: "Axes", named: bool = True) -> None:
    layers = [row.measures for row in known]
    profiles = [row.gaps.profile for row in known if row.gaps]
    spans = format_steps(layers)
    low, high = log_range(profiles, spans)
    for name, place, lift in format_names(spans, low, high):
        axes.axvline(10**place, color="0.6", linewidth=0.6, linestyle=":")
        style = {"rotation": 90, "fontsize": 5.5, "ha": "right", "va": "bottom", "color": "0.3"}
        where = ("data", "axes fraction")
        axes.annotate(name, (10**place, 0.03 + lift), xycoords=where, **style)
    for row, profile, colour in zip(known, profiles, layer_colours(len(known)), strict=True):
        mass = [share or math.nan for share in profile.mass]
        axes.plot(profile.widths, mass, color=colour, label=f"layer {row.label}")
    least = 0.5 / max(layer.tokens for layer in layers)
    axes.set(xscale="log", yscale="log", xlim=(10**low, 10**high), ylim=(least, 1.2))
    axes.set(xlabel=f"gap ({units_of(layers)})", ylabel="share of tokens with a smaller gap")
    if named:
        name_layers(axes, [row.label for row in known])


def _draw_near(known: Sequence[LayerRow], axes: "Axes") -> None:
    for row, colour in zip(known, layer_colours(len(known)), strict=True):
        near = row.measures.near.value
        if near is not None:
            counts = [count.value or math.nan for count in near.experts]
            axes.plot(near.epsilons, counts, color=colour, label=f"layer {row.label}")
    axes.set(xscale="log", xlabel="ε", ylabel="experts within ε of the threshold")
    name_layers(axes, [row.label for row in known])


def _draw_flips(result: Inspection, axes: "Axes") -> None:
    rows = layer_rows(result)
    known = [(r.label, r.measures.precision.value) for r in rows if r.measures.precision.value]
    status = rows[0].measures.precision.status
    require(bool(known), f"no figure without flips by format: {status}", TraceError)
    order = [row.precision for row in sorted(known[0][1], key=lambda row: finite(row.step) or 0)]
    for (label, found), colour in zip(known, layer_colours(len(known)), strict=True):
        by_name = {row.precision: row for row in found}
        ordered = [by_name[name] for name in order]
        counted = [row.flip_emulated.value or math.nan for row in ordered]
        predicted = [row.flip.value or math.nan for row in ordered]
        axes.plot(order, counted, "o", color=colour, markersize=4, label=f"layer {label}")
        axes.plot(order, predicted, "_", color=colour, markersize=9)
    axes.set(yscale="log", ylabel="share of tokens that change an expert")
    axes.set_xlabel("logits rounded to (dots counted, dashes predicted)")
    axes.set_xticks(range(len(order)), labels=[name.replace("_", " ") for name in order])
    percent_axis(axes)
    name_layers(axes, [label for label, _ in known])


def _draw_jumps(result: Inspection, axes: "Axes") -> None:
    known = [(row.label, row.jumps) for row in layer_rows(result) if row.jumps]
    status = result.jumps[0].status
    require(bool(known), f"no figure without jumps: {status}", TraceError)
    gaps = [gap for _, jumps in known for gap in (*jumps.near.gaps, *jumps.random.gaps)]
    floor = min((gap for gap in gaps if gap), default=1e-3) / 2
    for (label, jumps), colour in zip(known, layer_colours(len(known)), strict=True):
        for sample, marker in ((jumps.random, "s"), (jumps.near, "o")):
            filled = colour if sample is jumps.near else "none"
            axes.scatter(
                [gap or floor for gap in sample.gaps],
                [jump or math.nan for jump in sample.jumps],
                s=6,
                marker=marker,
                facecolors=filled,
                edgecolors=colour,
                linewidths=0.5,
                alpha=0.6,
                label=f"layer {label}" if sample is jumps.near else None,
            )
    limit = known[0][1].dangerous_above
    axes.axhline(limit, color=WARN, linestyle="--", linewidth=0.8)
    place, where = (0.99, limit), ("axes fraction", "data")
    ground = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1}
    words = {"ha": "right", "va": "bottom", "color": WARN, "fontsize": 6.5, "bbox": ground}
    axes.annotate(f"dangerous from {percent(limit)}", place, xycoords=where, **words)
    axes.set(xscale="log", yscale="log", xlabel="gap (filled: nearest to a tie; open: others)")
    axes.set_ylabel("relative change of the layer’s output")
    percent_axis(axes)
    name_layers(axes, [label for label, _ in known])


def _draw_load(result: Inspection, axes: "Axes") -> None:
    rows = layer_rows(result)
    widest = max(row.measures.n_experts for row in rows)
    loads = [relative_load(row.measures) for row in rows]
    cells = [[*load, *[math.nan] * (widest - len(load))] for load in loads]
    image = axes.imshow(cells, LOAD, aspect="auto", vmin=-FARTHEST, vmax=FARTHEST)
    dead = [(e, y) for y, row in enumerate(rows) for e in row.measures.load.dead]
    axes.scatter([e for e, _ in dead], [y for _, y in dead], marker="x", color=INK, s=12)
    step = max(1, math.ceil(len(rows) / 32))
    shown = range(0, len(rows), step)
    axes.set_yticks(list(shown), labels=[rows[place].label for place in shown])
    axes.set(xlabel="expert (crosses: never chosen)", ylabel="layer")
    bar = axes.figure.colorbar(image, ax=axes, label="load / even load")
    bar.set_ticks(list(TICKS), labels=list(TICKS.values()))
