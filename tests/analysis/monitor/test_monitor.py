"""The monitor: its numbers are those of `inspect`, its cost is on logged steps only."""

import json
import math
import warnings

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tests.models.tiny import batch, lively, tiny_model
from tieline import SmoothTopK, TopK, moe
from tieline.analysis.inspect import inspect
from tieline.analysis.monitor import JsonlWriter, RoutingMonitor
from tieline.core.errors import RoutingWarning, TielineError, UnsupportedModelError
from tieline.measure.measures import MeasureSettings
from tieline.models.demo import load_demo_tokenizer

TEXT = "def area(width, height):\n    return width * height  # <script>\n" * 12
BF16 = MeasureSettings(sigmas=(1e-2,), precisions=("bf16",))


def layer(**options):
    return moe(d_model=16, n_experts=8, k=2, d_hidden=8, **options)


def quiet(model, **options):
    return RoutingMonitor(model, check_losses=False, **options)


def bare(scalars):
    return {name.removeprefix("routing/"): value for name, value in scalars.items()}


class Operations(TorchDispatchMode):
    """Names of all operations that torch runs."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def model():
    return lively(tiny_model("olmoe", vocab_size=512))


@pytest.mark.parametrize("family", ["olmoe", "deepseek_v3", "gpt_oss"])
def test_scalars_equal_those_of_inspect_on_the_same_tokens(family):
    model = lively(tiny_model(family, vocab_size=512))
    tokenizer = load_demo_tokenizer()
    inspected = inspect(
        (model, tokenizer),
        text=TEXT,
        tokens=192,
        sequence_length=32,
        measure_settings=BF16,
        jumps=False,
    )
    metrics, layers = inspected.metrics, inspected.measures.layers
    monitor = quiet(model, training_only=False)
    with torch.no_grad():
        for rows in inspected.trace.tokens.long().view(6, 32).split(4):  # two micro-batches
            model(input_ids=rows.to(model.device))
    scalars = bare(monitor.step())
    expected = {"gap_p1": "gap@0.01", "gap_p10": "gap@0.1", "gap_p50": "gap@0.5", "ties": "ties"}
    expected |= {"flip_bf16": "flip@bf16", "tie_bf16": "tie@bf16"}
    # another batch size may round the model's matrix products otherwise
    for ours, theirs in expected.items():
        assert scalars[ours] == pytest.approx(metrics[theirs], rel=1e-4, abs=1e-6)
    flips = sum(layer.precision.value[0].flip.value for layer in layers)
    assert scalars["flips_per_token"] == pytest.approx(flips, rel=1e-4)
    loads = [layer.load for layer in layers]
    assert scalars["max_violation"] == pytest.approx(max(load.busiest for load in loads) - 1)
    assert scalars["dead_share"] == sum(len(load.dead) for load in loads) / 16
    diversity = sum(math.exp(load.entropy) / 8 for load in loads) / 2
    assert scalars["diversity"] == pytest.approx(diversity)
    assert scalars["active"] == layers[0].k
    assert len(scalars) == 15


def test_padding_is_left_out_as_inspect_leaves_it_out(model):
    ids = batch(3, 12)
    monitor = quiet(model, training_only=False, every=1)
    with torch.no_grad():
        model(input_ids=ids)
        plain = monitor.step()
        padded = torch.cat([ids, torch.zeros_like(ids[:, :5])], dim=1)
        mask = torch.cat([torch.ones_like(ids), torch.zeros_like(ids[:, :5])], dim=1)
        model(input_ids=padded, attention_mask=mask)
        assert monitor.step() == pytest.approx(plain, rel=1e-4)
    monitor.close()


def test_only_every_nth_step_is_logged():
    layers, x = layer(), torch.randn(5, 16)
    logged = []
    with quiet(layers, every=3) as monitor:
        for step in range(8):
            layers(x)
            if monitor.step():
                logged.append(step)
    assert logged == [0, 3, 6]


def test_other_steps_run_not_one_operation_more_and_have_no_hook():
    layers, x = layer(), torch.randn(5, 16)
    with Operations() as alone:
        layers(x).sum().backward()
    with quiet(layers, every=2) as monitor:
        layers(x)
        monitor.step()
        layers.zero_grad(set_to_none=True)
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in layers.modules())
        with Operations() as watched:
            layers(x).sum().backward()
            assert monitor.step() == {}
    assert watched.names == alone.names


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_repeated_forward_passes_are_not_counted_again(use_reentrant):
    layers, x = layer(), torch.randn(5, 16, requires_grad=True)
    with quiet(layers, every=1) as monitor:
        layers(x)
        once = monitor.step()
        checkpoint(layers, x, use_reentrant=use_reentrant).sum().backward()
        assert [len(calls) for calls in monitor._calls.values()] == [1]
        assert monitor.step() == once


def test_micro_batches_of_a_step_count_together():
    layers, x = layer(), torch.randn(12, 16)
    with quiet(layers, every=1) as monitor:
        layers(x)
        full_step = monitor.step()
        for part in x.split([5, 7]):
            layers(part)
        assert monitor.step() == pytest.approx(full_step, rel=1e-5)


def test_passes_in_evaluation_mode_are_left_out():
    layers, x = layer(), torch.randn(12, 16)
    with quiet(layers, every=1) as monitor:
        layers(x)
        training = monitor.step()
        layers(x)
        layers.eval()
        layers(torch.randn(9, 16))
        layers.train()
        assert monitor.step() == training
        layers.eval()
        layers(x)
        assert monitor.step() == {}


def test_the_loss_and_its_gradients_are_those_without_a_monitor():
    layers, x = layer(gate="smooth", gate_options={"epsilon": 0.3}), torch.randn(12, 16)
    results = []
    for watched in (False, True):
        with quiet(layers, start=0 if watched else 1):
            layers.zero_grad()
            y = layers(x)
            y.square().sum().backward()
            results.append([y, *(p.grad.clone() for p in layers.parameters())])
    assert all(torch.equal(plain, monitored) for plain, monitored in zip(*results, strict=True))


def test_a_smooth_layer_tells_its_band_and_its_experts():
    layers, x = layer(gate="smooth", gate_options={"epsilon": 0.5}), torch.randn(50, 16)
    with quiet(layers) as monitor:
        layers(x)
        scalars = bare(monitor.step())
    weights = layers.route(x).weights
    assert scalars["epsilon"] == 0.5
    assert scalars["active"] == pytest.approx((weights != 0).sum().item() / 50)
    assert scalars["active"] > 2


def test_scalars_of_each_layer_on_request():
    model = torch.nn.Sequential(layer(), layer())
    with quiet(model, per_layer=True) as monitor:
        model(torch.randn(20, 16))
        scalars = bare(monitor.step())
    for name in ("gap_p50", "max_violation", "score_rms"):
        assert f"0/{name}" in scalars
        assert f"1/{name}" in scalars
    assert scalars["max_violation"] == max(scalars["0/max_violation"], scalars["1/max_violation"])
    assert scalars["flips_per_token"] == scalars["0/flips_per_token"] + scalars["1/flips_per_token"]
    assert scalars["score_rms"] == pytest.approx(
        math.sqrt((scalars["0/score_rms"] ** 2 + scalars["1/score_rms"] ** 2) / 2)
    )


@pytest.mark.parametrize("gate", ["softmax", "relu"])
def test_a_layer_without_a_choice_has_no_gaps_but_a_load(gate):
    layers = layer(gate=gate)
    with quiet(layers) as monitor:
        layers(torch.randn(20, 16))
        scalars = bare(monitor.step())
    assert "gap_p1" not in scalars
    assert "near_bf16" not in scalars
    assert scalars["active"] == 8 if gate == "softmax" else 0 < scalars["active"] < 8


def test_what_cannot_be_measured_is_told_once_and_training_goes_on():
    layers, x = layer(), torch.randn(5, 16)
    broken = torch.full_like(x, torch.nan)
    with quiet(layers, every=1) as monitor:
        layers(broken)
        with pytest.warns(RoutingWarning, match=r"step 0.*not finite"):
            assert monitor.step() == {}
        layers(broken)
        assert monitor.step() == {}  # warnings are errors here
        layers(x)
        assert monitor.step()
        assert len(monitor.warnings) == 1


def test_a_router_that_cannot_be_captured_in_training_is_told():
    model = tiny_model("phimoe").train()
    with quiet(model) as monitor:
        model(input_ids=batch())
        with pytest.warns(RoutingWarning, match="phimoe"):
            assert monitor.step() == {}


def test_lines_of_json_are_written(tmp_path):
    layers, path = layer(), tmp_path / "logs" / "routing.jsonl"
    with quiet(layers, every=2, writers=[JsonlWriter(path)]) as monitor:
        for _ in range(4):
            layers(torch.randn(5, 16))
            monitor.step()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line.pop("step") for line in lines] == [0, 2]
    assert lines[1] == monitor.last


def test_bad_arguments_are_refused_before_training():
    with pytest.raises(TielineError, match="every=0"):
        RoutingMonitor(layer(), every=0)
    with pytest.raises(UnsupportedModelError, match="no router"):
        RoutingMonitor(torch.nn.Linear(2, 2))


def test_gates_of_ours_are_told_apart_from_their_bias_and_groups():
    x = torch.randn(40, 16)
    for gate in (TopK(2), SmoothTopK(2, epsilon=0.2), TopK(2, order="after")):
        layers = layer()
        layers.gate = gate
        with quiet(layers) as monitor, warnings.catch_warnings():
            layers(x)
            assert "flips_per_token" in bare(monitor.step())


def test_the_mass_at_bf16_spacing_and_the_sums_by_their_definitions():
    layers, x = layer(), torch.randn(500, 16)
    with quiet(layers) as monitor:
        layers(x)
        scalars = bare(monitor.step())
    scores = layers.router(x).detach().double()
    ranked = scores.sort(dim=1, descending=True).values
    spacing = 2.0 ** (ranked[:, 1].abs().log2().floor() - 7)
    near = (ranked[:, 1] - ranked[:, 2] <= spacing).double().mean().item()
    assert 0 < near < 1
    assert scalars["near_bf16"] == near
    assert scalars["confidence"] == pytest.approx(scores.softmax(1).amax(1).mean().item(), rel=1e-5)
    assert scalars["score_rms"] == pytest.approx(scores.square().mean().sqrt().item(), rel=1e-5)
    assert scalars["score_max"] == pytest.approx(scores.abs().max().item(), rel=1e-6)
