"""A slice through a router's input space, drawn: cells, bands near ties, kinks, one support.

slice_figure         for papers and PNG, by matplotlib
slice_page_bytes     one page without scripts; the coalition shows under the pointer
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tieline.report.figures import STYLE, drawn_bytes
from tieline.report.markup import escape
from tieline.report.numbers import percent
from tieline.report.plain_page import plain_page, table_html
from tieline.report.slice_colours import cell_colours

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["slice_figure", "slice_figure_bytes", "slice_page_bytes"]

BAND, SUPPORT, KINK = "#1d2127", "#b3400a", "#5d6570"
SIDE = 720.0
MOST_LISTED = 30


def slice_figure(data: Mapping[str, Any]) -> "Figure":
    """Cells coloured by coalition, their bands dark, kinks thin, the support outlined.

    Args:
        data: `Slice.to_dict()`.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=(4.2, 4.6), layout="constrained")
        axes = figure.subplots()
        _draw_cells(axes, data)
        _draw_lines(axes, data)
        marks = data["marks"]
        axes.plot(*zip(*marks, strict=True), "o", color="white", mec="black", mew=1, ms=5)
        low, high = data["window"][0], data["window"][2]
        axes.set(xlim=(low[0], high[0]), ylim=(low[1], high[1]), aspect="equal")
        axes.set(xlabel="length in input space", ylabel="length in input space")
        axes.set_title(_words(data), fontsize=7, wrap=True)
    return figure


def slice_figure_bytes(data: Mapping[str, Any], path: Path) -> bytes:
    """The figure in the format that the path's suffix names."""
    return drawn_bytes(lambda: slice_figure(data), path)


def slice_page_bytes(data: Mapping[str, Any], title: str = "Slice of a router") -> bytes:
    """One HTML file that needs nothing else.

    Args:
        data: `Slice.to_dict()`.
        title: heading of the page.
    """
    cells = data["cells"]
    facts = f"{data['k']} of {data['n_experts']} experts · {_words(data)}"
    largest = sorted(cells, key=lambda cell: -_area(cell["corners"]))[:MOST_LISTED]
    rows = [_listed(cell, _whole(data)) for cell in largest]
    sections = [
        ("The plane through three inputs", _svg(data) + _legend(data)),
        (
            f"Largest cells ({len(rows)} of {len(cells)})",
            table_html(["experts", "share of the window", "pieces"], rows),
        ),
    ]
    return plain_page(title, facts, sections).encode()


def _listed(cell: Mapping[str, Any], whole: float) -> list[str]:
    share = percent(_area(cell["corners"]) / whole)
    return [", ".join(map(str, cell["coalition"])), share, str(cell["pieces"])]


def _words(data: Mapping[str, Any]) -> str:
    cells = data["cells"]
    words = f"{len(cells)} coalitions, {sum(cell['pieces'] for cell in cells)} pieces"
    if data["epsilon"] > 0:
        words += f", gap < {data['epsilon']:g} on {percent(data['band_share'])}"
    if data["support"] is not None:
        support = data["support"]
        words += f", expert {support['expert']} fills {percent(support['fill'])} of its hull"
    return words


def _draw_cells(axes: "Axes", data: Mapping[str, Any]) -> None:
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Outline

    mine = set() if data["support"] is None else set(data["support"]["cells"])
    for place, (cell, colour) in enumerate(zip(data["cells"], cell_colours(data), strict=True)):
        faded = 0.9 if not mine or place in mine else 0.35
        axes.fill(*zip(*cell["corners"], strict=True), facecolor=colour, lw=0, alpha=faded)
        rings = [cell["corners"], *([cell["core"][::-1]] if cell["core"] else [])]
        if data["epsilon"] > 0:
            paths = [Outline([*ring, ring[0]], closed=True) for ring in rings]
            band = Outline.make_compound_path(*paths)
            axes.add_patch(PathPatch(band, facecolor=BAND, alpha=0.28, lw=0))


def _draw_lines(axes: "Axes", data: Mapping[str, Any]) -> None:
    from matplotlib.collections import LineCollection

    kinks = [kink for cell in data["cells"] for kink in cell["kinks"]]
    axes.add_collection(LineCollection(kinks, colors=KINK, linewidths=0.4))
    axes.add_collection(LineCollection(_walls(data), colors="black", linewidths=0.9))
    if data["support"] is not None:
        outline = data["support"]["outline"]
        axes.add_collection(LineCollection(outline, colors=SUPPORT, linewidths=2.2))


