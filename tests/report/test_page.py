"""The page: complete, self-contained, and seen by a browser as it was meant."""

import json
import re

import pytest

from tests.report.browser import BROWSERS, find_browser, look_at
from tests.report.zoo import HOSTILE, make_inspection
from tieline.core.errors import ParameterError
from tieline.report import page as page_module
from tieline.report.markup import visible
from tieline.report.page import LARGEST_PAGE, render_page, write_page
from tieline.report.panels import draw_panels

needs_browser = pytest.mark.skipif(
    find_browser() is None, reason=f"no browser: none of {', '.join(BROWSERS)} is in PATH"
)


@pytest.fixture(scope="module")
def rendered(result):
    return render_page(result)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("pages")


@pytest.fixture(scope="module")
def seen(result, folder):
    write_page(result, folder / "full.html")
    return look_at(folder / "full.html")


@pytest.fixture(scope="module")
def seen_without_scores(ids_only, folder):
    write_page(ids_only, folder / "ids.html")
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


def test_the_embedded_figures_are_those_of_the_panels(rendered, result):
    text = re.search(r'id="report-data">(.*?)</script>', rendered, flags=re.DOTALL)[1]
    data = json.loads(text)
    assert list(data["figures"]) == [panel.key for panel in draw_panels(result)]
    assert len(data["text"]["gaps"]) == len(HOSTILE)


def test_numbers_findings_and_provenance_are_in_the_page_without_any_script(rendered, result):
    body = rendered[rendered.index("<body>") : rendered.index('<script type="application/json"')]
    assert "<script" not in body
    assert "&lt;b&gt;most&lt;/b&gt;" in body
    for finding in result["findings"]:
        assert finding["text"].rstrip(".").replace("&", "&amp;") in body
    for name in result["metrics"]:
        assert f"<dt>{name}</dt>" in body
    assert "<dt>text.name</dt><dd>a.txt</dd>" in body
    assert body.count("<tr>") == 1 + len(result["measures"]["layers"])


def test_noise_stands_in_for_bf16_where_rounding_is_unknown(result):
    metrics = {"flip@0.01": 0.5, "flip@0.01:any": 0.75, "jump": 0.25}
    text = render_page({**result, "metrics": metrics})
    shown = re.findall(r"<li><strong>(.*?)</strong> (.*?)</li>", text)
    assert [number for number, _ in shown] == ["50 %", "75 %", "25 %"]
    assert "noise of 0.01" in shown[0][1]
    text = render_page({**result, "metrics": metrics | {"flip@bf16": 0.125}})
    assert "<strong>13 %</strong> tokens change" in text or "<strong>12 %</strong>" in text
    assert "noise of 0.01" not in text


def test_all_but_the_first_findings_are_folded_away(result):
    text = render_page({**result, "findings": result["findings"] * 4})
    assert "<summary>6 more</summary>" in text
    assert text.count('<span class="tag">') == 12
    assert "Nothing stands out." in render_page({**result, "findings": []})


def test_a_large_model_keeps_the_page_small(tmp_path):
    result = make_inspection(layers=1, experts=384, k=8, tokens=60).to_dict()
    layers, jumps = result["measures"]["layers"], result["jumps"]
    result["measures"]["layers"] = [{**layers[0], "name": f"layers.{i}"} for i in range(64)]
    result["jumps"] = [{**jumps[0], "name": f"layers.{i}"} for i in range(64)]
    piece = {**result["sample"]["pieces"][0], "gaps": [0.123456] * 64}
    result["sample"]["layers"] = [f"layers.{i}" for i in range(64)]
    result["sample"]["pieces"] = [piece] * 5000
    write_page(result, tmp_path / "large.html")
    assert (tmp_path / "large.html").stat().st_size <= LARGEST_PAGE


def test_a_page_that_would_be_too_large_is_not_written(result, tmp_path, monkeypatch):
    monkeypatch.setattr(page_module, "LARGEST_PAGE", 1000)
    with pytest.raises(ParameterError, match="at most 1000"):
        write_page(result, tmp_path / "large.html")
    assert list(tmp_path.iterdir()) == []


@needs_browser
def test_every_panel_is_drawn_without_trouble(seen, result):
    assert seen.status == "drawn", seen.troubles
    assert seen.troubles == []
    assert seen.console == []
    assert set(seen.drawings) == {panel.key for panel in draw_panels(result)}
    assert all(count > 0 for count in seen.drawings.values()), seen.drawings


@needs_browser
def test_no_request_leaves_the_page(seen, seen_without_scores):
    assert seen.requests == []
    assert seen_without_scores.requests == []


@needs_browser
def test_text_of_tokens_is_shown_as_text(seen):
    assert [words for _, words in seen.tokens] == [visible(text) or "◦" for text in HOSTILE]
    assert "<script>" in [words for _, words in seen.tokens]
    assert "</script>" in [words for _, words in seen.tokens]
    assert "img" not in seen.tags
    assert seen.tags.count("script") == 4


@needs_browser
def test_tokens_nearer_to_a_tie_have_a_stronger_ground(seen):
    levels = [int(kind.removeprefix("g")) for kind, _ in seen.tokens]
    assert levels == sorted(levels, reverse=True)
    assert set(levels) == {0, 1, 2, 3, 4}


@needs_browser
def test_what_cannot_be_drawn_is_said_in_a_sentence(seen_without_scores):
    seen = seen_without_scores
    assert seen.status == "drawn", seen.troubles
    assert list(seen.drawings) == ["load"]
    reason = "not answerable: the trace has expert ids only, no scores."
    assert seen.text.count(f"Not drawn – {reason}") == 7
    assert seen.text.count(reason) == 8


BAD = '<img src="https://example.org/x.png"><script>document.title = "run"</script><main>'


@needs_browser
def test_the_page_notices_what_goes_wrong_and_the_policy_stops_it(rendered, folder):
    (folder / "bad.html").write_text(rendered.replace("<main>", BAD).replace('"figures":', '"x":'))
    seen = look_at(folder / "bad.html")
    assert seen.status == "trouble"
    assert any("img-src" in trouble for trouble in seen.troubles)
    assert any("Cannot convert" in trouble for trouble in seen.troubles)
    assert "<title>run</title>" not in seen.dom
    assert seen.console != []
    assert seen.requests == []


@needs_browser
@pytest.mark.slow
def test_without_the_policy_the_request_would_be_seen(rendered, folder):
    unguarded = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", rendered)
    (folder / "open.html").write_text(unguarded.replace("<main>", BAD))
    seen = look_at(folder / "open.html")
    assert seen.requests == ["https://example.org/x.png"]
    assert "<title>run</title>" in seen.dom
