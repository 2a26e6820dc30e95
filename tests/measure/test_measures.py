"""The record of a layer and of a model: every section answers, or says why it cannot."""

import dataclasses
import json

import pytest
import torch

from tests.measure.problems import chosen_sets, layer_of, linear_router, trace_of
from tests.trace.zoo import make_trace
from tieline.core.errors import TraceError
from tieline.core.records import to_plain
from tieline.measure.boundary import gap_density, near_counts, tie_order
from tieline.measure.distance import expert_distances, nearest_tie
from tieline.measure.measures import MeasureSettings, measure, measure_layer
from tieline.measure.rounding_flips import certified_by_router, certified_choices
from tieline.trace.record import LayerFacts, LayerTrace

FEW = MeasureSettings(sigmas=(0.01, 0.1), precisions=("bf16", "int4"), probabilities=(0.1, 0.5))
SECTIONS = ("gap", "near", "distance", "noise", "precision", "product", "angular")


def full_layer(tokens=1500, experts=16, k=4, ranks=8, name="router"):
    inputs, weight, logits = linear_router(tokens, experts)
    layer = layer_of(logits, k, ranks=ranks, name=name)
    epsilons = (0.01, 0.1, 0.3)
    layer = dataclasses.replace(
        layer,
        distance=nearest_tie(logits, k, expert_distances(weight)).distance,
        near=near_counts(logits, k, epsilons),
        inputs=inputs,
    )
    return layer, weight, logits, epsilons


def test_a_full_layer_answers_everything():
    layer, weight, logits, epsilons = full_layer()
    measures = measure_layer(layer, FEW, epsilons, weight)
    assert all(getattr(measures, section).status == "ok" for section in SECTIONS)
    assert (measures.name, measures.tokens, measures.n_experts, measures.k) == (
        "router",
        1500,
        16,
        4,
    )
    assert measures.gap.value.quantiles.value[1] == layer.gap.sort().values[749]
    assert measures.gap.value.density == gap_density(layer.gap)
    assert measures.gap.value.profile.mass[-1] == 1
    assert measures.near.value.epsilons == epsilons
    assert measures.near.value.experts[1].value == layer.near[:, 1].double().mean()
    assert measures.near.value.censored == (0, 0, 0)
    orders = tie_order(logits, 4, 0.1)
    assert measures.near.value.orders[1][:3] == pytest.approx(
        [(orders == n).double().mean().item() for n in range(3)]
    )
    assert sum(measures.load.counts) == 1500 * 4


def test_layer_predicts_its_own_emulation():
    layer, weight, _, epsilons = full_layer(tokens=12_000, ranks=16)
    measures = measure_layer(layer, FEW, epsilons, weight)
    for row in measures.precision.value:
        for expected, emulated in ((row.tie, row.tie_emulated), (row.flip, row.flip_emulated)):
            error = 3 * emulated.standard_error + 0.05 * expected.value
            assert abs(expected.value - emulated.value) < error
    bf16 = measures.precision.value[0]
    for mean, population in ((bf16.tie, bf16.tie_population), (bf16.flip, bf16.flip_population)):
        assert abs(mean.value - population.value) < 3 * (
            mean.standard_error + population.standard_error
        )
    product = measures.product.value
    error = 3 * product.flip_emulated.standard_error + 0.05 * product.flip.value
    assert abs(product.flip.value - product.flip_emulated.value) < error
    assert product.flip.value > bf16.flip.value
    certified = certified_choices(layer.inputs, weight, layer.facts.k)
    assert product.uncertified.value == (~certified).double().mean()
    assert 0 <= product.uncertified.value < product.flip.value
    small, large = measures.noise.value
    assert small.upper == small.flip.value  # all ranks are there
    assert small.population.value == pytest.approx(small.flip.value, rel=0.1)
    assert small.two_runs.value == pytest.approx(2**0.5 * small.population.value)
    assert large.population.status != "ok"


def test_epsilon_of_half_an_expert_is_where_the_counts_say():
    layer, _, logits, epsilons = full_layer()
    estimate = measure_layer(layer_of(logits, 4), FEW).near.value.epsilon_half
    mean = near_counts(logits, 4, [estimate.value + 1e-9]).double().mean().item()
    assert mean == pytest.approx(4.5, abs=1e-3)
    short = layer_of(logits, 4, ranks=5)
    limit = measure_layer(short, FEW).near.value.epsilon_half
    assert limit.value >= estimate.value
    assert limit.status.startswith("upper limit")
    counted = dataclasses.replace(short, near=layer.near)
    between = measure_layer(counted, FEW, epsilons).near.value.epsilon_half
    assert between.status == "ok"
    assert between.value == pytest.approx(estimate.value, rel=0.15)
    few = dataclasses.replace(short, near=near_counts(logits, 4, [0.01]))
    assert measure_layer(few, FEW, (0.01,)).near.value.epsilon_half.value is None


