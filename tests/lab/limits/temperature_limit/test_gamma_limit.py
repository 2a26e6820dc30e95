"""Γ-convergence over normalised walls, and what a free scale does to it."""

import math

import pytest
import torch

from tests.lab.limits.problems import line
from tieline.core.errors import ParameterError, ShapeError
from tieline.lab.limits import free_scale, gamma_convergence, gaussian_profile, two_cells, wall_grid

TEACHER = two_cells(
    normal=[1.0, 0.0], offset=0.2, slopes=[[1.0, 0.5], [-1.0, 0.3]], intercepts=[0.5, 0.1]
)


def test_infima_and_minimisers_tend_to_those_of_the_hard_problem():
    walls = wall_grid(8, (-0.2, 0.2))
    result = gamma_convergence(TEACHER, walls, (0.4, 0.1, 0.025))
    assert result.profiles.shape == (4, 16)
    assert result.infima[-1] == pytest.approx(0, abs=1e-13)
    assert result.minimisers[-1].tolist() == [1.0, 0.0, 0.2]
    assert result.infima[0] > result.infima[1] > result.infima[2] > 0
    rates = [
        math.log(a / b, 4)
        for a, b in zip(result.uniform_gaps, result.uniform_gaps[1:], strict=False)
    ]
    assert all(0.5 < rate < 1.3 for rate in rates)
    assert result.distances[-1] == 0
    spread = (result.profiles[1] - result.profiles[3]).abs().max().item()
    assert result.uniform_gaps[1] == spread


def test_opposite_normals_are_one_wall():
    walls = torch.tensor([[1.0, 0.0, 0.2], [-1.0, 0.0, -0.2]]).double()
    result = gamma_convergence(TEACHER, walls, (0.1,))
    assert torch.allclose(result.profiles[:, 0], result.profiles[:, 1], atol=1e-13)
    assert result.distances[0] < 1e-12


def test_the_distance_of_minimisers_is_that_of_walls_not_of_labels():
    turn = math.radians(5)
    hard, soft = [1.0, 0.0, 0.2], [math.cos(turn), math.sin(turn), -0.4]
    walls = torch.tensor([hard, [-x for x in soft]], dtype=torch.float64)
    result = gamma_convergence(TEACHER, walls, (1.0,))
    assert torch.equal(result.minimisers, walls.flip(0))
    assert result.distances[0] == pytest.approx(math.dist(hard, soft))


def test_with_a_free_scale_the_infimum_does_not_depend_on_temperature():
    result = free_scale(TEACHER, TEACHER, (1.0, 0.1), (0.5, 3.0, 30.0))
    assert result.profiles[0] == pytest.approx(result.profiles[1], rel=1e-9)
    assert result.infima[0] == pytest.approx(result.infima[1], rel=1e-9)
    fixed = [gaussian_profile(TEACHER, TEACHER, None, tau).value.item() for tau in (1.0, 0.1)]
    assert fixed[0] > 10 * fixed[1]


def test_the_grid_of_walls_has_unit_normals_and_every_offset():
    walls = wall_grid(4, (0.0, 1.0))
    assert walls.shape == (8, 3)
    assert torch.allclose(walls[:, :2].norm(dim=1), torch.ones(8).double())
    assert walls[2].tolist() == pytest.approx([math.sqrt(0.5), math.sqrt(0.5), 0.0])


def test_bad_input_is_refused():
    with pytest.raises(ParameterError, match="got 2 … 2"):
        gamma_convergence(TEACHER, torch.tensor([[2.0, 0.0, 0.0]]).double(), (0.1,))
    with pytest.raises(ShapeError, match="2 columns, got 3"):
        gamma_convergence(line(), wall_grid(2), (0.1,))
    with pytest.raises(ParameterError, match=r"tau=0\.0"):
        gamma_convergence(TEACHER, wall_grid(2), (0.0,))
    with pytest.raises(ParameterError, match=r"\[-1\.0\]"):
        free_scale(TEACHER, TEACHER, (1.0,), (-1.0,))
    with pytest.raises(ParameterError, match="angles=0"):
        wall_grid(0)
