"""The claims ledger in the terminal and as a page."""

import io
import json
import re

import pytest
from rich.console import Console

from tests.report.browser import BROWSERS, find_browser, look_at
from tieline.report.ledger_page import ledger_bytes, render_ledger
from tieline.report.ledger_table import catalogue_view, ledger_view
from tieline.report.ledger_words import check_words, shown, verdict_words

HOSTILE = '<script>alert(1)</script> & "quotes" [bold]not markup[/bold]'


def make_check(**changes):
    check = {"name": HOSTILE, "measured": 1.5, "rule": "<=", "reference": 2.0, "tolerance": 0.1}
    return check | {"passed": True, "part": "paper"} | changes


def make_outcome(name="p0-a", verdict="holds", changed=False, **evidence):
    claim = {"id": name, "paper": 0, "number": "Thm 1", "title": HOSTILE, "expected": "holds"}
    claim |= {"statement": HOSTILE, "tested": "by hand", "condition": "", "untestable": ""}
    found = {"paper": 1.0, "corrected": None, "measured": "inf", "note": "", "figure": None}
    found |= {"checks": [make_check()]} | evidence
    return {"claim": claim, "verdict": verdict, "changed": changed, "evidence": found, "error": ""}


FIGURE = {
    "x": {"title": "τ", "scale": "log"},
    "y": {"title": "mass", "scale": "linear"},
    "series": [
        {"name": "bound", "x": [0.1, 1.0], "y": [1.0, 2.0], "kind": "dashed"},
        {"name": "found", "x": [0.1, 1.0], "y": [0.9, 1.9], "kind": "dots", "errors": [0.1, 0.1]},
    ],
}


@pytest.fixture
def ledger():
    failed = make_check(passed=False, name="a failed check")
    broken = make_outcome("p0-d", None, True) | {"error": "ValueError: no", "evidence": {}}
    outcomes = [
        make_outcome("p0-a", figure=FIGURE),
        make_outcome("p0-b", "does not hold", True, checks=[failed]),
        make_outcome("p0-c", "holds", True, checks=[make_check(), failed]),
        broken,
    ]
    return {
        "provenance": {"tieline": "1", "mode": "fast", "seed": 0},
        "papers": [{"paper": 0, "name": "p", "title": HOSTILE}],
        "verdicts": {"holds": 2, "holds with a condition": 0, "does not hold": 1},
        "changed": ["p0-b", "p0-c", "p0-d"],
        "broken": ["p0-d"],
        "claims": outcomes,
    }


def printed(view, width):
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(view)
    return console.export_text()


@pytest.mark.parametrize("width", [60, 160])
def test_the_terminal_names_every_claim_and_what_changed(ledger, width):
    text = printed(ledger_view(ledger, width), width)
    assert all(f"p0-{name}" in text for name in "abcd")
    assert "a failed check" in text
    assert "3 verdicts changed" in text
    assert ("measured" in text.splitlines()[1]) == (width == 160)
    assert "[bold]" in text.replace("\n", "")


def test_the_catalogue(ledger):
    text = printed(catalogue_view({"claims": [o["claim"] for o in ledger["claims"]]}), 100)
    assert text.count("● holds") == 4


def test_words():
    assert shown(None) == shown("") == "–"
    assert (shown("inf"), shown(1234), shown(0.25), shown("about")) == (
        "∞",
        "1,234",
        "0.250000",
        "about",
    )
    assert check_words(make_check(name="x")) == "✓ x: 1.50000 <= 2.00000 ± 0.100000"
    assert check_words(make_check(name="x", passed=False, tolerance=0.0)).startswith("✗ x: 1.5")
    assert verdict_words(make_outcome()) == "holds"
    assert "expected: holds" in verdict_words(make_outcome("a", "does not hold", True))
    assert "a check failed" in verdict_words(make_outcome("a", "holds", True))


def test_the_page_holds_every_claim_and_one_figure_per_claim_that_has_one(ledger):
    page = render_ledger(ledger)
    assert page.count('<section class="panel" id="p0-') == 4
    assert page.count('class="chart"') == 1
    data = json.loads(re.search(r'id="report-data">(.*?)</script>', page, flags=re.DOTALL)[1])
    drawn = data["figures"]["figure-p0-a"]
    assert [trace["mode"] for trace in drawn["data"]] == ["lines", "markers"]
    assert drawn["data"][0]["line"]["dash"] == "dash"
    assert drawn["data"][1]["error_y"]["array"] == [0.1, 0.1]
    assert drawn["layout"]["xaxis"]["type"] == "log"


def test_words_of_a_claim_are_shown_and_never_run(ledger):
    markup = re.sub(r"<script.*?</script>", "", render_ledger(ledger), flags=re.DOTALL)
    assert "alert(1)" in markup
    assert "<script>alert" not in markup


@pytest.mark.skipif(
    find_browser() is None, reason=f"no browser: none of {', '.join(BROWSERS)} is in PATH"
)
def test_a_browser_draws_the_page(ledger, tmp_path):
    path = tmp_path / "ledger.html"
    path.write_bytes(ledger_bytes(ledger))
    seen = look_at(path)
    assert (seen.status, seen.troubles) == ("drawn", [])
    assert seen.drawings["figure-p0-a"] > 0