def test_truncated_ranks_are_censored_and_bounded():
    _, _, logits = linear_router(800, 16)
    settings = dataclasses.replace(FEW, epsilons=(0.05, 5.0))
    near = measure_layer(layer_of(logits, 4, ranks=6), settings).near.value
    assert near.censored[0] < 0.1
    assert near.censored[1] == 1
    short = measure_layer(layer_of(logits, 4, ranks=6), settings).noise.value
    untruncated = measure_layer(layer_of(logits, 4), settings).noise.value
    for part, full in zip(short, untruncated, strict=True):
        assert part.flip.value <= full.flip.value + 1e-12 <= part.upper + 2e-12


def test_ids_alone_answer_the_load_and_nothing_else():
    trace = make_trace(ids_only=True)
    measures = measure(trace, FEW)
    for layer in measures.layers:
        assert sum(layer.load.share) == pytest.approx(1)
        assert layer.coalitions.seen > 0
        for section in SECTIONS:
            answer = getattr(layer, section)
            assert answer.value is None
            assert answer.status.startswith("not answerable: ")
    assert "ids only" in measures.layers[0].gap.status
    assert measures.model.gap.value is None
    assert measures.model.noise == ()


def test_every_kind_of_layer_is_measured_and_written_as_json():
    measures = measure(make_trace(tokens=60), FEW)
    written = json.loads(json.dumps(to_plain(measures), allow_nan=False))
    assert [layer["name"] for layer in written["layers"]] == [x.name for x in measures.layers]
    every = {layer.name: layer for layer in measures.layers}
    assert every["layers.2"].gap.status.endswith("no tie is possible")
    assert every["layers.2"].distance.status.endswith("not affine")
    assert every["layers.3"].precision.status.startswith("not answerable: softmax")
    assert every["layers.1"].precision.value[1].status.count(";") == 1
    assert written["layers"][0]["gap"]["value"]["profile"]["mass"][-1] == 1
    assert measures.model.gap.status == "not answerable: 3 kinds of score"


def test_only_the_chosen_scores_are_too_few():
    _, _, logits = linear_router(20)
    assert "next one" in measure_layer(layer_of(logits, 4, ranks=4), FEW).gap.status


def test_what_was_not_kept_is_named():
    _, weight, logits = linear_router(20)
    layer = layer_of(logits, 4)
    assert "inputs" in measure_layer(layer, FEW, weight=weight).product.status
    assert "inputs" in measure_layer(layer, FEW).angular.status
    with_inputs = dataclasses.replace(layer, inputs=torch.zeros(20, 32))
    assert "weight" in measure_layer(with_inputs, FEW).product.status
    assert measure_layer(layer, FEW).distance.status.endswith("no distances were kept")
    bent = layer_of(logits, 4, affine=False)
    assert measure_layer(bent, FEW).distance.status.endswith("not affine")


def test_the_certificate_counts_the_bias_of_the_router():
    inputs, weight, logits = linear_router(2000)
    bias = 1e3 * torch.ones(16)
    layer = dataclasses.replace(layer_of(logits + bias, 4), inputs=inputs)
    shares = [
        measure_layer(layer, FEW, weight=weight, bias=b).product.value.uncertified.value
        for b in (None, bias)
    ]
    certified = certified_by_router(inputs, weight, bias, 4)
    assert shares[1] == (~certified).double().mean() > 10 * shares[0]


@pytest.mark.parametrize(("units", "emulated"), [("sigmoid", True), ("softmax", False)])
def test_products_of_biased_scores(units, emulated):
    inputs, weight, logits = linear_router(4000)
    bias = 0.02 * torch.randn(16)
    layer = dataclasses.replace(layer_of(logits, 4, units, bias), inputs=inputs)
    product = measure_layer(layer, FEW, weight=weight).product.value
    assert 0 < product.flip.value < 0.1
    if emulated:
        error = 3 * product.flip_emulated.standard_error + 0.05 * product.flip.value
        assert abs(product.flip.value - product.flip_emulated.value) < error
    else:
        assert product.flip_emulated.status.startswith("not answerable")


