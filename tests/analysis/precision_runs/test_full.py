"""Full runs: weight moved, and routes that are forced."""

import pytest
import torch

from tests.analysis.zoo import FAMILIES
from tests.models.tiny import batch, lively, tiny_model
from tieline.analysis.perturbations import Perturbation, noise_generator
from tieline.analysis.precision_runs import (
    FullEffect,
    FullRuns,
    LocalRuns,
    model_logits,
)
from tieline.analysis.precision_runs import _rule as rule
from tieline.core.errors import UnsupportedModelError
from tieline.core.statistics import SequenceSums
from tieline.models.emulate import modular_routers
from tieline.models.router_call import Choice, RouterOutput
from tieline.models.running import forward, only_running


def runs_of(model, ids):
    routers = modular_routers(model)
    local = LocalRuns(model, routers, [], 0, 1.0, 1)
    with local.watching(0, *ids.shape):
        logits = model_logits(forward(model, ids), ids)
    return FullRuns(model, routers, ids, dict(local.clean), logits), routers


@pytest.mark.parametrize("family", FAMILIES)
def test_without_flips_nothing_moves_and_with_them_the_floor_is_lower(family):
    ids, model = batch(3, 20), lively(tiny_model(family))
    with torch.inference_mode():
        runs, routers = runs_of(model, ids)
        small, large = FullEffect(), FullEffect()
        runs.add(small, Perturbation("score noise", 1e-9), noise_generator(0))
        runs.add(large, Perturbation("score noise", 0.5), noise_generator(0))
    assert small.any_layer.mean().value == small.moved.mean().value == 0
    assert small.kl.mean().value == pytest.approx(0, abs=1e-9)
    assert small.loss.mean().value == pytest.approx(0, abs=1e-5)
    assert large.any_layer.mean().value > 0.2
    assert 0 < large.moved.mean().value < 1
    assert large.floor.mean().value < large.kl.mean().value
    layers = [large.flips[name].mean().value for name in routers]
    assert max(layers) <= large.any_layer.mean().value <= sum(layers)


def test_the_weight_moved_is_that_of_the_experts_lost():
    clean = Choice(torch.tensor([[0.75, 0.25], [0.5, 0.25]]), torch.tensor([[0, 1], [2, 3]]))
    found = RouterOutput(torch.zeros(2, 4), torch.ones(2, 2), torch.tensor([[1, 0], [1, 3]]))
    seen = {}
    free = rule(clean, seen, "a", False, found)
    assert seen["a"].tolist() == [-1.0, pytest.approx(2 / 3)]  # another order is no flip
    assert free.ids.tolist() == found.ids.tolist()
    forced = rule(clean, seen, "a", True, found)
    assert forced.ids.tolist() == [[1, 0], [2, 3]]
    assert forced.weights.tolist() == [[1.0, 1.0], [0.5, 0.25]]


def test_a_kept_router_is_left_alone_in_a_full_run():
    ids, model = batch(3, 20), lively(tiny_model("olmoe"))
    with torch.inference_mode():
        runs, routers = runs_of(model, ids)
        every, none = SequenceSums(), SequenceSums()
        int4 = Perturbation("rounding", "int4")
        runs.kept(every, int4, noise_generator(0), list(routers))
        runs.kept(none, int4, noise_generator(0), [])
    assert every.mean().value == 0
    assert none.mean().value > 0


def test_a_model_without_logits_is_refused():
    model = tiny_model("olmoe").model
    with only_running(model), pytest.raises(UnsupportedModelError, match="no logits"):
        model_logits(forward(model, batch()), batch())
