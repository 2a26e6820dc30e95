"""The operator M against sampling and closed forms, and the rates read off its spectrum."""

import math

import pytest
import torch
from scipy import integrate

from tests.lab.limits.problems import COVARIANCE, within
from tieline.core.errors import ParameterError, ShapeError
from tieline.core.statistics import mean_estimate
from tieline.lab.limits import (
    Response,
    alignment_rate,
    alignment_step,
    gaussian_inputs,
    operator,
    relabelled,
    response_constant,
    sampled_rayleigh,
)

V = torch.tensor([0.6, 0.8], dtype=torch.float64)
D = torch.tensor([1.0, 0.3], dtype=torch.float64)
RESPONSES = [Response(), Response("tanh", 0.4), Response("tanh", 50.0)]


@pytest.mark.parametrize("spread", [0.3, 1.0, 4.0])
def test_the_constant_of_the_sign_is_two_root_two_over_pi(spread):
    exact = 2 * math.sqrt(2 / math.pi)
    assert response_constant(Response(), spread) == pytest.approx(exact, rel=1e-13)


@pytest.mark.parametrize("gain", [0.1, 2.0, 300.0])
@pytest.mark.parametrize("spread", [0.5, 3.0])
def test_the_constant_of_tanh_by_adaptive_integration(gain, spread):
    def density(z):
        weight = math.exp(-z * z / 2) / math.sqrt(2 * math.pi)
        return 2 * math.tanh(gain * spread * z) * z**3 * weight

    turn = min(5.0, 20 / (gain * spread))
    integrals = [integrate.quad(density, a, b, epsabs=1e-15)[0] for a, b in ((0, turn), (turn, 12))]
    value = response_constant(Response("tanh", gain), spread)
    assert value == pytest.approx(sum(integrals), rel=1e-11)
    assert 0 < value < 2 * math.sqrt(2 / math.pi)


@pytest.mark.parametrize("response", RESPONSES)
def test_every_entry_of_the_operator_by_sampling(response):
    x = gaussian_inputs(200_000, 2, 1, COVARIANCE)
    factor = response(x @ V) * (x @ D)
    matrix = operator(V, D, COVARIANCE, response).matrix
    assert torch.equal(matrix, matrix.T)
    for i in range(2):
        for j in range(i + 1):
            assert within(mean_estimate(factor * x[:, i] * x[:, j]), matrix[i, j].item())


@pytest.mark.parametrize("response", RESPONSES)
def test_lemma_6_1_gives_the_rayleigh_quotient(response):
    result = operator(V, D, COVARIANCE, response)
    assert (V @ result.matrix @ V).item() == pytest.approx(result.rayleigh, rel=1e-13)
    assert within(sampled_rayleigh(V, D, COVARIANCE, response), result.rayleigh)
    expected = result.kappa * (D @ COVARIANCE @ V).item() * (V @ COVARIANCE @ V).sqrt().item()
    assert result.rayleigh == pytest.approx(expected, rel=1e-13)


def test_the_spectrum_is_in_descending_order_and_overlaps_the_separator():
    result = operator(V, D, COVARIANCE)
    rebuilt = result.eigenvectors @ torch.diag(result.eigenvalues) @ result.eigenvectors.T
    assert torch.allclose(rebuilt, result.matrix)
    assert result.eigenvalues[0] > result.eigenvalues[1]
    assert result.unstable
    assert result.overlap[0] > 0.9


def test_exchanging_the_sides_does_not_change_the_sign():
    v, d = relabelled(V, -D)
    assert torch.allclose(operator(v, d, COVARIANCE).matrix, operator(V, -D, COVARIANCE).matrix)
    assert operator(v, d, COVARIANCE).rayleigh < 0 < operator(V, D, COVARIANCE).rayleigh


def test_rates_by_hand_and_their_limits():
    values = torch.tensor([2.0, 1.0, -0.5], dtype=torch.float64)
    rate = alignment_rate(values, 0.1, 0.5)
    assert rate.amplification == pytest.approx(1.4)
    assert rate.ratio == pytest.approx(1.2 / 1.4)
    assert rate.ratio_first_order == pytest.approx(0.8)
    assert rate.steps == pytest.approx(5.0)
    assert rate.limit_ratio == 0.5
    assert rate.sign_stable
    assert not alignment_rate(values, 0.1, 0.04).sign_stable
    slow, cold = alignment_rate(values, 1e-6, 1.0), alignment_rate(values, 1.0, 1e-9)
    assert slow.steps == pytest.approx(slow.steps_exact, rel=1e-5)
    assert cold.ratio == pytest.approx(cold.limit_ratio, rel=1e-6)


def test_the_reduced_update_turns_at_the_rate_rho():
    result = operator(V, D, COVARIANCE)
    rho = alignment_rate(result.eigenvalues, 0.05, 0.5).ratio
    u = torch.tensor([1.0, 0.0], dtype=torch.float64)
    before = (result.eigenvectors.T @ u)[1] / (result.eigenvectors.T @ u)[0]
    u = alignment_step(u, result.matrix, 0.05 / 0.5)
    after = (result.eigenvectors.T @ u)[1] / (result.eigenvectors.T @ u)[0]
    assert (after / before).item() == pytest.approx(rho, rel=1e-12)


@pytest.mark.usefixtures("no_axis_checks")
def test_bad_input_is_refused():
    with pytest.raises(ParameterError, match="length 1, got 2"):
        operator(torch.tensor([2.0, 0.0]), D)
    with pytest.raises(ShapeError, match=r"one dimension, got 2 and 3"):
        operator(V, torch.ones(3))
    with pytest.raises(ParameterError, match=r"gain > 0, got -1\.0"):
        Response("tanh", -1.0)
    with pytest.raises(ParameterError, match=r"spread=0\.0"):
        response_constant(Response(), 0.0)
    with pytest.raises(ParameterError, match="λ_1 > λ_2"):
        alignment_rate(torch.tensor([1.0, 1.0]), 0.1, 0.1)
    with pytest.raises(ParameterError, match=r"tau=0\.0"):
        alignment_rate(torch.tensor([2.0, 1.0]), 0.1, 0.0)
