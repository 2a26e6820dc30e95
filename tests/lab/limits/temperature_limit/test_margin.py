"""Margin tails of routers, and the chain of bounds from the gap to C_sh τ^α."""

import math

import pytest
import torch
from scipy import optimize, special

from tests.lab.limits.problems import COVARIANCE, STUDENT, line, sample, within
from tieline.core.errors import ParameterError, ShapeError
from tieline.lab.limits import (
    evaluate,
    gaussian_inputs,
    gaussian_margin_constant,
    margin_constant,
    router_margin_tail,
    soft_to_hard_chain,
)


def test_the_fitted_tail_of_a_linear_router_is_its_density():
    drawn = sample(n=200_000)
    tail = router_margin_tail(drawn.scores, mass=0.05)
    assert tail.exponent.value == 1.0
    assert within(tail.constant, gaussian_margin_constant(STUDENT, COVARIANCE))


def test_a_router_that_is_flat_at_its_wall_has_a_smaller_exponent():
    x = gaussian_inputs(100_000, 1, 0)
    cube = x.pow(3)
    tail = router_margin_tail(torch.cat([cube, -cube], dim=1), mass=0.05)
    assert within(tail.fitted, 1 / 3)


@pytest.mark.parametrize("offset", [0.0, 0.5, 1.5, 3.0])
def test_the_constant_holds_for_every_width_and_is_attained(offset):
    def mass(t):
        return special.ndtr(t - offset) - special.ndtr(-t - offset)

    constant = gaussian_margin_constant(line(offset=offset))
    widths = torch.logspace(-3, 1, 400, dtype=torch.float64).tolist()
    assert all(mass(t) <= constant * t * (1 + 1e-12) for t in widths)
    best = optimize.minimize_scalar(lambda t: -mass(t) / t, bounds=(1e-4, 9), method="bounded")
    assert constant == pytest.approx(-best.fun, rel=1e-7)


def test_the_empirical_constant_is_the_largest_ratio():
    margins = torch.tensor([0.1, 0.4, 0.5, 2.0])
    assert margin_constant(margins, 1.0, least=1).value == pytest.approx(0.25 / 0.1)
    assert margin_constant(margins, 1.0, least=2).value == pytest.approx(0.75 / 0.5)
    assert margin_constant(margins, 0.5, least=2).value == pytest.approx(0.75 / math.sqrt(0.5))
    drawn = sample(n=100_000)
    exact = gaussian_margin_constant(STUDENT, COVARIANCE)
    assert within(margin_constant(drawn.margin, 1.0, least=1000), exact)


@pytest.mark.parametrize("tau", [0.01, 0.3, 1.0])
def test_each_bound_of_the_chain_is_above_the_one_before(tau):
    generator = torch.Generator().manual_seed(2)
    router, experts = torch.randn(2, 3, 6, generator=generator, dtype=torch.float64)
    x = gaussian_inputs(50_000, 3, 1)
    drawn = evaluate(
        lambda x: x @ router, lambda x: (x @ experts).tanh(), lambda x: x[:, 0].sign(), x
    )
    constant = margin_constant(drawn.margin, 1.0).value
    chain = soft_to_hard_chain(drawn, tau, C=constant, B_f=1.0, B_Y=1.0)
    assert abs(chain.gap.value) <= chain.predictions.value <= chain.exponential.value
    assert chain.exponential.value <= chain.bound * (1 + 1e-9)
    assert chain.bound == pytest.approx(4 * 2 * 5 * constant * tau)
    estimated_chain = soft_to_hard_chain(drawn, tau, C=constant)
    assert 0.5 * chain.bound < estimated_chain.bound <= chain.bound


def test_bad_tails_are_refused():
    with pytest.raises(ParameterError, match=r"alpha=0\.0"):
        margin_constant(torch.ones(3), 0.0)
    with pytest.raises(ShapeError, match="least=4"):
        margin_constant(torch.ones(3), 1.0, least=4)
