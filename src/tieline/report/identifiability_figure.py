"""The table of identifiability as a figure: a square for each gate, link and expert."""

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tieline.errors import require
from tieline.report.figures import STYLE, check_figure_path

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["identifiability_figure", "identifiability_figure_bytes"]

COLOURS = {"identifiable": "#0b5394", "up to scale": "#9fc0de", "not identifiable": "#f2d0b8"}
EMPTY = "#eeeeee"
FLOOR = 1e-16


def identifiability_figure(rows: Sequence[Mapping[str, Any]]) -> "Figure":
    """One square per combination: verdict by colour, least visible split by its power of ten.

    Args:
        rows: `Identifiability.to_dict()` of each combination.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    require(len(rows) > 0, "a figure of identifiability needs at least one row")
    experts = list(dict.fromkeys(row["expert"] for row in rows))
    routers = list(dict.fromkeys(_router(row) for row in rows))
    with rc_context(STYLE):
        figure = Figure(figsize=(6.75, 1.1 + 0.32 * len(routers)), layout="constrained")
        axes = figure.subplots()
        for row in rows:
            _square(axes, experts.index(row["expert"]), routers.index(_router(row)), row)
        axes.set(xlim=(-0.5, len(experts) - 0.5), ylim=(len(routers) - 0.5, -0.5))
        axes.set_xticks(range(len(experts)), labels=experts)
        axes.set_yticks(range(len(routers)), labels=routers)
        axes.set_xlabel(
            "expert; in the squares $\\log_{10}$ of the least visible split, up to scale"
        )
        keys = [Patch(color=colour, label=name) for name, colour in COLOURS.items()]
        figure.legend(handles=keys, loc="outside upper center", ncols=3, fontsize=7)
    return figure


def identifiability_figure_bytes(rows: Sequence[Mapping[str, Any]], path: Path) -> bytes:
    """The figure in the format that the path's suffix names; the same bytes for the same rows."""
    from matplotlib import rc_context

    check_figure_path(path)
    kind, buffer = path.suffix.lower().removeprefix("."), io.BytesIO()
    undated = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}.get(kind)
    with rc_context(STYLE):
        identifiability_figure(rows).savefig(buffer, format=kind, dpi=300, metadata=undated)
    return buffer.getvalue()


def _router(row: Mapping[str, Any]) -> str:
    return f"{row['gate']}, {row['link']}"


def _square(axes: "Axes", x: int, y: int, row: Mapping[str, Any]) -> None:
    from matplotlib.patches import Rectangle

    verdict, split = row["verdict"], row["split"]
    colour = COLOURS.get(verdict, EMPTY)
    axes.add_patch(Rectangle((x - 0.48, y - 0.46), 0.96, 0.92, color=colour, linewidth=0))
    text = "no zero row" if split is None else f"{_power(split['up_to_scale']):.1f}"
    ink = "white" if verdict == "identifiable" else "black"
    axes.text(x, y, text, ha="center", va="center", fontsize=6.5, color=ink)


def _power(value: float) -> float:
    return math.log10(max(value, FLOOR))
