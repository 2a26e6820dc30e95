"""Tables and findings, in the terminal at any width and without colour, and on pages."""

import io
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from tests.report.zoo import HOSTILE, make_inspection
from tieline.analysis.inspect_records import Finding
from tieline.report.html_page import visible_characters
from tieline.report.inspect import COLUMNS, terminal
from tieline.report.inspect_charts import inspected_layer_rows
from tieline.report.tables import (
    SEVERITY_SIGNS,
    Column,
    dotted_rows,
    finding_sentence,
    grid,
    rich_table,
    text_table,
    timing_rows,
    uniform_numbers,
)
from tieline.report.words.numbers import DASH, significant


def shown(result, width):
    console = Console(file=io.StringIO(), width=width, no_color=True)
    console.print(terminal(result, width))
    return console.file.getvalue()


def test_verdict_layers_and_findings_are_shown_as_they_are(result):
    text = shown(result, 160)
    assert "zoo/moe  3 routed layers · 2 of 8 experts · 200 tokens · float32" in text
    assert result.verdict[:80] in text
    assert all(finding.text[1:40] in text for finding in result.findings[:6])


def test_a_long_list_of_findings_is_cut_and_says_so(result):
    chosen = [next(x for x in result.observations if x.severity == s) for s in SEVERITY_SIGNS]
    text = shown(replace(result, observations=tuple(chosen) * 4), 100)
    assert text.count("▲") == text.count("◆") == text.count("●") == 2
    assert "6 more in the page and the JSON" in text


@pytest.mark.parametrize("width", [30, 40, 60, 80, 100, 200])
def test_no_line_is_too_long_and_no_cell_is_cut(result, width):
    text = shown(result, width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text


def test_a_wider_terminal_shows_more_columns(result):
    counts = [
        len(rich_table(COLUMNS, inspected_layer_rows(result), width).columns)
        for width in (10, 40, 80, 120, 300)
    ]
    assert counts == sorted(counts)
    assert counts[0] == 1
    assert counts[-1] == 14


def test_square_brackets_in_names_are_text():
    result = make_inspection(model="[bold red]x[/]", tokens=40)
    assert "[bold red]x[/]" in shown(result, 120)


def test_what_cannot_be_answered_is_a_dash(ids_only):
    first = next(
        line for line in shown(ids_only, 120).splitlines() if line.strip().startswith("0 ")
    )
    assert first.split().count("–") == 7


@pytest.mark.parametrize(
    ("text", "layer", "sentence"),
    [
        ("experts tie in layer 3", "m.3.gate", "Experts tie in layer 3."),
        ("experts tie.", "m.3.gate", "Experts tie (layer 3)."),
        ("experts tie", "other", "Experts tie (layer other)."),
        ("2 % tie", None, "2 % tie."),
    ],
)
def test_a_finding_is_a_sentence_that_names_its_layer_once(text, layer, sentence):
    assert finding_sentence(Finding("info", text, 1.0, layer), {"m.3.gate": "3"}) == sentence


def test_a_grid_holds_the_cells_of_its_columns_without_the_empty_ones():
    columns = (
        Column("a", "first", lambda row: row[0]),
        Column("b", "none", lambda row: "–"),
        Column("c", "last", lambda row: row[1]),
    )
    table = grid(columns, ["xy", "–z"])
    assert (table.head, table.meanings) == (("a", "c"), ("first", "last"))
    assert table.rows == (("x", "y"), ("–", "z"))
    assert grid(columns, []).rows == ()


def test_long_cells_of_a_table_are_folded_not_cut():
    console = Console(file=io.StringIO(), width=30)
    console.print(text_table(("name", "words"), [("a", "word " * 20)], left_aligned=2, fold=True))
    assert console.file.getvalue().count("word") == 21


@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize("width", [24, 40, 80])
def test_numbers_of_any_table_are_whole_at_any_width(width, fold):
    numbers = [[f"{line}{name},000,000.5" for name in range(1, 7)] for line in range(1, 4)]
    table = text_table([f"column{n}" for n in range(6)], numbers, fold=fold)
    console = Console(file=io.StringIO(), width=width, no_color=True)
    console.print(table)
    text = console.file.getvalue()
    assert all(number in text for row in numbers for number in row)
    assert max(map(len, text.splitlines())) <= width


texts = st.text(max_size=20) | st.sampled_from(HOSTILE)


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        (["0.013", "4.9e-4", DASH, "0"], ["1.3e-2", "4.9e-4", DASH, "0"]),
        (["+0.0024 ± 0.0009", "+1.9e-5 ± 8e-5"], ["+2.4e-3 ± 9e-4", "+1.9e-5 ± 8e-5"]),
        (["1,234.5", "1.2e9"], ["1.2345e3", "1.2e9"]),
        (
            ["0.0072 for 21,504 bytes", "1.1e-4 for 8 bytes"],
            ["7.2e-3 for 21,504 bytes", "1.1e-4 for 8 bytes"],
        ),
        (["0.013", "0.14"], ["0.013", "0.14"]),
        (["12", "1.5 %", "2.0 ×", "1e-5"], ["12", "1.5 %", "2.0 ×", "1e-5"]),
        (["int8 0.5", "v1.2.3", "1e-9"], ["int8 5e-1", "v1.2.3", "1e-9"]),
    ],
)
def test_a_column_has_one_form_of_numbers(cells, expected):
    assert uniform_numbers(cells) == expected


@given(st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=6))
def test_one_form_keeps_the_numbers(numbers):
    cells = [significant(number) for number in numbers]
    forms = uniform_numbers(cells)
    assert [float(x.replace(",", "")) for x in forms] == [float(x.replace(",", "")) for x in cells]
    assert len({"e" in x for x in forms if "." in x}) <= 1


@given(texts)
def test_visible_text_has_no_acting_characters(text):
    shown = visible_characters(text)
    shown.encode()
    kept = [sign for sign in shown if sign not in "\n\t"]
    assert all(ord(sign) >= 0x20 and ord(sign) != 0x7F for sign in kept)
    assert not set(shown) & set("\u202e\u202d\u2066\u2028\u2029\u0085")


def test_visible_text_shows_what_was_hidden():
    assert visible_characters("a\x00\u202eb\n\t\ud800日") == "a␀⟨202E⟩b↵\n⇥\t\ufffd日"


def test_nested_provenance_is_flat_and_what_is_empty_is_left_out():
    nested = {"a": {"b": 1, "c": {"d": 0}}, "e": None, "f": "", "g": [], "h": False}
    assert dotted_rows(nested) == [("a.b", 1), ("a.c.d", 0), ("h", False)]


def test_timings_are_seconds_and_rates():
    rows = timing_rows({"total": 1.25, "tokens_per_second": 3141.6})
    assert rows == [("time.total", "1.25 s"), ("tokens per second", "3,142")]
