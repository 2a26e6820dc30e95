"""Ranks under another program's choice: `ranked_choice` and `group_scores` of the ranking."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import dyadic_scores, score_matrices, seeds
from tieline.core.ranking import (
    confirmed_ranks,
    group_scores,
    ranked_choice,
    searched_ranks,
    stable_topk,
)


@st.composite
def choices(draw):
    """Scores with ties, and for each row k experts that hold its k largest scores, in any order."""
    scores = draw(score_matrices(max_experts=7)) // 2
    k = draw(st.integers(1, scores.shape[1]))
    shuffled = torch.stack(
        [torch.tensor(draw(st.permutations(range(scores.shape[1])))) for _ in scores]
    )
    order = scores.gather(1, shuffled).sort(dim=1, descending=True, stable=True).indices
    return scores, shuffled.gather(1, order)[:, :k]


@given(choices(), st.data())
def test_chosen_experts_come_first_then_score_then_index(drawn, data):
    scores, chosen = drawn
    k, experts = chosen.shape[1], scores.shape[1]
    n = data.draw(st.integers(k, experts))
    ranked = ranked_choice(scores, chosen, k, n)
    for t, row in enumerate(scores.tolist()):
        first = set(chosen[t].tolist())
        order = sorted(range(experts), key=lambda e: (e not in first, -row[e], e))
        assert ranked.indices[t].tolist() == order[:n]
        assert ranked.values[t].tolist() == sorted(row, reverse=True)[:n]


@given(score_matrices(), st.data())
def test_without_a_choice_of_its_own_it_is_the_tie_rule(scores, data):
    n = data.draw(st.integers(1, scores.shape[1]))
    k = data.draw(st.integers(1, n))
    top = stable_topk(scores, n)
    ranked = ranked_choice(scores, top.indices[:, :k], k, n)
    assert torch.equal(ranked.indices, top.indices)
    assert torch.equal(ranked.values, top.values)


def test_a_choice_that_rounding_turned_is_kept_and_the_scores_stay_in_order():
    scores = torch.tensor([[1.0, 3.0, 2.0, 2.0 - 2**-20]], dtype=torch.float64)
    ranked = ranked_choice(scores, torch.tensor([[1, 3]]), 2, 3)
    assert ranked.indices.tolist() == [[1, 3, 2]]
    assert ranked.values.tolist() == [[3.0, 2.0, 2.0 - 2**-20]]


def test_fewer_and_repeated_choices_hold_places_among_the_first_k():
    scores = torch.tensor([[1.0, 1.0, 1.0, 0.0]])
    assert ranked_choice(scores, torch.tensor([[2, 2]]), 2, 3).indices.tolist() == [[2, 0, 1]]


@pytest.mark.cpu("on an accelerator the answer would have to be read back")
@given(seeds, st.integers(1, 8), st.integers(0, 3))
def test_a_choice_that_scores_explain_is_ranked_without_a_search(seed, k, following):
    scores = dyadic_scores(seed, experts=24)
    shuffled = torch.randperm(24, generator=torch.Generator("cpu").manual_seed(seed))
    order = scores[:, shuffled].sort(dim=1, descending=True, stable=True).indices
    for chosen in (shuffled[order[:, :k]], shuffled[order[:, :k].flip(1)]):
        confirmed = confirmed_ranks(scores, chosen, k, k + following)
        searched = searched_ranks(scores, chosen, k, k + following)
        assert confirmed is not None
        assert torch.equal(confirmed.values, searched.values)
        assert torch.equal(confirmed.indices, searched.indices)


@pytest.mark.cpu("on an accelerator the answer would have to be read back")
def test_a_choice_is_confirmed_only_if_its_experts_differ_and_none_is_above_them():
    scores = torch.arange(24.0).flip(0).repeat(2, 1)
    assert confirmed_ranks(scores, torch.tensor([[0, 1], [1, 0]]), 2, 4) is not None
    for wrong in ([0, 2], [1, 1]):
        assert confirmed_ranks(scores, torch.tensor([[0, 1], wrong]), 2, 4) is None
    assert confirmed_ranks(scores, torch.tensor([[0], [0]]), 2, 4) is None
    assert confirmed_ranks(scores, torch.tensor([[0, 1], [0, 1]]), 2, 6) is None  # four maxima
    hidden = scores.masked_fill(scores < 22, -torch.inf)
    assert confirmed_ranks(hidden, torch.tensor([[0, 1], [0, 1]]), 2, 3) is None


@given(score_matrices(min_experts=6, max_experts=6))
def test_a_group_is_scored_by_its_best_or_its_two_best(scores):
    for t, row in enumerate(scores.tolist()):
        runs = [sorted(row[:3]), sorted(row[3:])]
        assert group_scores(scores, 2, "max")[t].tolist() == [run[-1] for run in runs]
        assert group_scores(scores, 2, "top2sum")[t].tolist() == [run[-1] + run[-2] for run in runs]
