"""Controllers reach what they are set to reach."""

import math

import pytest
import torch

from tieline import ReLUGate, TielineError, TopK
from tieline.lab.training.controllers import BalanceController, BudgetSchedule, SparsityController


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


def test_the_balance_controller_evens_out_the_load():
    torch.manual_seed(0)
    scores = torch.randn(512, 8) + torch.linspace(-1, 1, 8)
    gate = TopK(2, scoring="sigmoid", selection_bias=torch.zeros(8))
    controller = BalanceController(gate, rate=5e-3)

    def spread():
        load = (gate(scores) != 0).float().mean(0)
        return (load.max() / load.mean()).item()

    before = spread()
    for _ in range(300):
        controller.update(gate(scores))
    assert before > 1.5
    assert spread() < 1.1


def test_the_bias_moves_by_the_rate_towards_the_mean_number_of_tokens():
    """Four tokens at expert 0, one at 1 and 2, two at 3: the mean is 2, whatever the weights."""
    gate = TopK(2, scoring="sigmoid", selection_bias=torch.zeros(4))
    weights = torch.tensor([[1e-3, 9, 0, 0], [1e-3, 0, 9, 0], [1e-3, 0, 0, 9], [1e-3, 0, 0, 9]])
    BalanceController(gate, rate=0.5).update(weights)
    assert gate.selection_bias.tolist() == [-0.5, 0.5, 0.5, 0.0]


def test_the_budget_holds_falls_linearly_and_stays():
    schedule = BudgetSchedule(2.5, 2.0, hold=40, until=60)
    assert [schedule(t) for t in (0, 39, 40, 50, 60, 61, 99)] == [2.5] * 3 + [2.25] + [2.0] * 3
    assert schedule(41) == pytest.approx(2.475)


BAD = [
    (lambda: SparsityController(5, 4), "0 < k <= experts"),
    (lambda: SparsityController(2, 4, growth=1.0), "growth must exceed 1"),
    (lambda: SparsityController(2, 4, warmup=-1), "warmup and steps"),
    (lambda: BalanceController(TopK(2)), "no selection_bias"),
    (lambda: BudgetSchedule(2.5, 2.0, hold=5, until=4), "hold <= until"),
]


@pytest.mark.parametrize(("build", "message"), BAD, ids=[m for _, m in BAD])
def test_bad_settings_are_refused(build, message):
    with pytest.raises(TielineError, match=message):
        build()
