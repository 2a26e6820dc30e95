"""Rates, budgets and the sparsity coefficient over the steps; groups of the optimiser."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lab.training.tiny import tiny
from tieline.lab.training.config import GateConfig, OptimConfig
from tieline.lab.training.language import decoder, moe_layers
from tieline.lab.training.step import (
    GateSchedule,
    epsilon_share,
    is_epsilon,
    parameter_groups,
    rate_share,
)
from tieline.routing.losses import collect_routing

OPTIM = OptimConfig(steps=100, batch=8, warmup=10, final_share=0.1)


def built(gate):
    config = tiny(gate)
    return config, decoder(config.model, config.gate)


def test_the_rate_rises_linearly_and_falls_by_a_half_cosine():
    assert rate_share(0, OPTIM) == pytest.approx(0.1)
    assert rate_share(9, OPTIM) == 1
    assert rate_share(10, OPTIM) == 1
    assert rate_share(55, OPTIM) == pytest.approx(0.55)
    assert rate_share(100, OPTIM) == pytest.approx(0.1)
    assert [epsilon_share(s, OPTIM) for s in (0, 9, 10, 99)] == [0.1, 1, 1, 1]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 98))
def test_the_rate_never_rises_after_the_warm_up(step):
    low, high = sorted((step, step + 1))
    if low >= OPTIM.warmup:
        assert rate_share(high, OPTIM) <= rate_share(low, OPTIM)
    assert 0 < rate_share(step, OPTIM) <= 1


def test_groups_hold_every_parameter_once_and_epsilon_has_its_own_rate():
    config, model = built("smooth1")
    groups = parameter_groups(model, config.optim)
    held = [id(p) for group in groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in model.parameters())
    assert [len(group["params"]) for group in groups][-1] == 1
    theta = next(p for name, p in model.named_parameters() if is_epsilon(name))
    assert groups[-1]["params"][0] is theta
    assert groups[-1]["lr"] == config.optim.epsilon_rate != groups[0]["lr"]
    assert [group["weight_decay"] for group in groups] == [0.01, 0, 0]
    assert torch.nn.functional.softplus(theta).item() == pytest.approx(0.05)
    assert len(parameter_groups(built("smoe")[1], config.optim)) == 2


def test_the_budget_of_the_annealed_gate_has_three_stages():
    config, model = built("annealed")
    schedule = GateSchedule(model, config.gate, 80)
    gate = next(iter(moe_layers(model).values())).gate
    found = {}
    for step in (0, 39, 40, 50, 60, 79):
        schedule.begin(step)
        found[step] = gate.budget
    assert found == {0: 2.5, 39: 2.5, 40: 2.5, 50: 2.25, 60: 2, 79: 2}


def test_other_gates_keep_their_budget():
    config, model = built("smooth1")
    GateSchedule(model, config.gate, 80).begin(79)
    assert next(iter(moe_layers(model).values())).gate.budget == 2.5


def test_the_sparsity_of_a_relu_gate_waits_then_adapts_and_is_kept():
    _, model = built("remoe")
    gate = GateConfig(name="remoe", gate="relu", dense_share=0.5)
    schedule = GateSchedule(model, gate, 10)
    with collect_routing(model) as records:
        model(input_ids=torch.arange(32).view(1, 32))
    schedule.end(4, records)
    assert schedule.coefficient(4) == 0
    start = schedule.coefficient(5)
    active = torch.stack([r.routing.active.double().mean() for r in records]).mean()
    schedule.end(5, records)
    assert (schedule.coefficient(5) > start) == bool(active > 2)
    again = GateSchedule(model, gate, 10)
    again.load(schedule.state())
    assert again.coefficient(9) == schedule.coefficient(9) != start
