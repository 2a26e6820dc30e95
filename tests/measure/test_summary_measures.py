"""Measures of a summary against those of the trace that it summarises."""

import dataclasses
import json

import pytest
import torch

from tests.measure.problems import layer_of, linear_router, trace_of
from tests.trace.zoo import make_trace
from tieline.core.errors import TraceError
from tieline.core.records import to_plain
from tieline.measure.boundary import gap_density, near_counts
from tieline.measure.distance import expert_distances, nearest_tie
from tieline.measure.measures import MeasureSettings, measure
from tieline.measure.summary_measures import histogram_density, histogram_quantiles, measure_summary
from tieline.trace import summarise
from tieline.trace.counts import LogHistogram

FEW = MeasureSettings(sigmas=(0.01,), precisions=("bf16",), probabilities=(0.01, 0.1, 0.5, 0.99))
EPSILONS = (0.02, 0.1, 0.4)


@pytest.fixture(scope="module")
def trace():
    layers = []
    for seed in (1, 2):
        inputs, weight, logits = linear_router(6000, seed=seed)
        layer = layer_of(logits, 4, ranks=8, name=f"layer {seed}")
        distance = nearest_tie(logits, 4, expert_distances(weight)).distance
        near = near_counts(logits, 4, EPSILONS)
        layers.append(dataclasses.replace(layer, distance=distance, near=near, inputs=inputs))
    return trace_of(*layers, epsilons=EPSILONS)


def test_counts_give_what_the_trace_gives(trace):
    from_trace = measure(trace, FEW)
    from_counts = measure_summary(summarise(trace, sample_size=2000), FEW)
    for counted, exact_layer in zip(from_counts.layers, from_trace.layers, strict=True):
        assert (counted.tokens, counted.load) == (6000, exact_layer.load)
        assert counted.coalitions.seen == pytest.approx(exact_layer.coalitions.seen, rel=0.05)
        assert counted.gap.value.ties == exact_layer.gap.value.ties
        assert counted.near.value.orders[1] == pytest.approx(exact_layer.near.value.orders[1])
        for mean, exact in zip(
            counted.near.value.experts, exact_layer.near.value.experts, strict=True
        ):
            assert mean.value == pytest.approx(exact.value)
            assert mean.standard_error == pytest.approx(exact.standard_error)
        for part in ("gap", "distance"):
            mine, theirs = getattr(counted, part).value, getattr(exact_layer, part).value
            assert mine.quantiles.value == pytest.approx(theirs.quantiles.value, rel=1 / 32)
            gap = abs(mine.density.value - theirs.density.value)
            assert gap < 2 * (mine.density.standard_error + theirs.density.standard_error)
    assert from_counts.model.gap.value.tokens == 12_000
    assert (from_counts.model.dead, from_counts.model.evenness) == (
        from_trace.model.dead,
        from_trace.model.evenness,
    )
    json.dumps(to_plain(from_counts), allow_nan=False)


def test_profile_of_a_summary_is_exact_at_its_widths(trace):
    profile = measure_summary(summarise(trace, sample_size=10), FEW).layers[0].gap.value.profile
    gaps = trace.layers[0].gap
    assert len(profile.widths) > 50
    for width, mass in zip(profile.widths, profile.mass, strict=True):
        assert mass == (gaps <= width).double().mean()


def test_sample_predicts_the_flips_of_all_tokens(trace):
    all_tokens = measure(trace, FEW).layers[0].noise.value[0].flip
    sample = measure_summary(summarise(trace, sample_size=2000), FEW).layers[0].noise.value[0].flip
    assert abs(sample.value - all_tokens.value) < 4 * sample.standard_error


def test_quantiles_lie_in_their_interval():
    values = torch.rand(1000, dtype=torch.float64)
    quantiles = histogram_quantiles(LogHistogram.from_values(values), FEW)
    for p, value, low, high in zip(
        quantiles.probabilities, quantiles.value, quantiles.low, quantiles.high, strict=True
    ):
        assert low <= value <= high
        assert low < p < high


def test_density_of_counts_is_that_of_the_numbers():
    values = torch.empty(50_000, dtype=torch.float64).exponential_()
    density, reference = histogram_density(LogHistogram.from_values(values)), gap_density(values)
    assert abs(density.value - 1) < 3 * density.standard_error
    assert density.standard_error == pytest.approx(reference.standard_error, rel=0.05)
    assert "zero" in histogram_density(LogHistogram.from_values(torch.zeros(4))).status
    far = LogHistogram.from_values(torch.full((4,), torch.inf))
    assert "beyond" in histogram_density(far).status


def test_ids_and_every_kind_of_layer_pass():
    ids = measure_summary(summarise(make_trace(ids_only=True), sample_size=5), FEW)
    assert ids.layers[0].gap.value is None
    assert ids.layers[0].tokens == 20
    mixed = measure_summary(summarise(make_trace(tokens=60), sample_size=50), FEW)
    assert mixed.model.gap.value is None
    assert mixed.layers[0].near.status == "ok"


def test_broken_scores_are_refused_with_their_place():
    broken = summarise(make_trace(broken=0.5), sample_size=5)
    with pytest.raises(TraceError, match=r"layer 0.*of 20 tokens.*position="):
        measure_summary(broken, FEW)
