"""Refusals of scores that do not explain a choice."""

import math

import pytest
import torch

from tieline.core.errors import TielineError, UnsupportedModelError
from tieline.models.pass_tokens import DocumentCounter
from tieline.models.router_checks import check_distinct_experts, check_router_scores, check_selected

BATCH = DocumentCounter().read_batch({"input_ids": torch.tensor([[4, 5], [6, 7]])})


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_scores_that_are_no_numbers_are_reported_with_layer_count_and_first_token(wrong):
    scores = torch.zeros(4, 3)
    scores[2, 1] = scores[3, 0] = scores[3, 2] = wrong
    message = r"'gate': 3 .* of 2 tokens .* token 0 of document 1 \(token id 6\)"
    with pytest.raises(TielineError, match=message):
        check_router_scores(scores, "gate", BATCH)


def test_finite_scores_pass_even_if_their_sum_overflows():
    check_router_scores(torch.full((4, 3), 3e38), "gate", BATCH)


def test_an_expert_chosen_twice_is_refused():
    check_distinct_experts(torch.tensor([[1, 0], [2, 1]]), "gate", "own")
    with pytest.raises(UnsupportedModelError, match="twice"):
        check_distinct_experts(torch.tensor([[1, 0], [2, 2]]), "gate", "own")


def test_a_score_below_the_threshold_is_refused_naming_family_and_version():
    selected = torch.tensor([[3.0, 2.0], [3.0, 1.0]])
    with pytest.raises(UnsupportedModelError, match=r"'own'.*transformers 5.*1 of 2 tokens.*1 < 2"):
        check_selected(selected, torch.tensor([2.0, 2.0]), 2**-23, "gate", "own")


@pytest.mark.parametrize(("size", "rounding"), [(0.5, 2**-23), (100.0, 2**-23), (0.5, 2**-7)])
def test_the_tolerance_is_eight_roundings_of_the_threshold(size, rounding):
    threshold = torch.tensor([size], dtype=torch.float64)
    allowed = 8 * rounding * max(1.0, size)
    check_selected(threshold[:, None] - allowed * 0.999, threshold, rounding, "gate", "own")
    with pytest.raises(UnsupportedModelError):
        check_selected(threshold[:, None] - allowed * 1.001, threshold, rounding, "gate", "own")
