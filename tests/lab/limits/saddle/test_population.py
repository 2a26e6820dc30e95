"""Weighted points: the grid integrates the normal law, derivatives are those of autograd."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.lab.limits.problems import COVARIANCE, STUDENT, TEACHER, line, mixtures
from tieline.core.errors import ParameterError, ShapeError
from tieline.lab.limits import gaussian_grid, gaussian_points, population_gradient, population_risk

POINTS = gaussian_points(TEACHER, 300, 0, COVARIANCE)


def test_the_grid_has_the_moments_of_the_normal_law():
    grid = gaussian_grid(TEACHER, COVARIANCE)
    assert grid.weight.sum().item() == pytest.approx(1, abs=1e-14)
    assert (grid.weight @ grid.inputs).abs().max() < 1e-13
    second = grid.inputs.T @ (grid.weight[:, None] * grid.inputs)
    assert torch.allclose(second, COVARIANCE, atol=1e-13)
    side = grid.inputs @ TEACHER.normal + TEACHER.offset
    assert torch.allclose(grid.target, TEACHER.value(grid.inputs))
    spread = (TEACHER.normal @ COVARIANCE @ TEACHER.normal).sqrt()
    share = grid.weight[side > 0].sum()
    assert torch.isclose(share, torch.special.ndtr(TEACHER.offset / spread), atol=1e-14)


@given(mixtures(), st.sampled_from([0.2, 1.0]), st.booleans())
def test_closed_derivatives_are_those_of_automatic_differentiation(student, tau, balanced):
    parameters = student.flat()
    if balanced:
        parameters[:3] = 0.0

    def risk(flat):
        x = POINTS.inputs
        cells = STUDENT.with_flat(flat)
        p = torch.sigmoid((x @ cells.normal + cells.offset) / tau)
        first, second = cells.outputs(x).unbind(dim=1)
        return (POINTS.weight * (POINTS.target - p * first - (1 - p) * second).square()).sum()

    result = population_risk(POINTS, parameters, tau)
    gradient = torch.autograd.functional.jacobian(risk, parameters)
    hessian = torch.autograd.functional.hessian(risk, parameters)
    assert result.value == pytest.approx(risk(parameters).item(), rel=1e-12)
    assert torch.allclose(result.gradient, gradient, atol=1e-10)
    assert torch.allclose(result.hessian, hessian, atol=1e-9)
    value, alone = population_gradient(POINTS, parameters, tau)
    assert value == result.value
    assert torch.equal(alone, result.gradient)


def test_bad_input_is_refused():
    with pytest.raises(ShapeError, match="dimension 2, got 1"):
        gaussian_grid(line())
    with pytest.raises(ParameterError, match=r"spacing=0\.0"):
        gaussian_grid(TEACHER, spacing=0.0)
    with pytest.raises(ShapeError, match="need 9 parameters for dimension 2, got 8"):
        population_risk(POINTS, torch.zeros(8), 1.0)
    with pytest.raises(ParameterError, match=r"tau=0\.0"):
        population_gradient(POINTS, torch.zeros(9), 0.0)
