"""Alignment against planted shifts, renumberings, gaps and mismatches."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.analysis.planted import (
    all_scores,
    moved_tokens,
    renumbered,
    trace_of,
    without_scores,
)
from tieline.analysis.alignment import align
from tieline.analysis.diff import diff
from tieline.core.errors import TraceError
from tieline.trace import LayerTrace, select_layers, select_tokens

seeds = st.integers(0, 2**16)


def noisy(scores, seed, sigma=0.05):
    generator = torch.Generator().manual_seed(seed + 1)
    return [z + sigma * torch.randn(z.shape, generator=generator, dtype=z.dtype) for z in scores]


def test_some_of_the_layers_are_paired_by_name_where_two_have_the_same_number():
    scores = all_scores(1)
    names = [f"layers.{i}.{part}.router" for i in range(2) for part in ("attention", "mlp")]
    a = trace_of(scores)
    a = replace(a, layers=[replace(x, name=n) for x, n in zip(a.layers, names, strict=True)])
    late = align(a, select_layers(a, names[3:]))
    assert [(pair.name_a, pair.name_b) for pair in late.alignment.pairs] == [(names[3], names[3])]
    assert (late.alignment.layer_shift, late.layers_before) == (0, 3)


@pytest.mark.parametrize(
    ("first_a", "first_b", "names", "before"),
    [
        (0, 0, "model.layers.{}.mlp.gate", 0),
        (0, 2, "model.layers.{}.mlp.gate", 2),
        (3, 3, "layers.{}", 0),
        (20, 20, "layers.{}", 16),
        (1, 0, "layers.{}", 1),
    ],
)
def test_layers_before_the_first_compared_one_are_those_that_a_side_or_a_name_tells(
    first_a, first_b, names, before
):
    scores = all_scores(1)
    a, b = (
        trace_of(scores[first % 3 if first < 3 else 0 :], first=first, names=names)
        for first in (first_a, first_b)
    )
    assert align(a, b, partial=True).layers_before == before


@given(
    seeds,
    st.sampled_from([-1, 0, 1]),
    st.sampled_from([-1, 0, 1]),
    st.sets(st.integers(0, 3)),
    st.booleans(),
    st.booleans(),
)
def test_planted_shifts_and_renumberings_are_found_exactly(
    seed, tokens, layers, renumbered_layers, ids, noise
):
    scores = all_scores(seed)
    a = trace_of(scores, first=1)
    b = trace_of(noisy(scores, seed) if noise else scores, first=1 + layers)
    b, maps = renumbered(moved_tokens(b, tokens), renumbered_layers, seed)
    if not ids:
        a, b = without_scores(a), without_scores(b)
    comparison = diff(a, b)
    assert comparison.alignment.token_shift == tokens
    assert comparison.alignment.layer_shift == layers
    for pair in comparison.alignment.pairs:
        moved = dict(zip(pair.moved_experts, pair.moved_to, strict=True))
        order = maps.get(pair.name_b, list(range(12)))
        assert moved == {e: order[e] for e in range(12) if order[e] != e}
        assert pair.unseen == 0
    if not noise:
        assert comparison.tokens.anywhere.count == 0
    assert comparison.alignment.tokens == 400
    assert comparison.alignment.only_a == comparison.alignment.only_b == ()


@given(seeds)
def test_a_few_flips_of_rare_experts_are_no_renumbering(seed):
    generator = torch.Generator().manual_seed(seed)
    scores = [z.index_fill(1, torch.tensor([3, 7]), -20.0) for z in all_scores(seed, layers=1)]
    a = trace_of(scores)
    rows = torch.randperm(400, generator=generator)[:4]
    other = scores[0].clone()
    scores[0][rows, 3], other[rows, 7] = 30.0, 30.0
    comparison = diff(trace_of(scores), trace_of([other]))
    assert comparison.alignment.permuted == ()
    assert comparison.layers[0].flip.count == 4
    assert diff(a, a).alignment.permuted == ()


def test_routing_that_belongs_to_the_token_before_is_told_from_its_ids():
    a = trace_of(all_scores(1), documents=1)
    late = tuple(
        replace(x, experts=x.experts.roll(1, 0), scores=x.scores.roll(1, 0)) for x in a.layers
    )
    alignment = align(a, replace(a, layers=late)).alignment
    assert alignment.token_shift == 1
    assert alignment.ids_checked == 400
    assert alignment.against_ids
    assert alignment.differences[0] == "token shift"


def test_dense_layers_and_rows_of_minus_one_are_left_out_and_counted():
    a = trace_of(all_scores(2))
    has_routes = [True, True, False, True]
    layers = []
    for layer, routed in zip(a.layers, has_routes, strict=True):
        experts = layer.experts[:, :3].clone()
        experts[10 : 13 if routed else None] = -1
        if not routed:
            experts[:] = -1
        layers.append(LayerTrace(layer.name, layer.facts, experts))
    comparison = diff(a, replace(a, layers=tuple(layers)))
    assert comparison.alignment.dense_b == (a.layers[2].name,)
    assert comparison.alignment.only_a == (a.layers[2].name,)
    assert comparison.alignment.unrouted_b == 3
    assert comparison.alignment.tokens == 397
    assert comparison.tokens.anywhere.count == 0
    assert "layers" in comparison.alignment.differences


def test_layers_that_one_side_counts_otherwise_are_paired_by_order():
    scores = all_scores(3)
    a = trace_of(scores)
    names = (f"layers.{2 * i + 1}" for i in range(4))
    layers = tuple(replace(x, name=n) for x, n in zip(a.layers, names, strict=True))
    comparison = diff(a, replace(a, layers=layers))
    assert comparison.alignment.layer_shift is None
    assert comparison.tokens.anywhere.count == 0
    assert len(comparison.layers) == 4


def test_a_layer_that_one_side_lacks_is_reported():
    a = trace_of(all_scores(4))
    comparison = diff(a, select_layers(a, [0, 1, 3]))
    assert comparison.alignment.only_a == (a.layers[2].name,)
    assert [layer.name for layer in comparison.layers] == [a.layers[i].name for i in (0, 1, 3)]


def test_a_smaller_k_is_refused_unless_partial():
    scores = all_scores(5)
    a, b = trace_of(scores, k=3), trace_of(scores, k=2)
    with pytest.raises(TraceError, match=r"different k: layer 0 of A .*3"):
        diff(a, b)
    comparison = diff(a, b, partial=True)
    assert comparison.tokens.anywhere.count == 0
    assert {pair.k for pair in comparison.alignment.pairs} == {2}
    assert "k" in comparison.alignment.differences


def test_truncated_runs_are_refused_with_the_first_missing_token_unless_partial():
    a = trace_of(all_scores(6))
    b = select_tokens(a, slice(0, 250))
    with pytest.raises(TraceError, match=r"B lacks 150 of the 400 tokens of A, .* 3, position 10"):
        diff(a, b)
    with pytest.raises(TraceError, match="A lacks 150"):
        diff(b, a)
    assert diff(a, b, partial=True).alignment.tokens_only_a == 150
    one_document = {"documents": a.documents * 0, "positions": torch.arange(400)}
    with pytest.raises(TraceError, match=r"position 0: 5 documents in A, 1 in B; partial"):
        diff(a, replace(a, **one_document))
    last = a.positions < 79
    assert diff(a, select_tokens(a, last)).alignment.tokens_only_a == 5


def test_other_tokens_are_refused_with_the_first_place():
    a = trace_of(all_scores(7))
    tokens = a.tokens.clone()
    tokens[90] += 1
    with pytest.raises(TraceError, match=r"1 of 400 token ids differ, .* document 1, position 10"):
        diff(a, replace(a, tokens=tokens))


def test_unrelated_runs_are_refused_unless_ids_prove_the_tokens():
    a, b = trace_of(all_scores(8)), trace_of(all_scores(9))
    comparison = diff(a, b)
    assert [x.kind for x in comparison.findings].count("unrelated") == 4
    with pytest.raises(TraceError, match="cannot be aligned: no shift"):
        diff(without_scores(a), without_scores(b))


def test_runs_without_a_common_token_are_refused():
    a = trace_of(all_scores(10))
    with pytest.raises(TraceError, match="no token in common: A has documents 0 to 4"):
        diff(a, replace(a, documents=a.documents + 10))


def test_a_trace_without_tokens_is_refused():
    a = trace_of(all_scores(11))
    with pytest.raises(TraceError, match="B: the trace has no tokens"):
        diff(a, select_tokens(a, slice(0, 0)))


def test_a_token_twice_is_refused():
    a = trace_of(all_scores(11))
    twice = a.positions.clone()
    twice[1] = 0
    with pytest.raises(TraceError, match="B: 1 tokens occur twice, the first is position 0"):
        diff(a, replace(a, positions=twice))


def test_another_number_of_experts_is_refused_unless_it_was_inferred():
    a, b = trace_of(all_scores(12)), trace_of([z[:, :11] for z in all_scores(12)])
    with pytest.raises(TraceError, match="number of experts differs: 11 in layer"):
        diff(a, b)
    provenance = {"n_experts": "inferred from the largest id"}
    assert diff(a, replace(b, provenance=provenance)).layers[0].n_experts == 12


def test_a_row_with_some_experts_missing_is_refused():
    a = trace_of(all_scores(13))
    experts = a.layers[1].experts.clone()
    experts[7, 0] = -1
    layers = (a.layers[0], replace(a.layers[1], experts=experts), *a.layers[2:])
    with pytest.raises(TraceError, match=r"B, layer 1: 1 tokens .* index 7"):
        diff(a, replace(a, layers=layers))


@pytest.mark.parametrize("apart", [0.0, 1e-3, 1e-2])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_experts_with_equal_or_nearly_equal_scores_are_ties_and_not_renumbered(apart, k):
    generator = torch.Generator().manual_seed(k)
    scores = torch.randn(2048, 12, generator=generator).double()
    scores[:, 1] = scores[:, 0] + apart * torch.randn(2048, generator=generator)
    scores[:, 5] = scores[:, 4]
    noise = 1e-3 * torch.randn(2048, 12, generator=generator)
    a, others = trace_of([scores], k), [scores + noise, scores.clone()]
    others[1][:, [1, 5]] += 1e-6  # the other of two equals wins each time
    for other in others:
        b = trace_of([other], k)
        assert align(a, b).alignment.permuted == ()
        if other is others[0]:
            assert align(without_scores(a), without_scores(b)).alignment.permuted == ()


@pytest.mark.parametrize("missing", [1, 6])
def test_experts_that_nearly_all_tokens_choose_are_not_renumbered(missing):
    scores = all_scores(5, layers=1)[0] + 0.0
    scores[:, [2, 8]] += 100.0
    other = scores.clone()
    scores[:missing, 2], other[:missing, 8] = -100.0, -100.0
    a, b = trace_of([scores]), trace_of([other])
    assert align(a, b).alignment.permuted == ()
    assert align(without_scores(a), without_scores(b)).alignment.permuted == ()


def test_a_renumbering_beside_ties_is_still_found():
    scores = all_scores(3, layers=1, tokens=2048)[0]
    scores[:, 1] = scores[:, 0] + 1e-3
    swapped = scores.clone()
    swapped[:, [6, 7]] = scores[:, [7, 6]]
    pair = align(trace_of([scores]), trace_of([swapped])).alignment.permuted[0]
    assert (pair.moved_experts, pair.moved_to) == ((6, 7), (7, 6))
