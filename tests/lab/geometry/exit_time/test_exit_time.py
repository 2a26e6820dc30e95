"""Exact exit laws: reflection, images, orthogonality, quantiles, bounds."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from tieline.lab.geometry.exit_time import exit_bounds, face_exit, face_quantile, two_face_exit


def test_one_face_is_hit_as_the_reflection_principle_says():
    r = torch.tensor([0.5, 1.0, 3.0], dtype=torch.float64)
    assert face_exit(r, 2.0).tolist() == pytest.approx((2 * stats.norm.sf(r / 2**0.5)).tolist())
    assert face_exit(r, 0.0).tolist() == [0, 0, 0]


@given(st.floats(0.1, 5), st.floats(0.001, 0.999))
def test_quantiles_invert_the_law(r, p):
    time = face_quantile(torch.tensor(r, dtype=torch.float64), p)
    assert face_exit(torch.tensor(r, dtype=torch.float64), time).item() == pytest.approx(p)


@given(st.floats(0.05, 3), st.floats(0.05, 3), st.floats(-0.95, 0.95), st.floats(0.05, 4))
def test_two_faces_lie_between_the_bounds(r1, r2, cosine, t):
    r = torch.tensor([r1, r2], dtype=torch.float64)
    bounds = exit_bounds(r, torch.tensor([t], dtype=torch.float64))
    exact = two_face_exit(r1, r2, cosine, t)
    assert bounds.lower.item() - 1e-10 <= exact <= bounds.upper.item() + 1e-10
    assert exact == pytest.approx(two_face_exit(r2, r1, cosine, t), abs=1e-10)


@pytest.mark.parametrize("t", [0.02, 0.3, 5.0])
def test_the_series_meets_orthogonal_faces_parallel_faces_and_images(t):
    stay = [math.erf(r / math.sqrt(2 * t)) for r in (0.7, 1.0)]
    product = 1 - stay[0] * stay[1]
    assert two_face_exit(0.7, 1.0, 0.0, t) == pytest.approx(product, rel=1e-12)
    assert two_face_exit(0.7, 1.0, 1e-9, t) == pytest.approx(product, abs=1e-8)
    assert two_face_exit(0.7, 1.0, 1 - 1e-5, t) == pytest.approx(1 - stay[0], abs=1e-3)


def test_a_wedge_of_sixty_degrees_follows_by_reflection():
    # the six images of the start under the group of the wedge, integrated over the wedge
    t, r1, r2 = 0.8, 0.5, 0.9
    angle, cosine = math.pi / 3, -0.5
    along = (r2 - r1 * cosine) / math.sin(angle)
    radius, theta = math.hypot(r1, along), math.atan2(r1, along)
    grid = torch.linspace(0, 9, 3001, dtype=torch.float64)
    turns = torch.linspace(0, angle, 601, dtype=torch.float64)
    rho, turn = torch.meshgrid(grid, turns, indexing="ij")
    density = torch.zeros_like(rho)
    for m in range(3):
        for sign in (1, -1):
            image = 2 * m * angle + sign * theta
            square = rho**2 + radius**2 - 2 * rho * radius * (turn - image).cos()
            density += sign * (-square / (2 * t)).exp() / (2 * math.pi * t)
    stay = torch.trapezoid(torch.trapezoid(density * rho, turns, dim=1), grid).item()
    assert two_face_exit(r1, r2, cosine, t) == pytest.approx(1 - stay, abs=1e-6)


@pytest.mark.parametrize(
    ("ask", "names"),
    [
        (lambda: two_face_exit(0.0, 1.0, 0.0, 1.0), "r1=0"),
        (lambda: two_face_exit(1.0, 1.0, 1.0, 1.0), "cosine=1"),
        (lambda: face_exit(torch.tensor(-1.0), 1.0), ">= 0"),
        (lambda: face_exit(torch.tensor(1.0), -1.0), "-1"),
        (lambda: face_quantile(torch.tensor(1.0), 1.0), "p < 1"),
    ],
)
def test_bad_input_is_named(ask, names):
    with pytest.raises(ValueError, match=names):
        ask()
