"""Metrics, judgement and observations follow from the measures."""

from dataclasses import replace

import pytest
import torch

from tests.report.zoo import make_trace
from tieline.analysis.inspect_observations import (
    headline_flip_rate,
    inspection_metrics,
    judge_routing,
    routing_observations,
)
from tieline.analysis.inspect_records import (
    GapJumpTable,
    JumpMeasures,
    JumpSample,
    LayerJumps,
    LossJumps,
)
from tieline.analysis.served_precision import Serving, recommend
from tieline.core.statistics import Estimate, Quantiles, Share
from tieline.measure.measures import MeasureSettings, measure
from tieline.trace import LayerFacts, LayerTrace, RoutingTrace, select_tokens

SETTINGS = MeasureSettings(sigmas=(1e-2, 1e-1), precisions=("bf16", "int8"))
LEVELS = (0.25, 0.5, 0.75)


def jump_record(name, jumps, losses=None):
    none = tuple(range(len(jumps)))
    near = JumpSample(none, none, none, tuple(jumps), tuple(jumps), none, none, losses)
    quantiles = Quantiles(LEVELS, (0.0, 0.5, 1.0), (0.0,) * 3, (1.0,) * 3)
    share = sum(jump >= 0.1 for jump in jumps) / len(jumps)
    table = GapJumpTable((0.0, 1.0), (0.0, 1.0), (0.0, 1.0), ((len(jumps),),), ((1.0,),))
    loss = None if losses is None else LossJumps(Estimate(0.25, 0.125), quantiles, len(losses))
    empty = JumpSample((), (), (), (), (), (), ())
    value = JumpMeasures("block", near, empty, quantiles, None, Estimate(share), 0.1, table, loss)
    return LayerJumps(name, value)


@pytest.fixture(scope="module")
def measures():
    return measure(make_trace(), SETTINGS)


def jumps_for(measures, *rows):
    return tuple(
        jump_record(layer.name, row) for layer, row in zip(measures.layers, rows, strict=True)
    )


HIGH, LOW = (0.3, 0.4, 0.9) * 24, (0.01, 0.02, 0.2) * 24


def test_metrics_are_the_numbers_of_the_measures(measures):
    metrics = inspection_metrics(measures, jumps_for(measures, HIGH, LOW, HIGH))
    rates = {rate.name: rate for rate in (*measures.model.precision, *measures.model.noise)}
    for name in ("bf16", "int8", "0.01", "0.1"):
        assert metrics[f"flip@{name}"] == rates[name].mean.value
        assert metrics[f"flip@{name}:any"] == rates[name].any_layer.value
        assert metrics[f"flip@{name}:worst"] == rates[name].worst
    rows = [layer.precision.value[0] for layer in measures.layers]
    assert metrics["tie@bf16"] == pytest.approx(sum(row.tie_emulated.value for row in rows) / 3)
    gap = measures.model.gap.value
    assert metrics["ties"] == gap.ties / gap.tokens > 0
    assert metrics["gap@0.5"] == gap.quantiles.value[gap.quantiles.probabilities.index(0.5)]
    assert metrics["jump"] == 0.3
    assert metrics["jump:worst"] == 0.4
    assert metrics["dangerous"] == pytest.approx(7 / 9)
    assert metrics["dead"] == measures.model.dead == 3
    assert metrics["evenness"] == measures.model.evenness
    assert "loss" not in metrics
    assert all(isinstance(value, float) for value in metrics.values())


def test_losses_are_averaged_over_the_layers(measures):
    some = jump_record("a", HIGH, (1.0, None, 3.0)), jump_record("b", LOW, (2.0, None, None))
    assert inspection_metrics(measures, some)["loss"] == 2.0


def test_without_jumps_their_metrics_are_absent(measures):
    none = tuple(LayerJumps(layer.name, None, "not measured: ...") for layer in measures.layers)
    assert not {"jump", "jump:worst", "dangerous"} & set(inspection_metrics(measures, none))