def test_products_of_softmax_scores_are_those_of_their_logits():
    inputs, weight, logits = linear_router(2000)
    rows = [
        measure_layer(
            dataclasses.replace(layer_of(logits, 4, units), inputs=inputs), FEW, weight=weight
        ).product.value
        for units in ("logits", "softmax")
    ]
    assert rows[0].flip.value == pytest.approx(rows[1].flip.value, rel=0.01)
    assert rows[0].flip_emulated.value == pytest.approx(rows[1].flip_emulated.value, abs=2e-3)


def test_noise_of_biased_sigmoids_passes_through_their_slope():
    _, _, logits = linear_router(1000)
    bias = 0.05 * torch.randn(16)
    noise_flips = measure_layer(layer_of(logits, 4, "sigmoid", bias), FEW).noise.value[1]

    def chosen(noise):
        return chosen_sets((logits + noise).sigmoid() + bias, 4)

    runs = [(chosen(0.1 * torch.randn(1000, 16)) != chosen(0)).any(dim=1) for _ in range(50)]
    measured = torch.stack(runs).double().mean().item()
    assert noise_flips.flip.value == pytest.approx(measured, rel=0.04)
    quiet = measure_layer(layer_of(logits, 4, "sigmoid", bias), FEW).noise.value[0]
    assert quiet.population.value == pytest.approx(quiet.flip.value, rel=0.4)


def test_biased_sigmoids_round_on_grids_of_their_own():
    _, _, logits = linear_router(12_000)
    layer = layer_of(logits, 4, "sigmoid", 0.05 * torch.randn(16))
    quiet = dataclasses.replace(FEW, sigmas=())
    row, coarse = measure_layer(layer, quiet).precision.value
    for flips in (row, coarse):
        assert flips.tie.value == 0
        assert flips.tie_emulated.value < 1e-3
        error = 3 * flips.flip_emulated.standard_error + 0.05 * flips.flip.value
        assert abs(flips.flip.value - flips.flip_emulated.value) < error
    error = 3 * (row.flip_population.standard_error + row.flip.standard_error)
    assert abs(row.flip_population.value - row.flip.value) < error


