"""How quantities are written."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tieline.core.statistics import Estimate, Share
from tieline.report.words.numbers import (
    DASH,
    decimal,
    duration,
    finite,
    list_with_and,
    list_with_commas,
    percent,
    signed,
    significant,
    tokens_needed,
    with_error,
    with_interval,
)


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


@given(st.floats(1e-12, 1e12))
def test_significant_can_be_read_back(number):
    assert float(significant(number).replace(",", "")) == pytest.approx(number, rel=6e-3)


@pytest.mark.parametrize("number", [None, math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_a_dash(number):
    assert percent(number) == significant(number) == DASH
    assert with_error(Estimate(number, 0.1)).startswith(DASH)
    assert finite(number) is None


def test_an_estimate_is_told_with_its_error_where_that_is_known():
    assert with_error(Estimate(1.234, 0.056)) == "1.23 ± 0.056"
    assert with_error(Estimate(1.234, None)) == "1.23"
    assert with_error(Estimate(1.234, math.nan), 2) == "1.2"


@pytest.mark.parametrize(
    ("number", "text"), [(1.8e-5, "1.80e-5"), (2.3e-11, "2.30e-11"), (4.26e18, "4.26e18")]
)
def test_exponents_have_one_form(number, text):
    assert significant(number) == text


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (None, DASH),
        (0.0, "0 %"),
        (8e-19, "< 0.001 %"),
        (0.01, "1 %"),
        (0.0213, "2.1 %"),
        (0.31, "31 %"),
        (0.996, "100 %"),
        (1.0, "100 %"),
        (6.8, "680 %"),
        (-0.997, "-100 %"),
        (-12.34, "-1234 %"),
        (-8e-19, "> -0.001 %"),
    ],
)
def test_percentages_of_sentences_have_no_trailing_zeros(share, text):
    assert percent(share, trim=True) == text


def test_tiny_percentages_of_sentences_may_keep_their_size():
    assert percent(5.1e-8, trim=True, least=0.0) == "5.1e-06 %"
    assert percent(0.12345, 3, trim=True) == "12.3 %"
    assert percent(0.9999, 3, trim=True) == "100 %"


def test_intervals_changes_and_durations():
    share = Share(0.017, 0.015, None, 17, 1000)
    assert with_interval(share) == "1.7 % (95 % interval 1.5 % to 100 %)"
    assert signed(Estimate(0.25, 0.125)) == "+0.25 ± 0.1"
    assert signed(Estimate(-0.001, None), ".5f") == "-0.00100"
    assert signed(Estimate(None)) == DASH
    assert decimal(0.0) == "0"
    assert decimal(8e-4) == "0.00080"
    assert [duration(x) for x in (1.5, 150.0, 9000.0)] == ["1.50 s", "2.50 min", "2.50 h"]


@pytest.mark.parametrize(
    ("count", "text"), [(None, "–"), (0.4, "1"), (12.2, "13"), (1234.0, "1,240"), (999.5, "1,000")]
)
def test_tokens_are_rounded_upwards(count, text):
    assert tokens_needed(count) == text


def test_long_lists_are_counted():
    letters = list("abcdefgh")
    assert list_with_and(letters[:1]) == "a"
    assert list_with_and(letters[:3]) == "a, b and c"
    assert list_with_and(letters) == list_with_commas(letters) == "a, b, c, d, e, f and 2 more"
    assert list_with_commas(letters[:3]) == "a, b, c"
