"""Time near ties: quadrature, simulation, the paper's bounds and where they are infinite."""

import math

import pytest
import torch
from scipy import integrate, stats

from tests.measure.routers import inputs, router
from tieline.lab.geometry.occupation import (
    BrownianPaths,
    flat_occupation,
    occupation_bounds,
    sampled_occupation,
)
from tieline.lab.geometry.ties import tie_flat


def start_at(flat, distance):
    """A point at that distance from the flat."""
    return flat.nearest + distance * flat.basis[:, 0]


@pytest.mark.parametrize("tied", [2, 3, 4])
@pytest.mark.parametrize("distance", [0.1, 0.9])
def test_the_exact_time_lies_under_both_bounds_and_meets_simulation(tied, distance):
    weight, bias = router(tied, 6, 5)
    flat = tie_flat(weight, bias, tuple(range(tied)))
    x0 = start_at(flat, distance)
    occupation = flat_occupation(flat, x0, epsilon=0.3, horizon=2.0, sigma=0.7)
    assert occupation.exact < occupation.bound <= min(2.0, occupation.paper)
    # all experts tie, so that Γ is the flat whatever k
    paths = BrownianPaths(x0, 2.0, sigma=0.7, steps=8, paths=8000)
    simulated = sampled_occupation(paths, weight, bias, 1, order=tied - 1, epsilon=0.3)
    assert abs(simulated.value - occupation.exact) < 4 * simulated.stderr


def test_one_flat_of_order_one_is_a_single_integral():
    weight, bias = router(2, 4, 1)
    flat = tie_flat(weight, bias, (0, 1))
    occupation = flat_occupation(flat, start_at(flat, 0.5), epsilon=0.2, horizon=1.5, sigma=2.0)
    exact = integrate.quad(
        lambda t: (
            stats.norm.cdf((0.2 - 0.5) / (2 * math.sqrt(t)))
            - stats.norm.cdf((-0.2 - 0.5) / (2 * math.sqrt(t)))
        ),
        0,
        1.5,
        epsabs=1e-12,
    )[0]
    assert occupation.exact == pytest.approx(exact, rel=1e-9)


def test_bounds_have_the_closed_forms_of_the_paper():
    horizon, epsilon, r = 2.0, 0.3, 1.1
    b = (r - epsilon) ** 2 / 2
    for tied in (2, 3, 4, 5):
        n = tied - 1
        flat = tie_flat(torch.eye(tied, 6, dtype=torch.float64), None, tuple(range(tied)))
        occupation = flat_occupation(flat, start_at(flat, r), epsilon=epsilon, horizon=horizon)
        scale = math.pi ** (n / 2) / math.gamma(n / 2 + 1) / (2 * math.pi) ** (n / 2) * epsilon**n
        integral = integrate.quad(lambda t, n=n: t ** (-n / 2) * math.exp(-b / t), 0, horizon)[0]
        assert occupation.bound == pytest.approx(scale * integral, rel=1e-8)
        paper = 2 * scale * math.sqrt(horizon) if n == 1 else occupation.bound
        assert occupation.paper == pytest.approx(paper, rel=1e-12)


@pytest.mark.parametrize("tied", [3, 4])
def test_a_start_within_the_tube_makes_the_papers_bound_infinite_and_ours_the_horizon(tied):
    flat = tie_flat(torch.eye(tied, 5, dtype=torch.float64), None, tuple(range(tied)))
    occupation = flat_occupation(flat, start_at(flat, 0.1), epsilon=0.3, horizon=2.0)
    assert occupation.paper == math.inf
    assert occupation.exact < occupation.bound == 2.0


