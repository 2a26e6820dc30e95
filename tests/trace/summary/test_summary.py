"""The merge law: merged summaries of shards equal the summary of all tokens exactly."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trace.zoo import FACTS, make_trace, recipes
from tieline.core.errors import TraceError
from tieline.trace import SummaryBuilder, merge_summaries, select_tokens, summarise
from tieline.trace.counts import token_hash
from tieline.trace.record import identical_values
from tieline.trace.summary import _OPTIONAL_FIELDS, _SUMMED_FIELDS, LayerSummary, RoutingSummary


@settings(max_examples=25)
@given(recipes, st.randoms(use_true_random=False), st.sampled_from([1, 3, 8, 4096]))
def test_merged_shards_equal_the_whole_in_any_order_and_grouping(recipe, random, size):
    trace = make_trace(**recipe)
    owner = torch.tensor([random.randrange(3) for _ in range(trace.n_tokens)])
    shards = [select_tokens(trace, owner == shard) for shard in range(3)]
    full_summary = summarise(trace, size, keep_inputs=True)
    a, b, c = (summarise(shard, size, keep_inputs=True) for shard in shards)
    assert identical_values(merge_summaries([merge_summaries([a, b]), c]), full_summary)
    assert identical_values(merge_summaries([c, merge_summaries([b, a])]), full_summary)


@settings(max_examples=12)
@given(recipes, st.integers(2, 7), st.sampled_from([1, 3, 8]))
def test_batches_of_one_builder_equal_the_whole(recipe, batch, size):
    trace = make_trace(**recipe)
    builder = SummaryBuilder(trace.epsilons, size, trace.provenance, keep_inputs=True)
    for start in range(0, trace.n_tokens, batch):
        part = select_tokens(trace, slice(start, start + batch))
        for layer in part.layers:
            builder.update(layer.name, layer, part.documents, part.positions, part.tokens)
        builder.summary()  # reading it in between changes nothing
    assert identical_values(builder.summary(), summarise(trace, size, keep_inputs=True))


@given(recipes, st.sampled_from([1, 3, 8, 4096]))
def test_the_sample_is_that_of_the_smallest_hashes_and_holds_whole_rows(recipe, size):
    trace = make_trace(**recipe)
    sample = summarise(trace, size, keep_inputs=True).sample
    keys = list(zip(trace.documents.tolist(), trace.positions.tolist(), strict=True))
    hashes = token_hash(trace.documents, trace.positions).tolist()
    smallest = sorted(key for _, key in sorted(set(zip(hashes, keys, strict=True)))[:size])
    sampled_keys = list(zip(sample.documents.tolist(), sample.positions.tolist(), strict=True))
    assert sampled_keys == smallest
    for row, key in enumerate(sampled_keys):
        twins = [index for index, other in enumerate(keys) if other == key]
        for layer, full_layer in zip(sample.layers, trace.layers, strict=True):
            assert any(_same_row(layer, row, full_layer, index) for index in twins)


def _same_row(layer, row, full_layer, index):
    names = ("experts", "scores", "weights", "group_gap", "distance", "near", "inputs")
    return all(
        getattr(full_layer, name) is None
        or identical_values(getattr(layer, name)[row], getattr(full_layer, name)[index])
        for name in names
    )


def test_every_field_of_a_layer_is_merged():
    merged_fields = {*_SUMMED_FIELDS, *_OPTIONAL_FIELDS, "name", "facts", "first_nonfinite"}
    assert merged_fields == {entry.name for entry in dataclasses.fields(LayerSummary)}
    assert {entry.name for entry in dataclasses.fields(RoutingSummary)} == {
        "layers",
        "sample",
        "sample_size",
        "epsilons",
        "sources",
    }


def test_sources_are_kept_once_and_in_a_fixed_order():
    first, second = make_trace(1), make_trace(2)
    second = dataclasses.replace(second, provenance={"model": "another"})
    summaries = [summarise(trace) for trace in (first, second, first)]
    assert merge_summaries(summaries).sources == merge_summaries(summaries[::-1]).sources
    assert len(merge_summaries(summaries).sources) == 2


def test_a_bias_that_changes_is_reported_and_not_guessed():
    trace = make_trace(facts=FACTS[1:2])
    moved = dataclasses.replace(trace.layers[0], bias=torch.ones(6))
    other = dataclasses.replace(trace, layers=(moved,))
    summaries = [summarise(trace), summarise(other), summarise(trace)]
    for order in (summaries, summaries[::-1], [summaries[0], summaries[2], summaries[1]]):
        merged = merge_summaries(order)
        assert merged.layers[0].bias.changed
        assert merged.sample.layers[0].bias is None
    assert torch.equal(
        merge_summaries([summaries[0], summaries[2]]).sample.layers[0].bias, trace.layers[0].bias
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: dataclasses.replace(t, layers=t.layers[:3]), "different layers"),
        (lambda t: dataclasses.replace(t, epsilons=(0.1, 0.2, 0.3)), "differ in epsilons"),
        (lambda t: _changed(t, facts=dataclasses.replace(FACTS[0], k=1)), "same router"),
        (lambda t: _changed(t, distance=None), "distances was recorded differently"),
        (lambda t: _changed(t, weights=t.layers[0].weights.double()), "weights must have one type"),
        (lambda t: _changed(t, weights=None), "same fields"),
        (
            lambda t: _changed(
                t, experts=t.layers[0].experts[:, :3], scores=t.layers[0].scores[:, :3]
            ),
            "4 and of 3 ranks",
        ),
    ],
)
def test_summaries_of_different_things_are_refused(change, message):
    trace = make_trace()
    with pytest.raises(TraceError, match=message):
        merge_summaries([summarise(trace), summarise(change(trace))])


def _changed(trace, **fields):
    if "facts" in fields:
        fields["weights"] = trace.layers[0].weights[:, :1]
        fields["near"] = torch.full((20, 3), 6)
    layer = dataclasses.replace(trace.layers[0], **fields)
    return dataclasses.replace(trace, layers=(layer, *trace.layers[1:]))


def test_sample_sizes_must_agree_and_something_must_be_merged():
    trace = make_trace()
    with pytest.raises(TraceError, match="sample_size"):
        merge_summaries([summarise(trace, 4), summarise(trace, 5)])
    with pytest.raises(TraceError, match="nothing to merge"):
        merge_summaries([])


def test_more_tokens_than_the_counts_can_hold_are_refused():
    summary = summarise(make_trace())
    layers = tuple(dataclasses.replace(layer, tokens=1 << 38) for layer in summary.layers)
    big = dataclasses.replace(summary, layers=layers)
    with pytest.raises(TraceError, match="at most"):
        merge_summaries([big, big])


def test_tokens_are_counted():
    summary = summarise(make_trace())
    assert summary.tokens == 20
    assert summary.layers[0].measured == 20


def test_moments_and_quantiles_of_a_normal_batch():
    trace = make_trace(tokens=500, facts=FACTS[:1])
    summary, layer = summarise(trace).layers[0], trace.layers[0]
    expected = layer.scores.double().mean(0)
    assert torch.allclose(summary.moments.mean(), expected, rtol=1e-14)
    low, high = summary.gaps.quantile(0.5)
    assert low == high == layer.gap.sort().values[249].item()
    assert not math.isnan(summary.moments.variance().sum())


def test_the_cdf_and_quantiles_of_gaps_are_counts_of_them():
    trace = make_trace(tokens=300, facts=FACTS[:1])
    layer, gap = summarise(trace).layers[0], trace.layers[0].gap
    points, below, at_most, total = layer.gap_cdf()
    assert total == 300
    assert torch.equal(below, (gap[:, None] < points).sum(0))
    assert torch.equal(at_most, (gap[:, None] <= points).sum(0))
    ordered = gap.sort().values
    assert layer.gap_quantiles([0.1, 0.9]) == ((ordered[29],) * 2, (ordered[269],) * 2)


def test_tokens_that_came_twice_show_in_the_number_of_different_ones():
    trace = make_trace(tokens=2000, facts=FACTS[:1])
    once = summarise(trace)
    twice = merge_summaries([once, once])
    assert once.distinct_tokens() == twice.distinct_tokens() == (2000, 2000, 0.0)
    small = summarise(trace, sample_size=400).distinct_tokens()
    assert abs(small.value - 2000) < 4 * small.standard_error
    assert small.at_least == 400
