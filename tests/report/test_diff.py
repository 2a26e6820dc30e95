"""The page, the charts and the table of a comparison."""

import io
import math
import re
from dataclasses import replace

import pytest
from rich.console import Console

from tests.analysis.planted import all_scores, renumbered, trace_of, without_scores
from tests.report.browser import BROWSERS, find_browser, look_at
from tieline.analysis.diff import diff
from tieline.analysis.diff_records import Pattern
from tieline.core.errors import TraceError
from tieline.core.records import read_result
from tieline.report.diff import diff_panels, figures, notebook, page, terminal

needs_browser = pytest.mark.skipif(
    find_browser() is None, reason=f"no browser: none of {', '.join(BROWSERS)} is in PATH"
)


def compared(ids_only=False):
    scores = all_scores(0)
    other = [z.clone() for z in scores]
    other[1][:40] *= -1
    other[2][20:60] *= -1
    a, (b, _) = trace_of(scores), renumbered(trace_of(other), {3}, 1)
    sides = [without_scores(x) if ids_only else x for x in (a, b)]
    provenance = {"a": {"model": "<b>A</b>"}, "b": {"file": "b.npy"}}
    return replace(diff(*sides), provenance=provenance)


@pytest.fixture(scope="module")
def result():
    return compared()


def test_what_is_said_and_counted_is_in_the_page_without_any_script(result):
    markup = page(result)
    body = markup[markup.index("<body>") : markup.index('<script type="application/json"')]
    assert "&lt;b&gt;A&lt;/b&gt; against b.npy" in body
    assert "<b>A" not in body
    verdict, _, advice = result.verdict.partition(" What to do: ")
    assert verdict.replace(" %", "\u00a0%").replace("'", "&#39;") in body
    assert advice[:30] in body
    assert body.count("<tr>") == 1 + 4
    assert "model.layers.3.mlp.gate: " in body
    assert "→" in body
    assert re.findall(r'\b(?:src|href)="([^"]*)"', body) == []


def test_a_side_that_an_engine_ran_is_named_by_it(result):
    provenance = {"engine": "mlx", "model": "m", "dtype": "fp32", "bits": 4.503_125_001}
    for name in ("m", "mlx:m"):
        body = page(
            replace(result, provenance={"a": provenance, "b": provenance | {"model": name}})
        )
        assert "<h1>mlx:m (fp32) against mlx:m (fp32)</h1>" in body
        assert "4.503" in body
        assert "4.503125" not in body.partition("</main>")[0]


def test_names_in_b_are_shown_where_they_differ(result):
    assert all(layer.name == layer.name_b for layer in result.layers)
    assert "in B</th>" not in page(result)
    first = replace(result.layers[0], name_b="elsewhere")
    body = page(replace(result, layers=(first, *result.layers[1:])))
    assert "in B</th>" in body
    assert "elsewhere" in body


def test_charts_show_the_numbers_of_the_result(result):
    panels = {panel.key: panel.figure for panel in diff_panels(result)}
    assert panels["diff-rates"]["layout"]["yaxis"]["ticksuffix"] == " %"
    assert "%{y:.3~r} %, " in panels["diff-rates"]["data"][0]["hovertemplate"]
    assert panels["diff-rates"]["data"][0]["y"] == [0.0, 10.0, 10.0, 0.0]
    causes = panels["diff-causes"]["data"]
    assert [trace["y"] for trace in causes] == [[0, 0, 20, 0], [0, 0, 20, 0], [0, 40, 0, 0]]
    assert panels["diff-depth"]["data"][0]["y"] == [0.0, 10.0, 15.0, 15.0]
    assert panels["diff-after"]["data"][0]["y"] == pytest.approx([0.0, 10.0, 2000 / 360, 0.0])
    assert panels["diff-after"]["data"][1]["y"] == [None, None, 50.0, 0.0]


def test_the_terminal_shows_as_many_columns_as_fit(result):
    texts = []
    for width in (60, 200):
        console = Console(file=io.StringIO(), width=width)
        console.print(terminal(result, width))
        texts.append(console.file.getvalue())
    assert "flip rate" in texts[0]
    assert "relative" not in texts[0]
    assert "relative" in texts[1]
    assert "▲" in texts[1]
    rows = [line.split() for line in texts[1].splitlines()]
    assert [row[0] for row in rows if row and row[0] in "0123"] == ["0", "1", "2", "3"]


def test_what_ids_cannot_tell_is_said():
    panels = {panel.key: panel for panel in diff_panels(compared(ids_only=True))}
    assert panels["diff-causes"].figure is None
    assert "not attributable: A has expert ids only" in panels["diff-causes"].reason
    assert panels["diff-rates"].figure is not None


def test_loud_documents_are_named_and_a_large_ratio_has_no_exponent():
    loud = Pattern("document", "layers.0.mlp", 2 * math.log(152.0), 2.5, 7, detail="most")
    assert "document 7, the loudest, has 150 times the noise of most others in" in loud.text


def test_sentences_are_made_from_the_data_also_after_reading(result, tmp_path):
    result.to_json(tmp_path / "diff.json")
    read = read_result(tmp_path / "diff.json")
    assert read.causes == result.causes
    assert read.observations == result.observations
    assert (read.verdict, read.findings) == (result.verdict, result.findings)


def test_what_is_the_same_on_both_sides_is_not_listed(result):
    markup = page(result)
    assert "<dt>tokens compared</dt>" in markup
    for name in ("layers in A only", "dense layers of B", "shift of tokens"):
        assert name not in markup
    other = replace(result.alignment, only_a=("layers.9",), token_shift=2)
    markup = page(replace(result, alignment=other))
    assert "<dt>layers in A only</dt><dd>layers.9</dd>" in markup
    assert "<dt>shift of tokens</dt><dd>+2</dd>" in markup


def test_figures_show_the_numbers_of_the_result(result):
    drawn = figures(result)
    (axes,) = drawn["layers"]().axes
    assert axes.lines[0].get_ydata().tolist() == [0.0, 0.1, 0.1, 0.0]
    (axes,) = drawn["depth"]().axes
    assert axes.lines[0].get_ydata().tolist() == pytest.approx([0.0, 0.1, 0.15, 0.15])
    (axes,) = drawn["causes"]().axes
    assert sum(bar.get_height() for bar in axes.patches) == sum(
        layer.flip.count for layer in result.layers
    )
    (axes,) = drawn["layers"]().axes
    (bars,) = axes.containers[0].lines[2]
    ends = [segment[:, 1].tolist() for segment in bars.get_segments()]
    assert ends == [pytest.approx([x.flip.low, x.flip.high]) for x in result.layers]
    assert notebook(result).count("<img") == 3


def test_ids_alone_give_no_figure_of_causes():
    bare = compared(ids_only=True)
    with pytest.raises(TraceError, match="no figure of the causes: not attributable"):
        figures(bare)["causes"]()
    assert notebook(bare).count("<img") == 2


@needs_browser
def test_every_chart_is_drawn_without_trouble_or_request(result, tmp_path):
    result.to_html(tmp_path / "diff.html")
    browser_page = look_at(tmp_path / "diff.html")
    assert browser_page.status == "drawn", browser_page.troubles
    assert browser_page.troubles == browser_page.console == browser_page.requests == []
    assert set(browser_page.drawings) == {panel.key for panel in diff_panels(result)}
    assert all(count > 0 for count in browser_page.drawings.values())
