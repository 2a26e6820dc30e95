"""Findings, metrics and the verdict: each says the number that it was made from."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.report.zoo import make_trace
from tieline.analysis.findings import (
    MORE_TOKENS,
    NO_REPAIR,
    REPAIR,
    findings,
    layer_labels,
    leading_rate,
    metrics,
    percent,
    possible_states,
    verdict,
    with_interval,
)
from tieline.analysis.inspection import (
    GapJumpTable,
    JumpMeasures,
    JumpSample,
    LayerJumps,
    LossJumps,
)
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
    found = metrics(measures, jumps_for(measures, HIGH, LOW, HIGH))
    rates = {rate.name: rate for rate in (*measures.model.precision, *measures.model.noise)}
    for name in ("bf16", "int8", "0.01", "0.1"):
        assert found[f"flip@{name}"] == rates[name].mean.value
        assert found[f"flip@{name}:any"] == rates[name].any_layer.value
        assert found[f"flip@{name}:worst"] == rates[name].worst
    rows = [layer.precision.value[0] for layer in measures.layers]
    assert found["tie@bf16"] == pytest.approx(sum(row.tie_emulated.value for row in rows) / 3)
    gap = measures.model.gap.value
    assert found["ties"] == gap.ties / gap.tokens > 0
    assert found["gap@0.5"] == gap.quantiles.value[gap.quantiles.probabilities.index(0.5)]
    assert found["jump"] == 0.3
    assert found["jump:worst"] == 0.4
    assert found["dangerous"] == pytest.approx(7 / 9)
    assert found["dead"] == measures.model.dead == 3
    assert found["evenness"] == measures.model.evenness
    assert "loss" not in found
    assert all(isinstance(value, float) for value in found.values())


def test_losses_are_averaged_over_the_layers(measures):
    some = jump_record("a", HIGH, (1.0, None, 3.0)), jump_record("b", LOW, (2.0, None, None))
    assert metrics(measures, some)["loss"] == 2.0


def test_without_jumps_their_metrics_are_absent(measures):
    none = tuple(LayerJumps(layer.name, None, "not measured: ...") for layer in measures.layers)
    assert not {"jump", "jump:worst", "dangerous"} & set(metrics(measures, none))


def with_share(measures, share, low=None, high=None):
    """The same measures with another share of tokens that flip in bf16."""
    low, high = share if low is None else low, share if high is None else high
    found = {"any_layer": Estimate(share), "any_share": Share(share, low, high, 0, 0)}
    rates = tuple(
        replace(rate, **found) if rate.name == "bf16" else rate for rate in measures.model.precision
    )
    return replace(measures, model=replace(measures.model, precision=rates))


@pytest.mark.parametrize(
    ("share", "jumps", "words"),
    [
        (0.0, HIGH, "Routing is robust: 0 % (95 % interval 0 % to 0 %) of tokens"),
        (0.0, LOW, "Routing is robust: 0 % (95"),
        (0.01, HIGH, "Routing is mostly stable: 1 % (95 % interval 1 % to 1 %) of tokens"),
        (0.01, LOW, "Routing is mostly stable, but mostly at harmless ties: 1 % (95"),
        (0.02, HIGH, "Routing is fragile: 2 % (95"),
        (0.3, LOW, "Routing is fragile, but mostly at harmless ties: 30 % (95"),
    ],
)
def test_the_verdict_follows_the_numbers(measures, share, jumps, words):
    sentence = verdict(with_share(measures, share), jumps_for(measures, jumps, jumps, jumps))
    assert sentence.startswith(words)
    assert "in at least one of 3 layers when the router's logits are rounded to bf16" in sentence
    height = "40 %" if jumps is HIGH else "2 %"
    assert f"moves the output of its layer by {height} (median). What to do: " in sentence
    repaired = "tieline smooth" in sentence
    assert repaired == (share > 0.002 and jumps is HIGH)


TOLD = {
    (0.0, 0.001): "Routing is robust: ",
    (0.0, 0.002): "Routing is robust or mostly stable, too few tokens to tell which: ",
    (0.002, 0.019): "Routing is mostly stable: ",
    (0.01, 0.03): "Routing is mostly stable or fragile, too few tokens to tell which: ",
    (0.0, 0.9): "Too few tokens to tell how stable routing is: ",
    (0.02, 0.5): "Routing is fragile: ",
}


@pytest.mark.parametrize(("low", "high"), TOLD)
def test_a_verdict_has_the_words_that_its_interval_allows(measures, low, high):
    jumps = jumps_for(measures, HIGH, HIGH, HIGH)
    sentence = verdict(with_share(measures, (low + high) / 2, low, high), jumps)
    assert sentence.startswith(TOLD[low, high])
    assert f"(95 % interval {percent(low)} to {percent(high)}) of tokens" in sentence
    wanted = REPAIR if low >= 0.002 else NO_REPAIR if high < 0.002 else MORE_TOKENS
    assert sentence.endswith(wanted)


@given(*[st.tuples(st.floats(0, 0.1), st.floats(0, 0.1)).map(sorted)] * 2)
def test_two_verdicts_contradict_each_other_only_where_their_intervals_part(one, other):
    words = [set(possible_states(Share(low, low, high, 0, 0))) for low, high in (one, other)]
    apart = one[1] < other[0] or other[1] < one[0]
    assert words[0] & words[1] or apart
    assert all(1 <= len(found) <= 3 for found in words)


def test_few_near_ties_do_not_tell_whether_they_are_harmless(measures):
    few = jumps_for(measures, HIGH[:3], LOW[:3], HIGH[:3])
    sentence = verdict(with_share(measures, 0.3), few)
    assert "harmless" not in sentence
    assert sentence.endswith(MORE_TOKENS)
    (unclear,) = [f for f in findings(measures, few) if f.kind == "jump"]
    assert unclear.text.startswith("too few near-ties to tell whether most change the output")


def test_one_token_tells_nothing():
    trace = make_trace()
    first = select_tokens(trace, slice(1))
    assert verdict(measure(first, SETTINGS), ()).startswith("Too few tokens to tell how stable")


def test_the_verdict_without_jumps_or_scores(measures):
    assert "(median)" not in verdict(measures, ())
    bare = measure(make_trace(ids_only=True), SETTINGS)
    assert "only the load of the experts is known. Inspect the model itself" in verdict(bare, ())
    assert leading_rate(bare) is None


def softmax_trace():
    """Probabilities without the size of their logits."""
    scores = torch.rand(60, 4).softmax(dim=1).sort(dim=1, descending=True)
    layer = LayerTrace("h.0.gate", LayerFacts(4, 1, "softmax"), scores.indices, scores.values)
    places = torch.arange(60)
    return RoutingTrace((layer,), places, torch.zeros_like(places), places)


def test_unknown_logits_are_judged_by_noise():
    found = measure(softmax_trace(), SETTINGS)
    rate, cause = leading_rate(found)
    assert (rate.name, cause) == ("0.01", "under noise of 0.01 on the router's logits")
    texts = [finding.text for finding in findings(found, ()) if finding.kind == "flips"]
    assert len(texts) == 2
    assert all("under noise of" in text for text in texts)


def by_kind(found, kind):
    return [finding for finding in found if finding.kind == kind]


def test_the_gravest_come_first_and_numbers_are_in_the_words(measures):
    found = findings(measures, jumps_for(measures, HIGH, LOW, (0.3, 0.5, 0.9) * 24))
    ranks = [["warning", "notice", "info"].index(finding.severity) for finding in found]
    assert ranks == sorted(ranks)
    worst = next(rate for rate in measures.model.precision if rate.name == "bf16")
    flips = by_kind(found, "flips")[0]
    assert flips.number == worst.worst
    told = with_interval(worst.worst_share)
    assert flips.text.startswith(f"{told} of tokens change experts in layer")
    other = (0.01, 0.2, 0.3, 0.4) * 24
    mixed = by_kind(findings(measures, jumps_for(measures, LOW, other, LOW)), "jump")
    assert [finding.severity for finding in mixed] == ["warning", "info"]
    high, low = by_kind(found, "jump")
    assert (high.number, high.layer, high.severity) == (0.5, measures.layers[2].name, "warning")
    assert "by 50 % in layer 2 and 40 % in layer 0 (median of 72 near-ties)" in high.text
    assert (low.severity, low.number) == ("info", 0.02)
    assert "harmless in layer 1: " in low.text
    (dead,) = by_kind(found, "dead")
    assert dead.text == (
        "expert 1 of layer 0, expert 1 of layer 1 and expert 1 of layer 2 are never used by these "
        "200 tokens"
    )
    (ties,) = by_kind(found, "ties")
    shares = [layer.gap.value.ties / 200 for layer in measures.layers]
    for place, layer in enumerate(measures.layers):
        count = layer.gap.value.ties
        assert f"{count} tokens ({percent(count / 200)}) in layer {place}" in ties.text
    assert (ties.number, ties.severity) == (max(shares), "warning")
    epsilons = [layer.near.value.epsilon_half.value for layer in measures.layers]
    (epsilon,) = by_kind(found, "epsilon")
    assert epsilon.number == min(epsilons)
    assert f"{min(epsilons):.2g} in layer" in epsilon.text
    assert "2.5 experts per token" in epsilon.text
    assert by_kind(found, "tokens")[0].number == 200
    assert not by_kind(found, "gap")


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
    found = [
        finding
        for finding in findings(graded, ())
        if finding.number == worst and finding.kind == "flips"
    ]
    assert [finding.severity for finding in found] == [severity]


def test_losses_are_told_with_their_error(measures):
    record = jump_record(measures.layers[0].name, HIGH, (1.0, None, 3.0))
    (loss,) = by_kind(findings(measures, (record,)), "loss")
    assert loss.text == (
        "one swap changes the loss of its sequence by a median of 0.5 nats in layer 0 (mean +0.25 "
        "± 0.1)"
    )


def test_busy_and_cold_experts_are_told():
    experts = torch.zeros(400, 1, dtype=torch.int64)
    experts[:12, 0] = torch.arange(12) % 3 + 1
    layer = LayerTrace("layers.0.gate", LayerFacts(40, 1), experts)
    places = torch.arange(400)
    trace = RoutingTrace((layer,), places, torch.zeros_like(places), places)
    found = findings(measure(trace, SETTINGS), ())
    (busy,) = by_kind(found, "load")
    assert busy.text.endswith("than an even load: expert 0 of layer 0 38.8 times")
    dead = by_kind(found, "dead")[0]
    assert dead.text.startswith("experts 4, 5, 6, 7, 8, 9 and 30 more of layer 0 are never used")
    assert dead.number == 36
    (unanswered,) = by_kind(found, "gap")
    assert unanswered.text.startswith(
        "1 of 1 layers: gaps: not answerable: the trace has expert ids"
    )
    assert by_kind(found, "cold") == []


def test_a_low_precision_product_that_flips_is_a_warning(measures):
    from tieline.measure.measure_records import Answer
    from tieline.measure.rounding import ProductFlips

    product = ProductFlips("bf16", 0.1, Estimate(0.03), Estimate(0.025))
    layers = (replace(measures.layers[0], product=Answer(product)), *measures.layers[1:])
    found = by_kind(findings(replace(measures, layers=layers), ()), "flips")
    assert [f.text for f in found if f.number == 0.025] == [
        "tokens that change experts if a bf16 matrix product computes the logits: 2.5 % in layer 0"
    ]


@pytest.mark.parametrize(
    ("names", "labels"),
    [
        (["model.layers.3.mlp.gate"], ["layer 3"]),
        (
            ["l.1.attn.router", "l.1.mlp.router"],
            ["layer 'l.1.attn.router'", "layer 'l.1.mlp.router'"],
        ),
        (["gate"], ["layer 'gate'"]),
    ],
)
def test_layers_are_called_by_number_where_that_tells_them_apart(names, labels):
    assert list(layer_labels(names).values()) == labels


@pytest.mark.parametrize(
    ("share", "words"),
    [
        (0.0, "0 %"),
        (8e-19, "< 0.001 %"),
        (0.0213, "2.1 %"),
        (0.31, "31 %"),
        (1.0, "100 %"),
        (6.8, "680 %"),
    ],
)
def test_percent(share, words):
    assert percent(share) == words


def test_no_kind_of_finding_is_said_once_per_layer(measures):
    """A fact about many layers is one sentence."""
    found = findings(measures, jumps_for(measures, HIGH, HIGH, HIGH))
    for kind in ("jump", "ties", "dead", "cold", "load", "loss"):
        assert len(by_kind(found, kind)) <= 1
    assert len(by_kind(found, "flips")) == 2  # bf16, and all other formats
