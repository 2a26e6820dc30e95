"""Estimates, distribution functions, quantiles and their intervals against their definitions."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from tests.strategies import seeds
from tieline.core.errors import TielineError
from tieline.core.statistics import (
    Estimate,
    binomial_band,
    empirical_cdf,
    mean_estimate,
    normal_quantile,
    quantile_bands,
)


def dyadic(seed, n=17):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 12, (n,), generator=generator).double() / 8


@given(seeds)
def test_cdf_counts_what_is_at_most_the_width(seed):
    samples, at = dyadic(seed), torch.arange(-1, 14).double() / 8
    below = [sum(x < w for x in samples.tolist()) for w in at.tolist()]
    most = [sum(x <= w for x in samples.tolist()) for w in at.tolist()]
    assert (empirical_cdf(samples, at) * 17).tolist() == pytest.approx(most)
    middle = [(a + b) / 2 for a, b in zip(below, most, strict=True)]
    assert (empirical_cdf(samples, at, "middle") * 17).tolist() == pytest.approx(middle)


def test_cdf_keeps_the_shape_of_its_points_and_counts_in_float64():
    at = torch.tensor([[0.0], [1e-9]], dtype=torch.float64)
    assert empirical_cdf(torch.tensor([5e-10, 1.0]), at).tolist() == [[0.0], [0.5]]


@given(seeds, st.integers(0, 20))
def test_quantiles_are_the_inverse_of_the_cdf(seed, step):
    samples, p = dyadic(seed), step / 20
    value, low, high = (x.item() for x in quantile_bands(samples, [p]))
    reached = [x for x in samples.tolist() if empirical_cdf(samples, torch.tensor(x)) >= p - 1e-12]
    assert value == min(reached)
    assert low <= value <= high


def test_quantiles_of_infinities_stay_infinities():
    bands = quantile_bands(torch.tensor([1.0, torch.inf, torch.inf]), [0.1, 0.5, 1.0])
    assert bands.value.tolist() == [1.0, torch.inf, torch.inf]


def test_quantile_band_holds_the_true_median_as_often_as_promised():
    samples = torch.rand(800, 101, dtype=torch.float64)
    inside = 0
    for row in samples:
        _, low, high = quantile_bands(row, [0.5])
        inside += bool(low <= 0.5 <= high)
    assert 0.94 < inside / 800 < 0.985


@pytest.mark.parametrize("n", [1, 7, 40])
@pytest.mark.parametrize("confidence", [0.8, 0.95])
def test_binomial_band_covers_every_probability(n, confidence):
    low, high = binomial_band(torch.arange(n + 1), n, confidence)
    assert low[0] == 0
    assert high[-1] == 1
    for p in torch.linspace(0.001, 0.999, 197).tolist():
        inside = (low <= p) & (p <= high)
        probabilities = torch.tensor(stats.binom.pmf(range(n + 1), n, p))
        assert (probabilities * inside).sum() >= confidence - 1e-9


def test_binomial_band_is_the_exact_interval():
    low, high = binomial_band(torch.tensor([3]), 20)
    exact = stats.binomtest(3, 20).proportion_ci(0.95, "exact")
    assert (low.item(), high.item()) == pytest.approx((exact.low, exact.high))


def test_mean_has_the_error_of_independent_samples():
    mean = mean_estimate(torch.tensor([1.0, 2.0, 3.0, 6.0]))
    assert mean.value == 3
    assert mean.standard_error == pytest.approx(math.sqrt(14 / 3 / 4))
    assert mean_estimate(torch.tensor([2.0])).standard_error is None


def test_estimates_scale_and_add():
    scaled = Estimate(2.0, 0.3).times(-2.0)
    assert (scaled.value, scaled.standard_error) == (-4.0, 0.6)
    both = Estimate(1.0, 3.0).plus(Estimate(2.0, 4.0, "odd"))
    assert (both.value, both.standard_error, both.status) == (3.0, 5.0, "odd")
    lost = Estimate(None, None, "gone")
    assert lost.times(2.0) == lost
    assert lost.plus(scaled) == lost
    assert scaled.plus(lost) == lost


def test_interval_of_the_normal_law():
    assert normal_quantile(0.95) == pytest.approx(1.959964, abs=1e-6)


@pytest.mark.parametrize(
    "call",
    [
        lambda: empirical_cdf(torch.zeros(0), torch.zeros(1)),
        lambda: quantile_bands(torch.zeros(0), [0.5]),
        lambda: quantile_bands(torch.zeros(1), [1.5]),
        lambda: mean_estimate(torch.zeros(0)),
        lambda: binomial_band(torch.zeros(1, dtype=torch.long), 0),
        lambda: binomial_band(torch.zeros(1, dtype=torch.long), 3, confidence=1.0),
        lambda: normal_quantile(0.0),
    ],
)
def test_senseless_arguments_are_refused(call):
    with pytest.raises(TielineError):
        call()
