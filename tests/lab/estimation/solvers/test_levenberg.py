"""Levenberg-Marquardt on problems whose minima are known, and the status of each kind of end."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import least_squares

from tests.lab.estimation.zoo import Decay, Line, Product
from tieline.core.errors import TielineError
from tieline.lab.estimation.solvers import (
    LeastSquares,
    Status,
    levenberg_marquardt,
    relative_offset,
)


def normal(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def decays(sets=5, samples=200, noise=0.05):
    truth = torch.tensor([[2.0, 1.5]]).double() + 0.3 * normal(sets, 2, seed=1)
    x = torch.rand(
        sets, samples, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(2)
    )
    y = Decay().value(truth, x) + noise * normal(sets, samples, seed=3)
    return truth, x, y


@given(st.integers(0, 50), st.floats(0.0, 3.0))
def test_a_linear_problem_ends_at_the_normal_equations(seed, ridge):
    x, y = normal(2, 20, 4, seed=seed), normal(2, 20, seed=seed + 1)
    problem = LeastSquares(Line(4), x, y, ridge=ridge)
    solution = levenberg_marquardt(problem, normal(2, 4, seed=seed + 2), tolerance=1e-9)
    exact = torch.linalg.solve(x.mT @ x + ridge * torch.eye(4), (x.mT @ y[..., None])[..., 0])
    torch.testing.assert_close(solution.theta, exact, atol=1e-8, rtol=0)
    assert solution.answered.all()


def test_a_curved_problem_ends_where_scipy_ends():
    _, x, y = decays()
    weight = normal(5, 200, seed=9).square() + 0.1
    problem = LeastSquares(Decay(), x, y, weight)
    solution = levenberg_marquardt(problem, torch.ones(5, 2).double(), tolerance=1e-8)
    for s in range(5):

        def residual(theta, s=s):
            value = Decay().value(torch.tensor(theta)[None], x[s][None])[0]
            return (weight[s].sqrt() * (y[s] - value)).numpy()

        reference = least_squares(residual, [1.0, 1.0], xtol=1e-14, ftol=1e-14, gtol=1e-14)
        torch.testing.assert_close(solution.theta[s], torch.tensor(reference.x), atol=1e-6, rtol=0)
        assert solution.loss[s].item() == pytest.approx(2 * reference.cost, rel=1e-9)


def test_a_problem_ends_the_same_alone_and_among_others_that_end_before():
    _, x, y = decays()
    starts = torch.tensor([[1.0, 1.0], [0.1, 4.0]]).double().repeat(5, 1)
    together = levenberg_marquardt(LeastSquares(Decay(), x, y, starts=2), starts)
    assert len(set(together.iterations.tolist())) > 1
    for b in range(10):
        alone = LeastSquares(Decay(), x[b // 2][None], y[b // 2][None])
        solution = levenberg_marquardt(alone, starts[b][None])
        torch.testing.assert_close(solution.theta[0], together.theta[b], atol=1e-9, rtol=0)
        assert solution.status[0] == together.status[b]
        assert solution.iterations[0] == together.iterations[b]


def test_the_offset_says_how_far_the_minimum_is_in_standard_errors():
    x, y = normal(1, 50, 4, seed=1), normal(1, 50, seed=2)
    problem = LeastSquares(Line(4), x, y)
    best = torch.linalg.lstsq(x[0], y[0, :, None]).solution.T
    away = normal(1, 4, seed=3)
    offset, loss = relative_offset(problem, best + away)
    left = (away @ x[0].T @ x[0] @ away.T).item()
    assert offset.item() == pytest.approx((left / (4 / 50 * loss.item())) ** 0.5, rel=1e-6)
    assert relative_offset(problem, best)[0].item() < 1e-6


def test_data_without_noise_are_fitted_exactly():
    truth, x, y = decays(noise=0.0)
    solution = levenberg_marquardt(LeastSquares(Decay(), x, y), torch.ones(5, 2).double())
    assert solution.status.tolist() == [Status.EXACT] * 5
    torch.testing.assert_close(solution.theta, truth, atol=1e-9, rtol=0)


def test_a_flat_direction_is_left_as_it_was_and_does_not_hinder():
    x = normal(1, 100, 1, seed=1)
    y = 6 * x[..., 0] + 0.1 * normal(1, 100, seed=2)
    problem = LeastSquares(Product(), x, y, starts=3)
    solution = levenberg_marquardt(problem, torch.tensor([[1.0, 1], [2, 4], [5, 1]]).double())
    products = solution.theta.prod(-1)
    best = (x[0, :, 0] @ y[0]) / (x[0, :, 0] @ x[0, :, 0])
    torch.testing.assert_close(products, best.expand(3), atol=1e-4, rtol=0)
    assert solution.answered.all()
    assert solution.theta[:, 0].std() > 0.1  # three points of the valley


def test_the_box_holds_and_the_others_still_find_their_minimum():
    x = normal(1, 60, 2, seed=1)
    y = x[..., 0] * 50 + x[..., 1] * 3
    solution = levenberg_marquardt(
        LeastSquares(Line(2), x, y), torch.zeros(1, 2).double(), tolerance=1e-8
    )
    assert solution.theta[0, 0] == 30.0
    rest = y - 30 * x[..., 0]
    other = (x[0, :, 1] @ rest[0]) / (x[0, :, 1] @ x[0, :, 1])
    assert solution.theta[0, 1].item() == pytest.approx(other.item(), abs=1e-6)
    assert solution.answered.all()


def test_steps_that_run_out_are_unfinished_not_converged():
    _, x, y = decays(sets=1)
    solution = levenberg_marquardt(
        LeastSquares(Decay(), x, y), torch.tensor([[0.1, 8.0]]).double(), iterations=1
    )
    assert solution.status.tolist() == [Status.UNFINISHED]
    assert not solution.answered.any()
    assert solution.iterations.tolist() == [1]


class Cliff(Decay):
    """A gradient that points the wrong way: no step can lower the loss."""

    def value_and_jacobian(self, theta, x):
        value, jacobian = super().value_and_jacobian(theta, x)
        return value, -jacobian


def test_a_loss_that_no_step_lowers_is_stalled():
    _, x, y = decays(sets=1)
    solution = levenberg_marquardt(LeastSquares(Cliff(), x, y), torch.tensor([[1.0, 1.0]]).double())
    assert solution.status.tolist() == [Status.STALLED]
    torch.testing.assert_close(solution.theta, torch.tensor([[1.0, 1.0]]).double())


class Hole(Decay):
    """NaN for large decay rates."""

    def value_and_jacobian(self, theta, x):
        value, jacobian = super().value_and_jacobian(theta, x)
        lost = (theta[:, 1:] > 3) * torch.nan
        return torch.where(theta[:, 1:] > 3, lost, value), jacobian


def test_a_start_without_a_loss_fails_and_a_step_to_such_a_place_is_not_taken():
    _, x, y = decays(sets=1)
    problem = LeastSquares(Hole(), x, y, starts=2)
    solution = levenberg_marquardt(problem, torch.tensor([[1.0, 5.0], [1.0, 1.0]]).double())
    assert solution.status[0] == Status.FAILED
    assert solution.status[1] == Status.CONVERGED
    assert [Status(s).answered for s in solution.status.tolist()] == [False, True]


@pytest.mark.parametrize(
    ("starts", "message"),
    [
        (torch.ones(1, 2).double(), "a start for each problem"),
        (torch.ones(2, 2), "starts are float64"),
        (torch.full((2, 2), torch.nan).double(), "starts must be finite"),
    ],
)
def test_bad_starts_are_refused(starts, message):
    _, x, y = decays(sets=2)
    with pytest.raises(TielineError, match=message):
        levenberg_marquardt(LeastSquares(Decay(), x, y), starts)
