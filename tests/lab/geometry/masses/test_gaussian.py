"""Laws of independent normal scores: known values, other integrals, samples at 4 s.e."""

import math

import pytest
import torch
from scipy import integrate, special

from tests.measure.problems import normal_scores
from tieline.core.ranking import gap
from tieline.lab.geometry.masses import (
    gaussian_budget_epsilon,
    gaussian_gap_mass,
    gaussian_near_ties,
    gaussian_order_shares,
    gaussian_pair_density,
)
from tieline.measure.boundary import gaussian_gap_density, near_counts, tie_order


def test_values_known_to_ten_digits():
    assert gaussian_gap_density(64, 8) == pytest.approx(12.91488668807, rel=1e-12)
    assert gaussian_budget_epsilon(16, 2, 0.5) == pytest.approx(0.1515806538556, rel=1e-12)
    assert gaussian_pair_density(16) / gaussian_gap_density(16, 1) == pytest.approx(38.3, abs=0.05)
    assert gaussian_pair_density(256) / gaussian_gap_density(256, 1) == pytest.approx(6514, abs=1)


@pytest.mark.parametrize("width", [0.0, 1e-9, 0.3, 2.0, 9.0])
def test_two_experts_differ_by_a_normal_of_variance_two(width):
    exact = math.erf(width / 2)
    assert gaussian_gap_mass(2, 1, width) == pytest.approx(exact, rel=1e-12)
    assert gaussian_near_ties(2, 1, width) == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize(("experts", "k"), [(3, 1), (8, 5), (64, 8)])
def test_mass_agrees_with_an_adaptive_double_integral(experts, k):
    orderings = math.exp(math.lgamma(experts + 1) - math.lgamma(k) - math.lgamma(experts - k))
    cdf, width = special.ndtr, 0.2

    def density(gap_, t):  # joint density of z_[k] = t and z_[k+1] = t - gap
        low = t - gap_
        both = math.exp(-(t * t + low * low) / 2) / (2 * math.pi)
        return both * cdf(-t) ** (k - 1) * cdf(low) ** (experts - k - 1)

    mass = orderings * integrate.dblquad(density, -6, 6, 0, width, epsabs=0, epsrel=1e-10)[0]
    assert gaussian_gap_mass(experts, k, width) == pytest.approx(mass, rel=1e-8)


def test_mass_rises_from_the_density_and_the_count_from_the_mass():
    assert gaussian_gap_mass(64, 8, 1e-7) * 1e7 == pytest.approx(
        gaussian_gap_density(64, 8), rel=2e-6
    )
    assert gaussian_near_ties(16, 2, 1e-7) == pytest.approx(
        gaussian_gap_mass(16, 2, 1e-7), rel=1e-6
    )
    assert gaussian_near_ties(16, 2, 60.0) == pytest.approx(14, rel=1e-12)


def test_laws_agree_with_samples():
    n, scores = 200_000, normal_scores(200_000, 9, seed=3)
    mass, epsilon = gaussian_gap_mass(9, 3, 0.2), 0.4
    share = (gap(scores, 3) <= 0.2).double().mean().item()
    assert abs(share - mass) < 4 * math.sqrt(mass * (1 - mass) / n)
    extra = near_counts(scores, 3, [epsilon]).double() - 3
    error = extra.std().item() / math.sqrt(n)
    assert abs(extra.mean().item() - gaussian_near_ties(9, 3, epsilon)) < 4 * error
    shares = gaussian_order_shares(9, 3, epsilon, most=4)
    sampled_shares = (
        torch.bincount(tie_order(scores, 3, epsilon).clamp(max=4), minlength=5).double() / n
    )
    assert ((sampled_shares - shares).abs() < 4 * (shares * (1 - shares) / n).sqrt()).all()


def test_order_shares_are_a_law_that_knows_the_gap():
    shares = gaussian_order_shares(16, 2, 0.25)
    assert shares.sum().item() == pytest.approx(1, rel=1e-12)
    assert 1 - shares[0].item() == pytest.approx(gaussian_gap_mass(16, 2, 0.25), rel=1e-12)
    assert gaussian_order_shares(5, 2, 0.0).tolist() == pytest.approx([1, 0, 0, 0, 0], rel=1e-12)


def test_the_budget_is_met():
    for extra in (1e-3, 0.5, 3.0, 13.5):
        epsilon = gaussian_budget_epsilon(16, 2, extra)
        assert gaussian_near_ties(16, 2, epsilon) == pytest.approx(extra, rel=1e-12)


@pytest.mark.parametrize(
    ("ask", "names"),
    [
        (lambda: gaussian_gap_density(4, 4), "k=4"),
        (lambda: gaussian_gap_mass(4, 0, 0.1), "k=0"),
        (lambda: gaussian_near_ties(4, 2, -0.1), "-0.1"),
        (lambda: gaussian_budget_epsilon(4, 2, 2.0), "extra=2.0"),
        (lambda: gaussian_order_shares(4, 2, 0.1, most=4), "most=4"),
        (lambda: gaussian_pair_density(1), "E=1"),
    ],
)
def test_bad_input_is_named(ask, names):
    with pytest.raises(ValueError, match=names):
        ask()
