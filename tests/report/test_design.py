"""The advisor's table, figure and page, and slices: drawn from plain data."""

import io
import re
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from tests.report.browser import find_browser, look_at
from tieline.core.errors import TielineError
from tieline.report.design_figure import design_figure, design_figure_bytes
from tieline.report.design_page import design_page_bytes
from tieline.report.design_table import cell_text, design_facts, design_view
from tieline.report.slice_colours import cell_colours
from tieline.report.slice_figure import slice_figure, slice_figure_bytes, slice_page_bytes
from tieline.tropical.advisor import PRESETS, LayerShape, advise
from tieline.tropical.pictures import slice_router

SIGNATURES = {".png": b"\x89PNG", ".pdf": b"%PDF", ".svg": b"<?xml"}


@pytest.fixture(scope="module")
def advice():
    return advise(PRESETS["deepseek-v3"], 8, (1, 2, 4), "a <b>layer</b>").to_dict()


@pytest.fixture(scope="module")
def cut():
    r = np.random.default_rng(3)
    W, b = r.standard_normal((8, 2)), 0.5 * r.standard_normal(8)
    V, c = r.standard_normal((8, 4, 2)), r.standard_normal((8, 4))
    points = np.array([[0, 0], [1.0, 0.2], [0.3, 1.0]])
    return slice_router(points, W, b, 2, epsilon=0.15, V=V, c=c, expert=2, margin=1.0).to_dict()


def shown(view, width=100):
    stream = io.StringIO()
    Console(file=stream, width=width, highlight=False).print(view)
    return stream.getvalue()


def test_the_table_has_a_row_and_a_range_for_every_quantity(advice):
    text = shown(design_view(advice))
    for quantity in advice["quantities"].values():
        assert text.count(f"\n{quantity['heading']} ") == 2, "one row of numbers, one of words"
    assert text.count("holds: ") == len(advice["quantities"])
    assert text.count("as if routing were not group-limited") == 1
    assert "a <b>layer</b>" in text
    assert "1 shared" in design_facts(advice)
    assert "4 of 8 groups" in design_facts(advice)


def test_long_numbers_are_powers_of_ten():
    assert cell_text("coalitions", {"value": None, "log10": 612.4}) == "10^612"
    assert cell_text("coalitions", {"value": None, "log10": None}) == "–"
    assert cell_text("coalitions", {"value": 1820, "log10": 3.26}) == "1,820"
    assert cell_text("parameters", {"value": 402_784_256, "log10": 8.6}) == "4.03e8"
    assert cell_text("bf16_flips", {"value": 0.0219, "log10": -1.66}) == "2.2 %"


def test_a_first_split_other_than_one_is_told():
    assert "at split 2" in design_facts(advise(LayerShape(8, 2, 8), 2, (2, 4)).to_dict())


def test_the_figure_draws_each_logarithm_over_the_splits(advice):
    left, right = design_figure(advice).axes
    drawn = {line.get_label(): line.get_ydata() for line in [*left.lines, *right.lines]}
    assert len(drawn) == 7
    bounds = [row["entries"]["paper_bound"]["log10"] for row in advice["rows"]]
    assert list(drawn["paper's bound C(N, k) Φ(kH, d)"]) == bounds
    assert [tick.get_text() for tick in left.get_xticklabels()] == ["1", "2", "4"]


@pytest.mark.parametrize("suffix", SIGNATURES)
def test_figures_come_in_every_format_and_always_alike(advice, cut, suffix):
    path = Path(f"figure{suffix}")
    for draw, data in ((design_figure_bytes, advice), (slice_figure_bytes, cut)):
        made = draw(data, path)
        assert made.startswith(SIGNATURES[suffix])
        assert made == draw(data, path)
        with pytest.raises(TielineError, match="a figure is"):
            draw(data, Path("figure.txt"))


def test_pages_hold_every_number_and_nothing_that_runs(advice, cut):
    design, cells = design_page_bytes(advice).decode(), slice_page_bytes(cut, "<i>x</i>").decode()
    for page in (design, cells):
        assert "default-src 'none'" in page
        assert "<script" not in page
        assert not re.search(r'(src|href)="(?!data:)', page)
    assert "a &lt;b&gt;layer&lt;/b&gt;" in design
    assert "&lt;i&gt;x&lt;/i&gt;" in cells
    for name, quantity in advice["quantities"].items():
        assert design.count(f"<td>{quantity['heading']}</td>".replace("'", "&#x27;")) == 2
        assert cell_text(name, advice["rows"][2]["entries"][name]) in design
    assert "m = 1, 2, 4: as if routing were not group-limited" in design


def test_a_slice_shows_cells_bands_kinks_walls_and_the_support(cut):
    axes = slice_figure(cut).axes[0]
    bands, outlines = axes.patches, axes.collections
    assert len(bands) == 2 * len(cut["cells"]), "a face and a band each"
    kinks, walls, support = (len(lines.get_segments()) for lines in outlines)
    assert kinks == sum(len(cell["kinks"]) for cell in cut["cells"])
    assert walls == sum(tie is not None for cell in cut["cells"] for tie in cell["ties"])
    assert support == len(cut["support"]["outline"])
    page = slice_page_bytes(cut).decode()
    assert page.count("<polygon") == len(cut["cells"])
    assert page.count("<circle") == 3
    assert page.count("<line") == kinks + walls + support
    for cell in cut["cells"]:
        assert f"<title>experts {', '.join(map(str, cell['coalition']))}</title>" in page


def test_neighbours_differ_in_colour(cut):
    colours = cell_colours(cut)
    sets = [frozenset(cell["coalition"]) for cell in cut["cells"]]
    for i, one in enumerate(sets):
        for j in range(i):
            assert len(sets[j] - one) != 1 or colours[i] != colours[j]


def test_a_bare_slice_needs_no_bands_kinks_or_support():
    bare = slice_router(np.eye(3, 2), np.eye(3, 2), [0.0, 0.1, 0.2], 1).to_dict()
    assert len(slice_figure(bare).axes[0].patches) == len(bare["cells"])
    page = slice_page_bytes(bare).decode()
    assert "<path" not in page
    assert "Dark bands" not in page


@pytest.mark.skipif(find_browser() is None, reason="no Chromium to look at pages with")
def test_a_browser_shows_the_pages_without_complaint(advice, cut, tmp_path):
    for data, words in ((design_page_bytes(advice), "where it holds"), (slice_page_bytes(cut), "")):
        (tmp_path / "page.html").write_bytes(data)
        seen = look_at(tmp_path / "page.html")
        assert seen.console == []
        assert seen.requests == []
        assert words in seen.text
