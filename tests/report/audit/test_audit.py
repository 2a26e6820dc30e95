"""The audit drawn: every row in the table, every chart in a browser, nothing from outside."""

import html
import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from tests.analysis.zoo import small_audit
from tests.report.browser import BROWSERS, find_browser, look_at
from tieline.analysis.audit_records import PrecisionJudgement
from tieline.core.statistics import Estimate
from tieline.report.audit import (
    COLUMNS,
    IGNORE_TITLE,
    _served_columns,
    audit_panels,
    figures,
    kept_router_rows,
    notebook,
    page,
    terminal,
)
from tieline.report.tables import grid
from tieline.report.words.numbers import significant

needs_browser = pytest.mark.skipif(
    find_browser() is None, reason=f"no browser: none of {', '.join(BROWSERS)} is in PATH"
)


@pytest.fixture(scope="module")
def audit():
    audited = small_audit()
    return replace(audited, provenance=audited.provenance | {"model": "<b>model</b>"})


def shown(result, width):
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(terminal(result, width))
    return console.export_text()


def test_the_terminal_shows_every_row_and_what_there_is_room_for(audit):
    wide, narrow = shown(audit, 160), shown(audit, 60)
    for row in audit.effects:
        assert row.name in wide
        assert row.name in narrow
    assert "floor" in wide
    assert "floor" not in narrow
    assert "local flips" in narrow


def test_arguments_that_leave_the_routers_alone_are_shown(audit):
    assert set(audit.ignore) == {"llm-compressor", "auto-round", "gptqmodel", "bitsandbytes"}
    text, html = shown(audit, 200), page(audit)
    for argument in ("ignore=[", "layer_config={", "dynamic={", "llm_int8_skip_modules=["):
        assert argument in text
        assert argument in html
    without = replace(audit, ignore={})
    assert IGNORE_TITLE not in shown(without, 200)
    assert IGNORE_TITLE not in page(without)


def test_choices_that_are_not_certified_are_shown_by_layer(audit):
    assert list(audit.uncertified) == list(audit.layers)
    share = audit.uncertified[audit.layers[0]]
    assert 0 <= share.value < audit.effect("router int4").layers[0].local.value
    unknown = replace(audit, uncertified={audit.layers[0]: Estimate(None, None, "groups add")})
    assert "Choices that no order of summation changes" in page(audit)
    assert "groups add" in page(unknown)
    assert "another kernel sums" in shown(audit, 200)
    assert "another kernel sums" not in shown(unknown, 200)


def test_an_interval_is_shown_where_the_prediction_is_one(audit):
    column = next(c for c in COLUMNS if c.heading == "predicted")
    row = audit.effects[0]
    for low, high, text in (
        (0.01, 0.03, "1.0 % – 3.0 %"),
        (0.03, 0.03, "3.0 %"),
        (None, None, "–"),
    ):
        assert column.cell(replace(row, predicted_low=low, predicted=high)) == text


def test_layers_to_keep_are_named_with_their_cost(audit):
    rows = kept_router_rows(audit)
    assert [row[0] for row in rows] == ["bf16", "int4"]
    keep = audit.effects[1].keep
    assert rows[1][4] == f"{keep.bytes:,}"
    assert len(re.findall(r"\d", rows[1][1])) == len(keep.layers)


def test_numbers_are_in_the_page_without_any_script_and_names_are_escaped(audit):
    markup = page(audit)
    body = markup[markup.index("<body>") : markup.index('<script type="application/json"')]
    assert "<script" not in body
    assert "&lt;b&gt;model&lt;/b&gt;" in body
    assert all(row.name in body for row in audit.effects)
    verdict, _, advice = audit.verdict.partition(" What to do: ")
    assert verdict.replace(" %", "\u00a0%") in body
    assert advice in body
    assert body.count("<tr>") > len(audit.effects) * (1 + len(audit.layers))


def test_without_rounded_routers_one_line_says_so(audit):
    rows = tuple(row for row in audit.effects if row.kind == "score noise")
    bare = replace(audit, effects=rows, judgement=PrecisionJudgement("not run"))
    panels = audit_panels(bare)
    assert [panel.figure is None for panel in panels] == [False, False, True]
    markup = page(bare)
    assert markup.count("no rounding of the routers was run") == 1
    assert "Routers to keep" not in markup


def test_figures_show_the_numbers_of_the_rows(audit):
    drawn = figures(audit)
    assert list(drawn) == ["flips", "kl"]
    (axes,) = drawn["kl"]().axes
    shown = [y for line in axes.lines for y in line.get_ydata()]
    for row in audit.effects:
        assert row.kl.value in shown
    (axes,) = drawn["flips"]().axes
    names = [label.get_text() for label in axes.get_xticklabels()]
    assert names == [row.name for row in audit.effects]
    assert notebook(audit).count("<img") == 2


@needs_browser
def test_every_chart_is_drawn_without_trouble_and_nothing_is_asked_for(audit, tmp_path):
    audit.to_html(tmp_path / "audit.html")
    browser_page = look_at(tmp_path / "audit.html")
    assert browser_page.status == "drawn", browser_page.troubles
    assert browser_page.console == []
    assert browser_page.requests == []
    assert set(browser_page.drawings) == {panel.key for panel in audit_panels(audit)}
    assert all(count > 0 for count in browser_page.drawings.values())


def test_the_remedies_stand_side_by_side_with_what_they_leave(audit):
    assert audit.remedies is not None
    assert audit.remedies.perturbations == ("router bf16",)
    left = significant(audit.effect("router bf16").kl.value, 2)
    for text in (page(audit), shown(audit, 80)):
        flat = html.unescape(" ".join(text.split()))
        assert "Remedies" in flat
        assert "Smoothing wins where two independent runs must agree" in flat
        assert left in flat
        assert all(remedy.name.split(",")[0] in flat for remedy in audit.remedies.remedies)
    assert all(len(line) <= 80 for line in shown(audit, 80).splitlines())


def test_every_perturbation_has_a_verdict_on_a_brief_screen_and_on_the_page(audit):
    harmless = replace(audit.effects[0], kl=Estimate(1e-4, 1e-6), loss=Estimate(0.0, 1e-6))
    harmful = replace(harmless, kl=Estimate(1e-2, 1e-4))
    unsure = replace(harmless, kl=Estimate(1e-3, 5e-4))
    brief = replace(audit, effects=(harmless, harmful, unsure), remedies=None)
    assert [brief.tolerance(row) for row in brief.effects] == ["yes", "no", "unclear"]
    table = grid(_served_columns(brief), brief.effects)
    assert [row[-1] for row in table.rows] == ["harmless", "harmful", "unsure"]
    assert table.head == ("perturbation", "changed", "KL", "floor", "Δ loss (95 %)", "verdict")
    assert page(audit).count("</td><td>harm") + page(audit).count("</td><td>unsure") == len(
        audit.effects
    )
