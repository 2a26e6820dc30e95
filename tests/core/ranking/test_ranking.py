"""Laws of `tieline.core.ranking`, then the values and refusals that pin it down."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.reference import ranking
from tests.strategies import score_matrices
from tieline import TielineError
from tieline.core.ranking import gap, kth_largest, ranked_scores, stable_topk, topk_mask


@given(score_matrices(min_experts=1), st.data())
def test_all_functions_agree_with_a_stable_python_sort(scores, data):
    k = data.draw(st.integers(1, scores.shape[1]))
    top, mask, floor = stable_topk(scores, k), topk_mask(scores, k), kth_largest(scores, k)
    in_double = ranked_scores(scores, k)
    for t, row in enumerate(scores.tolist()):
        order = ranking(row)
        assert top.indices[t].tolist() == order[:k]
        assert top.values[t].tolist() == [row[e] for e in order[:k]] == in_double[t].tolist()
        assert set(mask[t].nonzero().flatten().tolist()) == set(order[:k])
        assert floor[t].item() == row[order[k - 1]]


@given(score_matrices(), st.data())
def test_gap_is_the_exact_difference_of_two_ranks(scores, data):
    k = data.draw(st.integers(1, scores.shape[1] - 1))
    expected = [sorted(row)[-k] - sorted(row)[-k - 1] for row in scores.tolist()]
    assert gap(scores, k).tolist() == expected


def test_equal_scores_go_to_the_lower_index_for_every_k():
    for k in range(1, 9):
        assert stable_topk(torch.zeros(8), k).indices.tolist() == list(range(k))
        assert topk_mask(torch.zeros(8), k).nonzero().flatten().tolist() == list(range(k))


def test_gaps_of_bfloat16_scores_are_not_rounded():
    scores = torch.tensor([[256.0, 1.5]], dtype=torch.bfloat16)  # 254.5 would round to 254
    assert gap(scores, 1).item() == 254.5


def test_without_an_expert_to_enter_the_gap_is_infinite():
    assert gap(torch.zeros(3, 2), 2).tolist() == [math.inf] * 3


def test_a_score_that_is_not_a_number_is_chosen_so_that_it_shows():
    scores = torch.tensor([[1.0, math.nan, 0.0], [1.0, -math.inf, 0.0]])
    assert topk_mask(scores, 1).tolist() == [[False, True, False], [True, False, False]]
    assert stable_topk(scores, 1).indices.tolist() == [[1], [0]]


@pytest.mark.parametrize("k", [0, 4, -1])
@pytest.mark.parametrize("function", [stable_topk, topk_mask, kth_largest, gap, ranked_scores])
def test_a_k_outside_the_experts_is_refused(function, k):
    with pytest.raises(TielineError, match=f"k={k}, experts=3"):
        function(torch.zeros(2, 3), k)


def test_the_mask_takes_what_is_not_a_number_although_two_scores_tie_below_it():
    scores = torch.tensor([[torch.nan, 5.0, 5.0, 1.0], [4.0, 3.0, 2.0, 1.0]])
    expected = torch.tensor([[True, True, False, False], [True, True, False, False]])
    assert torch.equal(topk_mask(scores, 2), expected)
    assert torch.equal(topk_mask(scores[:1].expand(3, -1), 2), expected[:1].expand(3, -1))
