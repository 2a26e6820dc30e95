"""A slice through a router's input space: cells, bands near ties, kinks, one expert's support.

slice_figure      the slice by matplotlib, for papers
slice_page        one page without script; the experts of a cell show under the pointer
slice_sentences   sentences on what a model's slice shows, and how it was checked
cell_colours      one colour per cell, different from the colours of its neighbours

`page`, `figures`, `terminal`, `summary` and `notebook` are those of a model's `RouterSlice`.
"""

import colorsys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from tieline.core.text import layer_label
from tieline.lab.on_model.slice import RouterSlice
from tieline.lab.tropical.plane_cells import Slice, SliceCell
from tieline.report.html_page import render_page, visible_characters
from tieline.report.matplotlib_figures import INK, MUTED, WARN, paper_text, styled_figure
from tieline.report.result_views import Report, report_views
from tieline.report.tables import Grid, text_table
from tieline.report.words.numbers import percent, significant

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


PAGE_SIDE = 720.0
"""Side of the drawing in a page, in pixels."""
MAX_LISTED_CELLS = 30
HUES, GOLDEN = 31, 0.61803398875

Points = Sequence[Sequence[float]]


def slice_figure(cut: Slice, names: Sequence[str] = ()) -> "Figure":
    """Draw cells coloured by coalition, with dark bands, thin kinks and an outlined support.

    Args:
        cut: the slice.
        names: labels of the three inputs.
    """

    def draw(axes: "Axes") -> None:
        _draw_slice_cells(axes, cut)
        _draw_slice_lines(axes, cut)
        axes.plot(*zip(*cut.marks, strict=True), "o", color="white", mec="black", mew=1, ms=5)
        for name, mark in zip(names, cut.marks, strict=False):
            ground = {"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 1}
            style = {"fontsize": 7, "bbox": ground, "textcoords": "offset points"}
            axes.annotate(paper_text(name), (mark[0], mark[1]), xytext=(5, 5), **style)
        low, high = cut.window[0], cut.window[2]
        axes.set(xlim=(low[0], high[0]), ylim=(low[1], high[1]), aspect="equal")
        axes.set(xlabel="length in input space", ylabel="length in input space")
        axes.set_title(_slice_counts_text(cut), fontsize=7, wrap=True)

    return styled_figure(draw, width=4.2, height=4.6)


def _slice_report(result: RouterSlice) -> Report:
    """Build the report: the plane with its cells, its check, and the largest cells."""
    sentences = slice_sentences(result)
    return Report(
        kind="slice",
        title=result.model,
        facts=f"{layer_label(result.layer)} · {result.cut.k} of {result.cut.n_experts} experts",
        verdict=sentences[1],
        table=partial(_largest_cells_grid, result.cut),
        body=lambda: _slice_page_body(result.cut, sentences),
        below=lambda width: [_slice_tokens_table(result), *map(Text, sentences[2:])],
        figures={"slice": partial(_slice_figure_with_tokens, result)},
    )


def _slice_tokens_table(result: RouterSlice) -> Table:
    """Return a table of the three tokens with document, position and experts."""
    rows = [
        (
            visible_characters(p.text) or "◦",
            str(p.document),
            str(p.position),
            ", ".join(map(str, p.experts)),
        )
        for p in result.points
    ]
    return text_table(("token", "document", "position", "experts"), rows)


page, figures, terminal, summary, notebook = report_views(_slice_report)._replace(
    summary=lambda result: "\n".join([f"Slice of {result.model}", *slice_sentences(result)]),
    notebook=lambda result: replace(
        _slice_report(result), verdict=" ".join(slice_sentences(result)[1:])
    ).notebook(),
)


def _slice_figure_with_tokens(plane: RouterSlice) -> "Figure":
    """Draw the slice with its three tokens labelled."""
    return slice_figure(plane.cut, [_quoted_token(point.text) for point in plane.points])


def _quoted_token(text: str) -> str:
    """Return a token as a label for matplotlib: other than Latin letters as "·", $ escaped."""
    latin = "".join(sign if sign.isprintable() and ord(sign) < 0x250 else "·" for sign in text)
    return f"“{latin or '·'}”".replace("$", "\\$")


def slice_sentences(plane: RouterSlice) -> list[str]:
    """Write what the slice shows, and how it was checked."""
    tokens = ", ".join(
        f"“{visible_characters(point.text).strip() or '◦'}” ({point.document}:{point.position}, "
        f"experts {', '.join(map(str, point.experts))})"
        for point in plane.points
    )
    cut = plane.cut
    band = (
        f"the band of gap below {significant(cut.epsilon)} ({plane.noise}) covers "
        f"{percent(cut.band_share)} of it"
        if cut.epsilon > 0
        else "the noise of this layer is not known, so no band is drawn"
    )
    sure = plane.checked - plane.undecided
    return [
        f"Slice of {layer_label(plane.layer)} through the tokens {tokens} (document:position).",
        f"The plane through three inputs of the router meets {len(cut.cells)} coalitions, sets of "
        f"experts that are chosen together; {band}.",
        f"Asked at {plane.checked:,} random points of the plane, the router chose the coalition of "
        f"the picture at {plane.agreed:,} of the {sure:,} that are not ties.",
    ]


def slice_page(cut: Slice, title: str = "Slice of a router") -> str:
    """Return one HTML page without script, of a slice of any router."""
    facts = f"{cut.k} of {cut.n_experts} experts · {_slice_counts_text(cut)}"
    return render_page(
        **_slice_page_body(cut, ()), kind="slice", title=title, facts=facts, verdict=""
    )


def _slice_page_body(cut: Slice, sentences: Sequence[str]) -> dict[str, Any]:
    """Return the values that the template of a slice shows."""
    return {
        "template": "slice.html",
        "style": "sections.css",
        "side": PAGE_SIDE,
        "cells": list(_svg_cells(cut)),
        "lines": list(_svg_lines(cut)),
        "marks": [_svg_pixel(mark, cut) for mark in cut.marks],
        "legend": _slice_legend(cut),
        "sentences": sentences,
        "heading": f"Largest cells ({min(MAX_LISTED_CELLS, len(cut.cells))} of {len(cut.cells)})",
        "table": _largest_cells_grid(cut),
    }


def _largest_cells_grid(cut: Slice) -> Grid:
    """Return one row per cell, the largest first."""
    largest = sorted(cut.cells, key=lambda cell: -_polygon_area(cell.corners))[:MAX_LISTED_CELLS]
    rows = [
        (
            ", ".join(map(str, cell.coalition)),
            percent(_polygon_area(cell.corners) / _polygon_area(cut.window)),
            str(cell.pieces),
        )
        for cell in largest
    ]
    return Grid(("experts", "share of the window", "pieces"), tuple(rows))


def cell_colours(cut: Slice) -> list[str]:
    """Return one hex colour per cell; cells that share a wall have different colours.

    Cells are neighbours if their coalitions differ by one expert. Each cell takes the first hue
    that no earlier neighbour has, counted from the cell's own index.
    """
    cells = [frozenset(cell.coalition) for cell in cut.cells]
    used_hues: list[int] = []
    for index, cell in enumerate(cells):
        neighbour_hues = {used_hues[i] for i in range(index) if len(cells[i] - cell) == 1}
        free_hues = [hue for hue in range(HUES) if hue not in neighbour_hues]
        start = index % HUES
        used_hues.append(
            min(free_hues, key=lambda hue: (hue - start) % HUES) if free_hues else start
        )
    return [_hue_colour(hue) for hue in used_hues]


def _hue_colour(hue: int) -> str:
    """Return the hex colour of a hue number, in golden-ratio steps around the wheel."""
    light = 0.72 + 0.1 * (hue % 3 - 1)
    channels = colorsys.hls_to_rgb((hue * GOLDEN) % 1.0, light, 0.62)
    return "#" + "".join(f"{round(255 * channel):02x}" for channel in channels)


def _slice_counts_text(cut: Slice) -> str:
    """Return one line with coalitions, pieces, share of the band and fill of a support."""
    sentence = f"{len(cut.cells)} coalitions, {sum(cell.pieces for cell in cut.cells)} pieces"
    if cut.epsilon > 0:
        sentence += f", gap < {cut.epsilon:.3g} on {percent(cut.band_share)}"
    if cut.support is not None:
        sentence += f", expert {cut.support.expert} fills {percent(cut.support.fill)} of its hull"
    return sentence


def _slice_legend(cut: Slice) -> str:
    """Explain the colours, lines and dots of the picture."""
    sentences = ["Colours: coalitions. Black lines: two experts tie. White dots: the three inputs."]
    if cut.epsilon > 0:
        sentences.append(f"Dark bands: gap below {cut.epsilon:.3g}.")
    if any(cell.kinks for cell in cut.cells):
        sentences.append("Thin grey lines: a neuron of a chosen expert is zero.")
    if cut.support is not None:
        expert = cut.support.expert
        sentences.append(f"Strong colours inside the orange outline: expert {expert} is chosen.")
    return " ".join(sentences)


def _coloured_cells(plane_slice: Slice) -> Iterator[tuple[SliceCell, str, bool]]:
    """Yield each cell with its colour, and whether it is faded for lying outside the support."""
    support_cells = None if plane_slice.support is None else set(plane_slice.support.cells)
    for index, (cell, colour) in enumerate(
        zip(plane_slice.cells, cell_colours(plane_slice), strict=True)
    ):
        yield cell, colour, support_cells is not None and index not in support_cells


def _tie_walls(cut: Slice) -> list[Points]:
    """Return the edges where two experts tie, once for each of their two cells."""
    return [
        [cell.corners[index], cell.corners[(index + 1) % len(cell.corners)]]
        for cell in cut.cells
        for index, tie in enumerate(cell.ties)
        if tie is not None
    ]


def _draw_slice_cells(axes: "Axes", cut: Slice) -> None:
    """Fill the cells, faded outside a support, with the dark band near ties."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Outline

    for cell, colour, faded in _coloured_cells(cut):
        alpha = 0.35 if faded else 0.9
        axes.fill(*zip(*cell.corners, strict=True), facecolor=colour, lw=0, alpha=alpha)
        if cut.epsilon > 0:
            rings = [cell.corners, *([cell.core[::-1]] if cell.core else [])]
            paths = [Outline([*ring, ring[0]], closed=True) for ring in rings]
            band = Outline.make_compound_path(*paths)
            axes.add_patch(PathPatch(band, facecolor=INK, alpha=0.28, lw=0))


def _draw_slice_lines(axes: "Axes", cut: Slice) -> None:
    """Draw kinks, ties and the outline of a support."""
    from matplotlib.collections import LineCollection

    kinks = [kink for cell in cut.cells for kink in cell.kinks]
    axes.add_collection(LineCollection(kinks, colors=MUTED, linewidths=0.4))
    axes.add_collection(LineCollection(_tie_walls(cut), colors="black", linewidths=0.9))
    if cut.support is not None:
        axes.add_collection(LineCollection(cut.support.outline, colors=WARN, linewidths=2.2))


def _svg_cells(cut: Slice) -> Iterator[tuple[str, str, float, str, str]]:
    """Yield corners, colour, opacity, experts and band path (may be empty) of each cell."""
    for cell, colour, faded in _coloured_cells(cut):
        band = _svg_ring(cell.corners, cut) + _svg_ring(cell.core, cut) if cut.epsilon > 0 else ""
        experts = f"experts {', '.join(map(str, cell.coalition))}"
        yield _svg_corners(cell.corners, cut), colour, 0.4 if faded else 0.95, experts, band


def _svg_lines(cut: Slice) -> Iterator[tuple[tuple[float, float], tuple[float, float], str, float]]:
    """Yield both ends, colour and width of each line."""
    lines = [(kink, MUTED, 0.6) for cell in cut.cells for kink in cell.kinks]
    lines += [(wall, "#000", 1.1) for wall in _tie_walls(cut)]
    lines += [(edge, WARN, 3.0) for edge in (cut.support.outline if cut.support else [])]
    for (first, second), colour, width in lines:
        yield _svg_pixel(first, cut), _svg_pixel(second, cut), colour, width


def _svg_corners(corners: Points, cut: Slice) -> str:
    """Return corners as the points of an SVG polygon."""
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in (_svg_pixel(corner, cut) for corner in corners))


def _svg_ring(corners: Points, cut: Slice) -> str:
    """Return corners as a closed SVG path; empty for none."""
    return "" if not corners else f"M{_svg_corners(corners, cut).replace(' ', 'L')}Z"


def _svg_pixel(corner: Sequence[float], cut: Slice) -> tuple[float, float]:
    """Return a point of the plane in pixels of the page."""
    (left, low), (right, high) = cut.window[0], cut.window[2]
    return PAGE_SIDE * (corner[0] - left) / (right - left), PAGE_SIDE * (high - corner[1]) / (
        high - low
    )


def _polygon_area(corners: Points) -> float:
    """Return the area of a polygon with corners in counter-clockwise order."""
    next_corners = [*corners[1:], corners[0]]
    return sum(a[0] * b[1] - a[1] * b[0] for a, b in zip(corners, next_corners, strict=True)) / 2