def group_limited_layer(logits, k=4, groups=4, chosen_groups=2):
    """Sigmoid scores, groups by the sum of their two best, as group-limited routers choose."""
    scores = logits.double().sigmoid()
    tokens, experts = scores.shape
    grouped = scores.view(tokens, groups, -1)
    totals = grouped.topk(2, dim=2).values.sum(dim=2)
    best = totals.topk(chosen_groups + 1, dim=1)
    allowed = torch.zeros_like(totals, dtype=torch.bool).scatter(
        1, best.indices[:, :chosen_groups], True
    )
    inside = scores.masked_fill(~allowed.repeat_interleave(experts // groups, dim=1), -torch.inf)
    ranked = inside.topk(2 * experts // groups + 1, dim=1)
    facts = LayerFacts(experts, k, "sigmoid", groups, chosen_groups, "top2sum", affine=False)
    gap = (best.values[:, chosen_groups - 1] - best.values[:, chosen_groups]).float()
    return LayerTrace("groups", facts, ranked.indices, ranked.values.float(), group_gap=gap)


def test_group_limited_flips_include_those_of_the_groups():
    _, _, logits = linear_router(2000)
    layer = group_limited_layer(logits)
    measures = measure_layer(layer, dataclasses.replace(FEW, sigmas=(0.02,)))
    alone = measure_layer(
        dataclasses.replace(layer, group_gap=None), dataclasses.replace(FEW, sigmas=(0.02,))
    )
    row, inner = measures.noise.value[0], alone.noise.value[0]
    clean, repeats = layer.experts[:, :4].sort(dim=1).values, 40
    flips = 0.0
    for _ in range(repeats):
        noisy = group_limited_layer(logits + 0.02 * torch.randn_like(logits))
        flips += (noisy.experts[:, :4].sort(dim=1).values != clean).any(dim=1).double().mean()
    measured = float(flips / repeats)
    assert inner.flip.value < measured < row.flip.value * 1.02
    assert row.flip.value == pytest.approx(measured, rel=0.25)  # an upper limit, and close
    assert row.population.value == pytest.approx(row.flip.value, rel=0.25)
    assert row.upper == row.flip.value
    bf16 = measures.precision.value[0]
    assert bf16.flip.value > alone.precision.value[0].flip.value
    assert bf16.flip_population.value == pytest.approx(bf16.flip.value, rel=0.35)
    assert "groups" in bf16.status


def test_only_experts_of_the_chosen_groups_can_be_hidden():
    _, _, logits = linear_router(200)
    layer = group_limited_layer(logits)
    assert layer.facts.reachable == 8
    reachable = dataclasses.replace(layer, scores=layer.scores[:, :8], experts=layer.experts[:, :8])
    assert measure_layer(reachable, FEW).near.value.censored == (0,) * len(FEW.epsilons)
    row = measure_layer(reachable, FEW).noise.value[1]
    assert row.upper == row.flip.value
    short = dataclasses.replace(layer, scores=layer.scores[:, :6], experts=layer.experts[:, :6])
    row = measure_layer(short, FEW).noise.value[1]
    assert row.upper > row.flip.value


def test_model_joins_its_layers():
    _, _, first = linear_router(1500, seed=1)
    _, _, second = linear_router(1500, seed=2)
    first_layer, second_layer = layer_of(first, 4, name="a"), layer_of(second / 3, 4, name="b")
    measures = measure(trace_of(first_layer, second_layer), FEW)
    gaps = torch.cat([first_layer.gap, second_layer.gap])
    assert measures.model.gap.value.tokens == 3000
    assert measures.model.gap.value.density == gap_density(gaps)
    smallest = torch.minimum(first_layer.gap, second_layer.gap).sort().values
    assert measures.model.smallest_gap.value.value == (smallest[149].item(), smallest[749].item())
    for index, rate in enumerate(measures.model.noise):
        rates = [layer.noise.value[index].flip.value for layer in measures.layers]
        assert rate.mean.value == pytest.approx(sum(rates) / 2)
        assert max(rates) <= rate.any_layer.value <= sum(rates)
        assert (rate.worst_layer, rate.worst, rate.layers) == ("b", pytest.approx(max(rates)), 2)
    assert [rate.name for rate in measures.model.noise] == ["0.01", "0.1"]
    assert [rate.name for rate in measures.model.precision] == ["bf16", "int4"]
    rates = [layer.precision.value[0].flip_emulated.value for layer in measures.layers]
    assert measures.model.precision[0].mean.value == pytest.approx(sum(rates) / 2)
    assert measures.model.evenness == pytest.approx(
        sum(x.load.evenness for x in measures.layers) / 2
    )
    assert measures.provenance == {"model": "made up"}


def test_dead_and_cold_experts_of_all_layers_are_counted():
    experts = torch.tensor([[0]] * 400 + [[1]] * 3)
    layer = LayerTrace("a", LayerFacts(4, 1), experts)
    twin = dataclasses.replace(layer, name="b")
    measures = measure(trace_of(layer, twin), FEW)
    assert (measures.model.dead, measures.model.cold) == (4, 2)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_scores_that_are_no_numbers_are_refused_with_their_place(bad):
    _, _, logits = linear_router(10)
    layer = layer_of(logits, 4)
    layer.scores[3, 1] = bad
    layer.scores[7, 0] = bad
    with pytest.raises(TraceError, match=r"'layer'.*2 of 10.*first at index 3"):
        measure_layer(layer, FEW)


def test_missing_ranks_are_no_error_but_missing_choices_are():
    _, _, logits = linear_router(10)
    layer = layer_of(logits, 4, ranks=6)
    layer.scores[:, 5] = -torch.inf
    assert measure_layer(layer, FEW).noise.status == "ok"
    layer.scores[2, 3] = -torch.inf
    layer.scores[2, 4] = -torch.inf
    with pytest.raises(TraceError, match="first at index 2"):
        measure_layer(layer, FEW)


def test_numbers_that_json_lacks_become_null():
    assert to_plain({"a": (1.0, float("nan"), [float("inf")]), 2: "x"}) == {
        "a": [1.0, None, [None]],
        "2": "x",
    }


def test_layers_on_two_threads_are_those_on_one():
    layers = [layer_of(linear_router(300, seed=s)[2], 4, name=f"layer {s}") for s in range(3)]
    trace, threads = trace_of(*layers), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = measure(trace, FEW)
        torch.set_num_threads(2)
        assert measure(trace, FEW) == alone
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
