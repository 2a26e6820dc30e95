"""Slabs around one decision surface: the normal case and the density of any margin."""

import math

import pytest
import torch

from tests.measure.routers import inputs
from tieline.lab.geometry.tubes import gaussian_slab, surface_density


@pytest.mark.parametrize(("mean", "spread"), [(0.0, 1.0), (0.7, 1.3), (-2.0, 0.5)])
def test_orders_follow_the_exact_mass(mean, spread):
    def errors(width):
        slab = gaussian_slab(mean, spread, width)
        return abs(slab.first_order / slab.exact - 1), abs(slab.next_order / slab.exact - 1)

    (first, following), (half_first, half_following) = errors(0.1), errors(0.05)
    assert first / half_first == pytest.approx(4, rel=0.1)
    assert following / half_following == pytest.approx(16, rel=0.2)


def test_mass_far_out_keeps_its_digits():
    slab = gaussian_slab(30.0, 1.0, 1e-3)
    assert slab.exact == pytest.approx(slab.next_order, rel=1e-6)
    assert gaussian_slab(0.0, 1.0, 1.0).exact == pytest.approx(
        math.erf(1 / math.sqrt(2)), rel=1e-14
    )


def test_density_of_a_linear_margin_is_the_papers_surface_integral():
    x, v = inputs(200_000, 3), torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    density = surface_density(x @ v + 0.4, 0.05)
    spread = v.norm().item()
    exact = math.exp(-((0.4 / spread) ** 2) / 2) / (spread * math.sqrt(2 * math.pi))
    assert abs(density.value - exact) < 4 * density.stderr


def test_density_on_a_curved_surface_is_its_surface_integral():
    # S = ‖x‖² - 1 in the plane: circle of length 2π, p = e^(-1/2)/2π on it, ‖∇S‖ = 2
    density = surface_density(inputs(200_000, 2).square().sum(dim=1) - 1, 0.05)
    assert abs(density.value - math.exp(-0.5) / 2) < 4 * density.stderr


@pytest.mark.parametrize(
    ("ask", "names"),
    [
        (lambda: gaussian_slab(0.0, 0.0, 0.1), "spread=0"),
        (lambda: gaussian_slab(0.0, 1.0, -0.1), "width=-0.1"),
        (lambda: surface_density(torch.zeros(3), 0.0), "width=0"),
        (lambda: surface_density(torch.zeros(0), 0.1), "none"),
    ],
)
def test_bad_input_is_named(ask, names):
    with pytest.raises(ValueError, match=names):
        ask()
