"""Figures of two studies: the continuity of layers, and which experts can be identified.

continuity_figure         paper 1, Figure 3: hard and smooth gates across ties
identifiability_figure    one square per gate, link and expert
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tieline.core.errors import require
from tieline.lab.estimation.identifiability import Identifiability
from tieline.lab.geometry.layer_continuity import LayerContinuity
from tieline.report.matplotlib_figures import ACCENT, NOTICE, STYLE, WARN, styled_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


GATE_STYLES = {
    "hard": ("hard top-k", WARN, "-"),
    "b = 50": ("smooth, b = 50", ACCENT, "-"),
    "b = 1": ("smooth, b = 1", NOTICE, "--"),
}
VERDICT_COLOURS = {"identifiable": ACCENT, "up to scale": "#9fc0de", "not identifiable": "#f2d0b8"}
UNTESTED_COLOUR = "#eeeeee"
ROUNDING_SPLIT = 1e-15
"""Splits below this are due to rounding."""


def continuity_figure(layers: Sequence[LayerContinuity]) -> "Figure":
    """Draw a row for each layer, with three columns.

    left      an output coordinate of the hard layer along the normal of a tie
    middle    the same of the smooth layers, on the same weights
    right     largest change of the output over all ties against the step across them
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    require(len(layers) > 0, "a figure of continuity needs at least one layer")
    with rc_context(STYLE):
        figure = Figure(figsize=(6.75, 0.5 + 1.55 * len(layers)), layout="constrained")
        rows = figure.subplots(len(layers), 3, squeeze=False)
        for (left, middle, right), layer in zip(rows, layers, strict=True):
            _draw_output_along_line(left, layer, ("hard",))
            _draw_output_along_line(middle, layer, ("b = 50", "b = 1"))
            middle.set_ylim(left.get_ylim())
            _draw_gate_steps(right, layer)
            left.set_ylabel(f"{layer.name}\noutput coordinate")
        for axes in rows[-1, :2]:
            axes.set_xlabel("signed distance from the tie")
        rows[-1, 2].set_xlabel("step across the tie")
        handles, labels = rows[0, 2].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=3)
    return figure


def _draw_output_along_line(axes: "Axes", layer: LayerContinuity, names: Sequence[str]) -> None:
    """Draw the output along the line; the hard layer's curve is broken at the tie."""
    for name in names:
        gate, (label, colour, style) = layer.gates[name], GATE_STYLES[name]
        xs, ys = list(gate.offsets), list(gate.output)
        if name == "hard":
            middle = sum(offset < 0 for offset in xs)
            xs.insert(middle, 0.0)
            ys.insert(middle, math.nan)
        axes.plot(xs, ys, color=colour, linestyle=style, label=label)
    axes.axvline(0, color="#9aa0a6", linewidth=0.5, zorder=0)


def _draw_gate_steps(axes: "Axes", layer: LayerContinuity) -> None:
    """Draw the largest change of each gate's output against the step size, log-log."""
    for name, (label, colour, line) in GATE_STYLES.items():
        gate = layer.gates[name]
        style = {"color": colour, "linestyle": line, "marker": "o", "markersize": 2.5}
        axes.loglog(gate.steps, gate.largest, label=label, **style)
    axes.set_ylabel("largest change / ‖f‖")


def identifiability_figure(rows: Sequence[Identifiability]) -> "Figure":
    """Draw one square per combination: verdict by colour, least visible split by its power of ten.

    A split that is due to rounding alone is shown as ≤ -15.
    """
    from matplotlib.patches import Patch

    require(len(rows) > 0, "a figure of identifiability needs at least one row")
    experts = list(dict.fromkeys(row.expert for row in rows))
    routers = list(dict.fromkeys(_router_name(row) for row in rows))

    def draw(axes: "Axes") -> None:
        for row in rows:
            _draw_verdict_square(
                axes, experts.index(row.expert), routers.index(_router_name(row)), row
            )
        axes.set(xlim=(-0.5, len(experts) - 0.5), ylim=(len(routers) - 0.5, -0.5))
        axes.set_xticks(range(len(experts)), labels=[name.replace("^2", "²") for name in experts])
        axes.set_yticks(range(len(routers)), labels=routers)
        axes.set_xlabel(
            "expert; numbers: $\\log_{10}$ of the least visible split across the expert's scale"
        )
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)

    figure = styled_figure(draw, height=1.1 + 0.32 * len(routers))
    names = dict(VERDICT_COLOURS)
    if any(row.split is None for row in rows):
        names["not tested: this router has no zero row"] = UNTESTED_COLOUR
    keys = [Patch(color=colour, label=name) for name, colour in names.items()]
    figure.legend(handles=keys, loc="outside upper center", ncols=4, fontsize=7, frameon=False)
    return figure


def _router_name(row: Identifiability) -> str:
    """Return "gate, link" of a row."""
    return f"{row.gate}, {row.link}"


def _draw_verdict_square(axes: "Axes", x: int, y: int, row: Identifiability) -> None:
    """Draw one coloured square with log10 of its split."""
    from matplotlib.patches import Rectangle

    colour = VERDICT_COLOURS.get(row.verdict, UNTESTED_COLOUR)
    axes.add_patch(Rectangle((x - 0.48, y - 0.46), 0.96, 0.92, color=colour, linewidth=0))
    text = "–" if row.split is None else _power_of_ten_text(row.split.up_to_scale)
    ink = "white" if row.verdict == "identifiable" else "black"
    axes.text(x, y, text, ha="center", va="center", fontsize=6.5, color=ink)


def _power_of_ten_text(value: float) -> str:
    """Return log10 of a value as text, with a minus sign instead of a hyphen."""
    text = (
        f"≤ {math.log10(ROUNDING_SPLIT):.0f}"
        if value <= ROUNDING_SPLIT
        else f"{math.log10(value):.1f}"
    )
    return text.replace("-", "−")
