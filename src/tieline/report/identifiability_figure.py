"""The table of identifiability as a figure: a square for each gate, link and expert.

The number in a square is a power of ten; a split that rounding alone leaves is shown as ≤ -15.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tieline.core.errors import require
from tieline.report.figures import STYLE, drawn_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["identifiability_figure", "identifiability_figure_bytes"]

COLOURS = {"identifiable": "#0b5394", "up to scale": "#9fc0de", "not identifiable": "#f2d0b8"}
EMPTY = "#eeeeee"
FLOOR = 1e-15


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
        axes.set_xticks(range(len(experts)), labels=[name.replace("^2", "²") for name in experts])
        axes.set_yticks(range(len(routers)), labels=routers)
        axes.set_xlabel(
            "expert; numbers: $\\log_{10}$ of the least visible split across the expert's scale"
        )
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        names = dict(COLOURS)
        if any(row["split"] is None for row in rows):
            names["not tested: this router has no zero row"] = EMPTY
        keys = [Patch(color=colour, label=name) for name, colour in names.items()]
        figure.legend(handles=keys, loc="outside upper center", ncols=4, fontsize=7)
    return figure


def identifiability_figure_bytes(rows: Sequence[Mapping[str, Any]], path: Path) -> bytes:
    """The figure in the format that the path's suffix names; the same bytes for the same rows."""
    return drawn_bytes(lambda: identifiability_figure(rows), path)


def _router(row: Mapping[str, Any]) -> str:
    return f"{row['gate']}, {row['link']}"


def _square(axes: "Axes", x: int, y: int, row: Mapping[str, Any]) -> None:
    from matplotlib.patches import Rectangle

    verdict, split = row["verdict"], row["split"]
    colour = COLOURS.get(verdict, EMPTY)
    axes.add_patch(Rectangle((x - 0.48, y - 0.46), 0.96, 0.92, color=colour, linewidth=0))
    text = "–" if split is None else _power(split["up_to_scale"])
    ink = "white" if verdict == "identifiable" else "black"
    axes.text(x, y, text, ha="center", va="center", fontsize=6.5, color=ink)


def _power(value: float) -> str:
    """The power of ten, with a real minus."""
    words = f"≤ {math.log10(FLOOR):.0f}" if value <= FLOOR else f"{math.log10(value):.1f}"
    return words.replace("-", "−")
