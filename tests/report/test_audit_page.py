"""The audit drawn: every row in the table, every chart in a browser, nothing from outside."""

import copy
import io
import re

import pytest
from rich.console import Console

from tests.analysis.zoo import small_audit
from tests.report.browser import BROWSERS, find_browser, look_at
from tieline.report.audit_page import audit_page_bytes, render_audit
from tieline.report.audit_panels import audit_panels
from tieline.report.audit_table import COLUMNS, audit_notes, audit_view, keep_rows

needs_browser = pytest.mark.skipif(
    find_browser() is None, reason=f"no browser: none of {', '.join(BROWSERS)} is in PATH"
)


@pytest.fixture(scope="module")
def audit():
    result = small_audit().to_dict()
    result["provenance"]["model"] = "<b>model</b>"
    return result


def shown(result, width):
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(audit_view(result, width))
    return console.export_text()


def test_the_terminal_shows_every_row_and_what_there_is_room_for(audit):
    wide, narrow = shown(audit, 160), shown(audit, 60)
    for row in audit["effects"]:
        assert row["name"] in wide
        assert row["name"] in narrow
    assert "floor" in wide
    assert "floor" not in narrow
    assert "local flips" in narrow


def test_notes_tell_noise_missing_experts_and_what_was_left_out(audit):
    result = copy.deepcopy(audit)
    layer = result["layers"][1]
    result["never_hit"] = [{"layer": layer, "experts": list(range(12)), "n_experts": 16}]
    result["left_out"] = ["100 of 200 tokens"]
    notes = audit_notes(result)
    assert notes[0].startswith("Noise of σ = 0.00")
    assert "Layer 1: 12 of 16 experts were never hit" in notes[1]
    assert "6, 7, …" in notes[1]
    assert notes[2] == "Left out for lack of time: 100 of 200 tokens."
    result["one_percent"]["model"] = None
    assert len(audit_notes(result)) == 2


def test_an_interval_is_shown_where_the_prediction_is_one(audit):
    column = next(c for c in COLUMNS if c.heading == "predicted")
    row = audit["effects"][0]
    assert column.cell({**row, "predicted_low": 0.01, "predicted": 0.03}) == "1.0 % – 3.0 %"
    assert column.cell({**row, "predicted_low": 0.03, "predicted": 0.03}) == "3.0 %"
    assert column.cell({**row, "predicted_low": None, "predicted": None}) == "–"


def test_layers_to_keep_are_named_with_their_cost(audit):
    rows = keep_rows(audit)
    assert [row[0] for row in rows] == ["bf16", "int4"]
    keep = audit["effects"][1]["keep"]
    assert rows[1][4] == f"{keep['bytes']:,}"
    assert len(re.findall(r"\d", rows[1][1])) == len(keep["layers"])


def test_numbers_are_in_the_page_without_any_script_and_names_are_escaped(audit):
    page = render_audit(audit)
    body = page[page.index("<body>") : page.index('<script type="application/json"')]
    assert "<script" not in body
    assert "&lt;b&gt;model&lt;/b&gt;" in body
    assert all(row["name"] in body for row in audit["effects"])
    assert audit["verdict"] in body
    assert body.count("<tr>") > len(audit["effects"]) * (1 + len(audit["layers"]))


def test_without_rounded_routers_one_panel_says_so(audit):
    rows = [row for row in audit["effects"] if row["kind"] == "score noise"]
    panels = audit_panels({**audit, "effects": rows})
    assert [panel.figure is None for panel in panels] == [False, False, True]
    assert "No damage by rounded routers" in render_audit({**audit, "effects": rows})


@needs_browser
def test_every_chart_is_drawn_without_trouble_and_nothing_is_asked_for(audit, tmp_path):
    (tmp_path / "audit.html").write_bytes(audit_page_bytes(audit))
    seen = look_at(tmp_path / "audit.html")
    assert seen.status == "drawn", seen.troubles
    assert seen.console == []
    assert seen.requests == []
    assert set(seen.drawings) == {panel.key for panel in audit_panels(audit)}
    assert all(count > 0 for count in seen.drawings.values())
