"""Flips and moved weight against their definitions; depth, and scores that cannot be compared."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.analysis.planted import all_scores, layer_of, trace_of, without_scores
from tieline.analysis.comparison import flipped_tokens, weight_moved
from tieline.analysis.diff import diff
from tieline.trace import LayerFacts, LayerTrace

seeds = st.integers(0, 2**16)


def by_definition(a, b, k):
    """Flips and moved weight from the sets and scores of all experts, token by token."""
    flips, moved = [], []
    for x, y in zip(a, b, strict=True):
        p, q = x.softmax(0), y.softmax(0)
        s, t = (set(z.argsort(descending=True, stable=True)[:k].tolist()) for z in (x, y))
        flips.append(s != t)
        w, v = ({e: (z[e] / z[sorted(c)].sum()).item() for e in c} for z, c in ((p, s), (q, t)))
        moved.append(sum(abs(w.get(e, 0) - v.get(e, 0)) for e in s | t) / 2)
    return flips, moved


@given(seeds, st.integers(1, 4))
def test_flips_and_weights_match_their_definitions(seed, k):
    a, b = (all_scores(seed + i, layers=1, tokens=40)[0] for i in range(2))
    b = torch.where(torch.rand(40, 1) < 0.5, a, (a + b) / 2)
    first, second = (layer_of(z, k, "x", ranks=12) for z in (a, b))
    flips, moved = by_definition(a, b, k)
    flipped, _ = flipped_tokens(first, second)
    assert flipped.tolist() == flips
    weight = weight_moved(first, second, flipped)
    assert weight.mean == pytest.approx(sum(moved) / 40, abs=1e-6)
    assert weight.largest == pytest.approx(max(moved), abs=1e-6)


def test_weights_of_the_same_run_move_nothing_and_of_other_experts_all():
    facts = LayerFacts(6, 2)
    weights = torch.tensor([[0.7, 0.1], [0.0, 0.0]])
    a = LayerTrace("x", facts, torch.tensor([[0, 1], [2, 3]]), weights=weights)
    b = replace(a, experts=torch.tensor([[4, 5], [3, 2]]), weights=weights)
    assert weight_moved(a, a, torch.tensor([False, False])).largest == 0
    moved = weight_moved(a, b, torch.tensor([True, False]))
    assert (moved.mean, moved.p99, moved.flipped_mean) == (0.5, 1.0, 1.0)


def test_ids_alone_are_not_attributable():
    trace = trace_of(all_scores(0))
    other = [z.clone() for z in all_scores(0)]
    other[2][:3] = -other[2][:3]
    comparison = diff(without_scores(trace), without_scores(trace_of(other)))
    assert comparison.layers[2].flip.count > 0
    assert all(layer.attribution is None for layer in comparison.layers)
    assert comparison.causes.conclusion == "cannot tell"
    assert comparison.causes.flips.obstacle.startswith("A has expert ids only")
    assert "unexplained" not in comparison.metrics
    assert comparison.layers[2].weight_status.startswith("not answerable")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"units": "softmax"}, "scores of A are logits, those of B softmax"),
        ({"n_groups": 3, "k_groups": 2}, "only B routes within groups"),
    ],
)
def test_scores_that_cannot_be_compared_are_not_attributed(change, reason):
    a = trace_of(all_scores(0, layers=1))
    facts = replace(a.layers[0].facts, **change)
    b = replace(a, layers=(replace(a.layers[0], facts=facts),))
    assert reason in diff(a, b).layers[0].attribution_status


def test_first_divergent_layer_and_compounding_over_depth():
    scores = all_scores(1, layers=3, tokens=100)
    other = [z.clone() for z in scores]
    other[0][:10] *= -1
    other[1][5:20] *= -1
    other[2][15:30] *= -1
    flips = diff(trace_of(scores), trace_of(other)).tokens
    assert [step.first for step in flips.depth] == [10, 10, 10]
    assert [round(step.cumulative, 12) for step in flips.depth] == [0.1, 0.2, 0.3]
    assert (flips.depth[1].after.count, flips.depth[1].after.total) == (5, 10)
    assert (flips.depth[1].fresh.count, flips.depth[1].fresh.total) == (10, 90)
    assert flips.depth[2].independent == pytest.approx(1 - 0.9 * 0.85 * 0.85)
    assert (flips.anywhere.count, flips.never) == (30, 70)
    assert flips.choices == pytest.approx(40 / 300)
    assert flips.depth[0].after.status == "no tokens"


def test_flips_after_an_earlier_one_are_consequences():
    scores = all_scores(2, layers=2, tokens=200)
    other = [z.clone() for z in scores]
    other[0][:4] *= -1
    other[1][2:7] *= -1
    why = diff(trace_of(scores), trace_of(other)).layers[1].attribution
    assert (why.later, why.explained + why.unexplained) == (2, 3)
