"""What the builder refuses, and how it orders layers."""

import dataclasses

import pytest
import torch

from tests.trace.zoo import EPSILONS, make_trace
from tieline.core.errors import ParameterError, TraceError
from tieline.trace import SummaryBuilder, summarise
from tieline.trace.record import identical_values

TRACE = make_trace()


def keys(trace):
    return trace.documents, trace.positions, trace.tokens


def test_layers_given_by_place_are_ordered_by_place():
    builder = SummaryBuilder(EPSILONS, provenance=TRACE.provenance)
    for index in reversed(range(4)):
        builder.update(index, TRACE.layers[index], *keys(TRACE))
    assert identical_values(builder.summary(), summarise(TRACE))


def test_inputs_are_sampled_on_request_only():
    assert summarise(TRACE).sample.layers[0].inputs is None
    assert summarise(TRACE, keep_inputs=True).sample.layers[0].inputs.shape == (20, 3)


def test_scores_with_gradients_and_short_integers_are_taken():
    layer = TRACE.layers[0]
    other = dataclasses.replace(
        layer,
        scores=layer.scores.clone().requires_grad_(),
        experts=layer.experts.to(torch.int16),
        near=layer.near.to(torch.int32),
    )
    results = []
    for record in (layer, other):
        builder = SummaryBuilder(EPSILONS)
        builder.update(0, record, *keys(TRACE))
        results.append(builder.summary())
    assert identical_values(*results)


def test_bfloat16_scores_are_counted_without_rounding():
    layer = dataclasses.replace(TRACE.layers[0], scores=TRACE.layers[0].scores.bfloat16())
    builder = SummaryBuilder(EPSILONS)
    builder.update(0, layer, *keys(TRACE))
    assert identical_values(builder.summary().layers[0].gaps, summarise(TRACE).layers[0].gaps)


def test_the_sample_does_not_share_memory_with_the_batch():
    builder = SummaryBuilder(EPSILONS)
    layer = dataclasses.replace(TRACE.layers[0], scores=TRACE.layers[0].scores.clone())
    builder.update(0, layer, *keys(TRACE))
    before = builder.summary().sample.layers[0].scores.clone()
    layer.scores.zero_()
    assert torch.equal(builder.summary().sample.layers[0].scores, before)


def test_a_batch_without_tokens_is_a_batch():
    empty = make_trace(tokens=0)
    summary = summarise(empty)
    assert summary.tokens == summary.sample.n_tokens == 0


def test_layers_that_saw_different_tokens_are_refused():
    builder = SummaryBuilder(EPSILONS)
    builder.update(0, TRACE.layers[0], *keys(TRACE))
    builder.update(1, TRACE.layers[1], TRACE.documents + 1, TRACE.positions, TRACE.tokens)
    with pytest.raises(TraceError, match=r"layer 0 and layer 1 did not see the same tokens"):
        builder.summary()


def test_layers_with_different_numbers_of_tokens_are_refused():
    builder = SummaryBuilder(EPSILONS, sample_size=1)
    builder.update(0, TRACE.layers[0], *keys(TRACE))
    for _ in range(2):
        builder.update(1, TRACE.layers[1], *keys(TRACE))
    with pytest.raises(TraceError, match="count the same tokens"):
        builder.summary()


@pytest.mark.usefixtures("axes_unchecked")
def test_ids_that_do_not_fit_are_refused():
    builder = SummaryBuilder(EPSILONS)
    with pytest.raises(TraceError, match="one id for each of 20 tokens"):
        builder.update(0, TRACE.layers[0], TRACE.documents[1:], TRACE.positions, TRACE.tokens)
    with pytest.raises(TraceError, match="3 columns for 0 epsilons"):
        SummaryBuilder().update(0, TRACE.layers[0], *keys(TRACE))


def test_nothing_makes_no_summary_and_sizes_are_positive():
    with pytest.raises(TraceError, match="no batch"):
        SummaryBuilder().summary()
    with pytest.raises(ParameterError, match="sample_size"):
        SummaryBuilder(sample_size=0)
    with pytest.raises(TraceError, match="ascending"):
        SummaryBuilder(epsilons=(2.0, 1.0))
    with pytest.raises(TraceError, match="no JSON value"):
        SummaryBuilder(provenance={"model": object()})
