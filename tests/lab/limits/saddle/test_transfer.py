"""Derivatives of L_τ against those of L_0: they agree away from the teacher and differ at it."""

import itertools
import math

import pytest
import torch

from tests.lab.limits.problems import COVARIANCE, SAME_WALL, STUDENT, TEACHER, line
from tieline.core.errors import ParameterError
from tieline.lab.limits import (
    derivative_transfer,
    gaussian_grid,
    gaussian_risk,
    offset_curvature,
    population_risk,
    risk_derivatives,
)

TAUS = (0.1, 0.05, 0.025)


@pytest.mark.parametrize("tau", [0.0, 0.2])
def test_derivatives_are_those_of_differences(tau):
    exact = risk_derivatives(STUDENT, TEACHER, COVARIANCE, tau)
    flat, h = STUDENT.flat(), 1e-5
    for i in (0, 2, 3, 8):
        e = torch.eye(9, dtype=torch.float64)[i]
        ends = (STUDENT.with_flat(flat + s * h * e) for s in (1, -1))
        up, down = (gaussian_risk(end, TEACHER, COVARIANCE, tau).item() for end in ends)
        assert (up - down) / (2 * h) == pytest.approx(exact.gradient[i].item(), abs=1e-8)
        ends = (STUDENT.with_flat(flat + s * h * e) for s in (1, -1))
        up, down = (risk_derivatives(end, TEACHER, COVARIANCE, tau).gradient for end in ends)
        assert torch.allclose((up - down) / (2 * h), exact.hessian[i], atol=1e-8)


def test_soft_derivatives_agree_with_the_grid():
    grid = gaussian_grid(TEACHER, COVARIANCE, spacing=0.1, order=20)
    expected = population_risk(grid, STUDENT.flat(), 0.6)
    exact = risk_derivatives(STUDENT, TEACHER, COVARIANCE, 0.6)
    assert torch.allclose(exact.gradient, expected.gradient, atol=1e-12)
    assert torch.allclose(exact.hessian, expected.hessian, atol=1e-12)


def test_off_the_teacher_gradient_and_hessian_transfer_at_first_order():
    result = derivative_transfer(STUDENT, TEACHER, TAUS, COVARIANCE)
    for gaps in (result.gradient_gaps, result.hessian_gaps):
        orders = [math.log2(a / b) for a, b in itertools.pairwise(gaps)]
        assert all(0.85 < order < 1.15 for order in orders)
    least = torch.linalg.eigvalsh(result.hard.hessian)[0].item()
    for value, gap in zip(result.least_eigenvalues, result.hessian_gaps, strict=True):
        assert abs(value - least) <= gap


@pytest.mark.parametrize("teacher", [SAME_WALL, SAME_WALL.swapped(), STUDENT])
def test_at_the_teachers_wall_the_curvature_grows_like_one_over_tau(teacher):
    result = offset_curvature(STUDENT, teacher, (1e-3, 5e-4), COVARIANCE)
    assert result.limit != 0
    assert 2 * result.rates[1] - result.rates[0] == pytest.approx(result.limit, rel=1e-4)


def test_the_growth_of_signs_by_hand_and_none_off_the_wall():
    density = 1 / math.sqrt(2 * math.pi)
    assert offset_curvature(line(), line(), (1.0,)).limit == pytest.approx(2 * density)
    off = offset_curvature(STUDENT, TEACHER, (1e-2, 1e-3), COVARIANCE)
    assert off.limit == 0
    hard = risk_derivatives(STUDENT, TEACHER, COVARIANCE).hessian[2, 2].item()
    assert off.curvatures[1] == pytest.approx(hard, rel=0.01)


def test_cases_without_a_hard_hessian_are_refused():
    with pytest.raises(ParameterError, match="offset_curvature"):
        derivative_transfer(line(), line(), (0.1,))
    with pytest.raises(ParameterError, match="must cross in dimension 2"):
        risk_derivatives(STUDENT, SAME_WALL, COVARIANCE)
    with pytest.raises(ParameterError, match=r"tau=0\.0"):
        derivative_transfer(STUDENT, TEACHER, (0.0,))
    with pytest.raises(ParameterError, match=r"tau=-1\.0"):
        offset_curvature(STUDENT, TEACHER, (-1.0,))
