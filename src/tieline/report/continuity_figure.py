"""The continuity of a model's layers as a figure: paper 1, Figure 3, a row for each layer.

left      an output coordinate of the hard layer along the normal of a tie
middle    the same of the smooth layers, on the same weights
right     largest change of the output over all ties against the step across them
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tieline.core.errors import require
from tieline.report.figures import STYLE, drawn_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["continuity_figure", "continuity_figure_bytes"]

LOOKS = {
    "hard": ("hard top-k", "#b3400a", "-"),
    "b = 50": ("smooth, b = 50", "#0b5394", "-"),
    "b = 1": ("smooth, b = 1", "#7a5c00", "--"),
}


def continuity_figure(layers: Sequence[Mapping[str, Any]]) -> "Figure":
    """Three columns, a row for each layer, 6.75 inches wide.

    Args:
        layers: `LayerContinuity.to_dict()` of each layer.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    require(len(layers) > 0, "no figure without a layer")
    with rc_context(STYLE):
        figure = Figure(figsize=(6.75, 0.5 + 1.55 * len(layers)), layout="constrained")
        rows = figure.subplots(len(layers), 3, squeeze=False)
        for axes, layer in zip(rows, layers, strict=True):
            _draw_line(axes[0], layer, ("hard",))
            _draw_line(axes[1], layer, ("b = 50", "b = 1"))
            axes[1].set_ylim(axes[0].get_ylim())
            _draw_steps(axes[2], layer)
            axes[0].set_ylabel(f"{layer['name']}\noutput coordinate")
        for axes in rows[-1, :2]:
            axes.set_xlabel("signed distance from the tie")
        rows[-1, 2].set_xlabel("step across the tie")
        _name_curves(figure, rows[0, 2])
    return figure


def continuity_figure_bytes(layers: Sequence[Mapping[str, Any]], path: Path) -> bytes:
    """The figure in the format that the path's suffix names; the same bytes for the same data."""
    return drawn_bytes(lambda: continuity_figure(layers), path, dpi=200)


def _draw_line(axes: "Axes", layer: Mapping[str, Any], names: Sequence[str]) -> None:
    for name in names:
        gate, (label, colour, style) = layer["gates"][name], LOOKS[name]
        xs, ys = _broken(gate["offsets"], gate["output"], name == "hard")
        axes.plot(xs, ys, color=colour, linestyle=style, label=label)
    axes.axvline(0, color="#9aa0a6", linewidth=0.5, zorder=0)


def _broken(
    offsets: Sequence[float], output: Sequence[float], hard: bool
) -> tuple[list[float], list[float]]:
    """The curve, with a gap at the tie where the layer is known to jump."""
    xs, ys = list(offsets), list(output)
    if hard:
        middle = sum(offset < 0 for offset in xs)
        xs.insert(middle, 0.0)
        ys.insert(middle, float("nan"))
    return xs, ys


def _draw_steps(axes: "Axes", layer: Mapping[str, Any]) -> None:
    for name, (label, colour, style) in LOOKS.items():
        gate = layer["gates"][name]
        axes.loglog(
            gate["steps"],
            gate["largest"],
            color=colour,
            linestyle=style,
            marker="o",
            markersize=2.5,
            label=label,
        )
    axes.set_ylabel("largest change / ‖f‖")


def _name_curves(figure: "Figure", axes: "Axes") -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3)
