"""The advisor's table, figure and page draw the record."""

import io
import re
from functools import partial
from pathlib import Path

import pytest
from markupsafe import escape
from rich.console import Console

from tests.report.browser import find_browser, look_at
from tieline.core.errors import TielineError
from tieline.lab.report.design import (
    design_cell_text,
    design_recommendation,
    figures,
    notebook,
    page,
    summary,
    terminal,
)
from tieline.lab.tropical.layer_shape_advice import PRESETS, Entry, LayerShape, advise
from tieline.report.matplotlib_figures import figure_bytes

SIGNATURES = {".png": b"\x89PNG", ".pdf": b"%PDF", ".svg": b"<?xml"}


@pytest.fixture(scope="module")
def advice():
    return advise(PRESETS["deepseek-v3"], 8, (1, 2, 4), "a <b>layer</b>")


def shown(view, width=100):
    stream = io.StringIO()
    Console(file=stream, width=width, highlight=False).print(view)
    return stream.getvalue()


def test_the_table_has_a_row_and_a_range_for_every_quantity(advice):
    text = shown(terminal(advice, 100))
    for quantity in advice.quantities.values():
        assert text.count(f"\n{quantity.heading} ") == 2, "one row of numbers, one of words"
    assert text.count("holds: ") == len(advice.quantities)
    assert text.count("as if routing were not group-limited") == 1
    assert "a <b>layer</b>" in text
    assert "1 shared" in text
    assert "4 of 8 groups" in text


def test_long_numbers_are_powers_of_ten():
    assert design_cell_text("coalitions", Entry(None, 612.4)) == "10^612"
    assert design_cell_text("coalitions", Entry(None, None)) == "–"
    assert design_cell_text("coalitions", Entry(1820, 3.26)) == "1,820"
    assert design_cell_text("parameters", Entry(402_784_256, 8.6)) == "4.03e8"
    assert design_cell_text("bf16_flips", Entry(0.0219, -1.66)) == "2.2 %"


@pytest.mark.parametrize(
    ("preset", "splits", "advice"),
    [
        ("olmoe", (1, 2, 4, 8), "Do not go beyond 16 of 128 experts unless the router computes"),
        ("olmoe", (8, 1, 4, 2), "Do not go beyond 16 of 128 experts unless the router computes"),
        ("olmoe", (1,), "8 of 64 experts are fine, also with a router in bf16: rounding"),
        ("olmoe", (8,), "Keep the router in float32: rounding its scores to bf16 changes"),
    ],
)
def test_the_recommendation_leads_in_one_sentence(preset, splits, advice):
    result = advise(PRESETS[preset], 16, splits)
    text = design_recommendation(result)
    assert text.startswith(advice)
    assert text.count(". ") == 0
    assert text.endswith(".")
    lines = shown(terminal(result, 80), 80).splitlines()
    assert advice[:40] in lines[1]
    assert text in summary(result)
    assert "1e+" not in text


def test_a_first_split_other_than_one_is_told():
    assert "at split 2" in summary(advise(LayerShape(8, 2, 8), 2, (2, 4)))


def test_the_figure_draws_each_logarithm_over_the_splits(advice):
    left, right = advice.plot("design").axes
    drawn = {line.get_label(): line.get_ydata() for line in [*left.lines, *right.lines]}
    assert len(drawn) == 7
    bounds = [row.entries["paper_bound"].log10 for row in advice.rows]
    assert list(drawn["paper's bound C(N, k) Φ(kH, d)"]) == bounds
    assert [tick.get_text() for tick in left.get_xticklabels()] == ["1", "2", "4"]


@pytest.mark.parametrize("suffix", SIGNATURES)
def test_the_figure_comes_in_every_format_and_always_alike(advice, suffix):
    draw = partial(figure_bytes, figures(advice)["design"])
    image = draw(Path(f"figure{suffix}"))
    assert image.startswith(SIGNATURES[suffix])
    assert image == draw(Path(f"figure{suffix}"))
    with pytest.raises(TielineError, match="a figure is"):
        draw(Path("figure.txt"))


def test_the_page_holds_every_number_and_nothing_that_runs(advice):
    markup = page(advice)
    assert "default-src 'none'" in markup
    assert "<script" not in markup
    assert not re.search(r'(src|href)="(?!data:)', markup)
    assert "a &lt;b&gt;layer&lt;/b&gt;" in markup
    for name, quantity in advice.quantities.items():
        assert markup.count(f'<th scope="row">{escape(quantity.heading)}</th>') == 2
        assert design_cell_text(name, advice.rows[2].entries[name]) in markup
    assert "m = 1, 2, 4: as if routing were not group-limited" in markup


def test_a_notebook_shows_the_table_and_the_figure(advice):
    markup = notebook(advice)
    assert markup == advice._repr_html_()
    assert markup.count("<img") == 1
    assert "<script" not in markup
    assert repr(advice) == summary(advice)


@pytest.mark.skipif(find_browser() is None, reason="no Chromium to look at pages with")
def test_a_browser_shows_the_page_without_complaint(advice, tmp_path):
    (tmp_path / "page.html").write_text(page(advice))
    rendering = look_at(tmp_path / "page.html")
    assert rendering.console == []
    assert rendering.requests == []
    assert "where it holds" in rendering.text
