"""The advisor's numbers as a figure: bounds against expectation, and ties, over the splits."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tieline.report.figures import STYLE, drawn_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["design_figure", "design_figure_bytes"]

PIECES = (
    ("paper_bound", "paper's bound C(N, k) Φ(kH, d)", "#b3400a", "--", "o"),
    ("sharp_bound", "rigorous bound B*", "#7a5c00", "-.", "s"),
    ("expected_regions", "expected, Gaussian layer", "#0b5394", "-", "D"),
    ("expected_cells", "expected coalitions alone", "#0b5394", ":", "v"),
)
TIES = (
    ("switches", "switches per radian", "#0b5394", "-", "D"),
    ("gap_density", "tie density $f_{gap}(0)$", "#7a5c00", "-.", "s"),
    ("bf16_flips", "flips by bf16 (share of tokens)", "#b3400a", "--", "o"),
)


def design_figure(advice: Mapping[str, Any]) -> "Figure":
    """Pieces (left, powers of ten) and ties (right) by split, 6.75 inches wide.

    Args:
        advice: `Advice.to_dict()`.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=(6.75, 2.9), layout="constrained")
        left, right = figure.subplots(1, 2)
        _draw(left, advice, PIECES)
        left.set(ylabel=f"$\\log_{{10}}$ of the number, $d_{{eff}}={advice['d_eff']}$")
        _draw(right, advice, TIES)
        right.set(ylabel="$\\log_{10}$ of the number")
    return figure


def design_figure_bytes(advice: Mapping[str, Any], path: Path) -> bytes:
    """The figure in the format that the path's suffix names; the same bytes for the same advice."""
    return drawn_bytes(lambda: design_figure(advice), path)


def _draw(axes: "Axes", advice: Mapping[str, Any], series: Any) -> None:
    places = range(len(advice["rows"]))
    for name, label, colour, line, marker in series:
        heights = [row["entries"][name]["log10"] for row in advice["rows"]]
        axes.plot(
            places, heights, color=colour, linestyle=line, marker=marker, markersize=4, label=label
        )
    axes.set_xticks(list(places), labels=[str(row["split"]) for row in advice["rows"]])
    axes.set_xlabel("split m  (mN experts, mk chosen, width H/m)")
    axes.margins(x=0.08, y=0.08)
    axes.legend(fontsize=6.5, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=1)
