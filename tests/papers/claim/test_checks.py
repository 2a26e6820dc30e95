"""Comparisons: what passes, what does not, and that no NaN ever does."""

import math

import pytest

from tieline.papers.claim import at_least, at_most, near, none_of, within


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
