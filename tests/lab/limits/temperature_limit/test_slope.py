"""The first order of L_τ - L_0 against small temperatures and against sampling."""

import math

import pytest
import torch
from hypothesis import given

from tests.lab.limits.problems import (
    COVARIANCE,
    SAME_WALL,
    STUDENT,
    TEACHER,
    line,
    mixtures,
    sample,
    within,
)
from tieline.core.errors import ParameterError
from tieline.lab.limits import (
    MoESample,
    evaluate,
    gaussian_inputs,
    gaussian_risk,
    gaussian_slope,
    risk_gap,
    sampled_slope,
)


def measured(student, teacher, tau):
    hard = gaussian_risk(student, teacher, COVARIANCE)
    return ((gaussian_risk(student, teacher, COVARIANCE, tau) - hard) / tau).item()


@pytest.mark.parametrize("teacher", [TEACHER, SAME_WALL, SAME_WALL.swapped(), STUDENT])
def test_the_slope_is_the_limit_of_the_difference(teacher):
    slope = gaussian_slope(STUDENT, teacher, COVARIANCE).value
    extrapolated = 2 * measured(STUDENT, teacher, 5e-5) - measured(STUDENT, teacher, 1e-4)
    assert extrapolated == pytest.approx(slope, rel=1e-5)


@given(mixtures(), mixtures())
def test_a_target_that_does_not_jump_makes_soft_routing_better(student, teacher):
    smooth = teacher.with_experts(teacher.experts[:1].repeat(2, 1))
    slope = gaussian_slope(student, smooth, COVARIANCE)
    assert slope.value <= 0
    assert gaussian_slope(student, teacher, COVARIANCE).smooth == slope.smooth


def test_the_slope_of_signs_on_the_line_by_hand():
    slope = gaussian_slope(line(), line())
    density = 1 / math.sqrt(2 * math.pi)
    assert slope.jump == pytest.approx(8 * math.log(2) * density, rel=1e-14)
    assert slope.smooth == pytest.approx(-4 * density, rel=1e-14)
    assert gaussian_slope(line(), line(levels=(-1.0, 1.0))).jump == -slope.jump
    assert gaussian_slope(line(), line(offset=0.2)).jump == 0


@pytest.mark.parametrize("teacher", [TEACHER, SAME_WALL])
def test_the_sampled_slope_agrees(teacher):
    drawn = sample(teacher=teacher, n=400_000)
    assert within(sampled_slope(drawn, 0.1), gaussian_slope(STUDENT, teacher, COVARIANCE).value)


def test_the_sampled_slope_of_five_experts_predicts_the_gap():
    generator = torch.Generator().manual_seed(4)
    router, experts = torch.randn(2, 3, 5, generator=generator, dtype=torch.float64)
    x = gaussian_inputs(400_000, 3, 0)
    drawn = evaluate(lambda x: x @ router, lambda x: x @ experts, lambda x: x[:, 0].sin(), x)
    slope, tau = sampled_slope(drawn, 0.05), 0.01
    gap = risk_gap(drawn, tau).times(1 / tau)
    assert slope.value < -10 * slope.stderr
    assert abs(slope.value - gap.value) < 4 * math.hypot(slope.stderr, gap.stderr)


def test_a_width_of_zero_is_refused():
    drawn = MoESample(*torch.zeros(2, 2, 2).double(), torch.zeros(2).double())
    with pytest.raises(ParameterError, match=r"width=0\.0"):
        sampled_slope(drawn, 0.0)
