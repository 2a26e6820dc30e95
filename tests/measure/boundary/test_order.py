"""Counts near the threshold and orders of ties against their definitions."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import dyadic_scores, seeds
from tieline.core.ranking import ranked_scores
from tieline.measure.boundary import (
    censored_share,
    epsilon_for_extra,
    near_counts,
    order_shares,
    tie_order,
    tie_order_from_counts,
)

EPSILONS = (0.125, 0.25, 0.5, 3.0)


@given(seeds, st.integers(1, 7))
def test_counts_match_their_definition(seed, k):
    scores = dyadic_scores(seed)
    counts = near_counts(scores, k, EPSILONS).tolist()
    for row, row_counts in zip(scores.tolist(), counts, strict=True):
        threshold = sorted(row, reverse=True)[k - 1]
        assert row_counts == [sum(z > threshold - epsilon for z in row) for epsilon in EPSILONS]


@given(seeds, st.integers(1, 7), st.sampled_from(EPSILONS))
def test_orders_match_their_definition(seed, k, epsilon):
    scores = dyadic_scores(seed)
    for row, order in zip(scores.tolist(), tie_order(scores, k, epsilon).tolist(), strict=True):
        ranked = sorted(row, reverse=True)
        within = sum(abs(z - ranked[k - 1]) < epsilon for z in row) - 1
        assert order == (0 if ranked[k - 1] - ranked[k] >= epsilon else within)


@given(seeds, st.integers(1, 7), st.sampled_from(EPSILONS))
def test_order_of_all_experts_follows_from_the_first_ranks_and_the_count(seed, k, epsilon):
    scores = dyadic_scores(seed)
    near = near_counts(scores, k, [epsilon])[:, 0]
    short = ranked_scores(scores, k + 1)
    assert torch.equal(
        tie_order_from_counts(short, k, epsilon, near), tie_order(scores, k, epsilon)
    )


@given(seeds, st.integers(1, 6))
def test_counts_of_the_first_ranks_are_exact_where_not_censored(seed, k):
    scores = dyadic_scores(seed)
    short = ranked_scores(scores, k + 2)
    for epsilon in EPSILONS:
        hidden = short[:, k - 1] - short[:, -1] < epsilon
        same = near_counts(short, k, [epsilon]) == near_counts(scores, k, [epsilon])
        assert same[~hidden].all()
        assert censored_share(short, k, epsilon) == hidden.double().mean()


def test_a_near_tie_inside_the_chosen_set_is_no_tie():
    scores = torch.tensor([[1.0, 1.0, 0.0], [2.0, 1.0, 1.0], [1.0, 1.0, 1.0]])
    assert tie_order(scores, 2, 0.5).tolist() == [0, 1, 2]


def test_shares_of_orders_gather_the_highest():
    shares = order_shares(torch.tensor([0, 1, 1, 2, 5]), most=2)
    assert shares.tolist() == pytest.approx([0.2, 0.4, 0.4])


@given(seeds, st.integers(1, 6), st.sampled_from([0.25, 0.5, 1.0]))
def test_epsilon_is_the_first_that_reaches_the_mean(seed, k, extra):
    scores = dyadic_scores(seed)
    estimate = epsilon_for_extra(ranked_scores(scores, 8), k, extra)

    def mean(epsilon):
        return near_counts(scores, k, [epsilon]).double().mean().item() - k

    assert mean(estimate.value + 1e-9) >= extra
    if estimate.value > 0:
        assert mean(estimate.value) < extra
    assert estimate.standard_error >= 0


def test_error_of_epsilon_is_that_of_repeated_samples():
    scores = torch.randn(200, 300, 16, dtype=torch.float64)
    estimates = [epsilon_for_extra(ranked_scores(rows, 8), 2) for rows in scores]
    values = torch.tensor([e.value for e in estimates])
    assert values.std().item() == pytest.approx(
        sum(e.standard_error for e in estimates) / len(estimates), rel=0.25
    )


def test_epsilon_that_no_rank_reaches_says_so():
    ranked = torch.tensor([[1.0, -torch.inf], [1.0, -torch.inf]])
    assert epsilon_for_extra(ranked, 1).status.startswith("not answerable")
    assert epsilon_for_extra(ranked[:, :1], 1).value is None


def test_counts_differ_in_float64():
    scores = torch.tensor([[256.0, 255.0, 1.5]], dtype=torch.bfloat16)
    assert near_counts(scores, 1, [254.5, 254.6]).tolist() == [[2, 3]]
    assert near_counts(scores, 1, []).shape == (1, 0)


@pytest.mark.parametrize(
    "call",
    [
        lambda: tie_order(torch.zeros(1, 2), 2, 0.1),
        lambda: tie_order(torch.zeros(1, 2), 1, 0.0),
        lambda: order_shares(torch.zeros(1, dtype=torch.long), 0),
        lambda: near_counts(torch.zeros(1, 2), 3, [0.1]),
    ],
)
def test_senseless_arguments_are_refused(call):
    with pytest.raises(ValueError, match="need"):
        call()


def test_infinite_gap_gives_a_finite_count():
    ranked = torch.tensor([[2.0, 1.0, -torch.inf]])
    assert near_counts(ranked, 1, [0.5, 2.0, math.inf]).tolist() == [[1, 2, 2]]
