"""Derivatives of the hard risk along motions of the wall, on both sides."""

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
from tieline.core.errors import ParameterError, ShapeError
from tieline.lab.limits import (
    MoESample,
    gaussian_inputs,
    moved,
    risk_derivatives,
    sampled_wall_derivative,
    wall_derivative,
    wall_variation,
)

TURN = torch.tensor([0.3, -0.7, 0.2], dtype=torch.float64)
PARALLEL = TEACHER.with_flat(torch.cat([STUDENT.normal, torch.tensor([-0.2]), torch.ones(6)]))


@given(mixtures(), mixtures())
def test_the_formula_is_the_limit_of_differences_on_both_sides(student, teacher):
    result = wall_variation(student, teacher, TURN, COVARIANCE, step=1e-5)
    size = 1 + abs(result.right)
    assert result.right == pytest.approx(result.right_difference, abs=1e-5 * size)
    assert result.left == pytest.approx(result.left_difference, abs=1e-5 * size)
    assert result.kink or result.right == pytest.approx(result.left, abs=1e-12 * size)


@pytest.mark.parametrize("teacher", [TEACHER, PARALLEL, SAME_WALL, STUDENT])
def test_the_formula_to_eight_digits_where_the_step_suits(teacher):
    result = wall_variation(STUDENT, teacher, TURN, COVARIANCE)
    assert result.right == pytest.approx(result.right_difference, abs=2e-8)
    assert result.left == pytest.approx(result.left_difference, abs=2e-8)


def test_at_the_teacher_the_two_sides_differ_in_sign():
    result = wall_variation(STUDENT, STUDENT, TURN, COVARIANCE)
    assert result.kink
    assert result.right == pytest.approx(-result.left, rel=1e-12)
    assert result.right > 0


def test_signs_on_the_line_by_hand():
    shift = torch.tensor([0.0, 1.0], dtype=torch.float64)
    density = 1 / math.sqrt(2 * math.pi)
    assert wall_derivative(line(), line(), shift) == pytest.approx(4 * density, rel=1e-14)
    assert wall_derivative(line(), line(), shift, side=-1) == pytest.approx(-4 * density, rel=1e-14)
    off = line(offset=-0.5), line()  # the student's wall lies at 0.5, where the target is 1
    assert wall_derivative(*off, shift) == pytest.approx(-4 * density * math.exp(-1 / 8), rel=1e-14)


def test_formula_and_automatic_differentiation_agree():
    exact = risk_derivatives(STUDENT, TEACHER, COVARIANCE)
    formula = wall_derivative(STUDENT, TEACHER, TURN, COVARIANCE)
    assert formula == pytest.approx((exact.gradient[:3] @ TURN).item(), rel=1e-12)
    second = wall_variation(STUDENT, TEACHER, TURN, COVARIANCE).second
    assert second == pytest.approx((TURN @ exact.hessian[:3, :3] @ TURN).item(), rel=1e-4)


@pytest.mark.parametrize("teacher", [TEACHER, SAME_WALL])
def test_the_sampled_form_is_the_mean_of_the_two_sides(teacher):
    n = 400_000
    x = gaussian_inputs(n, 2, 0, COVARIANCE)
    speed = x @ TURN[:2] + TURN[2]
    change = torch.stack([speed / 2, -speed / 2], dim=1)
    result = wall_variation(STUDENT, teacher, TURN, COVARIANCE)
    estimate = sampled_wall_derivative(sample(teacher=teacher, n=n), change, 0.05)
    assert within(estimate, (result.right + result.left) / 2)


def test_the_sampled_form_looks_at_the_top_two_experts_only():
    scores = torch.tensor([[1.0, 0.95, -9.0], [1.0, 0.0, 0.95]]).double()
    outputs = torch.tensor([[2.0, 1.0, 7.0], [2.0, 7.0, 3.0]]).double()
    change = torch.tensor([[1.0, 0.5, 9.0], [1.0, 9.0, 0.0]]).double()
    drawn = MoESample(scores, outputs, torch.zeros(2).double())
    expected = ((4 - 1) * 0.5 + (4 - 9) * 1.0) / 2 / (2 * 0.1)
    assert sampled_wall_derivative(drawn, change, 0.1).value == pytest.approx(expected)


def test_bad_directions_widths_and_sides_are_refused():
    with pytest.raises(ShapeError, match="needs 3 entries"):
        moved(STUDENT, torch.ones(2).double(), 1.0)
    with pytest.raises(ParameterError, match="got 0"):
        wall_derivative(STUDENT, TEACHER, TURN, side=0)
    with pytest.raises(ParameterError, match=r"step=0\.0"):
        wall_variation(STUDENT, TEACHER, TURN, step=0.0)
    with pytest.raises(ParameterError, match="width=-1"):
        sampled_wall_derivative(sample(n=10), torch.zeros(10, 2), -1.0)
    with pytest.raises(ShapeError, match=r"\(10, 3\)"):
        sampled_wall_derivative(sample(n=10), torch.zeros(10, 3), 1.0)