def with_share(measures, share, low=None, high=None):
    """The same measures with another share of tokens that flip in bf16."""
    low, high = share if low is None else low, share if high is None else high
    rate_changes = {"any_layer": Estimate(share), "any_share": Share(share, low, high, 0, 0)}
    rates = tuple(
        replace(rate, **rate_changes) if rate.name == "bf16" else rate
        for rate in measures.model.precision
    )
    return replace(measures, model=replace(measures.model, precision=rates))


@pytest.mark.parametrize(("low", "high"), [(0.0, 0.001), (0.01, 0.03), (0.02, 0.5)])
def test_the_judgement_names_the_share_of_the_routers_alone(measures, low, high):
    jumps = jumps_for(measures, HIGH, HIGH, HIGH)
    judgement = judge_routing(with_share(measures, (low + high) / 2, low, high), jumps)
    assert judgement.kind == "top-k"
    assert judgement.cause == "bf16"
    assert (judgement.share.low, judgement.share.high) == (low, high)
    assert judgement.jump == 0.4
    assert judgement.recommendation is None


def test_what_to_do_follows_from_the_precision_served(measures):
    costly = Serving("bf16", Estimate(0.1, 0.0), Estimate(0.5, 0.0), sequences=8)
    assert judge_routing(measures, (), costly).recommendation == recommend(costly)


def test_few_near_ties_do_not_tell_whether_they_are_harmless(measures):
    few = jumps_for(measures, HIGH[:3], LOW[:3], HIGH[:3])
    (unclear,) = by_kind(routing_observations(measures, few), "jump")
    assert unclear.case == "jump:unclear"


def test_one_token_tells_nothing():
    first = select_tokens(make_trace(), slice(1))
    share = judge_routing(measure(first, SETTINGS), ()).share
    assert share.high - share.low > 0.9


def test_the_judgement_without_jumps_or_scores(measures):
    assert judge_routing(measures, ()).jump is None
    bare = measure(make_trace(ids_only=True), SETTINGS)
    assert judge_routing(bare, ()).kind == "no scores"
    assert headline_flip_rate(bare) is None


def softmax_trace():
    """A trace of softmax probabilities, whose logits are unknown."""
    random = torch.Generator().manual_seed(0)
    scores = torch.rand(60, 4, generator=random).softmax(dim=1).sort(dim=1, descending=True)
    layer = LayerTrace("h.0.gate", LayerFacts(4, 1, "softmax"), scores.indices, scores.values)
    positions = torch.arange(60)
    return RoutingTrace((layer,), positions, torch.zeros_like(positions), positions)


def test_unknown_logits_are_judged_by_noise():
    measures = measure(softmax_trace(), SETTINGS)
    assert headline_flip_rate(measures).name == "0.01"
    flips = by_kind(routing_observations(measures, ()), "flips")
    assert [fact.source for fact in flips] == ["0.01", "0.1"]


def by_kind(observations, kind):
    return [fact for fact in observations if fact.kind == kind]


