"""What a record refuses, and the two-level gap."""

import math

import pytest
import torch

from tieline.core.errors import TraceError
from tieline.trace import LayerFacts, LayerTrace, RoutingTrace

FACTS = LayerFacts(n_experts=4, k=2)


def layer(name="router", tokens=3, facts=FACTS, **changes):
    ranked = torch.arange(facts.n_experts).expand(tokens, -1)
    fields = {"experts": ranked, "scores": -ranked.float(), **changes}
    return LayerTrace(name=name, facts=facts, **fields)


def trace(*layers, tokens=3, **changes):
    ids = torch.arange(tokens)
    fields = {"tokens": ids, "documents": ids * 0, "positions": ids, **changes}
    return RoutingTrace(layers=layers, **fields)


pytestmark = pytest.mark.usefixtures("axes_unchecked")


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"k": 0}, "1 <= k <= E"),
        ({"k": 5}, "1 <= k <= E"),
        ({"n_experts": 1 << 17}, "65536"),
        ({"units": "volts"}, "'volts'"),
        ({"group_score": "mean"}, "'mean'"),
        ({"n_groups": 3}, "equal size"),
        ({"n_groups": 2, "k_groups": 3}, "k_groups"),
        ({"n_groups": 4, "k_groups": 1}, "fit in 1"),
    ],
)
def test_impossible_facts_are_refused(facts, message):
    with pytest.raises(TraceError, match=message):
        LayerFacts(**{"n_experts": 4, "k": 2, **facts})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"experts": torch.zeros(3, dtype=torch.long)}, "'router': experts must have shape"),
        ({"experts": torch.zeros(3, 4)}, "experts must hold integers, got floating"),
        ({"experts": torch.zeros(3, 4, dtype=torch.bool)}, "experts must hold integers"),
        ({"experts": torch.zeros(3, 1, dtype=torch.long), "scores": None}, "k <= ranks <= E"),
        ({"experts": torch.zeros(3, 5, dtype=torch.long), "scores": None}, "k <= ranks <= E"),
        ({"scores": torch.zeros(3, 3)}, r"scores must have shape \(tokens=3, ranks=4\)"),
        ({"scores": torch.zeros(3, 4, dtype=torch.long)}, "scores must hold floating"),
        ({"weights": torch.zeros(3, 4)}, "k=2"),
        ({"distance": torch.zeros(2)}, "distance"),
        ({"group_gap": torch.zeros(3, 1)}, "group_gap"),
        ({"near": torch.zeros(2, 5, dtype=torch.long)}, "epsilons=any"),
        ({"bias": torch.zeros(3)}, "experts=4"),
        ({"inputs": torch.zeros(2, 9)}, "inputs"),
    ],
)
def test_a_layer_refuses_wrong_shapes_and_types(changes, message):
    with pytest.raises(TraceError, match=message):
        layer(**changes)


@pytest.mark.parametrize(
    ("layers", "changes", "message"),
    [
        ((), {}, "at least one layer"),
        ((layer(), layer()), {}, "names must differ"),
        ((layer(tokens=2),), {}, "3 tokens in all, got 2"),
        ((layer(),), {"positions": torch.arange(2)}, "positions must have shape"),
        ((layer(),), {"documents": torch.zeros(3)}, "documents must hold integers"),
        ((layer(),), {"epsilons": (0.2, 0.1)}, "ascending"),
        ((layer(),), {"epsilons": (0.0,)}, "positive"),
        ((layer(),), {"epsilons": (math.inf,)}, "finite"),
        ((layer(near=torch.ones(3, 2, dtype=torch.long)),), {"epsilons": (0.1,)}, "one ε"),
    ],
)
def test_a_trace_refuses_layers_that_do_not_fit(layers, changes, message):
    with pytest.raises(TraceError, match=message):
        trace(*layers, **changes)


def test_layers_are_found_by_name():
    both = trace(layer("a"), layer("b"))
    assert both.layer("b") is both.layers[1]
    with pytest.raises(TraceError, match=r"no layer 'c'.*\['a', 'b'\]"):
        both.layer("c")


def test_the_gap_is_the_smaller_of_the_two_levels_in_float64():
    scores = torch.tensor([[256.0, 1.5, 1.25, 0.0]], dtype=torch.bfloat16).expand(3, -1)
    group_gap = torch.tensor([0.125, 0.25, 7.0])
    assert layer(scores=scores).gap.tolist() == [0.25] * 3
    assert layer(scores=scores, group_gap=group_gap).gap.tolist() == [0.125, 0.25, 0.25]
    assert layer(scores=scores).gap.dtype == torch.float64


def test_the_gap_is_infinite_where_no_expert_is_left_to_enter():
    facts = LayerFacts(n_experts=4, k=4)
    assert layer(facts=facts).gap.tolist() == [math.inf] * 3
    masked = torch.tensor([[3.0, 2.0, -math.inf, -math.inf]]).expand(3, -1)
    assert layer(scores=masked).gap.tolist() == [math.inf] * 3


def test_ids_without_scores_have_no_gap():
    with pytest.raises(TraceError, match="ids only"):
        _ = layer(scores=None).gap


def test_the_chosen_ranks_alone_have_no_gap():
    with pytest.raises(TraceError, match="chosen ranks only"):
        _ = layer(experts=torch.tensor([[0, 1]] * 3), scores=torch.zeros(3, 2)).gap
