"""Slices drawn from the record, as figure and page."""

import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tests.lab.report.zoo import make_slice
from tests.report.browser import find_browser, look_at
from tieline.core.errors import TielineError
from tieline.lab.report.slices import (
    cell_colours,
    notebook,
    page,
    slice_figure,
    slice_page,
    slice_sentences,
    summary,
    terminal,
)
from tieline.lab.tropical.plane_cells import slice_router
from tieline.report.matplotlib_figures import figure_bytes

SIGNATURES = {".png": b"\x89PNG", ".pdf": b"%PDF", ".svg": b"<?xml"}


@pytest.fixture(scope="module")
def cut():
    r = np.random.default_rng(3)
    W, b = r.standard_normal((8, 2)), 0.5 * r.standard_normal(8)
    V, c = r.standard_normal((8, 4, 2)), r.standard_normal((8, 4))
    points = np.array([[0, 0], [1.0, 0.2], [0.3, 1.0]])
    return slice_router(points, W, b, 2, epsilon=0.15, V=V, c=c, expert=2, margin=1.0)


@pytest.mark.parametrize("suffix", SIGNATURES)
def test_the_figure_comes_in_every_format_and_always_alike(cut, suffix):
    draw = partial(figure_bytes, partial(slice_figure, cut))
    image = draw(Path(f"figure{suffix}"))
    assert image.startswith(SIGNATURES[suffix])
    assert image == draw(Path(f"figure{suffix}"))
    with pytest.raises(TielineError, match="a figure is"):
        draw(Path("figure.txt"))


def test_the_page_has_nothing_that_runs(cut):
    page = slice_page(cut, "<i>x</i>")
    assert "default-src 'none'" in page
    assert "<script" not in page
    assert not re.search(r'(src|href)="(?!data:)', page)
    assert "&lt;i&gt;x&lt;/i&gt;" in page


def test_a_slice_shows_cells_bands_kinks_walls_and_the_support(cut):
    axes = slice_figure(cut).axes[0]
    bands, outlines = axes.patches, axes.collections
    assert len(bands) == 2 * len(cut.cells), "a face and a band each"
    kinks, walls, support = (len(lines.get_segments()) for lines in outlines)
    assert kinks == sum(len(cell.kinks) for cell in cut.cells)
    assert walls == sum(tie is not None for cell in cut.cells for tie in cell.ties)
    assert support == len(cut.support.outline)
    page = slice_page(cut)
    assert page.count("<polygon") == len(cut.cells)
    assert page.count("<path") == len(cut.cells)
    assert page.count("<circle") == 3
    assert page.count("<line") == kinks + walls + support
    for cell in cut.cells:
        assert f"<title>experts {', '.join(map(str, cell.coalition))}</title>" in page


def test_neighbours_differ_in_colour(cut):
    colours = cell_colours(cut)
    sets = [frozenset(cell.coalition) for cell in cut.cells]
    for i, coalition in enumerate(sets):
        for j in range(i):
            assert len(sets[j] - coalition) != 1 or colours[i] != colours[j]


def test_a_bare_slice_needs_no_bands_kinks_or_support():
    bare = slice_router(np.eye(3, 2), np.eye(3, 2), [0.0, 0.1, 0.2], 1)
    assert len(slice_figure(bare).axes[0].patches) == len(bare.cells)
    page = slice_page(bare)
    assert "<path" not in page
    assert "Dark bands" not in page


@pytest.mark.skipif(find_browser() is None, reason="no Chromium to look at pages with")
def test_a_browser_shows_the_page_without_complaint(cut, tmp_path):
    (tmp_path / "page.html").write_text(slice_page(cut))
    rendering = look_at(tmp_path / "page.html")
    assert (rendering.console, rendering.requests) == ([], [])
    assert "The plane through three inputs" in rendering.text


def test_the_slice_of_a_model_is_shown_with_its_check():
    result = make_slice()
    assert "at 998 of the 998 that are not ties" in page(result)
    assert "<b>" not in "".join(slice_sentences(result)).replace("“<b>”", "")
    assert "<b>" not in page(result)
    assert result.plot("slice").axes
    assert terminal(result, 80)
    assert "998" in summary(result)
    assert notebook(result).count("<img") == 1
    assert result.metrics["agreed"] == 1
