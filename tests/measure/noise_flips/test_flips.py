"""Flip probabilities: closed forms, fine quadrature, simulation, limits, populations."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import special, stats

from tests.measure.problems import normal_scores, simulated_flips
from tests.strategies import dyadic_scores, seeds
from tieline.core.ranking import ranked_scores
from tieline.core.statistics import Estimate
from tieline.measure.boundary import gap_density, gaussian_gap_density
from tieline.measure.noise_flips import (
    flip_limits,
    flip_limits_by_size,
    flip_probability,
    group_flip_probability,
    noisy_gap,
    population_flips,
)


def by_summation(row, k, sigma):
    """The definition as a fine Stieltjes sum: P(outsider > t) over increments of F(t)."""
    z, s = np.array(row), np.array(sigma)
    t = np.linspace((z - 10 * s).min(), (z + 10 * s).max(), 400_001)
    mid = (t[1:] + t[:-1]) / 2
    survival, none_above = np.ones_like(t), np.zeros_like(mid)
    for i in range(k):
        survival = survival * special.ndtr((z[i] - t) / s[i])
    for j in range(k, len(z)):
        none_above = none_above + special.log_ndtr((mid - z[j]) / s[j])
    return float(-(np.diff(survival) * -np.expm1(none_above)).sum())


@pytest.mark.parametrize("ratio", [0.0, 0.1, 1.0, 3.0, 6.0, 8.0, 10.0])
@pytest.mark.parametrize("uneven", [1.0, 3.0, 10.0])
def test_two_experts_flip_as_the_normal_law_says(ratio, uneven):
    noise = torch.tensor([[1.0, uneven]], dtype=torch.float64) * 0.01
    spread = noise.square().sum().sqrt().item()
    scores = torch.tensor([[5 + ratio * spread, 5.0]], dtype=torch.float64)
    exact = stats.norm.sf((scores[0, 0] - scores[0, 1]).item() / spread)
    probability = flip_probability(scores, 1, noise).item()
    assert probability == pytest.approx(exact, rel=1e-3 if exact > 1e-12 else 1.0, abs=1e-22)


@given(seeds, st.integers(1, 5), st.sampled_from([0.03, 0.2, 1.0, 5.0]))
def test_probability_is_its_integral(seed, k, sigma):
    row = ranked_scores(dyadic_scores(seed, tokens=1, experts=6), 6)
    exact = by_summation(row[0].tolist(), k, [sigma] * 6)
    assert flip_probability(row, k, sigma).item() == pytest.approx(exact, rel=1e-5, abs=1e-12)


@given(seeds, st.integers(1, 4))
def test_probability_is_its_integral_for_uneven_noise(seed, k):
    generator = torch.Generator().manual_seed(seed)
    row = ranked_scores(normal_scores(1, 5, seed), 5)
    sigma = 0.3 * torch.logspace(-1.3, 0, 5, dtype=torch.float64)
    sigma = sigma[torch.randperm(5, generator=generator)]
    exact = by_summation(row[0].tolist(), k, sigma.tolist())
    assert flip_probability(row, k, sigma[None]).item() == pytest.approx(exact, rel=1e-3, abs=1e-12)


@given(seeds, st.integers(1, 5), st.booleans())
def test_closed_form_and_quadrature_err_by_a_millionth_for_all_sizes_at_once(seed, k, uneven):
    generator = torch.Generator().manual_seed(seed)
    row = ranked_scores(normal_scores(1, 7, seed), 7)
    noise = torch.ones(1, 7, dtype=torch.float64)
    if uneven:
        noise *= 0.4 + torch.rand(1, 7, dtype=torch.float64, generator=generator)
    sizes = (0.01, 0.1, 0.3, 1.0)
    low, high = flip_limits_by_size(row, k, noise if uneven else 1.0, sizes, 0)
    exact = [by_summation(row[0].tolist(), k, (c * noise[0]).tolist()) for c in sizes]
    assert torch.equal(low, high)
    for value, expected in zip(low[:, 0].tolist(), exact, strict=True):
        assert value == pytest.approx(expected, rel=1e-6 if expected > 1e-4 else 1e-5, abs=1e-13)


@given(seeds, st.integers(1, 4))
def test_sizes_of_the_noise_at_once_are_those_one_by_one(seed, k):
    scores = ranked_scores(normal_scores(30, 9, seed), 6)
    sizes = (0.0, 0.02, 0.2, 2.0)
    together = flip_limits_by_size(scores, k, 1.0, sizes, 3)
    for row, size in enumerate(sizes):
        alone = flip_limits(scores, k, size, 3)
        for limits, limit in zip(together, alone, strict=True):
            assert torch.allclose(limits[row], limit, rtol=1e-5, atol=1e-14)


def test_hidden_experts_beside_the_last_kept_rank_are_in_the_upper_limit():
    pair = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    low, high = flip_limits(pair, 1, 0.3, beyond=3)
    level = torch.tensor([[1.0, 0.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    assert low.item() == pytest.approx(stats.norm.sf(1 / (0.3 * math.sqrt(2))), rel=1e-6)
    assert high.item() == pytest.approx(flip_probability(level, 1, 0.3).item(), rel=1e-6)


@pytest.mark.parametrize("sigma", [1e-3, 0.03, 0.3, 3.0])
def test_rate_is_that_of_noisy_runs(sigma):
    scores = ranked_scores(normal_scores(500, 16), 16)
    expected = flip_probability(scores, 4, sigma)
    measured = simulated_flips(scores, 4, sigma, repeats=200)
    error = (expected * (1 - expected) / 200).sum().sqrt() / 500
    assert abs(measured.mean() - expected.mean()) < 4 * error + 1e-9


def test_rate_is_that_of_noisy_runs_for_uneven_noise():
    scores = ranked_scores(normal_scores(500, 8), 8)
    noise = 0.05 + 0.4 * torch.rand(500, 8, dtype=torch.float64)
    expected = flip_probability(scores, 3, noise)
    measured = simulated_flips(scores, 3, noise, repeats=300)
    error = (expected * (1 - expected) / 300).sum().sqrt() / 500
    assert abs(measured.mean() - expected.mean()) < 4 * error


@given(seeds, st.integers(1, 7), st.floats(0.01, 3), st.floats(0.1, 8))
def test_probability_knows_no_unit_and_no_origin(seed, k, sigma, scale):
    scores = ranked_scores(dyadic_scores(seed), 8)
    probability = flip_probability(scores, k, sigma)
    assert torch.allclose(
        flip_probability(scale * scores - 5, k, scale * sigma), probability, rtol=1e-6
    )


@given(seeds, st.integers(1, 7))
def test_probability_grows_with_the_noise(seed, k):
    scores = ranked_scores(dyadic_scores(seed), 8)
    rates = torch.stack([flip_probability(scores, k, s) for s in (0.05, 0.1, 0.3, 1.0)])
    assert (rates.diff(dim=0) >= -1e-6 * rates[1:]).all()
    assert ((rates >= 0) & (rates <= 1)).all()


def test_equal_scores_flip_unless_the_noise_picks_the_same_set():
    for experts, k in [(2, 1), (5, 2), (6, 3)]:
        scores = torch.zeros(1, experts, dtype=torch.float64)
        assert flip_probability(scores, k, 0.7).item() == pytest.approx(
            1 - 1 / math.comb(experts, k), rel=1e-6
        )


@given(seeds, st.integers(1, 4), st.sampled_from([0.1, 0.5, 2.0]))
def test_limits_enclose_the_probability_of_all_experts(seed, k, sigma):
    scores = ranked_scores(dyadic_scores(seed), 8)
    probability = flip_probability(scores, k, sigma)
    low, high = flip_limits(scores[:, :5], k, sigma, beyond=3)
    assert (low <= probability * (1 + 1e-6) + 1e-12).all()
    assert (probability <= high * (1 + 1e-6) + 1e-12).all()
    level = torch.cat([scores[:, :5], scores[:, 4:5].expand(-1, 3)], dim=1)
    assert torch.allclose(high, flip_probability(level, k, sigma), rtol=1e-6)


def test_ranks_without_an_expert_change_nothing():
    scores = ranked_scores(normal_scores(40, 6), 6)
    padded = torch.cat([scores, torch.full((40, 2), -torch.inf)], dim=1)
    assert torch.equal(flip_probability(padded, 2, 0.3), flip_probability(scores, 2, 0.3))
    low, high = flip_limits(padded, 2, 0.3, beyond=4)
    assert torch.equal(low, high)


def test_no_noise_and_no_outsider_mean_no_flip():
    scores = torch.tensor([[1.0, 1.0, 0.0]])
    assert flip_probability(scores, 1, 0.0).item() == 0
    assert flip_probability(scores, 3, 9.0).item() == 0
    one_exact = torch.tensor([[0.0, 0.0, 0.5]])
    exact = stats.norm.sf(2.0)
    assert flip_probability(torch.tensor([[9.0, 1.0, 0.0]]), 2, one_exact).item() == pytest.approx(
        exact, rel=1e-3
    )


def test_population_rate_is_that_of_other_tokens():
    gaps_of, other = normal_scores(20_000, 16, 1), ranked_scores(normal_scores(20_000, 16, 2), 10)
    ones = torch.ones(20_000, 16, dtype=torch.float64)
    density = gap_density(noisy_gap(ranked_scores(gaps_of, 16), 4, ones))
    for sigma in (1e-3, 1e-2):
        rate = population_flips(density, sigma)
        chances = flip_probability(other, 4, sigma)
        error = math.hypot(rate.standard_error, (chances.std() / math.sqrt(20_000)).item())
        assert abs(rate.value - chances.mean().item()) < 3 * error
    exact = gaussian_gap_density(16, 4) * 1e-3 / math.sqrt(math.pi)
    assert abs(population_flips(density, 1e-3).value - exact) < 3 * density.standard_error * 1e-3


def test_two_noisy_runs_differ_root_two_times_as_often():
    density = Estimate(2.0, 0.1)
    single_run, both_runs = population_flips(density, 0.01), population_flips(density, 0.01, runs=2)
    assert single_run.value == pytest.approx(0.02 / math.sqrt(math.pi))
    assert single_run.standard_error == pytest.approx(0.001 / math.sqrt(math.pi))
    assert both_runs.value == pytest.approx(math.sqrt(2) * single_run.value)
    scores = normal_scores(400, 8)
    noisy = [scores + 0.02 * torch.randn(200, 400, 8, dtype=torch.float64) for _ in range(2)]
    first, second = (x.topk(2, dim=-1).indices.sort(dim=-1).values for x in noisy)
    measured = (first != second).any(dim=-1).double().mean().item()
    clean = flip_probability(ranked_scores(scores, 8), 2, 0.02 * math.sqrt(2)).mean().item()
    assert measured == pytest.approx(clean, rel=0.05)


def test_rates_beyond_first_order_are_marked():
    assert population_flips(Estimate(10.0, 0.1), 0.01).status == "ok"
    assert population_flips(Estimate(10.0, 0.1), 0.3).status.startswith("first order")
    lost = Estimate(None, None, "not answerable: x")
    assert population_flips(lost, 0.1) == lost


def test_noisy_gap_counts_gaps_in_their_own_noise():
    scores = torch.tensor([[3.0, 2.0, 1.0]], dtype=torch.float64)
    slope = torch.tensor([[9.0, 1.0, 7.0]], dtype=torch.float64)
    assert noisy_gap(scores, 2, slope).item() == pytest.approx(1 / 5)


@pytest.mark.parametrize("per_group", [1, 2])
def test_groups_change_places_as_their_noise_says(per_group):
    gaps, noise = torch.tensor([0.0, 0.1, torch.inf]), torch.full((3,), 0.05, dtype=torch.float64)
    probabilities = group_flip_probability(gaps, noise, per_group)
    sums = 0.05 * torch.randn(2, 200_000, per_group, dtype=torch.float64)
    drop = (sums[0] - sums[1]).sum(dim=1)
    measured = [(drop > g).double().mean().item() for g in gaps.tolist()]
    assert probabilities.tolist() == pytest.approx(measured, abs=5e-3)
    assert group_flip_probability(gaps, 0 * noise, 1).tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    "call",
    [
        lambda: flip_probability(torch.zeros(1, 2), 0, 0.1),
        lambda: flip_probability(torch.zeros(1, 2), 3, 0.1),
        lambda: flip_probability(torch.zeros(1, 2), 1, -0.1),
        lambda: flip_probability(torch.zeros(1, 2), 1, math.nan),
        lambda: noisy_gap(torch.zeros(1, 2), 2, torch.ones(1, 2)),
        lambda: population_flips(Estimate(1.0), 0.1, runs=3),
    ],
)
def test_senseless_arguments_are_refused(call):
    with pytest.raises(ValueError, match=r"need|noise|flips are"):
        call()


@pytest.mark.parametrize("size", [1.0, 1e20, 1e30, 3e38])
def test_noise_near_the_largest_float_flips_ties_as_any_other_does(size):
    """Equal scores of six: the two chosen stay with probability 1/15."""
    ties = torch.full((3, 6), 1e30)
    limits = flip_limits_by_size(ties, 2, size, [1.0], 0)
    torch.testing.assert_close(limits.low, torch.full((1, 3), 14 / 15, dtype=torch.float64))
