"""Distance to the nearest tie: brute force, geometry, and the pairs that the shortcut may miss."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.measure.problems import linear_router
from tests.strategies import dyadic_scores, seeds
from tieline.core.ranking import Ranked, stable_topk
from tieline.measure import distance
from tieline.measure.distance import expert_distances, nearest_tie


def brute_force(scores, weight, k):
    """Minimum over pairs as the definition reads; equal scores are a tie whatever the weights."""
    distances, norms = [], [[(a - b).norm().item() for b in weight] for a in weight]
    for row in scores.tolist():
        order = sorted(range(len(row)), key=lambda e: (-row[e], e))
        best = math.inf
        for i in order[:k]:
            for j in order[k:]:
                norm, rise = norms[i][j], row[i] - row[j]
                best = min(best, 0.0 if rise == 0 else rise / norm if norm > 0 else math.inf)
        distances.append(best)
    return distances


def uneven_weight(experts, width, seed):
    """Rows of very different lengths, so that the nearest wall is often not the next rank's."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.logspace(-2, 2, experts, dtype=torch.float64)[:, None]
    return lengths * torch.randn(experts, width, generator=generator, dtype=torch.float64)


@given(seeds, st.integers(1, 12))
def test_distance_is_the_minimum_over_all_pairs(seed, k):
    weight, scores = uneven_weight(13, 5, seed), dyadic_scores(seed, tokens=9, experts=13)
    tie = nearest_tie(scores, k, expert_distances(weight))
    assert tie.distance.tolist() == pytest.approx(brute_force(scores, weight, k), rel=1e-12)


@given(seeds, st.integers(1, 5))
def test_the_pair_it_names_has_that_distance(seed, k):
    weight, scores = uneven_weight(16, 4, seed), dyadic_scores(seed, tokens=9, experts=16)
    norms = expert_distances(weight)
    tie = nearest_tie(scores, k, norms)
    rise = scores.gather(1, tie.leaving[:, None]) - scores.gather(1, tie.entering[:, None])
    ratio = rise.squeeze(1) / norms[tie.leaving, tie.entering]
    assert torch.allclose(tie.distance, ratio, rtol=1e-12)
    chosen = stable_topk(scores, k).indices
    assert (chosen == tie.leaving[:, None]).any(dim=1).all()
    assert not (chosen == tie.entering[:, None]).any()


@pytest.mark.parametrize(("experts", "k"), [(16, 2), (16, 8), (6, 5), (2, 1)])
def test_a_step_of_that_length_reaches_the_tie_and_no_shorter_one_does(experts, k):
    inputs, weight, _ = linear_router(tokens=300, experts=experts, dim=12)
    x, w = inputs.double(), weight.double()
    bias = torch.linspace(-0.5, 0.5, experts, dtype=torch.float64)
    scores = x @ w.T + bias
    tie = nearest_tie(scores, k, expert_distances(w))
    normal = w[tie.leaving] - w[tie.entering]
    normal = normal / normal.norm(dim=1, keepdim=True)

    def chosen(step):
        moved = (x - step * tie.distance[:, None] * normal) @ w.T + bias
        return stable_topk(moved, k).indices.sort(dim=1).values

    at_tie = (x - tie.distance[:, None] * normal) @ w.T + bias
    tied = at_tie.gather(1, tie.leaving[:, None]) - at_tie.gather(1, tie.entering[:, None])
    assert tied.abs().max() < 1e-12
    top = at_tie.sort(dim=1, descending=True).values
    assert (top[:, k - 1] - top[:, k]).abs().max() < 1e-12  # it is a tie across the threshold
    assert torch.equal(chosen(1 - 1e-6), chosen(0.0))
    assert (chosen(1 + 1e-6) != chosen(0.0)).any(dim=1).all()
    other = torch.randn_like(x)
    step = 0.999 * tie.distance[:, None] * other / other.norm(dim=1, keepdim=True)
    assert torch.equal(
        stable_topk((x + step) @ w.T + bias, k).indices.sort(dim=1).values, chosen(0.0)
    )


@pytest.mark.cpu("an accelerator searches for all tokens: which are left is not read back")
def test_even_routers_need_no_search_over_all_pairs(monkeypatch):
    _, weight, logits = linear_router(tokens=500, experts=64, dim=256)
    searched = []
    full = distance._nearest_among_all_pairs
    monkeypatch.setattr(
        distance,
        "_nearest_among_all_pairs",
        lambda s, *rest: searched.append(len(s)) or full(s, *rest),
    )
    tie = nearest_tie(logits, 8, expert_distances(weight))
    assert sum(searched) < 50
    assert tie.distance.tolist() == pytest.approx(brute_force(logits, weight.double(), 8))


def test_chunks_of_the_full_search_join(monkeypatch):
    monkeypatch.setattr(distance, "CHUNK", 40)
    weight, scores = uneven_weight(13, 5, 1), dyadic_scores(1, tokens=30, experts=13)
    tie = nearest_tie(scores, 4, expert_distances(weight))
    assert tie.distance.tolist() == pytest.approx(brute_force(scores, weight, 4), rel=1e-12)


def test_ranks_of_the_caller_are_used():
    _, weight, logits = linear_router(tokens=50, experts=16)
    norms, ranked = expert_distances(weight), stable_topk(logits, 16)
    given_ranks = nearest_tie(logits, 3, norms, ranked)
    short = nearest_tie(logits, 3, norms, stable_topk(logits, 4))
    alone = nearest_tie(logits, 3, norms)
    for first, second, third in zip(given_ranks, alone, short, strict=True):
        assert torch.equal(first, second)
        assert torch.equal(first, third)


def test_equal_weights_tie_everywhere_or_nowhere():
    norms = expert_distances(torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]))
    tie = nearest_tie(torch.tensor([[1.0, 0.5, -1.0], [1.0, 1.0, -1.0]]), 1, norms)
    assert tie.distance.tolist() == [2 / math.sqrt(2), 0.0]


def test_a_choice_of_the_lower_of_two_scores_stands_on_the_wall():
    scores = torch.tensor([[0.0, 1.0, 1.0 + 1e-7]], dtype=torch.float64)
    order = torch.tensor([[1, 2, 0]])
    ranked = Ranked(scores.gather(1, order), order)
    assert nearest_tie(scores, 1, expert_distances(torch.eye(3)), ranked).distance.item() == 0


def test_no_tie_where_all_experts_are_chosen():
    tie = nearest_tie(torch.zeros(2, 3), 3, expert_distances(torch.eye(3)))
    assert tie.distance.tolist() == [math.inf] * 2
    assert tie.leaving.tolist() == [-1, -1]


def test_experts_that_are_alike_keep_their_distance():
    weight = torch.tensor([[1e4, 0.0], [1e4, 1e-4]], dtype=torch.float64)
    assert expert_distances(weight)[0, 1].item() == pytest.approx(1e-4, rel=1e-12)


@pytest.mark.usefixtures("no_axis_checks")
def test_another_number_of_experts_is_refused():
    with pytest.raises(ValueError, match="experts"):
        nearest_tie(torch.zeros(1, 3), 1, torch.zeros(4, 4))
