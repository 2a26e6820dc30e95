"""How many times cheaper a straight ramp makes flips."""

import pytest

from tieline.lab.limits.continuity_cost import hard_sensitivity, projected_cost
from tieline.measure.flips import flip_reduction


@pytest.mark.parametrize("scale", [0.5, 1.0, 4.0, 32.0])
def test_the_reduction_is_that_of_the_law_of_continuity(scale):
    cost = projected_cost(1.0, 1.0, 1.0, scale)
    assert flip_reduction(scale) == hard_sensitivity(1.0, 1.0, 1.0) / cost.sensitivity


def test_wide_ramps_divide_the_cost_by_their_width():
    assert flip_reduction(64.0) == pytest.approx(2 * 64 * (2 / 3.141592653589793) ** 0.5, rel=0.02)
