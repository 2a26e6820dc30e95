"""The claims ledger in the terminal and as a page."""

import io
import json
import math
import re
from dataclasses import replace

import pytest
from rich.console import Console

from tests.report.browser import BROWSERS, find_browser, look_at
from tieline.lab.claims.claim import Claim, ClaimOutcome, Verdict
from tieline.lab.claims.evidence import Check, Evidence, FigureAxis, FigureData, FigureSeries, Fits
from tieline.lab.claims.ledger import Catalogue, Ledger, LedgerProvenance, PaperTitle
from tieline.lab.report.ledger import (
    CATALOGUE,
    claim_check_text,
    claim_value_text,
    claim_verdict_text,
    page,
    terminal,
)

HOSTILE = '<script>alert(1)</script> & "quotes" [bold]not markup[/bold]'
CHECK = Check(HOSTILE, 1.5, "<=", 2.0, 0.1, True)
FAILED = replace(CHECK, passed=False, name="a failed check")


def make_outcome(name="p0-a", verdict=Verdict.HOLDS, changed=False, error="", **evidence):
    texts = (HOSTILE, HOSTILE, "over-specified", "by hand", "a counterexample")
    claim = Claim(name, 0, "Thm 1", *texts, Verdict.HOLDS)
    fields = {"checks": (CHECK,), "paper": 1.0, "measured": float("inf")} | evidence
    return ClaimOutcome(claim, verdict, changed, Evidence(**fields), error=error)


FIGURE = FigureData(
    FigureAxis("τ", "log"),
    FigureAxis("mass", "linear"),
    (
        FigureSeries("bound", (0.1, 1.0), (1.0, 2.0), "dashed"),
        FigureSeries("found", (0.1, 1.0), (0.9, 1.9), "dots", (0.1, 0.1)),
    ),
)
TITLES = (PaperTitle(0, "p", HOSTILE),)


@pytest.fixture
def ledger():
    outcomes = (
        make_outcome("p0-a", figure=FIGURE),
        make_outcome("p0-b", Verdict.FAILS, True, checks=(FAILED,)),
        make_outcome("p0-c", Verdict.HOLDS, True, checks=(CHECK, FAILED)),
        make_outcome("p0-d", None, True, "ValueError: no", checks=(), paper=None, measured=None),
    )
    return Ledger(
        LedgerProvenance("1", "fast", 0),
        TITLES,
        {"holds": 2, "holds with a condition": 0, "does not hold": 1},
        ("p0-b", "p0-c", "p0-d"),
        ("p0-d",),
        outcomes,
    )


def printed(view, width):
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(view)
    return console.export_text()


def test_setting_and_what_would_change_the_verdict_are_shown_for_a_few_claims(ledger):
    few = printed(terminal(ledger, 160), 160)
    listed = Catalogue(TITLES, tuple(outcome.claim for outcome in ledger.claims))
    for text in (few, printed(CATALOGUE.terminal(listed, 160), 160), page(ledger)):
        assert text.count("over-specified") == len(ledger.claims)
        assert text.count("a counterexample") == len(ledger.claims)
    many = replace(ledger, claims=ledger.claims * 3)
    assert "over-specified" not in printed(terminal(many, 160), 160)


@pytest.mark.parametrize("width", [60, 160])
def test_the_terminal_names_every_claim_and_what_changed(ledger, width):
    text = printed(terminal(ledger, width), width)
    assert all(f"p0-{name}" in text for name in "abcd")
    assert "a failed check" in text
    assert "3 verdicts changed" in text
    assert ("measured" in text.splitlines()[1]) == (width == 160)
    assert "[bold]" in text.replace("\n", "")


def test_the_catalogue(ledger):
    catalogue = Catalogue(TITLES, tuple(outcome.claim for outcome in ledger.claims))
    assert printed(CATALOGUE.terminal(catalogue, 100), 100).count("● holds") == 4
    assert catalogue.to_html().count("● holds") == 4
    assert repr(catalogue) == "Catalogue of claims: 4 claims of 1 papers"