def _walls(data: Mapping[str, Any]) -> list[Any]:
    """Edges where two experts tie, once for each of their two cells."""
    found = []
    for cell in data["cells"]:
        corners = cell["corners"]
        for at, tie in enumerate(cell["ties"]):
            if tie is not None:
                found.append([corners[at], corners[(at + 1) % len(corners)]])
    return found


def _svg(data: Mapping[str, Any]) -> str:
    """The same drawing as inline SVG, whose cells tell their experts under the pointer."""
    mine = set() if data["support"] is None else set(data["support"]["cells"])
    parts = []
    for place, (cell, colour) in enumerate(zip(data["cells"], cell_colours(data), strict=True)):
        faded = 0.95 if not mine or place in mine else 0.4
        told = f"experts {', '.join(map(str, cell['coalition']))}"
        ring = _points(cell["corners"], data)
        parts.append(
            f'<polygon points="{ring}" fill="{colour}" fill-opacity="{faded}">'
            f"<title>{escape(told)}</title></polygon>"
        )
        if data["epsilon"] > 0:
            core = _ring(cell["core"], data)
            band = f"{_ring(cell['corners'], data)}{core}"
            parts.append(
                f'<path d="{band}" fill="{BAND}" fill-opacity=".28" fill-rule="evenodd" '
                'pointer-events="none"/>'
            )
    parts += [_line(kink, data, KINK, 0.6) for cell in data["cells"] for kink in cell["kinks"]]
    parts += [_line(wall, data, "#000", 1.1) for wall in _walls(data)]
    if data["support"] is not None:
        parts += [_line(edge, data, SUPPORT, 3.0) for edge in data["support"]["outline"]]
    for mark in data["marks"]:
        x, y = _place(mark, data)
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="6" fill="#fff" stroke="#000"/>')
    size = f"{SIDE:.0f}"
    return (
        f'<svg viewBox="0 0 {size} {size}" role="img" style="width:100%;max-width:{size}px;'
        f'background:#fff;border-radius:.4rem"><title>Cells of the router on a plane</title>'
        f"{''.join(parts)}</svg>"
    )


def _legend(data: Mapping[str, Any]) -> str:
    words = ["Colours: coalitions. Black lines: two experts tie. White dots: the three inputs."]
    if data["epsilon"] > 0:
        words.append(f"Dark bands: gap below {data['epsilon']:g}.")
    if any(cell["kinks"] for cell in data["cells"]):
        words.append("Thin grey lines: a neuron of a chosen expert vanishes.")
    if data["support"] is not None:
        expert = data["support"]["expert"]
        words.append(f"Strong colours inside the orange outline: expert {expert} is chosen.")
    return f'<p class="how">{escape(" ".join(words))}</p>'


def _line(ends: Any, data: Mapping[str, Any], colour: str, width: float) -> str:
    (a, b), (c, d) = _place(ends[0], data), _place(ends[1], data)
    return (
        f'<line x1="{a:.1f}" y1="{b:.1f}" x2="{c:.1f}" y2="{d:.1f}" stroke="{colour}" '
        f'stroke-width="{width}" stroke-linecap="round" pointer-events="none"/>'
    )


def _points(corners: Any, data: Mapping[str, Any]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in (_place(corner, data) for corner in corners))


def _ring(corners: Any, data: Mapping[str, Any]) -> str:
    return "" if not corners else f"M{_points(corners, data).replace(' ', 'L')}Z"


def _place(corner: Any, data: Mapping[str, Any]) -> tuple[float, float]:
    (left, low), (right, high) = data["window"][0], data["window"][2]
    return SIDE * (corner[0] - left) / (right - left), SIDE * (high - corner[1]) / (high - low)


def _area(corners: Any) -> float:
    ahead = [*corners[1:], corners[0]]
    return sum(a[0] * b[1] - a[1] * b[0] for a, b in zip(corners, ahead, strict=True)) / 2


def _whole(data: Mapping[str, Any]) -> float:
    return _area(data["window"])
