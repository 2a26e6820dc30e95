"""The output of `tieline smooth` agrees with its result."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from tests.report.browser import BROWSERS, find_browser, look_at
from tieline.analysis.served_precision import recommend
from tieline.analysis.smooth_repair import Latency, Repair, RepairRow, RepairTable, original_serving
from tieline.core.statistics import Estimate
from tieline.models.smoothed_model import LayerSmoothing, Smoothing
from tieline.report.smooth import _repair_table, figures, notebook, page, terminal

needs_browser = pytest.mark.skipif(
    find_browser() is None, reason=f"no browser: none of {', '.join(BROWSERS)} is in PATH"
)


def estimate(value, error=0.1):
    return Estimate(value, error)


def result():
    kls = [estimate(0.5 + index) for index in range(5)]
    other = [estimate(7.5), estimate(0.02), estimate(0.04), estimate(8.5), estimate(9.5)]
    rows = tuple(RepairRow(name, *kls, *other) for name in ("router bf16", "model bf16"))
    layers = (
        LayerSmoothing("a.0.gate", "olmoe", 2, 16, 4, 0.25, "logits"),
        LayerSmoothing("a.1.gate", "olmoe", 2, 16, 4, 0.0, "logits"),
    )
    repair = RepairTable(
        rows=rows,
        experts_before=estimate(2.0),
        experts_after=estimate(2.5),
        experts_by_layer={"a.0.gate": 2.625},
        loss=estimate(2.25),
        loss_change=estimate(-0.001, 0.0005),
        moved=estimate(0.003),
        tokens=16384,
        sequences=32,
    )
    smoothing = Smoothing(layers, {"a.2.gate": "hashes"}, how="budget 2.5")
    times = latency(1.7, "eager", "eager"), latency(1.2, "eager", "tieline")
    serving = original_serving("bf16", repair, 2)
    served = (serving, recommend(serving))
    return Repair("some <b>model</b>", smoothing, repair, times, *served, {"seed": 0})


def latency(ratio, original, implementation):
    return Latency(ratio, ratio - 0.1, ratio + 0.1, 4, 100, original, implementation)


def test_every_number_of_the_result_is_shown_in_eighty_columns():
    console = Console(file=io.StringIO(), width=80)
    console.print(terminal(result(), 80))
    shown = console.file.getvalue()
    for text in (
        "some <b>model</b>",
        "budget 2.5",
        "0.250",
        "0, as it was",
        "2.62",
        "4.5 × (4.3 to 4.7) nearer",
        "-0.00100 (-0.00202 to +0.00002) nats",
    ):
        assert " ".join(text.split()) in " ".join(shown.split())
    assert max(map(len, shown.splitlines())) <= 80
    assert len(shown.splitlines()) <= 40


def test_every_precision_has_a_verdict_before_and_after():
    repaired = result()
    small, large = estimate(1e-4, 1e-6), estimate(1e-2, 1e-4)
    row = replace(
        repaired.repair.rows[1], before=large, after=small, loss_before=small, loss_after=small
    )
    table = _repair_table(replace(repaired, repair=replace(repaired.repair, rows=(row,))))
    verdicts = [i for i, heading in enumerate(table.head) if heading == "verdict"]
    assert [table.rows[0][i] for i in verdicts] == ["harmful", "harmless"]
    unsure = replace(row, before=estimate(1e-3, 5e-4))
    table = _repair_table(replace(repaired, repair=replace(repaired.repair, rows=(unsure,))))
    assert table.rows[0][verdicts[0]] == "unsure"


def test_the_page_has_every_table_and_names_are_text():
    markup = page(result())
    body = markup[markup.index("<body>") : markup.index('<script type="application/json"')]
    assert "some &lt;b&gt;model&lt;/b&gt;" in body
    assert "<script" not in body
    assert body.count("<tr>") == 2 + 2 + 2
    assert "Not smoothed: a.2.gate: hashes." in body


def test_the_figure_shows_both_sides_and_their_floors():
    (axes,) = figures(result())["repair"]().axes
    shown = {float(y) for line in axes.lines for y in line.get_ydata()}
    assert {0.5, 1.5, 2.5, 3.5} <= shown
    assert notebook(result()).count("<img") == 1


@needs_browser
def test_the_chart_is_drawn_without_trouble_or_request(tmp_path):
    result().to_html(tmp_path / "smooth.html")
    browser_page = look_at(tmp_path / "smooth.html")
    assert browser_page.status == "drawn", browser_page.troubles
    assert browser_page.troubles == browser_page.console == browser_page.requests == []
    assert list(browser_page.drawings) == ["smooth-kl"]