def test_words():
    assert claim_value_text(None) == claim_value_text("") == "–"
    values = ("inf", float("inf"), float("-inf"), 1234, 0.25, "about")
    assert [*map(claim_value_text, values)] == ["∞", "∞", "-∞", "1,234", "0.250000", "about"]
    assert claim_check_text(replace(CHECK, name="x")) == "✓ x: 1.50000 <= 2.00000 ± 0.100000"
    assert claim_check_text(replace(CHECK, name="x", passed=False, tolerance=0.0)) == (
        "✗ x: 1.50000 <= 2.00000"
    )
    assert claim_verdict_text(make_outcome()) == "● holds"
    assert "expected: holds" in claim_verdict_text(make_outcome("a", Verdict.FAILS, True))
    assert "a check failed" in claim_verdict_text(make_outcome("a", Verdict.HOLDS, True))


def test_the_page_holds_every_claim_and_one_figure_per_claim_that_has_one(ledger):
    markup = page(ledger)
    assert markup.count('<section class="panel" id="p0-') == 4
    assert markup.count('class="chart"') == 1
    data = json.loads(re.search(r'id="report-data">(.*?)</script>', markup, flags=re.DOTALL)[1])
    drawn = data["figures"]["figure-p0-a"]
    assert [trace["mode"] for trace in drawn["data"]] == ["lines", "markers"]
    assert drawn["data"][0]["line"]["dash"] == "dash"
    assert drawn["data"][1]["error_y"]["array"] == [0.1, 0.1]
    assert drawn["layout"]["xaxis"]["type"] == "log"


def test_a_claim_with_data_is_drawn_by_its_name(ledger):
    axes = ledger.plot("p0-a").axes[0]
    assert (axes.get_xscale(), axes.get_xlabel(), axes.get_ylabel()) == ("log", "τ", "mass")
    assert [list(line.get_ydata()) for line in axes.lines[:2]] == [[1.0, 2.0], [0.9, 1.9]]
    (bars,) = axes.containers[0].lines[2]
    ends = [segment[:, 1].tolist() for segment in bars.get_segments()]
    assert ends == [pytest.approx([0.8, 1.0]), pytest.approx([1.8, 2.0])]
    assert ledger._repr_html_().count("<tr>") == 1 + 4
    assert "3 verdicts changed" in repr(ledger)


def test_words_of_a_claim_are_shown_and_never_run(ledger):
    markup = re.sub(r"<script.*?</script>", "", page(ledger), flags=re.DOTALL)
    assert "alert(1)" in markup
    assert "<script>alert" not in markup


@pytest.mark.skipif(
    find_browser() is None, reason=f"no browser: none of {', '.join(BROWSERS)} is in PATH"
)
def test_a_browser_draws_the_page(ledger, tmp_path):
    path = tmp_path / "ledger.html"
    path.write_text(page(ledger))
    rendering = look_at(path)
    assert (rendering.status, rendering.troubles) == ("drawn", [])
    assert rendering.drawings["figure-p0-a"] > 0


def test_an_undecided_claim_says_why(ledger):
    wide = Check("slope", -0.4, "=", -0.5, 0.1, False, open="reaches across", low=-0.6, high=-0.2)
    outcome = make_outcome("p0-e", Verdict.UNDECIDED, checks=(wide,), fits=Fits(9, 10))
    undecided_outcome = replace(outcome, reason="the interval is too wide")
    extended = replace(ledger, claims=(*ledger.claims, undecided_outcome))
    assert claim_verdict_text(undecided_outcome) == "? undecided"
    assert claim_check_text(wide) == (
        "? slope: -0.400000 [-0.6, -0.2] = -0.500000 ± 0.100000 (reaches across)"
    )
    text = " ".join(printed(terminal(extended, 100), 100).split())
    assert "p0-e: undecided: the interval is too wide" in text
    markup = page(extended)
    assert "9 of 10 fits converged" in markup
    assert "Why undecided</dt><dd>the interval is too wide" in markup


def test_an_undecided_claim_says_what_the_run_could_not_measure(ledger):
    absent = Check("gain", math.nan, "=", 0.5, 0.0, False, open="the images are not here")
    wide = Check("slope", -0.4, "=", -0.5, 0.1, False, open="reaches across")
    outcome = make_outcome("p0-e", Verdict.UNDECIDED, checks=(absent, absent, wide))
    undecided_outcome = replace(
        outcome, claim=replace(outcome.claim, undecided="too small a model")
    )
    text = " ".join(
        printed(terminal(replace(ledger, claims=(undecided_outcome,)), 100), 100).split()
    )
    assert "p0-e: undecided: too small a model. Not measured: the images are not here" in text
    assert text.count("the images are not here") == 1
