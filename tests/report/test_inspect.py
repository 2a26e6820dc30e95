"""The page is complete and self-contained, and a browser renders it as intended."""

import json
import re
from dataclasses import replace

import pytest

from tests.report.browser import BROWSERS, find_browser, look_at
from tests.report.zoo import HOSTILE, make_inspection
from tieline.core.errors import ParameterError
from tieline.report import html_page
from tieline.report.html_page import MAX_PAGE_BYTES, visible_characters
from tieline.report.inspect import (
    calibration_grid,
    notebook,
    page,
    summary,
)
from tieline.report.inspect_charts import inspection_panels

needs_browser = pytest.mark.skipif(
    find_browser() is None, reason=f"no browser: none of {', '.join(BROWSERS)} is in PATH"
)


@pytest.fixture(scope="module")
def rendered(result):
    return page(result)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("pages")


@pytest.fixture(scope="module")
def browser_page(result, folder):
    result.to_html(folder / "full.html")
    return look_at(folder / "full.html")


@pytest.fixture(scope="module")
def browser_page_without_scores(ids_only, folder):
    ids_only.to_html(folder / "ids.html")
    return look_at(folder / "ids.html", dark=True)


def test_nothing_in_the_page_points_outside(rendered):
    markup = re.sub(r"<script>.*?</script>", "", rendered, flags=re.DOTALL)
    assert re.findall(r'\b(?:src|href|action|data|srcset)="([^"]*)"', markup) == ["data:,"]
    assert "@import" not in markup
    assert "url(" not in markup


def test_the_policy_allows_the_page_s_own_scripts_alone(rendered):
    policy = re.search(r'Security-Policy" content="([^"]*)"', rendered)[1]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert policy.count("'sha256-") == 3
    assert "script-src 'unsafe" not in policy
    assert "unsafe-eval" not in policy


def test_columns_and_values_that_nothing_fills_are_left_out(result, ids_only):
    head = re.search(r"<thead>(.*?)</thead>", page(ids_only), flags=re.DOTALL)[1]
    assert "evenness" in head
    assert "gap" not in head
    assert "k of E" not in head  # the facts say it for all layers
    cells = re.findall(r"<dd>(.*?)</dd>", page(replace(result, provenance={"a": None, "b": 1})))
    assert "None" not in cells


def test_a_notebook_shows_verdict_table_and_figures_without_script(result, ids_only):
    markup = notebook(result)
    assert result.verdict[:40].replace(" %", "\xa0%") in markup
    assert markup.count("<img") == 3
    assert markup.count("<tr>") == 1 + len(result.measures.layers)
    assert "<script" not in markup
    assert re.findall(r'\bsrc="(.{22})', markup) == ["data:image/png;base64,"] * 3
    assert notebook(ids_only).count("<img") == 0


def test_calibration_is_in_page_and_terminal(result):
    assert f"until every expert has {result.calibration[0].least:,}" in page(result)
    rows = calibration_grid(result).rows
    assert len(rows) == len(result.measures.layers)
    assert "Tokens for calibration" not in page(replace(result, calibration=()))


def test_the_summary_is_a_few_plain_lines(result):
    assert repr(result) == summary(result)
    assert summary(result).splitlines()[0] == "Inspection of zoo/moe"
    assert 3 <= len(summary(result).splitlines()) <= 5


def test_the_embedded_figures_are_those_of_the_panels(rendered, result):
    text = re.search(r'id="report-data">(.*?)</script>', rendered, flags=re.DOTALL)[1]
    data = json.loads(text)
    assert list(data["figures"]) == [panel.key for panel in inspection_panels(result)]
    assert len(data["text"]["gaps"]) == len(HOSTILE)


def test_numbers_findings_and_provenance_are_in_the_page_without_any_script(rendered, result):
    body = rendered[rendered.index("<body>") : rendered.index('<script type="application/json"')]
    assert "<script" not in body
    body = re.sub("</?code>", "`", body)  # commands in a sentence are set as code
    for finding in result.findings:
        assert finding.text[1:].replace("'", "&#39;").replace(" %", "\u00a0%") in body
    for name in result.metrics:
        assert f"<dt>{name}</dt>" in body
    assert "<dt>text.name</dt><dd>a.txt</dd>" in body
    by_layer = 1 + len(result.measures.layers)  # also calibration
    assert body.count("<tr>") == 2 * by_layer


def test_noise_stands_in_for_bf16_where_rounding_is_unknown(result):
    metrics = {"flip@0.01": 0.5, "evenness": 0.75, "dead": 2.0}
    text = page(replace(result, metrics=metrics))
    shown = re.findall(r"<li><strong>(.*?)</strong> (.*?)</li>", text)
    assert [number for number, _ in shown] == ["50 %", "75 %", "2"]
    assert "noise of 0.01" in shown[0][1]
    text = page(replace(result, metrics=metrics | {"flip@bf16": 0.125}))
    assert "<strong>12 %</strong> tokens change" in text
    assert "noise of 0.01" not in text


