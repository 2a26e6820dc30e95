"""Sums over blocks equal the sums over everything, with weights, ridge and several outputs."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.lab.estimation.zoo import Decay, Line, Pair
from tieline.core.errors import TielineError
from tieline.lab.estimation.solvers import LeastSquares


def normal(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 40), st.integers(1, 200))
def test_blocks_of_any_size_give_the_sums_of_the_definition(sets, starts, samples, block):
    x, y = normal(sets, samples, 3, seed=1), normal(sets, samples, seed=2)
    weight = normal(sets, samples, seed=3).square() + 0.1
    problem = LeastSquares(Line(3), x, y, weight, 0.5, starts, block)
    theta, which = normal(sets * starts, 3, seed=4), torch.arange(sets * starts)
    equations = problem.normal_equations(theta, which)
    for b in range(sets * starts):
        s = b // starts
        residual = y[s] - x[s] @ theta[b]
        loss = (weight[s] * residual**2).sum() + 0.5 * theta[b] @ theta[b]
        pull = x[s].T @ (weight[s] * residual) - 0.5 * theta[b]
        gram = x[s].T @ (weight[s, :, None] * x[s]) + 0.5 * torch.eye(3)
        torch.testing.assert_close(equations.loss[b], loss)
        torch.testing.assert_close(equations.pull[b], pull)
        torch.testing.assert_close(equations.gram[b], gram)
    torch.testing.assert_close(problem.loss(theta, which), equations.loss)


def test_some_problems_alone_are_as_among_all():
    x, y = normal(3, 50, 1, seed=1), normal(3, 50, seed=2)
    problem = LeastSquares(Decay(), x, y, starts=2, block=40)
    theta = normal(6, 2, seed=3)
    every = problem.normal_equations(theta, torch.arange(6))
    indices = torch.tensor([4, 1])
    alone = problem.normal_equations(theta[indices], indices)
    for separate, batched in zip(alone, every, strict=True):
        torch.testing.assert_close(separate, batched[indices])


def test_several_outputs_are_rows_of_the_same_sum():
    x, y = normal(2, 30, 1, seed=1), normal(2, 30, 2, seed=2)
    weight = normal(2, 30, seed=5).square()
    problem = LeastSquares(Pair(), x, y, weight, block=17)
    theta, which = normal(2, 2, seed=3), torch.arange(2)
    equations = problem.normal_equations(theta, which)
    value, jacobian = Pair().value_and_jacobian(theta, x)
    heavy = weight[..., None]
    torch.testing.assert_close(equations.loss, (heavy * (y - value) ** 2).sum((1, 2)))
    pull = torch.einsum("bnop,bno->bp", jacobian, heavy * (y - value))
    torch.testing.assert_close(equations.pull, pull)
    gram = torch.einsum("bnop,bnoq,bn->bpq", jacobian, jacobian, weight)
    torch.testing.assert_close(equations.gram, gram)
    torch.testing.assert_close(problem.scale, (heavy * y**2).sum((1, 2)))


def test_the_pull_of_all_rows_is_that_of_the_mean_loss():
    x, y = normal(2, 30, 3, seed=1), normal(2, 30, seed=2)
    problem = LeastSquares(Line(3), x, y, normal(2, 30, seed=5).square(), ridge=2.0)
    theta, which = normal(2, 3, seed=3), torch.arange(2)
    every = problem.minibatch_pull(theta, which, torch.randperm(30))
    torch.testing.assert_close(every, problem.normal_equations(theta, which).pull / 30)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"y": normal(2, 4)}, "must agree"),
        ({"x": torch.full((2, 5, 1), torch.nan, dtype=torch.float64)}, "must be finite"),
        ({"y": torch.full((2, 5), torch.inf, dtype=torch.float64)}, "must be finite"),
        ({"x": normal(2, 0, 1), "y": normal(2, 0)}, "at least one sample"),
        ({"weight": normal(2, 4).abs()}, "a weight for each sample"),
        ({"weight": -torch.ones(2, 5, dtype=torch.float64)}, "not negative"),
        ({"weight": torch.zeros(2, 5, dtype=torch.float64)}, "not all zero"),
        ({"ridge": -1.0}, "a ridge is not negative, got -1.0"),
    ],
)
@pytest.mark.usefixtures("no_axis_checks")
def test_bad_data_are_refused(change, message):
    good = {"x": normal(2, 5, 1), "y": normal(2, 5)}
    with pytest.raises(TielineError, match=message):
        LeastSquares(Decay(), **{**good, **change})
