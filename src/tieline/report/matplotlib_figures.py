"""Charts drawn by matplotlib, for papers, slides and notebooks, and the files of figures.

The format of a file follows its name: .pdf, .svg or .png. Text in PDF stays text (fonttype 42), and
the same figure gives the same bytes.
"""

import base64
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tieline.core.errors import require
from tieline.core.text import printable_line
from tieline.report.charts import Axis, Chart, Guide, Heat, Series, layer_colour
from tieline.report.words.numbers import percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


Drawings = Mapping[str, Callable[[], "Figure"]]
"""Figures by name, each drawn when called; the main one first."""

ACCENT, WARN, NOTICE, INK, MUTED = "#0b5394", "#b3400a", "#7a5c00", "#1d2127", "#5d6570"
"""Colours of the chart roles, as in the light scheme of a page."""

ROLE_COLOURS = {"@accent": ACCENT, "@warn": WARN, "@notice": NOTICE, "@ink": INK, "@muted": MUTED}
DEPTH_COLOUR_MAP = "viridis"
"""Colour map of the depth of a layer."""
HEAT_COLOUR_MAPS = {"gap": "viridis_r", "load": "RdBu_r"}
"""Colour maps by meaning: nearness to a tie, load of an expert."""
MARKERS = {
    "circle": "o",
    "square": "s",
    "square-open": "s",
    "triangle-down": "v",
    "diamond": "D",
    "diamond-open": "D",
    "dash": "_",
    "cross": "x",
}
DASHES = {"": "-", "dash": "--", "dot": ":", "dashdot": "-."}
POINTS_PER_PIXEL = 0.55
"""Size on paper, in points, of one pixel of a page."""

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
MAX_LEGEND_LAYERS = 8
"""Largest number of layers that a legend lists; a colour bar replaces it for more."""
LEGEND_ROW_LETTERS = 54
"""Letters that fit into one row of a legend."""