def test_all_but_the_first_findings_are_folded_away(result):
    text = page(replace(result, observations=result.observations[:4] * 3))
    assert "<summary>6 more</summary>" in text
    assert text.count('<span class="tag">') == 12
    assert "Nothing stands out." in page(replace(result, observations=()))


def test_a_large_model_keeps_the_page_small(tmp_path):
    result = make_inspection(layers=1, experts=384, k=8, tokens=60)
    names = tuple(f"layers.{i}" for i in range(64))
    measures = replace(
        result.measures,
        layers=tuple(replace(result.measures.layers[0], name=name) for name in names),
    )
    jumps = tuple(replace(result.jumps[0], name=name) for name in names)
    piece = replace(result.sample.pieces[0], gaps=(0.123456,) * 64)
    sample = replace(result.sample, layers=names, pieces=(piece,) * 5000)
    large = replace(result, measures=measures, jumps=jumps, sample=sample, observations=())
    large.to_html(tmp_path / "large.html")
    assert (tmp_path / "large.html").stat().st_size <= MAX_PAGE_BYTES


def test_a_page_that_would_be_too_large_is_not_written(result, tmp_path, monkeypatch):
    monkeypatch.setattr(html_page, "MAX_PAGE_BYTES", 1000)
    with pytest.raises(ParameterError, match="at most 1000"):
        result.to_html(tmp_path / "large.html")
    assert list(tmp_path.iterdir()) == []


@needs_browser
def test_every_panel_is_drawn_without_trouble(browser_page, result):
    assert browser_page.status == "drawn", browser_page.troubles
    assert browser_page.troubles == []
    assert browser_page.console == []
    assert set(browser_page.drawings) == {panel.key for panel in inspection_panels(result)}
    assert all(count > 0 for count in browser_page.drawings.values()), browser_page.drawings


@needs_browser
def test_no_request_leaves_the_page(browser_page, browser_page_without_scores):
    assert browser_page.requests == []
    assert browser_page_without_scores.requests == []


@needs_browser
def test_text_of_tokens_is_shown_as_text(browser_page):
    assert [piece for _, piece in browser_page.tokens] == [
        visible_characters(text) or "◦" for text in HOSTILE
    ]
    assert "<script>" in [piece for _, piece in browser_page.tokens]
    assert "</script>" in [piece for _, piece in browser_page.tokens]
    assert "img" not in browser_page.tags
    assert browser_page.tags.count("script") == 4


@needs_browser
def test_tokens_nearer_to_a_tie_have_a_stronger_ground(browser_page):
    levels = [int(kind.removeprefix("g")) for kind, _ in browser_page.tokens]
    assert levels == sorted(levels, reverse=True)
    assert set(levels) == {0, 1, 2, 3, 4}


@needs_browser
def test_what_was_not_measured_is_one_line_at_the_end(browser_page_without_scores):
    browser_page = browser_page_without_scores
    assert browser_page.status == "drawn", browser_page.troubles
    assert list(browser_page.drawings) == ["load"]
    reason = "not answerable: the trace has expert ids only, no scores"
    assert browser_page.text.count("Not measured: ") == 1
    line = next(
        text_line for text_line in browser_page.text.splitlines() if "Not measured: " in text_line
    )
    assert browser_page.text.partition('{"figures"')[0].rstrip().endswith(line.strip())
    panels = inspection_panels(make_inspection(ids_only=True, tokens=60))
    assert all(f"“{panel.title}”" in line for panel in panels if panel.figure is None)
    assert "“A stretch of the text, coloured by gap”" in line
    assert line.count(reason) == 1


BAD = '<img src="https://example.org/x.png"><script>document.title = "run"</script><main>'


@needs_browser
def test_the_page_notices_what_goes_wrong_and_the_policy_stops_it(rendered, folder):
    (folder / "bad.html").write_text(rendered.replace("<main>", BAD).replace('"figures":', '"x":'))
    browser_page = look_at(folder / "bad.html")
    assert browser_page.status == "trouble"
    assert any("img-src" in trouble for trouble in browser_page.troubles)
    assert any("Cannot convert" in trouble for trouble in browser_page.troubles)
    assert "<title>run</title>" not in browser_page.dom
    assert browser_page.console != []
    assert browser_page.requests == []


@needs_browser
@pytest.mark.slow
def test_without_the_policy_the_request_would_be_seen(rendered, folder):
    unguarded = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", rendered)
    (folder / "open.html").write_text(unguarded.replace("<main>", BAD))
    browser_page = look_at(folder / "open.html")
    assert browser_page.requests == ["https://example.org/x.png"]
    assert "<title>run</title>" in browser_page.dom
