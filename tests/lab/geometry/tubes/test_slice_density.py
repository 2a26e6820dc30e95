"""Slice densities: closed forms, samples, the paper's bounds, ratios of volumes."""

import itertools
import math

import pytest
import torch

from tests.measure.routers import router
from tieline.lab.geometry.masses import linf_distance
from tieline.lab.geometry.tubes import (
    band_ratio,
    sampled_slice_density,
    slice_bounds,
    slice_density,
    tie_tube,
    tube_ratio,
    uniform_ball,
)


def test_the_density_can_be_one():
    assert slice_density(4, 2, 2) == pytest.approx(1, rel=1e-13)
    assert slice_density(5, 3, 4) == pytest.approx(1, rel=1e-13)


@pytest.mark.parametrize("k", [1, 2])
def test_three_experts_have_an_angle(k):
    # the third lies above (k = 2) or below (k = 1) the tied pair: a half-space of directions
    assert slice_density(3, k, 1) == pytest.approx(0.5, rel=1e-13)


def test_four_experts_have_an_orthant_angle():
    # P(both others below t) of equicorrelated signs: 1/4 + arcsin(ρ)/2π, ρ = (1/2)/(1 + 1/2)
    exact = 0.25 + math.asin(1 / 3) / (2 * math.pi)
    assert slice_density(4, 1, 1) == pytest.approx(exact, rel=1e-12)
    assert slice_density(4, 2, 1) == pytest.approx(1 - 2 * exact, rel=1e-12)


@pytest.mark.parametrize("experts", [5, 16, 64])
@pytest.mark.parametrize("order", [1, 3])
def test_densities_are_symmetric_and_order_one_ties_partition_a_flat(experts, order):
    for k in range(1, experts):
        assert slice_density(experts, k, order) == pytest.approx(
            slice_density(experts, experts - k, order), rel=1e-11
        )
    if order == 1:
        total = math.fsum(slice_density(experts, k, 1) for k in range(1, experts))
        assert total == pytest.approx(1, rel=1e-12)


@pytest.mark.parametrize(("k", "tied"), [(2, (0, 3)), (2, (1, 2, 4)), (3, (0, 1))])
def test_samples_of_orthonormal_rows_agree(k, tied):
    density = sampled_slice_density(torch.eye(7, 9), k, tied, samples=20_000, seed=1)
    assert abs(density.value - slice_density(7, k, len(tied) - 1)) < 4 * density.stderr


def test_samples_of_a_planar_router_are_exact_angles():
    # in the plane a flat of order 1 is a line with two directions
    weight = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.3, 2.0]], dtype=torch.float64)
    density = sampled_slice_density(weight, 1, (0, 1), samples=20_000)
    assert abs(density.value - 0.5) < 4 * density.stderr


@pytest.mark.parametrize("seed", range(3))
def test_the_papers_lower_bound_holds_and_its_upper_bound_may_not(seed):
    weight, _ = router(5, 6, seed)
    for tied in ((0, 1), (0, 1, 2), (0, 1, 2, 3)):
        bounds = slice_bounds(weight, 2, tied)
        density = sampled_slice_density(weight, 2, tied, samples=20_000)
        assert 0 < bounds.lower <= density.value + 4 * density.stderr
        assert bounds.choices == sum(
            math.comb(5 - len(tied), p)
            for p in range(max(0, 3 - len(tied)), min(1, 5 - len(tied)) + 1)
        )
    every = slice_bounds(torch.eye(4), 2, (0, 1, 2))
    assert every.paper_upper < slice_density(4, 2, 2) <= every.upper + 1e-12
    assert slice_bounds(torch.eye(3), 1, (0, 1, 2)).lower == 1


def test_the_direction_of_the_lower_bound_is_the_best_one():
    # two projected normals at a right angle: ρ = |n|/√2 along their bisector
    weight = torch.tensor([[0.0, 0, 0], [1, 0, 0], [0.5, 2, 0], [0.5, 0, 2]], dtype=torch.float64)
    bounds = slice_bounds(weight, 3, (0, 1))  # both others above
    s = math.sqrt(2) / (4 * math.hypot(0.5, 2))
    angle = 2 * math.asin(s)
    assert bounds.lower == pytest.approx(angle / math.pi, rel=1e-9)  # an arc of a circle


def test_ratio_of_tubes_agrees_with_samples():
    epsilon, radius, n = 0.08, 1.0, 60_000
    weight = torch.eye(4, 5, dtype=torch.float64)
    first, second = (
        tie_tube(weight, None, 1, order=r, epsilon=epsilon, radius=radius, samples=n).sampled
        for r in (1, 2)
    )
    ratio = tube_ratio(4, 1, dim=5, orders=(2, 1), epsilon=epsilon, radius=radius)
    error = second.stderr / first.value
    # the formula is of first order in ε/R: overlaps and ends add up to 10 % here
    assert second.value / first.value == pytest.approx(ratio.value, abs=4 * error, rel=0.12)
    assert ratio.paper == ratio.value


def test_bands_need_the_factor_that_the_paper_lacks():
    epsilon, n = 0.02, 400_000
    x = uniform_ball(n, 5, 1.0)[:, :4]  # scores of orthonormal rows
    single_ties, double_ties = (
        (linf_distance(x, 1, r) <= epsilon).double().mean().item() for r in (1, 2)
    )
    ratio = band_ratio(4, 1, dim=5, orders=(2, 1), epsilon=epsilon, radius=1)
    assert ratio.value == pytest.approx(1.5 * ratio.paper)
    assert double_ties / single_ties == pytest.approx(ratio.value, rel=0.1)
    assert abs(double_ties / single_ties - ratio.paper) > 0.25 * ratio.paper


def test_all_sets_are_counted_in_the_ratio():
    ratio = tube_ratio(6, 2, dim=8, orders=(2, 1), epsilon=0.1, radius=2)
    sets = [len(list(itertools.combinations(range(6), r + 1))) for r in (2, 1)]
    volumes = math.pi / 2 * (math.pi**3 / 6) / (math.pi**3.5 / math.gamma(4.5))
    exact = sets[0] * slice_density(6, 2, 2) / (sets[1] * slice_density(6, 2, 1)) * volumes * 0.05
    assert ratio.value == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize(
    ("ask", "names"),
    [
        (lambda: slice_density(4, 4, 1), "k=4"),
        (lambda: slice_density(4, 2, 4), "order=4"),
        (lambda: sampled_slice_density(torch.eye(4), 0, (0, 1), 10), "k=0"),
        (lambda: sampled_slice_density(torch.ones(4, 3), 1, (0, 1), 10), "rank-deficient"),
        (lambda: slice_bounds(torch.eye(24), 12, (0, 1)), "choices"),
        (lambda: tube_ratio(4, 2, dim=5, orders=(2, 1), epsilon=0.0, radius=1), "epsilon=0"),
        (lambda: band_ratio(4, 2, dim=5, orders=(2, 1), epsilon=-0.1, radius=1), "epsilon=-0.1"),
    ],
)
def test_bad_input_is_named(ask, names):
    with pytest.raises(ValueError, match=names):
        ask()
