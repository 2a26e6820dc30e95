"""Structured perturbations: laws of one wall, bounds of the cell, steps, the adversary."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from tieline.core.errors import ParameterError, ShapeError
from tieline.core.ranking import topk_mask
from tieline.lab.geometry.exit_time import exit_bounds, exit_curve, face_exit, top_k_cell
from tieline.lab.geometry.perturbations import (
    PerturbationLaw,
    drifting_exit,
    flip_rate,
    pair_noise,
    perturbation_law,
    step_bounds,
    structured_bounds,
    whitened_router,
    worst_step,
)

EXPERTS, DIM, K = 6, 5, 2


def normal(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def number(value):
    return torch.tensor(float(value), dtype=torch.float64)


def law(rank=DIM, seed=1, mean=0.3):
    """A law of some rank with a mean."""
    root = normal(DIM, rank, seed=seed)
    return PerturbationLaw(mean * normal(DIM, seed=seed + 1), root @ root.T)


WEIGHT = normal(EXPERTS, DIM, seed=7)
INPUTS = normal(40, DIM, seed=8)
SCORES = INPUTS @ WEIGHT.T


def test_the_law_of_samples_is_their_mean_and_covariance():
    samples = normal(500, 3) @ normal(3, 3, seed=1) + 2
    sample_law = perturbation_law(samples.float())
    assert sample_law.mean.dtype == torch.float64
    torch.testing.assert_close(sample_law.covariance, samples.T.cov(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sample_law.mean, samples.mean(dim=0), rtol=1e-5, atol=1e-5)


def test_pairs_have_the_deviation_and_drift_of_their_difference():
    given_law = law()
    deviation, drift = pair_noise(WEIGHT, given_law)
    d = WEIGHT[1] - WEIGHT[4]
    assert deviation[1, 4].item() == pytest.approx((d @ given_law.covariance @ d).sqrt().item())
    assert drift[1, 4].item() == pytest.approx((d @ given_law.mean).item())
    assert deviation.diagonal().abs().max() == 0


@given(st.floats(0.05, 4), st.floats(0.1, 3), st.floats(0.01, 5))
def test_without_drift_the_law_is_the_reflection_principle(gap, deviation, t):
    probability = drifting_exit(number(gap), number(deviation), number(0), t)
    assert probability.item() == pytest.approx(
        face_exit(number(gap / deviation), t).item(), rel=1e-9
    )


@given(st.floats(0.1, 3), st.floats(0.2, 2), st.floats(-3, -0.2), st.floats(0.05, 5))
def test_towards_the_wall_the_law_is_inverse_gaussian(gap, deviation, drift, t):
    mean, shape = gap / -drift, (gap / deviation) ** 2
    expected = stats.invgauss(mean / shape, scale=shape).cdf(t)
    probability = drifting_exit(number(gap), number(deviation), number(drift), t).item()
    assert probability == pytest.approx(expected, rel=1e-7, abs=1e-12)


def test_away_from_the_wall_some_paths_never_meet_it():
    probability = drifting_exit(number(1), number(1), number(0.5), 1e6).item()
    assert probability == pytest.approx(math.exp(-1), rel=1e-9)


def test_a_strong_drift_does_not_overflow():
    away = drifting_exit(number(5), number(0.01), number(-20), 1.0)
    assert away.item() == 1
    assert drifting_exit(number(5), number(0.01), number(20), 1.0).item() == 0


def test_without_noise_a_wall_is_met_when_the_drift_gets_there():
    t = torch.tensor([0.4, 0.5, 0.6], dtype=torch.float64)
    assert drifting_exit(number(1), number(0), number(-2), t).tolist() == [0, 1, 1]
    assert drifting_exit(number(1), number(0), number(2), t).tolist() == [0, 0, 0]


def test_bounds_agree_with_paper_one_where_it_speaks():
    root = normal(DIM, DIM, seed=3)
    given_law = PerturbationLaw(torch.zeros(DIM).double(), root @ root.T)
    times = torch.tensor([0.01, 0.1, 1.0], dtype=torch.float64)
    bounds = structured_bounds(SCORES[:1], K, WEIGHT, given_law, times)
    reference = exit_bounds(top_k_cell(SCORES[0], K, WEIGHT, root).distances, times)
    torch.testing.assert_close(bounds.lower[0], reference.lower)
    torch.testing.assert_close(bounds.upper[0], reference.upper)


@pytest.mark.parametrize("rank", [1, 2, DIM])
def test_simulated_paths_lie_between_the_bounds(rank):
    given_law = law(rank)
    times = torch.tensor([0.02, 0.2], dtype=torch.float64)
    for scores in SCORES[:3]:
        cell = top_k_cell(scores, K, whitened_router(WEIGHT, given_law))
        deviation, drift = pair_noise(WEIGHT, given_law)
        at = cell.faces[:, 0], cell.faces[:, 1]
        speed = drift[at] / deviation[at]
        bounds = structured_bounds(scores[None], K, WEIGHT, given_law, times)
        for index, t in enumerate(times.tolist()):
            curve = exit_curve(cell, t, 32, 4_000, seed=1, drift=speed)
            slack = 5 * curve.stderr[-1] + 2e-3
            assert (
                bounds.lower[0, index] - slack <= curve.value[-1] <= bounds.upper[0, index] + slack
            )


def test_a_drifting_path_meets_one_wall_as_the_law_says():
    weight = torch.tensor([[1.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
    cell = top_k_cell(torch.tensor([1.0, 0.0]).double(), 1, weight)
    for speed in (-0.7, 0.7):
        drift = torch.tensor([speed], dtype=torch.float64)
        curve = exit_curve(cell, 1.5, 4, 40_000, drift=drift)
        expected = drifting_exit(number(1), number(1), drift, curve.times)
        assert ((curve.value - expected).abs() < 5 * curve.stderr + 1e-9).all()


def test_a_drift_that_brings_far_walls_near_is_not_cut_off():
    weight = torch.tensor([[1.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
    cell = top_k_cell(torch.tensor([50.0, 0.0]).double(), 1, weight)
    drift = torch.tensor([-60.0], dtype=torch.float64)
    assert exit_curve(cell, 1.0, 4, 100, drift=drift).value[-1] == pytest.approx(1)
    with pytest.raises(ShapeError, match="2 drifts, 1 faces"):
        exit_curve(cell, 1.0, 4, 100, drift=torch.zeros(2))


def test_one_step_is_half_as_likely_as_one_path_for_each_wall():
    given_law = law(mean=0)
    path = structured_bounds(SCORES, K, WEIGHT, given_law, torch.tensor([1.0]))
    step = step_bounds(SCORES, K, WEIGHT, given_law)
    torch.testing.assert_close(step.lower, path.lower[:, 0] / 2)


def test_drawn_steps_lie_between_the_bounds_of_a_step():
    given_law = law(rank=2, mean=0.2)
    bounds = step_bounds(SCORES, K, WEIGHT, given_law)
    rate = flip_rate(SCORES, K, WEIGHT, given_law, draws=2_000)
    drawn = [flip_rate(row[None], K, WEIGHT, given_law, draws=2_000).value for row in SCORES[:5]]
    assert bounds.lower.mean() - 0.02 <= rate.value <= bounds.upper.mean() + 0.02
    for index, share in enumerate(drawn):
        assert bounds.lower[index] - 0.06 <= share <= bounds.upper[index] + 0.06


def test_power_that_the_router_does_not_see_is_free():
    directions = torch.linalg.svd(WEIGHT - WEIGHT.mean(dim=0))[2]
    narrow = WEIGHT @ directions[:2].T @ directions[:2]
    hidden = directions[3:].T @ directions[3:] * 1e6
    given_law = PerturbationLaw(torch.zeros(DIM).double(), hidden)
    assert flip_rate(INPUTS @ narrow.T, K, narrow, given_law).value == 0
    assert worst_step(INPUTS @ narrow.T, K, narrow, given_law).length.min() > 1e6


@pytest.mark.parametrize("rank", [2, DIM])
def test_the_worst_step_makes_a_tie_and_no_shorter_one_changes_the_set(rank):
    given_law = law(rank)
    perturbation = worst_step(SCORES, K, WEIGHT, given_law)
    before = topk_mask(SCORES, K)
    for factor, changes in ((1 - 1e-6, False), (1 + 1e-6, True)):
        moved = (INPUTS + factor * perturbation.step) @ WEIGHT.T
        assert ((topk_mask(moved, K) != before).any(dim=1) == changes).all()
    root = given_law.root()
    directions = normal(400, root.shape[1], seed=5)
    directions /= directions.norm(dim=1, keepdim=True)
    for x, z, length in zip(INPUTS, SCORES, perturbation.length, strict=True):
        moved = (x + 0.999 * length * directions @ root.T) @ WEIGHT.T
        assert (topk_mask(moved, K) == topk_mask(z[None], K)).all()


def test_no_perturbation_reaches_no_tie():
    still = PerturbationLaw(torch.zeros(DIM).double(), torch.zeros(DIM, DIM).double())
    perturbation = worst_step(SCORES, K, WEIGHT, still)
    assert perturbation.length.isinf().all()
    assert perturbation.step.isnan().all()
    assert flip_rate(SCORES, K, WEIGHT, still).value == 0
    assert step_bounds(SCORES, K, WEIGHT, still).upper.max() == 0


def test_the_isotropic_law_has_the_same_power():
    given_law = law()
    even = given_law.isotropic()
    power = given_law.covariance.trace() + given_law.mean.square().sum()
    assert even.covariance.trace().item() == pytest.approx(power.item())


def test_bad_input_is_refused():
    with pytest.raises(ShapeError, match="two samples"):
        perturbation_law(torch.zeros(1, 3))
    with pytest.raises(ShapeError, match="dimensions"):
        whitened_router(torch.zeros(2, 3), law())
    with pytest.raises(ParameterError, match="in the cell"):
        drifting_exit(number(0), number(1), number(0))
    with pytest.raises(ParameterError, match="semidefinite"):
        PerturbationLaw(torch.zeros(2).double(), -torch.eye(2).double()).root()
    with pytest.raises(ParameterError, match="need a draw"):
        flip_rate(SCORES, K, WEIGHT, law(), draws=0)
