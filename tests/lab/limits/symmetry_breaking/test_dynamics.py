"""The reduced model of symmetry breaking beside the true descent."""

import math

import pytest
import torch

from tests.lab.limits.problems import COVARIANCE
from tieline.core.errors import ParameterError, ShapeError
from tieline.lab.limits import (
    coupled_modes,
    gaussian_grid,
    operator,
    population_risk,
    symmetry_breaking,
    symmetry_teacher,
)

V = torch.tensor([1.0, 0.0], dtype=torch.float64)
D = torch.tensor([1.0, 0.5], dtype=torch.float64)


def test_modes_are_the_negative_spectrum_of_the_true_hessian():
    tau = 0.7
    modes = coupled_modes(V, D, tau, COVARIANCE)
    grid = gaussian_grid(symmetry_teacher(V, D), COVARIANCE)
    level = torch.tensor([modes.intercept], dtype=torch.float64)
    zero = torch.zeros(2).double()
    flat = torch.cat([zero, level * 0, zero, level, zero, level])
    at = population_risk(grid, flat, tau)
    assert at.gradient.norm() < 1e-13  # the symmetric point is critical at this intercept
    # coordinates (u, slopes): the normal is 2u, and the offset does not move
    keep = [0, 1, 3, 4, 6, 7]
    scale = torch.tensor([2.0, 2.0, 1.0, 1.0, 1.0, 1.0]).double()
    hessian = at.hessian[keep][:, keep] * scale * scale[:, None]
    growth = -torch.linalg.eigvalsh(hessian)[:2]
    # the mode of u and δ grows at |λ|/(√2 τ); the mean of the experts does not couple to it
    assert torch.allclose(growth, modes.rates, rtol=1e-10)


def test_the_papers_operator_is_the_one_without_intercept():
    modes = coupled_modes(V, D, 0.5, COVARIANCE, intercept=0.0)
    paper = operator(V, D, COVARIANCE)
    assert torch.equal(modes.matrix, paper.matrix)
    assert modes.rates[0].item() == pytest.approx(
        paper.eigenvalues.abs().max().item() / math.sqrt(2) / 0.5
    )
    assert modes.paper_rate == pytest.approx(paper.eigenvalues[0].item() / 0.5)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_true_descent_grows_as_the_coupled_modes_say_whatever_the_sign(sign):
    contrast = D * torch.tensor([sign, 1.0]).double()
    result = symmetry_breaking(V, contrast, tau=1.0, step_size=0.1, steps=180)
    assert torch.allclose(result.drift, result.predicted_drift, rtol=1e-6)
    assert result.growth == pytest.approx(result.predicted_growth, rel=1e-4)
    assert (result.paper_growth > 1) == (sign > 0)
    assert abs(result.paper_growth - result.growth) > 0.05
    assert bool(result.risks[-1] < result.risks[0] - 1e-6)
    assert (result.reduced_norms[-1] > result.reduced_norms[0]) == (sign > 0)
    assert result.alignments[-1].item() == pytest.approx(
        result.modes.direction[0].abs().item(), abs=0.05
    )
    assert len(result.norms) == len(result.risks) == 181


def test_the_reduced_model_aligns_with_its_first_eigenvector():
    result = symmetry_breaking(V, D, tau=1.0, step_size=0.1, steps=60)
    overlap = operator(V, D).overlap[0].item()
    assert result.reduced_alignments[-1].item() == pytest.approx(overlap, abs=2e-3)
    ratio = (result.reduced_norms[-1] / result.reduced_norms[-2]).item()
    assert ratio == pytest.approx(result.paper_growth, rel=1e-3)
    assert math.isnan(result.growth)  # too short to leave the start behind


@pytest.mark.usefixtures("no_axis_checks")
def test_bad_input_is_refused():
    with pytest.raises(ParameterError, match=r"start=0\.5"):
        symmetry_breaking(V, D, tau=1.0, step_size=0.1, steps=1, start=0.5)
    with pytest.raises(ParameterError, match="steps=0"):
        symmetry_breaking(V, D, tau=1.0, step_size=0.1, steps=0)
    with pytest.raises(ParameterError, match=r"tau=0\.0"):
        coupled_modes(V, D, 0.0)
    with pytest.raises(ShapeError, match="2, 3"):
        symmetry_teacher(V, torch.ones(3))
