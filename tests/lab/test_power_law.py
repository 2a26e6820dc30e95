"""Power laws and the sample sizes they ask for."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tieline.core.errors import TielineError
from tieline.lab.power_law import exponent, fit_rate, sample_size

SIZES = [1000, 3000, 10_000, 30_000]


def losses(slope, spread=0.0, repetitions=20):
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(len(SIZES), repetitions, dtype=torch.float64, generator=generator)
    return [3 * n**slope * (spread * noise[i]).exp() for i, n in enumerate(SIZES)]


@given(st.floats(-2, 1))
def test_an_exact_power_law_is_found_without_an_interval(slope):
    rate = fit_rate(SIZES, losses(slope))
    assert rate.slope == pytest.approx(slope, abs=1e-10)
    assert rate.high - rate.low < 1e-9
    assert rate.intercept == pytest.approx(math.log(3), abs=1e-9)


def test_the_interval_covers_a_noisy_slope_about_as_often_as_it_says():
    covered = 0
    for seed in range(60):
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(4, 30, dtype=torch.float64, generator=generator)
        drawn = [n**-0.5 * (1 + 0.3 * noise[i]).abs() for i, n in enumerate(SIZES)]
        rate = fit_rate(SIZES, drawn)
        assert rate.low < rate.slope < rate.high
        covered += rate.low <= -0.5 <= rate.high
    assert 50 <= covered <= 60


def test_the_line_goes_through_logarithms_of_means():
    drawn = [torch.tensor([1.0, 3.0]), torch.tensor([0.2, 0.2])]
    rate = fit_rate([10, 1000], drawn)
    assert rate.slope == pytest.approx((math.log(0.2) - math.log(2)) / math.log(100))


def test_one_repetition_moves_a_law_of_means_and_not_one_of_medians():
    drawn = losses(-0.5)
    drawn[0][3] *= 1000
    assert fit_rate(SIZES, drawn).slope < -1
    rate = fit_rate(SIZES, drawn, middle="median")
    assert rate.slope == pytest.approx(-0.5, abs=1e-10)
    assert rate.high - rate.low < 1e-9


def test_medians_are_those_of_the_repetitions():
    drawn = [torch.tensor([1.0, 2.0, 9.0]), torch.tensor([0.2, 0.1, 0.4])]
    rate = fit_rate([10, 1000], drawn, middle="median")
    assert rate.slope == pytest.approx((math.log(0.2) - math.log(2)) / math.log(100))


def test_the_sample_size_is_where_the_line_crosses_the_error():
    estimate = sample_size(SIZES, losses(-0.5, 0.2), 0.03)
    assert estimate.low < estimate.n < estimate.high
    assert estimate.n == pytest.approx(10_000, rel=0.2)
    assert estimate.seen
    assert "for error 0.03 you need about" in str(estimate)
    far = sample_size(SIZES, losses(-0.5), 0.0003)
    assert far.n == pytest.approx(1e8, rel=1e-6)
    assert not far.seen
    assert "extrapolated" in str(far)


def test_an_error_that_does_not_fall_is_never_reached():
    estimate = sample_size(SIZES, losses(0.1), 0.5)
    assert math.isinf(estimate.n)
    assert math.isinf(estimate.high)


@pytest.mark.parametrize(
    ("sizes", "values", "message"),
    [
        ([10], [torch.ones(3)], "two sample sizes"),
        ([10, 10], [torch.ones(3)] * 2, "two sample sizes"),
        ([10, 20], [torch.ones(3), torch.full((3,), torch.nan)], "finite losses"),
        ([10, 20], [torch.ones(3), torch.zeros(3)], "positive mean"),
    ],
)
def test_losses_without_a_logarithm_are_refused(sizes, values, message):
    with pytest.raises(TielineError, match=message):
        fit_rate(sizes, values)


def test_an_error_to_reach_is_positive():
    with pytest.raises(TielineError, match="positive, got 0"):
        sample_size(SIZES, losses(-0.5), 0.0)


def test_exponents():
    assert exponent([1, 2, 4], [3, -12, 48]) == pytest.approx(2)
    with pytest.raises(ValueError, match="two points"):
        exponent([1.0], [1.0])
