"""The counts of a batch against the definitions, token by token."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.trace.zoo import (
    EPSILONS,
    FACTS,
    make_layer,
    make_trace,
    near_by_definition,
    recipes,
)
from tieline.core.errors import TraceError
from tieline.trace import LayerFacts, LayerTrace
from tieline.trace.counts import LogHistogram, grid_points
from tieline.trace.summary import summarise_chunk


def summary_of(trace, index=0):
    layer = trace.layers[index]
    return summarise_chunk(layer, trace.documents, trace.positions, trace.epsilons)


@given(recipes, st.sampled_from(range(len(FACTS))))
def test_load_and_coalitions_count_every_token(recipe, index):
    trace = make_trace(**recipe)
    layer, summary = trace.layers[index], summary_of(trace, index)
    chosen = [row[: layer.facts.k] for row in layer.experts.tolist()]
    for expert in range(layer.facts.n_experts):
        assert summary.load[expert] == sum(expert in row for row in chosen)
    assert summary.coalitions.count().value == len({frozenset(row) for row in chosen})
    assert summary.tokens == trace.n_tokens


@given(recipes, st.sampled_from(range(len(FACTS))))
def test_gaps_are_counted_for_finite_tokens(recipe, index):
    trace = make_trace(**recipe)
    layer, summary = trace.layers[index], summary_of(trace, index)
    if layer.scores is None:
        assert summary.gaps is summary.near is summary.orders is summary.moments is None
        return
    finite = layer.scores.isfinite().all(1)
    keys = list(zip(trace.documents.tolist(), trace.positions.tolist(), strict=True))
    broken = [key for key, is_finite in zip(keys, finite.tolist(), strict=True) if not is_finite]
    assert summary.nonfinite == len(broken)
    assert summary.first_nonfinite == min(broken, default=None)
    assert torch.equal(summary.gaps.counts, LogHistogram.from_values(layer.gap[finite]).counts)
    assert summary.exact_ties == int((layer.gap[finite] == 0).sum())
    if layer.distance is not None:
        expected = LogHistogram.from_values(layer.distance[finite].double())
        assert torch.equal(summary.distances.counts, expected.counts)
    if layer.group_gap is not None:
        decides = (layer.group_gap < layer.inner_gap)[finite]
        assert summary.group_decides == int(decides.sum())
        assert summary.group_gaps.total == int(finite.sum())
    assert summary.moments.count.tolist() == [int(finite.sum())] * layer.scores.shape[1]


@given(st.integers(0, 1000), st.sampled_from(FACTS))
def test_near_and_orders_are_those_of_the_definition_over_all_experts(seed, facts):
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
    scores = torch.randint(-16, 17, (9, facts.n_experts), generator=generator).double() / 8
    layer = make_layer(torch.Generator(torch.get_default_device()).manual_seed(seed), "a", facts, 9)
    summary = summarise_chunk(layer, torch.zeros(9).long(), torch.arange(9), EPSILONS)
    for row, eps in enumerate(EPSILONS):
        near, orders = [0] * (facts.n_experts + 1), [0] * facts.n_experts
        for token in scores.tolist():
            ranked = sorted(token, reverse=True)
            threshold = ranked[facts.k - 1]
            following = ranked[facts.k] if facts.k < facts.n_experts else -math.inf
            near[sum(z > threshold - eps for z in token)] += 1
            within = sum(abs(z - threshold) < eps for z in token)
            orders[within - 1 if threshold - following < eps else 0] += 1
        assert summary.near[row].tolist() == near
        assert summary.orders[row].tolist() == orders
    mean = [sum(c * n for c, n in enumerate(row)) / 9 for row in summary.near.tolist()]
    assert summary.mean_near().tolist() == pytest.approx(mean, rel=1e-15)


def test_masked_ranks_are_no_broken_scores():
    facts = LayerFacts(n_experts=4, k=1, n_groups=2)
    scores = torch.tensor([[1.0, 0.5, -math.inf], [2.0, -math.inf, -math.inf]])
    layer = LayerTrace("a", facts, torch.tensor([[0, 1, 2]] * 2), scores)
    summary = summarise_chunk(layer, torch.zeros(2).long(), torch.arange(2), ())
    assert summary.nonfinite == 0
    assert summary.gaps.at_most()[grid_points() >= 0.5][0] == 1
    assert summary.gaps.total == 2
    assert summary.moments.count.tolist() == [2, 1, 0]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("experts", torch.full((3, 4), 6), r"0 ... 5, got 6"),
        ("experts", torch.full((3, 4), -1), r"0 ... 5, got -1"),
        ("near", torch.full((3, 3), 7), r"near must lie in 0 ... 6, got 7"),
        ("near", torch.full((3, 3), 0), r"orders of ties must lie in 0 ... 5, got -"),
        ("distance", torch.full((3,), -1.0), "distance: gaps and distances must be numbers >= 0"),
        ("distance", torch.full((3,), math.nan), "layer 0: distance"),
    ],
)
def test_impossible_values_are_refused_with_the_layer(field, value, message):
    trace = make_trace(tokens=3)
    layer = dataclasses.replace(trace.layers[0], **{field: value})
    with pytest.raises(TraceError, match=message):
        summarise_chunk(layer, trace.documents, trace.positions, EPSILONS)


def test_the_chosen_ranks_alone_have_moments_and_no_gaps():
    layer = LayerTrace("a", LayerFacts(4, 2), torch.tensor([[0, 1]]), torch.ones(1, 2))
    summary = summarise_chunk(layer, torch.zeros(1).long(), torch.zeros(1).long(), ())
    assert summary.gaps is None
    assert summary.moments.mean().tolist() == [1.0, 1.0]
    with pytest.raises(TraceError, match="no gaps"):
        _ = summary.exact_ties
    with pytest.raises(TraceError, match="without counts"):
        summary.mean_near()


def test_more_than_255_chosen_experts_are_counted():
    facts = LayerFacts(n_experts=300, k=280)
    scores = torch.arange(300).flip(0).float()[None]
    near = near_by_definition(scores, 280)
    layer = LayerTrace("a", facts, torch.arange(290)[None], scores[:, :290], near=near)
    summary = summarise_chunk(layer, torch.zeros(1).long(), torch.zeros(1).long(), EPSILONS)
    assert summary.orders[2].nonzero().tolist() == [[2]]  # 18, 19 and 20 lie within 2 of 19
    assert summary.orders[0].nonzero().tolist() == [[0]]


def test_a_chosen_expert_without_a_score_breaks_the_token_and_the_means_leave_it_out():
    scores = torch.tensor([[1.0, -math.inf, -math.inf], [1.0, 0.5, 0.0]])
    near = torch.tensor([[1], [3]])
    layer = LayerTrace("a", LayerFacts(4, 2), torch.tensor([[0, 1, 2]] * 2), scores, near=near)
    summary = summarise_chunk(layer, torch.zeros(2).long(), torch.arange(2), (2.0,))
    assert summary.nonfinite == 1
    assert summary.first_nonfinite == (0, 0)
    assert summary.measured == summary.gaps.total == 1
    assert summary.mean_near().tolist() == [3.0]


def test_scores_beyond_float32_are_finite_scores():
    scores = torch.tensor([[3e300, 1e300, 0.0]], dtype=torch.float64)
    layer = LayerTrace("a", LayerFacts(4, 1), torch.tensor([[0, 1, 2]]), scores)
    summary = summarise_chunk(layer, torch.zeros(1).long(), torch.zeros(1).long(), ())
    assert summary.nonfinite == 0
    assert summary.gaps.total == 1
