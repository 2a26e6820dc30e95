"""Pairwise constants of linear routers against their definitions and a sample."""

import math

import pytest
import torch

from tests.lab.limits.problems import COVARIANCE
from tieline.core.errors import ParameterError, ShapeError
from tieline.lab.geometry.masses import pair_gap
from tieline.lab.limits import gaussian_boundary_mass, gaussian_inputs, pair_constants, two_cells

WEIGHT = torch.tensor([[1.0, 0.5], [0.0, -1.0], [-0.7, 0.2], [0.4, 0.4]], dtype=torch.float64)
BIAS = torch.tensor([0.1, -0.4, 0.0, 0.9], dtype=torch.float64)


def test_each_pair_has_the_density_of_its_two_cell_mixture():
    result = pair_constants(WEIGHT, BIAS, COVARIANCE)
    total = 0.0
    for k in range(4):
        assert result.densities[k, k] == 0
        for j in range(k):
            wall = two_cells(
                normal=WEIGHT[k] - WEIGHT[j],
                offset=(BIAS[k] - BIAS[j]).item(),
                slopes=torch.zeros(2, 2).double(),
            )
            density = gaussian_boundary_mass(wall, 0.0, COVARIANCE).density
            assert result.densities[k, j].item() == pytest.approx(density, rel=1e-13)
            assert result.densities[j, k] == result.densities[k, j]
            total += 2 * density
    assert result.union == pytest.approx(total, rel=1e-13)
    assert result.margin > result.union


def test_the_margin_constant_bounds_the_pairwise_mass_at_every_width():
    scores = gaussian_inputs(50_000, 2, 0, COVARIANCE) @ WEIGHT.T + BIAS
    gaps, constant = pair_gap(scores), pair_constants(WEIGHT, BIAS, COVARIANCE).margin
    for width in (0.01, 0.1, 0.5):
        share = (gaps <= width).double().mean().item()
        assert share <= constant * width + 4 * math.sqrt(share / 50_000)
        assert share > 0.2 * constant * width


@pytest.mark.usefixtures("no_axis_checks")
def test_routers_without_a_wall_are_refused():
    with pytest.raises(ParameterError, match="same weights"):
        pair_constants(torch.ones(2, 3).double())
    with pytest.raises(ShapeError, match="got 1"):
        pair_constants(torch.ones(1, 3).double())
    with pytest.raises(ShapeError, match="need 4 biases, got 2"):
        pair_constants(WEIGHT, BIAS[:2])
