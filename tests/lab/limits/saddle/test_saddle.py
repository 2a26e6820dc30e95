"""Critical points of a small problem: the teacher's minima, and strict saddles elsewhere."""

import pytest
import torch

from tests.lab.limits.problems import line
from tieline.core.errors import ParameterError, ShapeError
from tieline.lab.limits import (
    find_critical_points,
    gaussian_risk,
    negative_curvature,
    perturbed_curvature,
    two_cells,
)

TEACHER = two_cells(normal=[1.0, 0.0], slopes=[[1.0, 0.5], [-1.0, 0.5]], intercepts=[0.3, 0.0])


@pytest.fixture(scope="module")
def points():
    return find_critical_points(TEACHER, 0.5, starts=6, seed=1)


def test_points_are_critical_by_the_independent_quadrature(points):
    assert points
    for point in points:
        assert point.gradient_norm < 1e-9
        assert point.risk == pytest.approx(gaussian_risk(point.student, TEACHER, None, 0.5).item())
        assert point.student.normal.norm().item() == pytest.approx(1)


def test_every_point_away_from_the_teacher_is_a_strict_saddle(points):
    kinds = {point.kind for point in points}
    assert {"minimum", "strict saddle"} <= kinds
    for point in points:
        assert (point.kind == "strict saddle") == (point.misrouted > 0.1)
        assert (point.drop < 0) == (point.least_eigenvalue < 0)
    assert [p.risk for p in points] == sorted(p.risk for p in points)


def test_the_drop_has_the_size_that_the_curvature_predicts(points):
    saddle = next(p for p in points if p.kind == "strict saddle")
    assert saddle.direction.norm().item() == pytest.approx(1)
    assert saddle.drop == pytest.approx(saddle.least_eigenvalue / 2 * 0.3**2, rel=0.3)


def test_curvatures_are_second_differences(points):
    def risk(point, direction, step):
        angle = torch.atan2(point.student.normal[1], point.student.normal[0])
        rest = torch.cat([point.student.offset[None], point.student.experts.flatten()])
        q = torch.cat([angle[None], rest]) + step * direction
        flat = torch.cat([q[:1].cos(), q[:1].sin(), q[1:]])
        return gaussian_risk(point.student.with_flat(flat), TEACHER, None, 0.5).item()

    turn = torch.eye(8, dtype=torch.float64)[0]
    for point in points:
        for motion, curvature in (
            (point.direction, point.least_eigenvalue),
            (turn, point.hessian[0, 0].item()),
        ):
            up, centre, down = (risk(point, motion, step) for step in (0.01, 0.0, -0.01))
            second = (up - 2 * centre + down) / 0.01**2
            assert second == pytest.approx(curvature, rel=0.01, abs=1e-6)


def test_negative_curvature_and_its_persistence():
    least, direction = negative_curvature(torch.diag(torch.tensor([2.0, -3.0, 1.0])))
    assert least == -3
    assert direction.abs().tolist() == [0, 1, 0]
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        first, second = torch.randn(2, 4, 4, generator=generator, dtype=torch.float64)
        bound = perturbed_curvature(first + first.T, second + second.T)
        assert bound.least <= bound.bound + 1e-12
    shift = perturbed_curvature(first + first.T, first + first.T + 0.5 * torch.eye(4).double())
    assert shift.least == pytest.approx(shift.bound)


def test_bad_input_is_refused():
    with pytest.raises(ParameterError, match="starts=0"):
        find_critical_points(TEACHER, 0.5, starts=0)
    with pytest.raises(ShapeError, match="dimension 2, got 1"):
        find_critical_points(line(), 0.5)
