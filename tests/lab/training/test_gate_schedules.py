"""Controllers reach their targets."""

import math

import pytest
import torch

from tests.lab.training.tiny import tiny_decoder
from tieline import ReLUGate, TielineError
from tieline.lab.training.config import GateConfig
from tieline.lab.training.gate_schedules import BudgetSchedule, GateSchedule, SparsityController
from tieline.lab.training.language_tasks import moe_layers
from tieline.routing.losses import collect_routing


def test_the_sparsity_controller_reaches_its_number_of_experts():
    torch.manual_seed(0)
    scores, controller = torch.randn(256, 16), SparsityController(2, 16)
    for _ in range(200):  # a model whose scores sink as the coefficient grows
        weights = ReLUGate()(scores - 0.1 * math.log(controller.coefficient / 1e-8))
        controller.update(weights)
    assert (weights != 0).sum(-1).float().mean().item() == pytest.approx(2, abs=0.1)


def test_the_coefficient_rises_above_the_target_falls_below_and_rests_on_it():
    controller = SparsityController(1, 2, coefficient=1.0, growth=2.0)
    assert controller.update(torch.ones(3, 2)) == 2.0
    assert controller.update(torch.eye(2)) == 2.0
    assert controller.update(torch.zeros(3, 2)) == 1.0


def test_the_first_steps_are_dense_and_leave_the_coefficient_alone():
    controller = SparsityController(1, 2, coefficient=1.0, growth=2.0, warmup=2)
    assert [controller.update(torch.ones(3, 2)) for _ in range(4)] == [0.0, 0.0, 2.0, 4.0]
    resumed = SparsityController(1, 2, coefficient=4.0, growth=2.0, warmup=2, steps=4)
    assert resumed.update(torch.ones(3, 2)) == controller.update(torch.ones(3, 2)) == 8.0


def test_the_budget_holds_falls_linearly_and_stays():
    schedule = BudgetSchedule(2.5, 2.0, hold=40, until=60)
    assert [schedule(t) for t in (0, 39, 40, 50, 60, 61, 99)] == [2.5] * 3 + [2.25] + [2.0] * 3
    assert schedule(41) == pytest.approx(2.475)


def test_the_budget_of_the_annealed_gate_has_three_stages():
    config, model = tiny_decoder("annealed")
    schedule = GateSchedule(model, config.gate, 80)
    gate = next(iter(moe_layers(model).values())).gate
    budgets = {}
    for step in (0, 39, 40, 50, 60, 79):
        schedule.begin(step)
        budgets[step] = gate.budget
    assert budgets == {0: 2.5, 39: 2.5, 40: 2.5, 50: 2.25, 60: 2, 79: 2}


def test_other_gates_keep_their_budget():
    config, model = tiny_decoder("smooth1")
    GateSchedule(model, config.gate, 80).begin(79)
    assert next(iter(moe_layers(model).values())).gate.budget == 2.5


def test_the_sparsity_of_a_relu_gate_waits_then_adapts_and_is_kept():
    _, model = tiny_decoder("remoe")
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


BAD = [
    (lambda: SparsityController(5, 4), "0 < k <= experts"),
    (lambda: SparsityController(2, 4, growth=1.0), "growth must exceed 1"),
    (lambda: SparsityController(2, 4, warmup=-1), "warmup and steps"),
    (lambda: BudgetSchedule(2.5, 2.0, hold=5, until=4), "hold <= until"),
]


@pytest.mark.parametrize(("build", "message"), BAD, ids=[m for _, m in BAD])
def test_bad_settings_are_refused(build, message):
    with pytest.raises(TielineError, match=message):
        build()
