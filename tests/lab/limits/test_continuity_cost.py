"""The price of continuity against integrals by hand, and what is refused."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tieline import TielineError
from tieline.lab.limits import (
    added_cost,
    continuity_bound,
    hard_sensitivity,
    least_moved,
    projected_cost,
    ramp_cost,
    segment_share,
    token_noise_bounds,
)

EDGES = torch.tensor([-0.3, 0.3], dtype=torch.float64)
ENDS = torch.tensor([0.0, 1.0], dtype=torch.float64)
MEAN = math.sqrt(2 / math.pi)


def test_the_bound_is_in_units_of_density_jump_and_noise():
    assert continuity_bound(2.0, 3.0, 0.5) == pytest.approx(4 * 81 * 0.25 / 16)
    assert hard_sensitivity(2.0, 3.0, 0.5) == pytest.approx(9 * MEAN)


def test_a_straight_ramp_has_four_thirds_of_the_bound():
    cost = ramp_cost(EDGES, ENDS)
    assert cost.moved == pytest.approx(0.6 / 12)
    assert cost.sensitivity == pytest.approx(1 / 0.6)
    assert cost.product * 16 == pytest.approx(4 / 3)


@pytest.mark.parametrize("sigma", [0.05, 0.2, 1.0])
def test_the_projection_is_a_straight_ramp_of_twice_epsilon(sigma):
    cost, ramp = projected_cost(2.0, 3.0, sigma, 0.3), ramp_cost(EDGES, ENDS, sigma)
    assert cost.moved == pytest.approx(18 * ramp.moved)
    assert cost.sensitivity == pytest.approx(18 * ramp.sensitivity, rel=1e-3)


def test_small_noise_is_linear_and_a_small_band_is_top_k():
    assert projected_cost(1.0, 1.0, 1e-4, 0.3).sensitivity == pytest.approx(1e-8 / 0.6, rel=1e-3)
    narrow = projected_cost(1.0, 1.0, 0.1, 0.0)
    assert narrow.moved == 0
    assert narrow.sensitivity == pytest.approx(hard_sensitivity(1.0, 1.0, 0.1))


@pytest.mark.parametrize("sigma", [0.02, 0.2, 1.0])
@pytest.mark.parametrize("slope", [-0.8, 2.0])
def test_a_density_with_a_slope_is_that_of_the_integrals(sigma, slope):
    epsilon, s = 0.3, torch.linspace(-9, 9, 36_001, dtype=torch.float64)
    weight = 2.0 * 3.0**2 * (1 + slope * s.abs())

    def share(margin):
        return (margin / (2 * epsilon) + 0.5).clamp(0, 1)

    noise, step = torch.linspace(-6, 6, 241, dtype=torch.float64), 12 / 240
    changes = [
        torch.trapezoid(weight * (share(s + sigma * n) - share(s)).square(), s) for n in noise
    ]
    normal = (-noise.square() / 2).exp() / math.sqrt(2 * math.pi)
    cost = projected_cost(2.0, 3.0, sigma, epsilon, slope)
    moved = torch.trapezoid(weight * (share(s) - (s > 0).double()).square(), s)
    assert cost.moved == pytest.approx(moved.item(), rel=1e-3)
    expected = (torch.stack(changes) * normal).sum() * step
    assert cost.sensitivity == pytest.approx(expected.item(), rel=2e-3)
    small = projected_cost(2.0, 3.0, 1e-5, epsilon, slope).sensitivity
    assert small == pytest.approx(18 * 1e-10 / 0.6 * (1 + slope * epsilon / 2), rel=1e-3)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.floats(-3, 3), st.floats(-0.5, 1.5)), min_size=3, max_size=9))
def test_no_ramp_beats_the_bound(points):
    positions = torch.tensor(sorted({round(s, 2) for s, _ in points}), dtype=torch.float64)
    if len(positions) < 2:
        return
    shares = torch.tensor([r for _, r in points[: len(positions)]], dtype=torch.float64)
    shares[0], shares[-1] = 0, 1
    assert ramp_cost(positions, shares).product >= (1 - 1e-9) / 16


@pytest.mark.parametrize(
    ("factor", "share"), [(1.7, 0.315), (2.9, 0.683), (5.3, 0.894), (9.9, 0.970)]
)
def test_the_frontier_tends_to_the_linear_law(factor, share):
    assert least_moved(factor) / (math.pi / 32 * factor) == pytest.approx(share, abs=2e-3)


def test_the_frontier_starts_at_top_k_and_is_not_crossed_by_straight_ramps():
    assert least_moved(1.0) == 0
    for epsilon, most in ((0.2, 2.0), (0.4, 1.5), (2.0, 4 / 3)):
        cost, hard = projected_cost(1.0, 1.0, 0.2, epsilon), hard_sensitivity(1.0, 1.0, 0.2)
        assert 1 <= cost.moved / (least_moved(hard / cost.sensitivity) * hard) < most


def test_the_ramp_of_paper_one_by_quadrature():
    assert added_cost() == pytest.approx((1 / 3, 1))
    steep = added_cost(1.0, 50.0)
    u = torch.linspace(0, 1, 200_001, dtype=torch.float64)
    share = u / (u + (1 - u) ** 50)
    assert steep.moved == pytest.approx(torch.trapezoid(share**2, u).item(), rel=1e-5)
    slope = share.diff() / u.diff()
    assert steep.sensitivity == pytest.approx((slope**2 * u.diff()).sum().item(), rel=1e-3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: continuity_bound(-1.0, 1.0, 1.0), "density must be finite and not negative"),
        (lambda: continuity_bound(1.0, math.nan, 1.0), "jump must be"),
        (lambda: projected_cost(1.0, 1.0, 1.0, -0.1), "epsilon must be"),
        (lambda: projected_cost(1.0, 1.0, 1.0, 0.1, math.inf), "slope must be finite"),
        (lambda: least_moved(0.5), "at least 1 and finite, got 0.5"),
        (lambda: ramp_cost(EDGES.flip(0), ENDS), "ascending"),
        (lambda: ramp_cost(EDGES, ENDS / 2), "from 0 to 1, got 0 and 0.5"),
        (lambda: added_cost(0.5), "below 1"),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(TielineError, match=message):
        call()


def test_the_frontier_of_a_sample_is_that_of_its_law():
    noise = torch.special.ndtri((torch.arange(4000, dtype=torch.float64) + 0.5) / 4000)
    for factor in (1.5, 3.0, 8.0):
        assert least_moved(factor, 0.02 * noise) == pytest.approx(least_moved(factor), rel=0.02)
    uniform = torch.linspace(-1, 1, 4001, dtype=torch.float64)
    limit = 60 * (1 / 3) / (16 * 0.25)
    assert least_moved(60.0, uniform) == pytest.approx(limit, rel=0.05)
    with pytest.raises(TielineError, match="finite and not zero"):
        least_moved(2.0, torch.zeros(3))


def test_a_gate_that_knows_the_noise_has_the_smaller_bound():
    generator = torch.Generator().manual_seed(0)
    jumps, sigmas = (torch.rand(500, generator=generator) + 0.1 for _ in range(2))
    bounds = token_noise_bounds(0.5, jumps, sigmas)
    assert bounds.knowing < bounds.common
    alike = token_noise_bounds(0.5, jumps, torch.full((500,), 0.3))
    rms = jumps.double().square().mean().sqrt().item()
    assert alike == pytest.approx((continuity_bound(0.5, rms, 0.3),) * 2, rel=1e-6)


def test_an_output_is_split_into_its_share_and_what_is_off_the_segment():
    lower, upper = torch.zeros(3, 2), torch.tensor([2.0, 0.0]).expand(3, 2)
    outputs = torch.tensor([[1.0, 0.0], [0.5, 3.0], [-2.0, 1.0]])
    share, off = segment_share(outputs, lower, upper)
    assert share.tolist() == [0.5, 0.25, -1.0]
    assert off.tolist() == [0.0, 9.0, 1.0]
