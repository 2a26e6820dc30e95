"""Padded slots: the dense weights come back, and every implementation passes over the rest."""

import pytest
import torch
from hypothesis import given

from tests.models.experts.test_kernel import experts_of, routing
from tests.strategies import seeds
from tieline.core.errors import ShapeError
from tieline.models.experts import KERNEL, SkipRule, choice_in_slots, dense_weights, skip_rule
from tieline.models.family_table import TRANSFORMERS_FAMILIES

pytestmark = pytest.mark.filterwarnings("ignore")
BY_INDEX, BY_WEIGHT = SkipRule(6, eager=True), SkipRule(6, eager=False)


def sparse(seed, tokens=7, experts=6, density=0.5):
    torch.manual_seed(seed)
    weights = torch.rand(tokens, experts, dtype=torch.float64) + 0.1
    return weights * (torch.rand(tokens, experts) < density)


@given(seeds)
def test_slots_hold_the_weights_and_nothing_else(seed):
    weights = sparse(seed)
    choice = choice_in_slots(weights, BY_INDEX)
    assert choice.ids.shape[1] == max(1, int((weights != 0).sum(1).max()))
    assert torch.equal(dense_weights(choice.ids, choice.weights, 6), weights)
    assert torch.equal(choice.ids == 6, choice.weights == 0)
    assert (choice.weights.diff(dim=1) <= 0).all()
    valid = choice_in_slots(weights, BY_WEIGHT)
    assert torch.equal(valid.weights, choice.weights)
    assert (valid.ids < 6).all()


def test_gradients_reach_the_weights():
    weights = sparse(0).requires_grad_()
    choice_in_slots(weights, BY_INDEX).weights.sum().backward()
    assert (weights.grad[weights != 0] == 1).all()


def test_columns_that_do_not_hold_the_experts_are_refused():
    weights, skip = torch.ones(2, 3), SkipRule(3, eager=True)
    assert choice_in_slots(weights, skip, 3).ids.shape == (2, 3)
    for columns in (2, 4):
        with pytest.raises(ShapeError, match=f"columns={columns}"):
            choice_in_slots(weights, skip, columns)
    assert choice_in_slots(torch.zeros(0, 3), skip).ids.shape == (0, 1)
    assert choice_in_slots(torch.zeros(2, 3), skip).ids.tolist() == [[3], [3]]


@pytest.mark.parametrize("name", ["eager", "grouped_mm", "batched_mm", KERNEL])
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "nemotron_h", "aria"])
def test_every_implementation_passes_over_skipped_slots(family, name, monkeypatch):
    experts = experts_of(family, torch.float32)
    monkeypatch.setattr(experts, "_is_expert_parallel", True)
    x, indices, weights, _ = routing(experts, torch.float32)
    weights = weights.masked_fill(torch.rand(weights.shape) < 0.4, 0)
    experts.config._experts_implementation = "eager"
    with torch.no_grad():
        expected = experts(x, indices, weights)
        experts.config._experts_implementation = name
        record = next(f for f in TRANSFORMERS_FAMILIES if f.name == family)
        skip = skip_rule(record, experts, 8)
        choice = choice_in_slots(dense_weights(indices, weights, 8), skip, 8)
        output = experts(x, choice.ids, choice.weights)
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
