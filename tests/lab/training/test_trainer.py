"""Learning rates over the steps, and the groups of the optimiser."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lab.training.tiny import tiny_decoder
from tieline.lab.training.config import OptimConfig
from tieline.lab.training.trainer import (
    epsilon_share,
    is_epsilon,
    parameter_groups,
    rate_share,
)

OPTIM = OptimConfig(steps=100, batch=8, warmup=10, final_share=0.1)


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
    config, model = tiny_decoder("smooth1")
    groups = parameter_groups(model, config.optim)
    held = [id(p) for group in groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in model.parameters())
    assert [len(group["params"]) for group in groups][-1] == 1
    theta = next(p for name, p in model.named_parameters() if is_epsilon(name))
    assert groups[-1]["params"][0] is theta
    assert groups[-1]["lr"] == config.optim.epsilon_rate != groups[0]["lr"]
    assert [group["weight_decay"] for group in groups] == [0.01, 0, 0]
    assert torch.nn.functional.softplus(theta).item() == pytest.approx(0.05)
    assert len(parameter_groups(tiny_decoder("smoe")[1], config.optim)) == 2
