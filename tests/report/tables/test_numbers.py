"""How numbers and names are written."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.report.zoo import HOSTILE
from tieline.core.statistics import Estimate
from tieline.report.tables import (
    DASH,
    compact,
    finite,
    flat,
    one_form,
    percent,
    short_names,
    significant,
    timing_rows,
    visible,
    with_error,
)

texts = st.text(max_size=20) | st.sampled_from(HOSTILE)


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (None, DASH),
        (0.0, "0 %"),
        (1.0, "100 %"),
        (0.5, "50 %"),
        (0.0234, "2.3 %"),
        (0.00021, "0.021 %"),
        (1.25e-6, "0.00013 %"),
        (8e-19, "< 0.000001 %"),
    ],
)
def test_percent_keeps_two_digits(share, text):
    assert percent(share) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (None, DASH),
        (0.0, "0"),
        (12345.6, "12,346"),
        (3.14159, "3.14"),
        (0.00123, "0.00123"),
        (0.000123, "1.23e-4"),
        (1.5e9, "1.50e9"),
        (-2.0, "-2.00"),
    ],
)
def test_significant_keeps_three_digits(number, text):
    assert significant(number) == text


@pytest.mark.parametrize(
    ("cells", "wanted"),
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
def test_a_column_has_one_form_of_numbers(cells, wanted):
    assert one_form(cells) == wanted


@given(st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=6))
def test_one_form_keeps_the_numbers(numbers):
    cells = [significant(number) for number in numbers]
    forms = one_form(cells)
    assert [float(x.replace(",", "")) for x in forms] == [float(x.replace(",", "")) for x in cells]
    assert len({"e" in x for x in forms if "." in x}) <= 1


@given(st.floats(1e-12, 1e12))
def test_significant_can_be_read_back(number):
    assert float(significant(number).replace(",", "")) == pytest.approx(number, rel=6e-3)


@given(st.floats(allow_nan=True, allow_infinity=True))
def test_compact_numbers_are_finite_and_near(number):
    short = compact({"a": [number, 7, "text", None]})["a"]
    assert short[1:] == [7, "text", None]
    if math.isfinite(number):
        assert short[0] == pytest.approx(number, rel=6e-4)
    else:
        assert short[0] is None


@pytest.mark.parametrize(
    ("names", "short"),
    [
        (["model.layers.0.mlp.gate", "model.layers.11.mlp.gate"], ["0", "11"]),
        (["encoder.0.gate", "decoder.0.gate"], ["encoder", "decoder"]),
        (["a.gate"], ["a.gate"]),
        (["a", "a.b"], ["a", "a.b"]),
        (["x.1", "x.1.y"], ["x.1", "x.1.y"]),
        ([], []),
    ],
)
def test_short_names_drop_what_all_share(names, short):
    assert short_names(names) == short


@given(st.lists(st.text("ab.", min_size=1, max_size=5), min_size=1, max_size=5, unique=True))
def test_short_names_stay_different(names):
    assert len(set(short_names(names))) == len(names)


@given(texts)
def test_visible_text_has_no_acting_characters(text):
    shown = visible(text)
    shown.encode()
    kept = [sign for sign in shown if sign not in "\n\t"]
    assert all(ord(sign) >= 0x20 and ord(sign) != 0x7F for sign in kept)
    assert not set(shown) & set("\u202e\u202d\u2066\u2028\u2029\u0085")


def test_visible_text_shows_what_was_hidden():
    assert visible("a\x00\u202eb\n\t\ud800日") == "a␀⟨202E⟩b↵\n⇥\t\ufffd日"


@pytest.mark.parametrize("number", [None, math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_a_dash(number):
    assert percent(number) == significant(number) == DASH
    assert with_error(Estimate(number, 0.1)).startswith(DASH)
    assert finite(number) is None


def test_an_estimate_is_told_with_its_error_where_that_is_known():
    assert with_error(Estimate(1.234, 0.056)) == "1.23 ± 0.056"
    assert with_error(Estimate(1.234, None)) == "1.23"
    assert with_error(Estimate(1.234, math.nan), 2) == "1.2"


def test_nested_provenance_is_flat_and_what_is_empty_is_left_out():
    nested = {"a": {"b": 1, "c": {"d": 0}}, "e": None, "f": "", "g": [], "h": False}
    assert flat(nested) == [("a.b", 1), ("a.c.d", 0), ("h", False)]


def test_timings_are_seconds_and_rates():
    rows = timing_rows({"total": 1.25, "tokens_per_second": 3141.6})
    assert rows == [("time.total", "1.25 s"), ("tokens per second", "3,142")]


@pytest.mark.parametrize(
    ("number", "text"), [(1.8e-5, "1.80e-5"), (2.3e-11, "2.30e-11"), (4.26e18, "4.26e18")]
)
def test_exponents_have_one_form(number, text):
    assert significant(number) == text