def test_the_gravest_come_first_with_their_numbers(measures):
    observations = routing_observations(
        measures, jumps_for(measures, HIGH, LOW, (0.3, 0.5, 0.9) * 24)
    )
    ranks = [["warning", "notice", "info"].index(fact.severity) for fact in observations]
    assert ranks == sorted(ranks)
    names = [layer.name for layer in measures.layers]
    worst = next(rate for rate in measures.model.precision if rate.name == "bf16")
    assert by_kind(observations, "flips")[0].number == worst.worst
    other = (0.01, 0.2, 0.3, 0.4) * 24
    mixed = by_kind(routing_observations(measures, jumps_for(measures, LOW, other, LOW)), "jump")
    assert [fact.severity for fact in mixed] == ["warning", "info"]
    high, low = by_kind(observations, "jump")
    assert (high.case, high.number, high.severity) == ("jump:dangerous", 0.5, "warning")
    assert high.layers == (names[2], names[0])
    assert (low.case, low.number, low.layers) == ("jump:harmless", 0.02, (names[1],))
    (dead,) = by_kind(observations, "dead")
    assert (dead.number, dead.layers, dead.layer) == (3, tuple(names), None)
    (ties,) = by_kind(observations, "ties")
    shares = [layer.gap.value.ties / 200 for layer in measures.layers]
    assert (ties.number, ties.severity) == (max(shares), "warning")
    assert set(ties.layers) == set(names)
    epsilons = [layer.near.value.epsilon_half.value for layer in measures.layers]
    (epsilon,) = by_kind(observations, "epsilon")
    assert epsilon.number == min(epsilons)
    assert epsilon.layers == tuple(names[epsilons.index(f(epsilons))] for f in (min, max))
    assert by_kind(observations, "tokens")[0].number == 200
    assert not by_kind(observations, "gap")


@pytest.mark.parametrize(
    ("worst", "severity"), [(0.004, "info"), (0.005, "notice"), (0.02, "warning")]
)
def test_flips_are_graded_by_their_share(measures, worst, severity):
    rates = tuple(
        replace(rate, worst=worst, worst_share=Share(worst, worst, 1.0, 0, 0))
        if rate.name == "bf16"
        else rate
        for rate in measures.model.precision
    )
    graded = replace(measures, model=replace(measures.model, precision=rates))
    observations = [
        finding
        for finding in routing_observations(graded, ())
        if finding.number == worst and finding.kind == "flips"
    ]
    assert [finding.severity for finding in observations] == [severity]


def test_losses_are_those_of_the_layers_with_swaps(measures):
    record = jump_record(measures.layers[0].name, HIGH, (1.0, None, 3.0))
    (loss,) = by_kind(routing_observations(measures, (record,)), "loss")
    assert (loss.number, loss.layers) == (0.25, (measures.layers[0].name,))


def test_busy_and_unused_experts_are_counted():
    observations = routing_observations(measure(busy_trace(), SETTINGS), ())
    (busy,) = by_kind(observations, "load")
    assert busy.number == pytest.approx(38.8)
    (dead,) = by_kind(observations, "dead")
    assert dead.number == 36
    (unanswered,) = by_kind(observations, "gap")
    assert unanswered.number == 1
    assert unanswered.source.startswith("gaps: not answerable: the trace has expert ids")
    assert by_kind(observations, "cold") == []


def busy_trace():
    """Forty experts of which one gets nearly all tokens."""
    experts = torch.zeros(400, 1, dtype=torch.int64)
    experts[:12, 0] = torch.arange(12) % 3 + 1
    layer = LayerTrace("layers.0.gate", LayerFacts(40, 1), experts)
    positions = torch.arange(400)
    return RoutingTrace((layer,), positions, torch.zeros_like(positions), positions)


def test_a_low_precision_product_that_flips_is_a_warning(measures):
    from tieline.measure.measure_settings import Measurement
    from tieline.measure.rounding_flips import ProductFlips

    product = ProductFlips("bf16", 0.1, Estimate(0.03), Estimate(0.025), Estimate(0.0))
    layers = (replace(measures.layers[0], product=Measurement(product)), *measures.layers[1:])
    flips = by_kind(routing_observations(replace(measures, layers=layers), ()), "flips")
    (fact,) = [x for x in flips if x.case == "flips:product"]
    assert (fact.number, fact.severity, fact.source) == (0.025, "warning", "bf16")
    assert fact.layers == (measures.layers[0].name,)


def test_no_kind_is_observed_once_per_layer(measures):
    observations = routing_observations(measures, jumps_for(measures, HIGH, HIGH, HIGH))
    for kind in ("jump", "ties", "dead", "cold", "load", "loss"):
        assert len(by_kind(observations, kind)) <= 1
    assert len(by_kind(observations, "flips")) == 2  # bf16, and all other formats
