"""The density of the gap at zero: exact values, estimates within their errors, refusals."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, special

from tests.measure.problems import normal_scores
from tieline.core.ranking import gap
from tieline.measure.boundary import (
    density_from_masses,
    gap_density,
    gaussian_gap_density,
    margin_tail,
)

E64K8 = 12.9149


def test_density_of_normal_scores_is_the_known_number():
    assert gaussian_gap_density(64, 8) == pytest.approx(E64K8, abs=5e-5)
    assert gaussian_gap_density(2, 1) == pytest.approx(1 / math.sqrt(math.pi), rel=1e-12)


@given(st.integers(2, 12), st.data())
def test_density_of_normal_scores_is_its_integral(experts, data):
    k = data.draw(st.integers(1, experts - 1))
    orderings = math.factorial(experts) / math.factorial(k - 1) / math.factorial(experts - k - 1)

    def integrand(t):
        above, below = special.ndtr(-t) ** (k - 1), special.ndtr(t) ** (experts - k - 1)
        return orderings * math.exp(-(t**2)) / (2 * math.pi) * above * below

    assert gaussian_gap_density(experts, k) == pytest.approx(
        integrate.quad(integrand, -9, 9)[0], rel=1e-8
    )
    assert gaussian_gap_density(experts, k) == pytest.approx(
        gaussian_gap_density(experts, experts - k), rel=1e-12
    )


def test_estimate_from_200000_rows_meets_the_exact_density():
    gaps = torch.cat([gap(normal_scores(50_000, 64, seed), 8) for seed in range(4)])
    estimate = gap_density(gaps)
    assert estimate.standard_error < 0.02 * E64K8
    assert abs(estimate.value - E64K8) < 3 * estimate.standard_error


def test_standard_error_is_that_of_repeated_samples():
    rows = torch.empty(400, 500, dtype=torch.float64).exponential_()
    estimates = [gap_density(row, width=0.1) for row in rows]
    values = torch.tensor([e.value for e in estimates])
    errors = torch.tensor([e.standard_error for e in estimates])
    assert values.std().item() == pytest.approx(errors.mean().item(), rel=0.12)
    assert abs(values.mean() - 1) < 4 * values.std() / 20


def test_estimate_is_free_of_the_slope_of_the_density():
    n = 100_000
    uniform = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    gaps = -torch.log1p(-uniform)  # quantiles of the exponential law: density 1 at 0, slope -1
    assert gap_density(gaps).value == pytest.approx(1.0, abs=0.004)
    assert (gaps <= 0.1).double().mean().item() / 0.1 < 0.96


def test_gaps_on_a_grid_give_the_density_of_the_gaps_behind_them():
    n, step = 200_000, 1 / 64
    uniform = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    continuous = -torch.log1p(-uniform)
    rounded = (continuous / step).round() * step
    grid = gap_density(rounded, width=8 * step).value
    assert grid == pytest.approx(gap_density(continuous, width=8 * step).value, rel=2e-3)


def test_masses_alone_give_the_same_density():
    gaps = gap(normal_scores(3000, 16), 4)
    f_w, f_2w = ((gaps <= w).double().mean().item() for w in (0.02, 0.04))
    assert density_from_masses(f_w, f_2w, 0.02, 3000) == gap_density(gaps, width=0.02)
    density = density_from_masses(0.1, 0.18, 0.5, 100)
    assert density.value == pytest.approx(0.22)
    assert density.standard_error == pytest.approx(math.sqrt(0.98 / 100))


@given(st.floats(0.1, 10))
def test_density_is_per_unit_of_score(scale):
    gaps = gap(normal_scores(500, 8), 2)
    density, scaled_density = gap_density(gaps), gap_density(scale * gaps)
    assert scaled_density.value == pytest.approx(density.value / scale, rel=0.03)


def test_default_width_leaves_a_fifth_of_the_gaps_within_twice_of_it():
    gaps = torch.arange(1, 1001, dtype=torch.float64)
    assert gap_density(gaps).value == gap_density(gaps, width=100.0).value


@pytest.mark.parametrize(("gaps", "why"), [([0.0] * 9 + [1.0], "zero"), ([torch.inf] * 9, "inf")])
def test_densities_that_do_not_exist_say_so(gaps, why):
    estimate = gap_density(torch.tensor(gaps))
    assert estimate.value is None
    assert why in estimate.status


@pytest.mark.parametrize(("alpha", "fixed"), [(1.0, True), (0.5, False), (2.0, False)])
def test_tail_finds_its_law_and_prefers_one(alpha, fixed):
    uniform = (torch.arange(40_000, dtype=torch.float64) + 0.5) / 40_000
    gaps = (uniform / 3) ** (1 / alpha)  # P(gap <= t) = 3 t^alpha
    tail = margin_tail(gaps)
    assert tail.fitted.value == pytest.approx(alpha, rel=0.01)
    assert tail.fitted.standard_error == pytest.approx(tail.fitted.value / math.sqrt(tail.below))
    assert (tail.exponent.value == 1.0 and tail.exponent.standard_error == 0.0) == fixed
    assert tail.constant.value == pytest.approx(3.0, rel=0.03 if not fixed else 1e-3)
    assert (tail.below, tail.ties) == (2000, 0)


def test_tail_errors_are_those_of_repeated_samples():
    rows = torch.rand(200, 2000, dtype=torch.float64) ** 2  # alpha 1/2
    fits = [margin_tail(row) for row in rows]
    alphas = torch.tensor([fit.fitted.value for fit in fits])
    constants = torch.tensor([fit.constant.value for fit in fits])
    assert alphas.std().item() == pytest.approx(fits[0].fitted.standard_error, rel=0.25)
    middle = sorted(fit.constant.standard_error for fit in fits)[100]
    assert constants.std().item() == pytest.approx(middle, rel=0.35)


def test_tail_leaves_exact_ties_out_and_counts_them():
    gaps = torch.cat([torch.zeros(10), torch.linspace(0.001, 1, 990)])
    tail = margin_tail(gaps)
    assert tail.ties == 10
    assert tail.below == 40
    assert margin_tail(torch.zeros(5)).constant.value is None
    assert margin_tail(torch.full((5,), torch.inf)).exponent.status.startswith("not answerable")


@pytest.mark.parametrize("gap", [1e-3, 0.3, 1.0, 40.0])
def test_gaps_of_one_repeated_token_have_no_tail(gap):
    noise = 1 + 1e-7 * torch.arange(2000, dtype=torch.float64) / 2000
    tail = margin_tail(gap * noise)
    assert tail.fitted.value > 1e6
    assert all(
        x is None or math.isfinite(x) for x in (tail.constant.value, tail.constant.standard_error)
    )
    assert gap == 1.0 or tail.constant.status.startswith("not answerable: α =")


@pytest.mark.parametrize(
    "call",
    [
        lambda: gaussian_gap_density(4, 4),
        lambda: gap_density(torch.zeros(0)),
        lambda: gap_density(torch.ones(3), mass=0.0),
        lambda: density_from_masses(0.1, 0.2, 0.0, 10),
    ],
)
def test_senseless_arguments_are_refused(call):
    with pytest.raises(ValueError, match="need"):
        call()
