"""Oracles against planted truth: ties are accepted, everything else is explained."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import dyadic_scores, seeds
from tieline.analysis.oracles import (
    assert_routing_close,
    compare_choices,
    regret,
    tie_band,
    tie_free_scores,
    tie_heavy_scores,
)
from tieline.core.errors import TielineError
from tieline.core.ranking import stable_topk


def other_rule(scores, k):
    """Top-k with the higher index first among equals."""
    return scores.shape[1] - 1 - stable_topk(scores.flip(-1), k).indices


@given(seeds, st.integers(1, 7))
def test_regret_by_brute_force(seed, k):
    scores = dyadic_scores(seed)
    for row in scores:
        for ids in itertools.combinations(range(8), k):
            chosen = torch.zeros(1, 8, dtype=torch.bool)
            chosen[0, list(ids)] = True
            left = [row[e].item() for e in range(8) if e not in ids]
            assert regret(chosen, row[None]).item() == max(left) - min(row[list(ids)].tolist())
            if k in (1, 7):
                continue
            break


@given(seeds, st.integers(1, 7))
def test_a_top_k_choice_has_no_regret_and_no_other_set_has_none_without_ties(seed, k):
    scores = dyadic_scores(seed)
    for row in scores:
        best = sorted(row.tolist(), reverse=True)
        for ids in itertools.islice(itertools.combinations(range(8), k), 30):
            chosen = torch.zeros(1, 8, dtype=torch.bool)
            chosen[0, list(ids)] = True
            right = sorted(row[list(ids)].tolist(), reverse=True) == best[:k]
            assert (regret(chosen, row[None]).item() <= 0) == right


@given(seeds, st.integers(1, 7))
def test_two_tie_rules_differ_at_ties_only(seed, k):
    planted = tie_heavy_scores(50, 8, k, seed=seed)
    ours, theirs = stable_topk(planted.scores, k).indices, other_rule(planted.scores, k)
    comparison = assert_routing_close(ours, theirs, planted.scores, 0.0)
    assert comparison.wrong == ()
    assert comparison.ties == tuple(planted.tied.nonzero().squeeze(1).tolist())


@given(seeds)
def test_flips_planted_outside_the_band_are_all_found_and_none_inside(seed):
    planted = tie_free_scores(60, 8, 3, gap=0.125, seed=seed)
    ids = stable_topk(planted.scores, 4).indices
    swapped = ids[:, [0, 1, 3]]  # rank 4 instead of rank 3: wrong by exactly the gap
    band = 0.25
    comparison = compare_choices(ids[:, :3], swapped, planted.scores, band)
    inside = planted.gap <= band
    assert comparison.ties == tuple(inside.nonzero().squeeze(1).tolist())
    assert comparison.wrong == tuple((~inside).nonzero().squeeze(1).tolist())
    each = compare_choices(ids[:, :3], swapped, planted.scores, planted.gap)
    assert each.wrong == ()


def test_leaving_out_a_clear_winner_is_wrong_whatever_enters():
    scores = torch.tensor([[3.0, 1.0, 0.99, -5.0]])
    ids, wrong = torch.tensor([[0, 1]]), torch.tensor([[1, 2]])
    with pytest.raises(AssertionError, match=r"b chose expert 2 \(0\.99\S*\) and left out 0 \(3\)"):
        assert_routing_close(ids, wrong, scores, 0.1)
    assert assert_routing_close(ids, torch.tensor([[2, 0]]), scores, 0.1).ties == (0,)


def test_equal_sets_in_another_order_are_no_difference():
    scores = torch.randn(9, 6)
    ids = stable_topk(scores, 3).indices
    comparison = assert_routing_close(ids, ids.flip(1), scores, 0.0)
    assert (comparison.ties, comparison.wrong) == ((), ())


@pytest.mark.parametrize("ids", [[[0, 0]], [[0, 4]], [[-1, 0]]])
def test_broken_ids_are_explained(ids):
    scores = torch.tensor([[3.0, 1.0, 0.5, 0.0]])
    with pytest.raises(AssertionError, match=r"b chose .* which are not 2 experts of 0\.\.3"):
        assert_routing_close(torch.tensor([[0, 1]]), torch.tensor(ids), scores, 9.0)


def test_masked_experts_may_be_swapped_for_each_other_only():
    scores = torch.tensor([[3.0, -torch.inf, -torch.inf, 0.0]])
    a, b = torch.tensor([[0, 3, 1]]), torch.tensor([[0, 3, 2]])
    assert assert_routing_close(a, b, scores, 0.0).ties == (0,)
    with pytest.raises(AssertionError, match="b chose expert 1"):
        assert_routing_close(a[:, :2], torch.tensor([[0, 1]]), scores, 1.0)


def test_many_mismatches_are_counted_and_few_spelled_out():
    planted = tie_free_scores(40, 8, 2)
    ids = stable_topk(planted.scores, 8).indices
    with pytest.raises(AssertionError, match=r"40 of 40 tokens .*: 0 at ties, 40 not") as error:
        assert_routing_close(ids[:, :2], ids[:, 6:], planted.scores, 0.01)
    assert str(error.value).count("\ntoken ") == 5
    assert "... and 35 more" in str(error.value)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32", "int8"])
def test_rounding_once_stays_within_one_spacing(dtype):
    scores = torch.randn(4000, 16) * 3
    rounded = scores.to({"bf16": torch.bfloat16, "fp16": torch.float16}.get(dtype, torch.float32))
    if dtype == "int8":
        step = scores.abs().amax(dim=1, keepdim=True) / 127
        rounded = (scores / step).round() * step
    ours, theirs = stable_topk(scores, 4).indices, other_rule(rounded.float(), 4)
    comparison = assert_routing_close(
        ours, theirs, scores, tie_band(scores, 4, dtype, roundings=1.0)
    )
    assert dtype == "fp32" or len(comparison.ties) > 2
    assert compare_choices(ours, theirs, scores, 0.0).wrong == comparison.ties


def test_bad_arguments_are_refused():
    scores = torch.randn(3, 4)
    ids = torch.zeros(3, 1, dtype=torch.int64)
    with pytest.raises(TielineError, match="band"):
        compare_choices(ids, ids, scores, -1.0)
    with pytest.raises(TielineError, match="NaN"):
        compare_choices(ids, ids, scores * torch.nan, 0.0)
    with pytest.raises(TielineError, match="fp12"):
        tie_band(scores, 1, "fp12")


@pytest.mark.usefixtures("no_axis_checks")
def test_shapes_that_do_not_fit_are_refused():
    scores, ids = torch.randn(3, 4), torch.zeros(3, 1, dtype=torch.int64)
    with pytest.raises(TielineError, match="shapes"):
        compare_choices(ids, ids[:2], scores, 0.0)
    with pytest.raises(TielineError, match="shapes"):
        compare_choices(ids[:2], ids[:2], scores, 0.0)
