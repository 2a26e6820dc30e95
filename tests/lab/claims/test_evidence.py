"""Comparisons: what passes, what does not, and that no NaN ever does."""

import math

import pytest

from tieline.core.statistics import Estimate
from tieline.lab.claims.evidence import (
    at_least,
    at_most,
    corrected,
    estimated,
    near,
    none_of,
    qualified,
    sampled,
    unmeasured,
    within,
)


@pytest.mark.parametrize(
    ("check", "passed"),
    [
        (near("", 1.0, 1.05, 0.1), True),
        (near("", 1.0, 1.2, 0.1), False),
        (near("", math.inf, math.inf), True),
        (near("", math.nan, math.nan, 9.0), False),
        (at_most("", 1.0, 1.0), True),
        (at_most("", 1.1, 1.0), False),
        (at_most("", 1.1, 1.0, 0.2), True),
        (at_most("", math.nan, 1.0), False),
        (at_least("", 1.0, 1.0), True),
        (at_least("", 0.9, 1.0), False),
        (at_least("", 0.9, 1.0, 0.2), True),
        (at_least("", math.nan, 1.0), False),
        (none_of("", 0), True),
        (none_of("", 1), False),
        (within("", 1.0, 0.01, 1.039), True),
        (within("", 1.0, 0.01, 1.041), False),
        (within("", 1.0, 0.01, 1.041, bias=0.002), True),
        (within("", 1.0, 0.2, 1.0), False),
        (within("", 1.0, 0.2, 1.0, resolution=0.3), True),
        (within("", 1.0, math.inf, 1.0), False),
        (within("", math.nan, 0.01, 1.0), False),
    ],
)
def test_checks(check, passed):
    assert check.passed is passed


def test_a_vague_estimate_does_not_pass_for_agreement():
    assert not within("", 5.0, 100.0, 1.0).passed
    assert "too large" in within("", 5.0, 100.0, 1.0).open
    assert not within("", 5.0, 0.01, 1.0).open


@pytest.mark.parametrize(
    ("interval", "limits", "passed", "is_open"),
    [
        ((-0.6, -0.4), (-0.64, -0.36), True, False),
        ((-0.7, -0.4), (-0.64, -0.36), False, True),
        ((-0.3, -0.2), (-0.64, -0.36), False, False),
        ((-0.1, 0.1), (-0.15, math.inf), True, False),
        ((-0.2, 0.1), (-0.15, math.inf), False, True),
        ((-0.5, -0.4), (-math.inf, -0.15), True, False),
        ((math.nan, math.nan), (-0.64, -0.36), False, True),
    ],
)
def test_an_interval_decides_only_on_one_side_of_a_limit(interval, limits, passed, is_open):
    check = estimated("slope", sum(interval) / 2, interval, least=limits[0], most=limits[1])
    assert (check.passed, bool(check.open)) == (passed, is_open)
    assert (check.low, check.high) == pytest.approx(interval, nan_ok=True)


def test_what_was_not_measured_is_open():
    check = unmeasured("slope", -0.5, "the start is not stated")
    assert (check.passed, check.open) == (False, "the start is not stated")


def test_an_estimate_is_compared_by_its_standard_error():
    assert sampled("", Estimate(1.0, 0.01), 1.039) == within("", 1.0, 0.01, 1.039)
    assert sampled("", Estimate(1.0, 0.2), 1.0, resolution=0.3).passed
    for unknown in (Estimate(None), Estimate(1.0)):
        check = sampled("", unknown, 1.0)
        assert (check.passed, bool(check.open)) == (False, True)


def test_checks_belong_to_the_paper_unless_they_are_grouped():
    checks = near("a", 0, 0), unmeasured("b", 1.0, "not run")
    assert [check.part for check in checks] == ["paper", "paper"]
    assert [check.part for check in qualified(*checks)] == ["condition", "condition"]
    assert [check.part for check in corrected(*checks)] == ["corrected", "corrected"]
    assert [check.open for check in corrected(*checks)] == ["", "not run"]
