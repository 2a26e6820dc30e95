"""Soft gates with a temperature: their limits and bounds, schedules, and hardening."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import Trainer, TrainingArguments

from tests.lab.training.tiny import tiny, tiny_decoder
from tieline import TielineError
from tieline.core.errors import ParameterError
from tieline.core.ranking import gap
from tieline.core.statistics import Estimate
from tieline.lab.training.config import CoolingConfig, GateConfig
from tieline.lab.training.gate_schedules import GateSchedule
from tieline.lab.training.language_tasks import LanguageModelling, moe_layers, scored_windows
from tieline.lab.training.soft_to_hard import (
    Cooling,
    CoolingCallback,
    HardeningPoint,
    TemperatureTopK,
    halved_temperature,
    harden_,
    hardening_path,
    inclusion_probabilities,
    moved_weight_bound,
    when_to_stop,
)
from tieline.lab.training.training_run import run_training
from tieline.routing import TopK


def probabilities_by_enumeration(logits, k):
    """P(i ∈ S) over all sets of k, in float64."""
    total, inclusion = 0.0, [0.0] * len(logits)
    for chosen in itertools.combinations(range(len(logits)), k):
        weight = math.exp(sum(logits[i] for i in chosen))
        total += weight
        for i in chosen:
            inclusion[i] += weight
    return torch.tensor([value / total for value in inclusion], dtype=torch.float64)


@given(st.lists(st.integers(-40, 40), min_size=2, max_size=7), st.data())
def test_inclusion_probabilities_are_those_of_all_sets(entries, data):
    logits = torch.tensor(entries, dtype=torch.float64) / 8
    k = data.draw(st.integers(1, len(entries)))
    expected = probabilities_by_enumeration(logits.tolist(), k)
    assert torch.allclose(inclusion_probabilities(logits, k), expected, atol=1e-12)


def drawn_scores(tokens=400, experts=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, experts, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize("tau", [0.05, 1.0, 7.0])
def test_a_single_expert_is_the_softmax_of_the_paper(tau):
    scores = drawn_scores()
    weights = TemperatureTopK(1, temperature=tau)(scores)
    assert torch.allclose(weights, (scores * (1 + 1 / tau)).softmax(-1), atol=1e-7)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_a_cold_gate_is_hard_and_its_gradient_finite(k):
    scores = drawn_scores().float().requires_grad_()
    cold = TemperatureTopK(k, temperature=1e-4)
    clear = gap(scores.detach(), k) > 0.01
    assert torch.allclose(cold(scores)[clear], TopK(k)(scores)[clear], atol=1e-6)
    cold(scores).square().sum().backward()
    assert scores.grad.isfinite().all()


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("tau", [0.02, 0.1, 0.5, 3.0])
def test_soft_weights_are_as_near_to_hard_ones_as_the_bound_says(k, tau):
    scores = drawn_scores(4000, seed=k)
    gate = TemperatureTopK(k, temperature=tau)
    moved = (gate(scores) - gate.hard()(scores)).abs().sum(-1) / 2
    share = inclusion_probabilities(scores / tau, k)
    sets = scores.topk(k).indices
    outside = k - share.gather(1, sets).sum(-1)
    assert (moved <= moved_weight_bound(gap(scores, k), tau, k, 6) + 1e-6).all()
    assert (outside / k <= moved_weight_bound(gap(scores, k), tau, k, 6) + 1e-6).all()


def test_schedules_fall_from_start_to_end_and_stay():
    linear = CoolingConfig(schedule="linear", start=2.0, end=0.5)
    cosine = CoolingConfig(schedule="cosine", start=2.0, end=0.5)
    assert [linear.at(x) for x in (0.0, 0.5, 1.0, 3.0)] == [2.0, 1.25, 0.5, 0.5]
    assert cosine.at(0.5) == pytest.approx(1.25)
    assert cosine.at(0.25) > linear.at(0.25)
    assert cosine.at(1.0) == cosine.at(2.0) == 0.5
    assert CoolingConfig(schedule="constant", start=0.3).at(0.9) == 0.3


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"schedule": "cosine", "start": 0.5, "end": 0.5}, r"0\.5 to 0\.5 never hardens: need end"),
        ({"schedule": "linear", "start": 0.1, "end": 1.0}, r"0\.1 to 1 never hardens"),
        ({"end": 0.0}, r"positive and finite, got 0\.0"),
        ({"start": -1.0}, r"positive and finite, got -1\.0"),
        ({"schedule": "steep"}, "'steep' is not one of"),
        ({"until": 0.0}, r"share of the steps in \(0, 1\], got 0\.0"),
        ({"schedule": "boundary", "halvings": 40}, "1 <= halvings <= 20, got 40"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused_with_value_and_rule(fields, message):
    with pytest.raises(ParameterError, match=message):
        CoolingConfig(**fields)


def test_a_temperature_must_be_positive_and_needs_a_schedule():
    with pytest.raises(ParameterError, match=r"positive and finite, got 0\.0"):
        TemperatureTopK(2, temperature=0.0)
    with pytest.raises(ParameterError, match="needs a cooling schedule"):
        GateConfig(name="soft", gate="temperature")
    with pytest.raises(ParameterError, match="no gate with a temperature to cool"):
        Cooling(tiny_decoder("smoe")[1], CoolingConfig(), 10)


def test_the_next_temperature_halves_the_boundary_mass():
    gaps = torch.rand(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    tau = 0.4
    for _ in range(5):
        before = (gaps <= tau).sum().item()
        tau = halved_temperature(gaps, tau)
        assert (gaps <= tau).sum().item() == before // 2
    with pytest.raises(TielineError, match=r"1 of 1000 tokens and cannot be halved"):
        halved_temperature(gaps, gaps.min().item())


def test_cooling_keeps_the_norm_of_the_routers():
    config, model = tiny_decoder("cooled")
    schedule = GateSchedule(model, config.gate, 10)
    routers = [layer.router.weight for layer in moe_layers(model).values()]
    norms = [weight.norm().item() for weight in routers]
    with torch.no_grad():
        for weight in routers:
            weight.mul_(3)
    schedule.after_update(1)
    assert [weight.norm().item() for weight in routers] == pytest.approx(norms)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "boundary"])
def test_a_run_cools_scores_hard_and_saves_a_hard_model(schedule, tmp_path):
    cooling = CoolingConfig(schedule=schedule, start=1.0, end=0.05, halvings=2)
    config = tiny("cooled", gate__cooling=cooling)
    result = run_training(config, tmp_path / "run")
    hardening = result.scores["hardening"]
    assert hardening["hard"] == pytest.approx(result.scores["validation"]["loss"], rel=1e-5)
    assert result.scores["validation"]["experts_per_token"] == 2
    ends = {"constant": 1.0, "linear": 0.05, "cosine": 0.05}
    assert 0 < hardening["tau"] <= 1
    assert hardening["tau"] == pytest.approx(ends.get(schedule, hardening["tau"]))
    if schedule == "boundary":
        assert hardening["tau"] < 0.7
    assert (tmp_path / "run" / "stock" / "config.json").is_file()
    saved = (tmp_path / "run" / "model" / "config.json").read_text()
    assert '"gate": "topk"' in saved


def test_a_run_that_was_stopped_goes_on_with_its_temperature(tmp_path):
    cooling = CoolingConfig(schedule="boundary", halvings=3, until=1.0)
    config = tiny("cooled", gate__cooling=cooling, checkpoint_every=2)
    full_run = run_training(config, tmp_path / "whole")
    cut = tmp_path / "cut"

    def stop(model, step):
        if step == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_training(config, cut, watch=stop)
    resumed = run_training(config, cut, resume=True)
    assert resumed.scores["hardening"] == full_run.scores["hardening"]


def test_the_callback_cools_under_any_trainer_and_hardens(tmp_path):
    config, model = tiny_decoder("cooled")
    data = LanguageModelling().data(config)
    arguments = TrainingArguments(
        str(tmp_path), max_steps=4, per_device_train_batch_size=4, report_to="none",
        disable_tqdm=True, save_strategy="no", use_cpu=True, dataloader_pin_memory=False,
    )  # fmt: skip
    callback = CoolingCallback(CoolingConfig(schedule="linear", start=1.0, end=0.1, until=0.5))
    trainer = Trainer(model, arguments, train_dataset=data.train, callbacks=[callback])
    trainer.train()
    assert callback.cooling.temperature == pytest.approx(0.1)
    assert all(isinstance(layer.gate, TopK) for layer in moe_layers(model).values())


def test_the_path_measures_both_models_and_leaves_the_model_as_it_was():
    config, model = tiny_decoder("cooled")
    rows = scored_windows(LanguageModelling().data(config).streams.validation, 32, 8)
    gates = [layer.gate for layer in moe_layers(model).values()]
    warm, cold = hardening_path(model.train(), rows, [1.0, 1e-4])
    assert [layer.gate for layer in moe_layers(model).values()] == gates
    assert all(gate.temperature == 1.0 for gate in gates)
    assert model.training
    assert warm.hard == cold.hard
    for point in (warm, cold):
        for layer in point.layers:
            assert 0 <= layer.moved <= layer.chain * (1 + 1e-6)
    assert cold.layers[0].moved < 0.01 * warm.layers[0].moved
    assert cold.layers[0].boundary_mass < warm.layers[0].boundary_mass
    harden_(model)
    with pytest.raises(ParameterError, match="no gate with a temperature"):
        hardening_path(model, rows, [1.0])


def test_hardening_is_free_from_where_its_change_is_within_the_error():
    changes = {1.0: 0.5, 0.1: 0.05, 0.03: 0.001, 0.01: -0.002}
    path = [HardeningPoint(t, 1 + c, 1.0, Estimate(c, 0.01), ()) for t, c in changes.items()]
    assert when_to_stop(path) == 0.03
    with pytest.raises(ParameterError, match=r"τ = 0\.1, the lowest of the path, .* \+0\.05"):
        when_to_stop(path[:2])