def styled_figure(
    draw: "Callable[..., None]", columns: int = 1, width: float = 6.75, height: float = 2.6
) -> "Figure":
    """Return a figure with axes side by side that `draw` fills, in the project's style.

    Args:
        draw: called with the axes, one argument each.
        columns: number of axes.
        width: inches.
        height: inches.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        draw(*figure.subplots(1, columns, squeeze=False)[0])
    return figure


def chart_figure(*charts: Chart, width: float = 4.5, height: float = 3.0) -> "Figure":
    """Return charts side by side as a figure; a legend of layers is drawn in the last only.

    Args:
        charts: what to draw.
        width: inches; by default for a slide or a notebook.
        height: inches.
    """

    def draw(*panels: "Axes") -> None:
        for chart, axes in zip(charts, panels, strict=True):
            draw_chart(chart, axes, legend=not chart.layers or chart is charts[-1])

    return styled_figure(draw, len(charts), width, height)


def draw_chart(chart: Chart, axes: "Axes", legend: bool = True) -> None:
    """Draw a chart on axes.

    Args:
        chart: what to draw.
        axes: where.
        legend: whether to add a legend.
    """
    chart = _with_paper_texts(chart)
    for guide in chart.guides:
        _draw_guide(guide, axes)
    if chart.heat is not None:
        _draw_heat_map(chart.heat, axes)
    bottom: dict[Any, float] = {}
    for series in chart.series:
        _draw_series(series, axes, chart, bottom if chart.stacked else {})
    _set_axis(axes, "x", chart.x)
    _set_axis(axes, "y", chart.y)
    values = [x for series in chart.series for x in series.x]
    if chart.x.scale == "linear" and not chart.x.ticks and all(type(x) is int for x in values):
        axes.locator_params(axis="x", integer=True)  # no step 7.5
    names = [series.name for series in chart.series if series.in_legend and series.name]
    if legend and chart.layers:
        _draw_layer_legend(axes, chart.layers)
    elif legend and names:
        columns = max(1, min(3, LEGEND_ROW_LETTERS // max(map(len, names))))
        axes.legend(fontsize=6.5, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=columns)


def paper_text(text: str) -> str:
    """Return a text for matplotlib: printable, on one line, with "$" escaped."""
    return printable_line(text).replace("$", r"\$")


def _with_paper_texts(value: Any) -> Any:
    """Return a chart, or a part of one, with every text passed through `paper_text`."""
    if isinstance(value, str):
        return paper_text(value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(
            value, **{x.name: _with_paper_texts(getattr(value, x.name)) for x in fields(value)}
        )
    if isinstance(value, Mapping):
        return {_with_paper_texts(key): _with_paper_texts(item) for key, item in value.items()}
    return type(value)(map(_with_paper_texts, value)) if isinstance(value, list | tuple) else value


def _paper_colour(role: str) -> Any:
    """Return the matplotlib colour of a role."""
    if not role.startswith("@ramp:"):
        return ROLE_COLOURS.get(role, INK)
    from matplotlib import colormaps

    return colormaps[DEPTH_COLOUR_MAP](0.8 * float(role.removeprefix("@ramp:")))


def _draw_series(series: Series, axes: "Axes", chart: Chart, bottom: dict[Any, float]) -> None:
    """Draw points, a line or bars; bars are stacked on `bottom`, which is updated."""
    colour, label = _paper_colour(series.colour), series.name if series.in_legend else None
    x = list(series.x)
    if chart.heat is not None:
        rows = {name: index for index, name in enumerate(chart.heat.y)}
        axes.scatter(x, [rows[name] for name in series.y], marker="x", color=INK, s=12)
        return
    y = [math.nan if value is None else value for value in series.y]
    if series.kind == "bar":
        below = [bottom.get(name, 0.0) for name in x]
        heights = [0.0 if math.isnan(value) else value for value in y]
        axes.bar(x, heights, bottom=below, color=colour, label=label)
        bottom |= {n: a + b for n, a, b in zip(x, below, heights, strict=True)}
        return
    filled = "none" if series.symbol.endswith("-open") else colour
    size = series.size * POINTS_PER_PIXEL
    if series.opacity < 1 and series.kind == "points":
        look = {"facecolors": filled, "edgecolors": [colour], "linewidths": 0.5}
        marker = MARKERS[series.symbol]
        axes.scatter(x, y, s=6, marker=marker, alpha=series.opacity, label=label, **look)
        return
    style: dict[str, Any] = {"color": colour, "label": label, "alpha": series.opacity}
    style["linestyle"] = "" if series.kind == "points" else DASHES[series.dash]
    if series.kind != "line":
        style |= {"marker": MARKERS[series.symbol], "markersize": size, "markerfacecolor": filled}
    if series.errors is None:
        axes.plot(x, y, **style)
    else:
        above, below = series.errors
        axes.errorbar(x, y, yerr=(below, above), capsize=2, elinewidth=0.8, **style)


def _draw_heat_map(heat: Heat, axes: "Axes") -> None:
    """Draw a heat map with its colour bar."""
    cells = [[math.nan if value is None else value for value in row] for row in heat.values]
    low, high = heat.limits or (None, None)
    image = axes.imshow(cells, HEAT_COLOUR_MAPS[heat.colours], aspect="auto", vmin=low, vmax=high)
    step = max(1, math.ceil(len(heat.y) / 32))
    rows = range(0, len(heat.y), step)
    axes.set_yticks(list(rows), labels=[heat.y[row] for row in rows])
    if any(isinstance(name, str) for name in heat.x):
        axes.set_xticks(range(len(heat.x)), labels=list(heat.x))
    bar = axes.figure.colorbar(image, ax=axes, label=heat.title)
    ends = image.get_clim()
    ticks = {value: name for value, name in heat.ticks.items() if ends[0] <= value <= ends[1]}
    bar.set_ticks(list(ticks), labels=list(ticks.values()))


def _draw_guide(guide: Guide, axes: "Axes") -> None:
    """Draw the line of a guide with its name."""
    colour, line = _paper_colour(guide.colour), {"linestyle": DASHES[guide.dash], "linewidth": 0.8}
    if guide.axis == "y":
        axes.axhline(guide.at, color=colour, **line)
        ground = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1}
        style = {"ha": "right", "va": "bottom", "color": colour, "fontsize": 6.5, "bbox": ground}
        where = ("axes fraction", "data")
        if guide.name:
            axes.annotate(guide.name, (0.99, guide.at), xycoords=where, **style)
        return
    axes.axvline(guide.at, color="0.6", **line)
    style = {"rotation": 90, "fontsize": 5.5, "ha": "right", "va": "bottom", "color": "0.3"}
    where = ("data", "axes fraction")
    axes.annotate(guide.name, (guide.at, 0.03 + guide.lift), xycoords=where, **style)


def _set_axis(axes: "Axes", letter: str, spec: Axis) -> None:
    """Set title, scale, limits and ticks of one axis."""
    options: dict[str, Any] = {f"{letter}label": spec.title}
    if spec.scale == "log":
        options[f"{letter}scale"] = "log"
    if spec.limits is not None:
        options[f"{letter}lim"] = spec.limits
    axes.set(**options)
    if spec.from_zero:
        axes.set_ylim(bottom=0)
    if spec.percent:
        from matplotlib.ticker import FuncFormatter

        axis = axes.xaxis if letter == "x" else axes.yaxis
        axis.set_major_formatter(
            FuncFormatter(lambda share, _: percent(share, 6, trim=True, least=0.0))
        )
    if spec.ticks:
        axes.set_xticks(list(spec.ticks), labels=list(spec.ticks.values()))
        axes.tick_params(which="minor", labelbottom=False)
    if spec.angle:
        axes.tick_params(axis="x", labelrotation=-spec.angle, labelsize=6.5)
        for label in axes.get_xticklabels():
            label.set(ha="right", rotation_mode="anchor")


def _draw_layer_legend(axes: "Axes", labels: Sequence[str]) -> None:
    """Add a legend for a few layers, a colour bar for many."""
    if len(labels) <= MAX_LEGEND_LAYERS:
        axes.legend(fontsize=6.5)
        return
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, Normalize
    from matplotlib.figure import Figure

    last = len(labels) - 1
    ramp = ListedColormap([_paper_colour(layer_colour(i, last + 1)) for i in range(last + 1)])
    figure = axes.figure
    assert isinstance(figure, Figure)
    bar = figure.colorbar(ScalarMappable(Normalize(0, last), ramp), ax=axes, label="layer")
    indices = sorted({0, last // 2, last})
    bar.set_ticks(indices, labels=[labels[index] for index in indices])


def figure_bytes(draw: "Callable[[], Figure]", path: Path, dpi: int = 300) -> bytes:
    """Return the figure as the bytes of a file in the path's format, without a date.

    Args:
        draw: returns the figure.
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
    """Return the figure as a `data:` address of an image, "svg" or "png"."""
    code = base64.b64encode(figure_bytes(draw, Path(f"drawing.{kind}"), dpi=144)).decode()
    return f"data:image/{kind.replace('svg', 'svg+xml')};base64,{code}"


def check_figure_path(path: Path) -> None:
    """Raise unless the suffix is one of `FIGURE_SUFFIXES`."""
    supported = path.suffix.lower() in FIGURE_SUFFIXES
    require(supported, f"a figure is {', '.join(FIGURE_SUFFIXES)}, got {path.name!r}")
