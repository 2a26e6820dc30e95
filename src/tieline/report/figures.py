"""Figures for papers, by matplotlib: the gap's distribution and the experts near the threshold.

The format follows the name of the file: .pdf, .svg or .png. Text in PDF stays text (fonttype 42),
colours are steps of a ramp whose lightness grows with depth and survive a grey printer.
"""

import io
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tieline.core.errors import TraceError, require
from tieline.core.files import write_whole
from tieline.report.numbers import short_names, value_of
from tieline.report.panels.gaps import format_names, format_steps, log_range, units_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "FIGURE_SUFFIXES",
    "check_figure_path",
    "drawn_bytes",
    "figure_bytes",
    "routing_figure",
    "write_figure",
]

FIGURE_SUFFIXES = (".pdf", ".png", ".svg")
STYLE: dict[Any, Any] = {
    "font.size": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "lines.linewidth": 1.1,
    "legend.frameon": False,
    "pdf.fonttype": 42,
    "svg.fonttype": "none",
    "svg.hashsalt": "tieline",
}
MOST_NAMED = 8


def routing_figure(result: Mapping[str, Any]) -> "Figure":
    """Gap distribution per layer (left) and K(ε) per layer (right), 6.75 inches wide.

    Args:
        result: `Inspection.to_dict()`; it must have the gaps of a layer at least.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    layers = result["measures"]["layers"]
    labels = short_names([layer["name"] for layer in layers])
    known = [pair for pair in zip(labels, layers, strict=True) if pair[1]["gap"]["value"]]
    require(len(known) > 0, f"no figure without gaps: {layers[0]['gap']['status']}", TraceError)
    with rc_context(STYLE):
        figure = Figure(figsize=(6.75, 2.6), layout="constrained")
        left, right = figure.subplots(1, 2)
        _draw_gaps(left, known)
        _draw_near(right, known)
        _name_layers(figure, right, [label for label, _ in known])
    return figure


def figure_bytes(result: Mapping[str, Any], path: Path) -> bytes:
    """The figure in the format that the path's suffix names; the same bytes for the same result."""
    return drawn_bytes(lambda: routing_figure(result), path)


def drawn_bytes(draw: "Callable[[], Figure]", path: Path, dpi: int = 300) -> bytes:
    """What `draw` draws, in our style and without a date, so that the same is the same bytes."""
    from matplotlib import rc_context

    check_figure_path(path)
    kind, buffer = path.suffix.lower().removeprefix("."), io.BytesIO()
    undated = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}.get(kind)
    with rc_context(STYLE):
        draw().savefig(buffer, format=kind, dpi=dpi, metadata=undated)
    return buffer.getvalue()


def write_figure(result: Mapping[str, Any], path: Path) -> None:
    """Write the figure whole or not at all."""
    write_whole(path, figure_bytes(result, path))


def check_figure_path(path: Path) -> None:
    """Refuse a suffix that names no format."""
    known = path.suffix.lower() in FIGURE_SUFFIXES
    require(known, f"a figure is {', '.join(FIGURE_SUFFIXES)}, got {path.name!r}")


def _draw_gaps(axes: "Axes", known: list[tuple[str, Any]]) -> None:
    layers = [layer for _, layer in known]
    spans = format_steps(layers)
    profiles = [layer["gap"]["value"]["profile"] for layer in layers]
    low, high = log_range(profiles, spans)
    for name, place, lift in format_names(spans, low, high):
        axes.axvline(10**place, color="0.6", linewidth=0.6, linestyle=":")
        style = {"rotation": 90, "fontsize": 5.5, "ha": "right", "va": "bottom", "color": "0.3"}
        where = ("data", "axes fraction")
        axes.annotate(name, (10**place, 0.03 + lift), xycoords=where, **style)
    for profile, colour in zip(profiles, _colours(len(known)), strict=True):
        axes.plot(profile["widths"], [mass or math.nan for mass in profile["mass"]], color=colour)
    tokens = max(layer["tokens"] for layer in layers)
    axes.set(xscale="log", yscale="log", xlim=(10**low, 10**high), ylim=(0.5 / tokens, 1.2))
    axes.set(xlabel=f"gap ({units_of(layers)})", ylabel="share of tokens with a smaller gap")


def _draw_near(axes: "Axes", known: list[tuple[str, Any]]) -> None:
    for (label, layer), colour in zip(known, _colours(len(known)), strict=True):
        near = layer["near"]["value"]
        if near is not None:
            counts = [value_of(count) or math.nan for count in near["experts"]]
            axes.plot(near["epsilons"], counts, color=colour, label=f"layer {label}")
    axes.set(xscale="log", xlabel="ε", ylabel="experts within ε of the threshold")


def _name_layers(figure: "Figure", axes: "Axes", labels: list[str]) -> None:
    """A legend for a few layers, a bar of colours for many."""
    if len(labels) <= MOST_NAMED:
        axes.legend(fontsize=6.5)
        return
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, Normalize

    ramp = ListedColormap(_colours(len(labels)))
    last = len(labels) - 1
    bar = figure.colorbar(ScalarMappable(Normalize(0, last), ramp), ax=axes, label="layer")
    places = sorted({0, last // 2, last})
    bar.set_ticks(places, labels=[labels[place] for place in places])


def _colours(count: int) -> list[Any]:
    from matplotlib import colormaps

    steps = [place / (count - 1) if count > 1 else 0.5 for place in range(count)]
    return [colormaps["plasma"](0.8 * step) for step in steps]
