"""Coalitions between the hidden states of tokens."""

import math

import numpy as np
import pytest
import torch

from tieline.core.errors import TraceError
from tieline.core.ranking import stable_topk
from tieline.lab.tropical import crossings, pieces_along, token_pairs, wall_density
from tieline.trace import LayerFacts, LayerTrace, RoutingTrace


def traced(inputs, W, k, documents=None):
    ranked = stable_topk(inputs @ W.T, W.shape[0])
    layer = LayerTrace("gate", LayerFacts(len(W), k), ranked.indices, inputs=inputs.float())
    count = len(inputs)
    documents = torch.zeros(count, dtype=torch.long) if documents is None else documents
    ids = torch.arange(count)
    return RoutingTrace([layer], ids, documents, ids)


def gaussian(seed, experts=8, width=6, tokens=400):
    draw = torch.Generator().manual_seed(seed)
    inputs = torch.randn(tokens, width, generator=draw).half().double()
    return inputs, torch.randn(experts, width, generator=draw, dtype=torch.float64)


def test_each_pair_is_walked_like_a_curve_of_two_points():
    inputs, W = gaussian(0)
    trace = traced(inputs, W, 3)
    pairs = token_pairs(trace, 20, "any", seed=1)
    statistics = crossings(trace.layers[0], W, pairs)
    curves = [pieces_along(inputs[pair], W, None, 3) for pair in pairs]
    assert statistics.switches.value == pytest.approx(np.mean([p.switches for p in curves]))
    switches = sum(p.switches for p in curves)
    assert statistics.per_length == pytest.approx(switches / sum(p.length for p in curves))
    assert statistics.per_radian == pytest.approx(
        switches / sum(p.spherical_length for p in curves)
    )
    assert statistics.expected_per_radian == pytest.approx(wall_density(8, 3) / math.pi)
    assert statistics.needed <= statistics.switches.value
    assert (statistics.agreement, statistics.pairs) == (1, 20)


def test_gaussian_routers_switch_as_often_as_crofton_says():
    rates = []
    for seed in range(40):
        inputs, W = gaussian(seed, tokens=60)
        trace = traced(inputs, W, 2)
        rates.append(crossings(trace.layers[0], W, token_pairs(trace, 100, "any", seed)).per_radian)
    error = np.std(rates, ddof=1) / math.sqrt(40)
    assert abs(np.mean(rates) - wall_density(8, 2) / math.pi) < 3 * error


def test_another_weight_shows_in_the_agreement():
    inputs, W = gaussian(0)
    trace = traced(inputs, W, 3)
    pairs = token_pairs(trace, 50, "any")
    assert crossings(trace.layers[0], -W, pairs).agreement < 0.1


def test_neighbours_follow_each_other_in_one_text():
    inputs, W = gaussian(0, tokens=9)
    trace = traced(inputs, W, 3, torch.tensor([0, 0, 0, 1, 2, 2, 2, 2, 2]))
    pairs = token_pairs(trace, 100, "neighbours")
    assert sorted(pairs[:, 0].tolist()) == [0, 1, 4, 5, 6, 7]
    assert (pairs[:, 1] == pairs[:, 0] + 1).all()
    assert len(token_pairs(trace, 3, "neighbours")) == 3
    any_two = token_pairs(trace, 500, "any")
    assert (any_two[:, 0] != any_two[:, 1]).all()
    assert any_two.min() == 0
    assert any_two.max() == 8


def test_equal_inputs_are_no_line_and_lone_tokens_no_pair():
    inputs, W = gaussian(0, tokens=3)
    trace = traced(torch.stack([inputs[0], inputs[0], inputs[1]]), W, 3, torch.tensor([0, 1, 2]))
    layer = trace.layers[0]
    assert crossings(layer, W, torch.tensor([[0, 1], [0, 2]])).pairs == 1
    with pytest.raises(TraceError, match="same input at both ends"):
        crossings(layer, W, torch.tensor([[0, 1]]))
    with pytest.raises(TraceError, match="follow each other"):
        token_pairs(trace, 3, "neighbours")


def test_the_model_in_the_box_switches_about_as_often_as_a_gaussian_router():
    from tieline.models.capture import capture
    from tieline.models.demo import demo_text, load_demo_model, load_demo_tokenizer
    from tieline.models.linear_routers import linear_weights

    model = load_demo_model()
    ids = load_demo_tokenizer()(demo_text()[:3000])["input_ids"][:512]
    with torch.no_grad(), capture(model, keep="inputs") as recorder:
        model(torch.tensor(ids).reshape(2, 256))
    trace = recorder.trace()
    weights = linear_weights(model, trace)
    for layer in trace.layers:
        statistics = crossings(layer, weights[layer.name], token_pairs(trace, 500, "any"))
        assert statistics.agreement == 1
        assert 0.85 < statistics.per_radian / statistics.expected_per_radian < 1.12
