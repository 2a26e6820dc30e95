"""The profiled hard problem along motions of its wall."""

import math

import pytest
import torch

from tests.lab.limits.problems import COVARIANCE, STUDENT, TEACHER, line
from tieline.core.errors import ParameterError, ShapeError
from tieline.lab.limits import (
    gaussian_profile,
    moved,
    profile_variation,
    two_cells,
    velocity_gram,
)

TURN = torch.tensor([0.3, -0.7, 0.2], dtype=torch.float64)
MIRROR = two_cells(normal=[1.0, 0.0], slopes=[[1.0, 0.5], [-1.0, 0.5]], intercepts=[0.3, 0.0])
ACROSS = two_cells(normal=[0.0, 1.0], slopes=[[0.0, 0.0], [0.0, 0.0]])


@pytest.mark.parametrize("tau", [0.0, 0.1])
def test_variations_are_those_of_differences(tau):
    def profile(t):
        return gaussian_profile(moved(STUDENT, TURN, t), TEACHER, COVARIANCE, tau).value.item()

    result = profile_variation(STUDENT, TEACHER, TURN, COVARIANCE, tau)
    h = 1e-3
    assert result.value == profile(0.0)
    assert result.first == pytest.approx((profile(h) - profile(-h)) / (2 * h), rel=1e-4)
    second = (profile(h) - 2 * profile(0.0) + profile(-h)) / h**2
    assert result.second == pytest.approx(second, rel=1e-3)
    assert result.descent == pytest.approx(-result.second / result.speed)


def test_a_wall_across_the_teachers_is_critical_and_falls_to_both_sides():
    result = profile_variation(ACROSS, MIRROR, torch.tensor([1.0, 0.0, 0.0]))
    assert abs(result.first) < 1e-14
    assert result.descent > 1
    assert result.curvature > 0.1
    assert result.speed == pytest.approx(1 / math.sqrt(2 * math.pi))


def test_a_linear_router_realises_as_many_velocities_as_dimensions():
    gram = velocity_gram(STUDENT, COVARIANCE)
    assert gram.rank == 2
    idle = torch.cat([STUDENT.normal, STUDENT.offset[None]])
    assert (gram.gram @ idle).abs().max() < 1e-14


def test_motions_that_move_nothing_are_refused():
    with pytest.raises(ParameterError, match="does not move the wall"):
        profile_variation(ACROSS, MIRROR, torch.tensor([0.0, 1.0, 0.0]))
    with pytest.raises(ShapeError, match="dimensions differ: 2, 1"):
        profile_variation(ACROSS, line(), TURN)
