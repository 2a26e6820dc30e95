"""Capture, observers and the monitor beside replay: they see the router's own choice."""

import pytest
import torch

from tests.models.replay.test_replay import PATTERNS, other_trace, recorded, states
from tests.models.tiny import batch, lively, tiny_model
from tieline.analysis.monitor import RoutingMonitor
from tieline.models import capture
from tieline.models.replay import replay
from tieline.models.router_output import LIVE
from tieline.run.observers import RouteRecorder, observing
from tieline.run.plan import Pass


def same_trace(a, b):
    assert torch.equal(a.tokens, b.tokens)
    for a_layer, b_layer in zip(a.layers, b.layers, strict=True):
        for name in ("experts", "scores", "weights"):
            assert torch.equal(getattr(a_layer, name), getattr(b_layer, name)), name


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", [name for name in PATTERNS if name != "llama4"])
@pytest.mark.parametrize("weights", ["live", "recorded"])
def test_capture_records_the_own_choice_inside_and_outside_of_a_replay(family, weights):
    model = lively(tiny_model(family))
    routes, (plain_routes, _) = other_trace(model), recorded(model)
    last = [routes.layers[-1].name]
    with torch.no_grad(), replay(model, routes, weights, layers=last):
        expected = states(model(input_ids=batch()))
    with torch.no_grad():
        with replay(model, routes, weights, layers=last) as inner, capture(model) as recorder:
            first = states(model(input_ids=batch()))
        same_trace(recorder.trace(), plain_routes)
        with capture(model) as recorder, replay(model, routes, weights, layers=last) as outer:
            second = states(model(input_ids=batch()))
        same_trace(recorder.trace(), plain_routes)
    assert inner.changed == outer.changed
    assert sum(inner.changed.values()) > 0
    assert torch.equal(first, expected)
    assert torch.equal(second, expected)
    assert not any(LIVE in module.__dict__ for module in model.modules())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["dbrx", "deepseek_v3", "olmoe"])
def test_the_monitor_sees_own_scores_and_the_load_of_the_replay(family):
    model = lively(tiny_model(family))
    routes, (plain_routes, _) = other_trace(model), recorded(model)
    last = routes.layers[-1].name
    options = {"every": 1, "training_only": False, "per_layer": True, "check_losses": False}
    with torch.no_grad(), RoutingMonitor(model, **options) as monitor:
        model(input_ids=batch())
        plain = monitor.step()
        with replay(model, routes, layers=[last]):  # armed before, read inside
            model(input_ids=batch())
            outer = monitor.step()
            model(input_ids=batch())
            inner = monitor.step()
        model(input_ids=batch())
        after = monitor.step()
    assert after == pytest.approx(plain)
    assert inner == pytest.approx(outer)
    moved = routes.layers[-1].experts.long().flatten().bincount(minlength=8)
    for name, value in plain.items():
        if "max_violation" in name or "diversity" in name or "dead" in name:
            continue
        assert inner[name] == pytest.approx(value), name
    k = plain_routes.layers[-1].facts.k
    busiest = float(moved.max()) / (24 * k / plain_routes.layers[-1].facts.n_experts) - 1
    assert inner[f"routing/{last}/max_violation"] == pytest.approx(busiest)


def test_observers_see_the_own_choice():
    model = lively(tiny_model("olmoe"))
    routes, (plain_routes, _) = other_trace(model), recorded(model)
    recorder = RouteRecorder(model)
    recorder.on_start(Pass(0), batch())
    last = [routes.layers[-1].name]
    with torch.no_grad(), replay(model, routes, layers=last), observing(model, [recorder]):
        model(input_ids=batch())
    for layer in plain_routes.layers:
        live = recorder.recorded(Pass(0), layer.name)
        assert torch.equal(live.experts, layer.experts)


@pytest.mark.parametrize("reentrant", [True, False])
def test_capture_inside_a_checkpointed_replay_counts_once(reentrant):
    model = lively(tiny_model("olmoe")).requires_grad_(True).train()
    routes, (plain_routes, _) = other_trace(model), recorded(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    last = [routes.layers[-1].name]
    with replay(model, routes, layers=last) as replayed, capture(model) as recorder:
        states(model(input_ids=batch())).square().mean().backward()
    assert replayed.replayed == {last[0]: 24}
    same_trace(recorder.trace(), plain_routes)
