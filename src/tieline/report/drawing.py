"""What all matplotlib figures share: style, colours, legends of layers, and files.

The format of a file follows its name: .pdf, .svg or .png. Text in PDF stays text (fonttype 42), and
the same figure gives the same bytes.

    canvas           a figure of the project's style with its axes; small_canvas for a single one
    layer_colours    colours by depth, whose lightness grows and survives a grey printer
    name_layers      a legend for a few layers, a bar of colours for many
    percent_axis     percentages at the ticks
    drawn_bytes      a drawing as the bytes of a file
    inline_image     a drawing as the address of an image, for notebooks and pages without script
"""

import base64
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tieline.core.errors import require

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


ACCENT, WARN, NOTICE, INK, MUTED = "#0b5394", "#b3400a", "#7a5c00", "#1d2127", "#5d6570"
"""The colours of the roles of a page's charts, in its light scheme."""

DEPTH, LOAD = "viridis", "RdBu_r"
"""Colour maps by meaning: depth of a layer, load of an expert."""

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


def canvas(
    draw: "Callable[..., None]", columns: int = 1, width: float = 6.75, height: float = 2.6
) -> "Figure":
    """A figure of so many axes side by side, drawn upon in the project's style.

    Args:
        draw: called with the axes, one argument each.
        columns: number of axes.
        width: inches.
        height: inches.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        made = Figure(figsize=(width, height), layout="constrained")
        draw(*made.subplots(1, columns, squeeze=False)[0])
    return made


def small_canvas(draw: "Callable[[Axes], None]") -> "Figure":
    """A figure of one axes for a slide or a notebook."""
    return canvas(draw, width=4.5, height=3.0)


def layer_colours(count: int) -> list[Any]:
    """One colour per layer, by depth."""
    from matplotlib import colormaps

    steps = [place / (count - 1) if count > 1 else 0.5 for place in range(count)]
    return [colormaps[DEPTH](0.8 * step) for step in steps]


def name_layers(axes: "Axes", labels: Sequence[str]) -> None:
    """A legend of what is labelled in the axes for a few layers, a bar of colours for many."""
    if len(labels) <= MOST_NAMED:
        axes.legend(fontsize=6.5)
        return
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, Normalize
    from matplotlib.figure import Figure

    ramp, last = ListedColormap(layer_colours(len(labels))), len(labels) - 1
    figure = axes.figure
    assert isinstance(figure, Figure)
    bar = figure.colorbar(ScalarMappable(Normalize(0, last), ramp), ax=axes, label="layer")
    places = sorted({0, last // 2, last})
    bar.set_ticks(places, labels=[labels[place] for place in places])


def name_places(axes: "Axes", labels: Sequence[str]) -> None:
    """Name the places 0, 1, … of the level axis by layers: all of a few, some of many."""
    step = -(-len(labels) // MOST_NAMED)
    places = range(0, len(labels), max(1, step))
    axes.set_xticks(list(places), labels=[labels[place] for place in places])
    axes.set_xlabel("layer")


def percent_axis(axes: "Axes") -> None:
    """Write the ticks of the upright axis as percentages."""
    from matplotlib.ticker import FuncFormatter

    axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:g} %"))


def drawn_bytes(draw: "Callable[[], Figure]", path: Path, dpi: int = 300) -> bytes:
    """What `draw` draws as a file of the path's format, without a date.

    Args:
        draw: makes the figure.
        path: its suffix names the format.
        dpi: dots per inch of a .png.
    """
    from matplotlib import rc_context

    check_figure_path(path)
    kind, buffer = path.suffix.lower().removeprefix("."), io.BytesIO()
    undated = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}.get(kind)
    with rc_context(STYLE):
        draw().savefig(buffer, format=kind, dpi=dpi, metadata=undated)
    return buffer.getvalue()


def inline_image(draw: "Callable[[], Figure]", kind: str = "svg") -> str:
    """What `draw` draws as a `data:` address of an image, "svg" or "png"."""
    code = base64.b64encode(drawn_bytes(draw, Path(f"drawing.{kind}"), dpi=144)).decode()
    return f"data:image/{kind.replace('svg', 'svg+xml')};base64,{code}"


def check_figure_path(path: Path) -> None:
    """Refuse a suffix that names no format."""
    known = path.suffix.lower() in FIGURE_SUFFIXES
    require(known, f"a figure is {', '.join(FIGURE_SUFFIXES)}, got {path.name!r}")