def test_noise_that_is_not_isotropic_has_bounds_but_no_exact_value():
    weight, bias = router(3, 5, 2)
    flat = tie_flat(weight, bias, (0, 1, 2))
    sigma = torch.diag(torch.tensor([1.0, 2.0, 0.5, 1.5, 0.7], dtype=torch.float64))
    x0 = start_at(flat, 1.5)
    occupation = flat_occupation(flat, x0, epsilon=0.2, horizon=1.0, sigma=sigma)
    assert occupation.exact is None
    paths = BrownianPaths(x0, 1.0, sigma=sigma, steps=8, paths=8000)
    simulated = sampled_occupation(paths, weight, bias, 1, order=2, epsilon=0.2)
    assert 0 < simulated.value < occupation.bound
    # a turned coordinate system changes nothing
    turn = torch.linalg.qr(torch.randn(5, 5, dtype=torch.float64)).Q
    turned = tie_flat(weight @ turn.T, bias, (0, 1, 2))
    again = flat_occupation(turned, turn @ x0, epsilon=0.2, horizon=1.0, sigma=turn @ sigma)
    assert again.bound == pytest.approx(occupation.bound, rel=1e-10)


def test_the_bound_shrinks_the_distance_by_the_quietest_direction():
    # normal coordinates x_1, x_2 of the flat, with standard deviations 2 and 1/2
    weight = torch.tensor([[0.0, 0, 0], [1, 0, 0], [0, 1, 0]], dtype=torch.float64)
    sigma = torch.diag(torch.tensor([2.0, 0.5, 1.0], dtype=torch.float64))
    flat, x0 = tie_flat(weight, None, (0, 1, 2)), torch.tensor([3.0, 1.0, 0.0]).double()
    occupation = flat_occupation(flat, x0, epsilon=0.2, horizon=1.0, sigma=sigma)
    b = (math.hypot(3 / 2, 1 / 0.5) - 0.2 / 0.5) ** 2 / 2
    scale = math.pi * 0.2**2 / (2 * math.pi * 2 * 0.5)
    integral = integrate.quad(lambda t: math.exp(-b / t) / t, 0, 1)[0]
    assert occupation.bound == pytest.approx(scale * integral, rel=1e-8)


@pytest.mark.parametrize("order", [1, 2, 3])
def test_all_ties_of_a_router_stay_under_the_sum(order):
    weight, bias = router(5, 6, 4)
    x0 = inputs(1, 6)[0]
    bounds = occupation_bounds(x0, weight, bias, order=order, epsilon=0.1, horizon=1.0)
    paths = BrownianPaths(x0, 1.0, steps=8, paths=3000)
    simulated = sampled_occupation(paths, weight, bias, 2, order=order, epsilon=0.1)
    assert bounds.flats == math.comb(5, order + 1)
    assert simulated.value - 4 * simulated.stderr <= bounds.bound <= min(1.0, bounds.paper)


def test_the_number_of_looks_does_not_change_the_mean():
    weight, bias = router(4, 5, 6)
    x0 = inputs(1, 5)[0]
    rough, fine = (
        sampled_occupation(paths, weight, bias, 2, order=1, epsilon=0.2)
        for paths in (
            BrownianPaths(x0, 1.0, steps=1, paths=40_000, seed=1),
            BrownianPaths(x0, 1.0, steps=20, paths=8000, seed=20),
        )
    )
    assert abs(rough.value - fine.value) < 4 * math.hypot(rough.stderr, fine.stderr)


TUBE = ("order", "epsilon")


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"epsilon": 0.0}, "epsilon=0"),
        ({"epsilon": -0.1}, "epsilon=-0.1"),
        ({"horizon": 0.0}, "horizon=0"),
        ({"sigma": 0.0}, "invertible"),
        ({"order": 4}, "order=4"),
    ],
)
def test_bad_input_is_named(change, names):
    weight, bias = router(4, 5)
    good = {"order": 1, "epsilon": 0.1, "horizon": 1.0}
    with pytest.raises(ValueError, match=names):
        occupation_bounds(inputs(1, 5)[0], weight, bias, **{**good, **change})
    tube = {name: value for name, value in {**good, **change}.items() if name in TUBE}
    moving = {name: value for name, value in {**good, **change}.items() if name not in TUBE}
    paths = BrownianPaths(inputs(1, 5)[0], paths=10, **moving)
    with pytest.raises(ValueError, match=names):
        sampled_occupation(paths, weight, bias, 2, **tube)
