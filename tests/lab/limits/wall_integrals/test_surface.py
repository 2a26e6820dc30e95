"""Surface integrals against closed forms, and the coarea law on smooth routers."""

import math

import pytest
import torch
from scipy import stats

from tests.lab.limits.problems import within
from tieline.core.errors import ParameterError
from tieline.lab.limits import coarea_check, surface_integral


def plane(x):
    return x @ torch.tensor([1.0, 0.5], dtype=torch.float64) + 0.3


def sphere(x):
    return x.square().sum(dim=1) - 2.0


def bent(x):
    return x[:, 0].tanh() - x[:, 1].square() + 0.2 * x[:, 2]


@pytest.mark.parametrize("level", [0.0, 0.8])
def test_profiles_of_a_plane_and_a_sphere_are_known_densities(level):
    spread = math.sqrt(1.25)
    expected = stats.norm(0.3, spread).pdf(level)
    assert within(surface_integral(plane, 2, level=level, lines=1000), expected)
    expected = stats.chi2(3).pdf(2.0 + level)
    assert within(surface_integral(sphere, 3, level=level, lines=1000), expected)


def test_an_integrand_is_averaged_over_the_surface():
    weighted = surface_integral(sphere, 3, integrand=lambda x: x[:, 0].square(), lines=1000)
    assert within(weighted, stats.chi2(3).pdf(2.0) * 2 / 3)


@pytest.mark.parametrize(("score", "dim"), [(plane, 2), (sphere, 3), (bent, 3)])
def test_boundary_mass_is_its_first_order_for_small_widths(score, dim):
    check = coarea_check(score, dim, (0.05, 0.01), 0.1, n=100_000, lines=1000)
    for mass, first in zip(check.masses, check.first_orders, strict=True):
        assert abs(mass.value - first.value) < 4 * math.hypot(mass.stderr, first.stderr)
    assert check.constant.value == pytest.approx(2 * math.log(9) * check.profile.value)
    assert check.first_orders[1].value == pytest.approx(0.01 * check.constant.value)


def test_the_gradient_near_the_wall_tells_a_degenerate_one():
    good = coarea_check(plane, 2, (0.05,), 0.1, n=10_000, lines=10)
    assert good.least_gradient == pytest.approx(math.sqrt(1.25))
    flat = coarea_check(lambda x: x[:, 0].pow(3), 2, (0.05,), 0.1, n=10_000, lines=10)
    assert flat.least_gradient < 1e-3


def test_bad_input_is_refused():
    with pytest.raises(ParameterError, match="lines=1"):
        surface_integral(plane, 2, lines=1)
    with pytest.raises(ParameterError, match="dim=0"):
        surface_integral(plane, 0)
    with pytest.raises(ParameterError, match=r"got \(0\.0,\)"):
        coarea_check(plane, 2, (0.0,), 0.1)
