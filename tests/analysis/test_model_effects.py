"""Effects over all layers: nothing moves without flips, and the floor is below the KL with them."""

import pytest
import torch

from tests.analysis.zoo import FAMILIES
from tests.models.tiny import batch, lively, tiny_model
from tieline.analysis.model_effects import (
    Divergences,
    FullEffect,
    FullEffects,
    audit_phase,
    compared_phase,
)
from tieline.core.errors import UnsupportedModelError
from tieline.core.predictions import kl_divergence
from tieline.models.emulate import modular_routers
from tieline.models.model import Model
from tieline.run.condition import Condition, Perturbation
from tieline.run.forward import forward, model_logits, only_running
from tieline.run.observers import Outcome
from tieline.run.plan import Pass, Plan
from tieline.run.runner import Runner

SMALL, LARGE = Perturbation("score noise", 1e-9), Perturbation("score noise", 0.5)


@pytest.mark.parametrize("family", FAMILIES)
def test_without_flips_nothing_moves_and_with_them_the_floor_is_lower(family):
    model, effects = lively(tiny_model(family)), FullEffects([SMALL, LARGE])
    conditions = [Condition(SMALL), Condition(LARGE)]
    phase = audit_phase("test", {0: batch(3, 20)}, conditions)
    Runner(Model(model)).run(Plan((phase,)), [effects])
    small, large = effects.effects[SMALL], effects.effects[LARGE]
    assert small.any_layer.mean().value == small.moved.mean().value == 0
    assert small.kl.mean().value == pytest.approx(0, abs=1e-9)
    assert small.loss.mean().value == pytest.approx(0, abs=1e-5)
    assert large.any_layer.mean().value > 0.2
    assert 0 < large.moved.mean().value < 1
    assert large.floor.mean().value < large.kl.mean().value
    layers = [large.flips[name].mean().value for name in modular_routers(model)]
    assert max(layers) <= large.any_layer.mean().value <= sum(layers)


def test_a_kept_router_is_left_alone_in_a_full_run():
    model = lively(tiny_model("olmoe"))
    int4 = Perturbation("rounding", "int4")
    every, none = Condition(int4, kept=tuple(modular_routers(model))), Condition(int4)
    counted = Divergences([every, none])
    phase = compared_phase("test", {0: batch(3, 20)}, [every, none])
    Runner(Model(model)).run(Plan((phase,)), [counted])
    assert counted.kl[every].mean().value == 0
    assert counted.kl[none].mean().value > 0


def test_a_model_without_logits_is_refused():
    model = tiny_model("olmoe").model
    with only_running(model), pytest.raises(UnsupportedModelError, match="no logits"):
        model_logits(forward(model, batch()), batch())


def test_moved_weight_is_the_mean_over_layers_and_a_flip_counts_in_any():
    logits = torch.randn(1, 2, 5)
    lost = {"a": torch.tensor([0.5, -1.0]), "b": torch.tensor([-1.0, -1.0])}
    effect = FullEffect()
    ids, clean = torch.zeros(1, 2, dtype=torch.long), {Pass(0): logits}
    run = Pass(0, reference=Pass(0))
    effect.add_pass(run, Outcome(ids, logits, clean, lost=lost), None)
    assert effect.moved.mean().value == 0.125
    assert effect.any_layer.mean().value == effect.flips["a"].mean().value == 0.5
    assert effect.flips["b"].mean().value == 0


def test_divergences_are_those_of_the_reference_to_the_perturbed_run():
    condition = Condition(LARGE)
    clean, noisy = torch.randn(1, 3, 5), torch.randn(1, 3, 5)
    counted, run = Divergences([condition]), Pass(0, condition, Pass(0))
    counted.on_pass_done(run, Outcome(torch.zeros(1, 3, dtype=torch.long), noisy, {Pass(0): clean}))
    expected = kl_divergence(clean, noisy).mean().item()
    assert counted.kl[condition].mean().value == pytest.approx(expected)
    assert expected != pytest.approx(kl_divergence(noisy, clean).mean().item(), rel=1e-3)
