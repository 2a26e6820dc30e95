"""`smooth_`: how ε is chosen, what is refused, and that a refusal leaves the model untouched."""

import copy
import json
import math
import subprocess
import sys

import pytest
import torch
from transformers import OlmoeForCausalLM

from tests.models.smoothing import states
from tests.models.tiny import batch, lively, tiny_model
from tieline.core.errors import ParameterError, TielineError, UnsupportedModelError
from tieline.models import (
    FAMILIES,
    RouterFamily,
    find_routers,
    load_smoothed,
    smooth_,
    unsmooth_,
)
from tieline.models.band_width import (
    budget_epsilon,
    gap_noise,
    margin_changes,
    noise_epsilon,
    ramp_width,
)
from tieline.models.demo import load_demo_tokenizer
from tieline.models.model import Model
from tieline.models.saved_models import changes_of
from tieline.models.smoothed_model import read_smoothing
from tieline.models.smoothed_router import default_k_max, plan_layers, router_smoothing
from tieline.routing import Groups
from tieline.run.calibration import calibrate

LINES = batch(8, 32)


@pytest.fixture
def model():
    return lively(tiny_model("olmoe"))


@pytest.fixture
def reference(model):
    return copy.deepcopy(model)


def run(model):
    with torch.inference_mode():
        return states(model(input_ids=batch()))


def used_experts(model, ids):
    """Mean experts per token of each router, seen at the experts."""
    counts, handles = [], []
    for name in find_routers(model):
        block = model.get_submodule(name.rpartition(".")[0])

        def hook(module, args, output=None):
            counts.append((args[2] > 0).double().sum(dim=1).mean().item())

        handles.append(block.experts.register_forward_pre_hook(hook))
    with torch.inference_mode():
        model(input_ids=ids)
    for handle in handles:
        handle.remove()
    return counts


@pytest.mark.parametrize("gate", ["projected", "ramp"])
def test_the_budget_is_met_layer_by_layer(model, gate):
    record = smooth_(model, budget=2.5, calibration=calibrate(model, [LINES]), gate=gate)
    first, second = used_experts(model, LINES)
    assert first == pytest.approx(2.5, abs=0.01)
    assert second == pytest.approx(2.5, abs=0.1)  # its inputs moved when the first was smoothed
    assert record.how == "budget 2.5"
    assert record.gate == gate
    slots = {"projected": 8, "ramp": 4}[gate]
    assert all(layer.k_max == slots and layer.units == "logits" for layer in record.layers)


def test_without_a_wish_half_an_expert_more_is_used(model, reference):
    assert (
        smooth_(model, calibration=calibrate(model, [LINES])).epsilons
        == smooth_(reference, budget=2.5, calibration=calibrate(reference, [LINES])).epsilons
    )


def test_the_ramp_is_ten_times_as_wide_as_the_noise(model):
    record = smooth_(model, noise=0.01)
    assert list(record.epsilons.values()) == pytest.approx([0.1 / 1.6] * 2)
    unsmooth_(model)
    record = smooth_(model, noise=0.01, gate="ramp")
    assert list(record.epsilons.values()) == pytest.approx([0.1 / 0.8] * 2)
    assert ramp_width(1.0, 50.0) == pytest.approx(0.0883 - 0.0275, abs=1e-3)
    assert noise_epsilon(0.0, 1.0, 50.0) == 0


def test_measured_noise_is_that_of_the_precision(model, reference):
    def smoothed(model, budget, noise):
        return smooth_(model, None, budget, noise, calibration=calibrate(model, [LINES], noise))

    widths = smoothed(model, None, "router bf16").epsilons
    unsmooth_(model)
    wider = smoothed(model, None, "router fp8_e4m3").epsilons
    capped = smoothed(reference, 2.1, "fp8_e5m2")
    most = smoothed(lively(tiny_model("olmoe")), 2.1, None)
    for name, width in widths.items():
        assert 0 < width < wider[name]
        assert capped.epsilons[name] == most.epsilons[name]
    assert capped.how == "budget 2.1 and noise fp8_e5m2"


def test_the_budget_of_groups_is_found_by_halving():
    scores = torch.rand(400, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    from tieline.routing.smooth_gates import smooth_columns

    groups = Groups(4, 2)
    epsilon = budget_epsilon(scores, 2, 4, 2.6, groups)
    share = smooth_columns(scores, 2, epsilon=epsilon, k_max=4, groups=groups).share
    assert (share > 0).double().sum(dim=1).mean().item() == pytest.approx(2.6, abs=0.02)


@pytest.mark.parametrize(("k", "experts", "slots"), [(1, 8, 3), (2, 16, 4), (8, 64, 12), (2, 3, 3)])
def test_there_is_room_for_a_tie_of_three(k, experts, slots):
    assert default_k_max(k, experts) == slots


def test_zero_runs_the_original_code(model):
    before = run(model)
    classes = [type(router) for router in find_routers(model).values()]
    names = list(find_routers(model))
    record = smooth_(model, epsilon={names[1]: 0.2})
    after = [type(router) for router in find_routers(model).values()]
    assert after[0] is classes[0]
    assert after[1] is not classes[1]
    assert [layer.smoothed for layer in record.layers] == [False, True]
    unsmooth_(model)
    smooth_(model, epsilon=[0.0, 0.0])
    assert torch.equal(run(model), before)


def test_layers_chooses_routers(model):
    name = list(find_routers(model))[1]
    record = smooth_(model, epsilon=0.2, layers=[name])
    assert [layer.name for layer in record.layers] == [name]


def test_logits_and_losses_stay(model):
    with torch.inference_mode():
        before = model(input_ids=batch(), output_router_logits=True)
        smooth_(model, epsilon=0.2)
        after = model(input_ids=batch(), output_router_logits=True)
    assert len(after.router_logits) == len(before.router_logits)
    assert torch.equal(after.router_logits[0], before.router_logits[0])
    assert after.aux_loss.isfinite()


@pytest.mark.parametrize("detached", [True, False])
def test_gradients_pass(detached):
    model = lively(tiny_model("mixtral")).requires_grad_(True)
    smooth_(model, epsilon=0.5, detach_ramp=detached)
    model(input_ids=batch(), labels=batch()).loss.backward()
    gradient = next(iter(find_routers(model).values())).weight.grad
    assert gradient.isfinite().all()
    assert gradient.abs().sum() > 0


def test_a_copy_is_smoothed_by_itself(model):
    before = run(model)
    smooth_(model, epsilon=0.3)
    other = copy.deepcopy(model)
    unsmooth_(model)
    assert torch.equal(run(model), before)
    assert not torch.equal(run(other), before)
    unsmooth_(other)
    assert torch.equal(run(other), before)


def test_the_flag_of_the_experts_comes_back(model):
    experts = model.model.layers[0].mlp.experts
    record = smooth_(model, epsilon=0.3)
    assert experts._is_expert_parallel
    record.undo()
    assert not experts._is_expert_parallel
    assert changes_of(model.config) == {}
    with pytest.raises(ParameterError, match="nothing to undo"):
        unsmooth_(model)


def test_hash_layers_are_counted_apart():
    model = lively(tiny_model("deepseek_v4", mlp_layer_types=["hash_moe", "moe"]))
    record = smooth_(model, epsilon=0.2)
    assert len(record.layers) == len(record.refused) == 1
    assert "token id" in next(iter(record.refused.values()))
    unsmooth_(model)
    with pytest.raises(UnsupportedModelError, match="hash layers"):
        smooth_(model, epsilon=0.2, layers=list(record.refused))


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("zaya", "skips all experts"),
        ("phimoe", "sparsemixer"),
        ("doge", "product-key"),
        ("nllb_moe", "capacity"),
        ("switch_transformers", "capacity"),
        ("vitpose_backbone", "data set"),
    ],
)
def test_families_without_a_choice_to_replace_are_refused_by_name(family, reason):
    model = tiny_model(family)
    before = [type(module) for module in model.modules()]
    with pytest.raises(UnsupportedModelError, match=reason) as error:
        smooth_(model, epsilon=0.2)
    assert family in str(error.value)
    assert [type(module) for module in model.modules()] == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epsilon": -0.1}, "not negative, got -0.1"),
        ({"epsilon": math.nan}, "got nan"),
        ({"epsilon": math.inf}, "got inf"),
        ({"epsilon": [0.1]}, "1 epsilons for 2 routers"),
        ({"epsilon": {"nowhere": 0.1}}, "nowhere"),
        ({"epsilon": 0.1, "budget": 2.5}, "not both"),
        ({"budget": 2.0}, "between k and k_max, got 2 "),
        ({"budget": 4.0, "gate": "ramp"}, "between k and k_max"),
        ({"budget": 8.0}, "between k and k_max"),
        ({"epsilon": 0.1, "gate": "projected", "b": 50.0}, "belong to the ramp, got a=1, b=50"),
        ({"epsilon": 0.1, "gate": "projected", "k_max": 4}, "belong to the ramp"),
        ({"epsilon": 0.1, "gate": "laplace"}, "'projected' or 'ramp', got 'laplace'"),
        ({"budget": math.nan}, "between k and k_max"),
        ({"budget": 2.5, "calibration": None}, "calibration tokens"),
        ({"noise": 0.0}, "positive and finite"),
        ({"noise": "bf17"}, "unknown precision 'bf17'"),
        ({"epsilon": 0.1, "b": 0.0}, "a and b must be positive"),
        ({"epsilon": 0.1, "k_max": 2}, "k_max must be above k"),
        ({"epsilon": 0.1, "k_max": 9}, "at most the number of experts"),
        ({"epsilon": 0.1, "layers": ["nowhere"]}, "no routers named"),
    ],
)
@pytest.mark.usefixtures("no_axis_checks")
def test_a_refusal_says_why_and_leaves_the_model_untouched(model, options, message):
    before, classes = run(model), [type(module) for module in model.modules()]
    calibration = calibrate(model, [LINES])
    with pytest.raises(TielineError, match=message):
        smooth_(model, **({"calibration": calibration} | options))
    assert [type(module) for module in model.modules()] == classes
    assert torch.equal(run(model), before)


def test_a_smoothed_router_is_not_smoothed_twice(model):
    smooth_(model, epsilon=0.3)
    before = run(model)
    with pytest.raises(ParameterError, match="smoothed already"):
        smooth_(model, epsilon=0.1)
    assert torch.equal(run(model), before)


def test_a_record_that_does_not_explain_the_weights_is_refused(model, monkeypatch):
    record = FAMILIES["OlmoeTopKRouter"]
    wrong = RouterFamily(record.name, record.routers, combine="sigmoid", renormalise="never")
    monkeypatch.setitem(FAMILIES, "OlmoeTopKRouter", wrong)
    smooth_(model, epsilon=0.1)
    with pytest.raises(UnsupportedModelError, match="does not explain the weights"):
        run(model)


@pytest.fixture
def saved(model, tmp_path):
    smooth_(model, epsilon=0.3, b=50.0)
    model.save_pretrained(tmp_path)
    load_demo_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def test_it_is_loaded_by_name(saved, model):
    loaded = Model.open(saved, device=model.device.type).module
    assert router_smoothing(next(iter(find_routers(loaded).values()))).b == 50
    assert torch.equal(run(loaded), run(model))


LOADERS = ["AutoModelForCausalLM", "AutoModel", "AutoConfig", "OlmoeForCausalLM", "OlmoeModel"]
WITHOUT_US = """
import sys, transformers
for name in sys.argv[2:]:
    try:
        getattr(transformers, name).from_pretrained(sys.argv[1])
    except Exception as problem:
        print("\\n" + name, type(problem).__name__, str(problem).splitlines()[0])
assert "tieline" not in sys.modules
"""


def test_without_tieline_it_does_not_load(saved):
    command = [sys.executable, "-c", WITHOUT_US, str(saved), *LOADERS]
    given = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL}
    done = subprocess.run(command, timeout=240, **given)
    lines = [line for line in done.stdout.splitlines() if line.partition(" ")[0] in LOADERS]
    assert [line.split()[0] for line in lines] == LOADERS, done.stderr
    for line in lines[:3]:
        assert "custom code" in line
    for line in lines[3:]:
        assert "no file named model.safetensors" in line


def test_saved_after_undoing_it_is_a_model_like_any_other(model, tmp_path):
    before = run(model)
    smooth_(model, epsilon=0.3).undo()
    model.save_pretrained(tmp_path)
    assert torch.equal(run(OlmoeForCausalLM.from_pretrained(tmp_path)), before)
    with pytest.raises(UnsupportedModelError, match="no smoothed model"):
        load_smoothed(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s["layers"][0].update(k=3), "does not match the checkpoint"),
        (lambda s: s["layers"][0].update(name="lm_head"), "does not match the checkpoint"),
        (lambda s: s["layers"][0].update(n_experts=7), "does not match the checkpoint"),
        (lambda s: s["layers"][0].update(units="sigmoid"), "does not match the checkpoint"),
        (lambda s: s["layers"][0].update(epsilon=-1.0), "cannot be read"),
        (lambda s: s["layers"][0].update(k_max=99), "cannot be read"),
        (lambda s: s.update(version=7), "version is 7"),
        (lambda s: s.update(layers="all"), "cannot be read"),
        (lambda s: s.pop("a"), "cannot be read"),
        (lambda s: s.update(b=0), "ramp"),
        (lambda s: s.pop("config"), "no 'config'"),
        (lambda s: s["config"].update(model_type="nothing"), "'nothing'"),
        (lambda s: s["config"].update(num_experts=4), "."),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(saved, change, message):
    config_file = saved / "config.json"
    stored = json.loads(config_file.read_text())["tieline"]
    both = stored["changes"].pop("smooth") | {"config": stored["config"]}
    change(both)
    inner = {"config": both.pop("config")} if "config" in both else {}
    stored = {"changes": {"smooth": both}, **inner}
    config_file.write_text(json.dumps({"model_type": "x", "tieline": stored}))
    with pytest.raises(TielineError, match=message) as error:
        Model.open(saved)
    assert "\n" not in str(error.value)


def test_noise_of_the_whole_model_is_more_than_that_of_its_routers(model):
    """The second router also receives the noise of the first layer."""
    router_noise, all_noise = (
        list(calibrate(model, [LINES], precision).sigmas.values())
        for precision in ("router bf16", "bf16")
    )
    assert all_noise[1] > 1.5 * router_noise[1] > 0


def test_the_size_of_the_noise_is_a_standard_deviation(model):
    """Planted normal noise in two independent scores: sd √2 of their difference."""
    plans, _ = plan_layers(model, None)
    clean = calibrate(model, [batch(64, 32)]).clean
    generator, noisy = torch.Generator().manual_seed(5), copy.deepcopy(dict(clean))
    for kept in noisy.values():
        scores = kept.scores
        noise = torch.randn(scores.shape, generator=generator, device="cpu")
        kept._calls = [scores + 0.01 * noise]
    for sigma in gap_noise(margin_changes(plans, clean, noisy)).values():
        assert sigma == pytest.approx(0.01 * 2**0.5, rel=0.1)


def test_the_gradient_of_the_ramp_is_let_through_on_request_only():
    """Against a difference quotient along a direction of the last router's matrix."""
    slopes, quotients = [], []
    for detached in (True, False):
        model = lively(tiny_model("mixtral")).double()
        model.set_experts_implementation("eager")
        smooth_(model, epsilon=0.5, detach_ramp=detached)
        weight = list(find_routers(model).values())[-1].weight.requires_grad_()
        generator = torch.Generator().manual_seed(1)
        direction = torch.randn(weight.shape, generator=generator).to(weight)
        probe = torch.randn(2, 12, 64, generator=generator).to(weight)

        def value(model=model, probe=probe):
            return (model(input_ids=batch()).logits * probe).sum()

        (gradient,) = torch.autograd.grad(value(), weight)
        ends = []
        for step in (1e-4, -2e-4):
            weight.data += step * direction
            ends.append(value().item())
        slopes.append((gradient * direction).sum().item())
        quotients.append((ends[0] - ends[1]) / 2e-4)
    assert quotients[0] == pytest.approx(quotients[1], rel=1e-6)
    assert slopes[1] == pytest.approx(quotients[1], rel=0.01)
    assert abs(slopes[0] - quotients[0]) > 0.1 * abs(quotients[0])


def test_a_record_is_read_as_it_was_written(model):
    record = smooth_(model, epsilon=[0.1, 0.0], a=2.0, b=3.0, detach_ramp=False)
    assert read_smoothing(json.loads(json.dumps(record.to_dict()))) == record


def test_a_router_that_uses_all_experts_is_left_alone():
    model = lively(tiny_model("olmoe", num_experts_per_tok=8))
    classes = [type(module) for module in find_routers(model).values()]
    record = smooth_(model, epsilon=0.2)
    assert not any(layer.smoothed for layer in record.layers)
    assert [type(module) for module in find_routers(model).values()] == classes


@pytest.mark.parametrize(
    ("family", "experts", "skips"),
    [
        ("olmoe", "eager", True),
        ("olmoe", "grouped_mm", True),
        ("gpt_oss", "eager", False),  # takes the index E for an expert
        ("gpt_oss", "grouped_mm", True),
        ("gpt_oss", "tieline", True),
    ],
)
def test_slots_that_are_not_used_have_the_index_that_skips_them(family, experts, skips):
    model, outputs = lively(tiny_model(family)), []
    model.set_experts_implementation(experts)
    smooth_(model, epsilon=0.3)
    router = next(iter(find_routers(model).values()))
    router.register_forward_hook(lambda module, args, output: outputs.append(output))
    run(model)
    _, weights, ids = outputs[0]
    assert (weights == 0).any()
    assert torch.equal(ids == 8, (weights == 0) & skips)


def test_with_budget_and_noise_the_smaller_width_counts(model):
    record = smooth_(model, budget=3.5, noise=1e-4, calibration=calibrate(model, [LINES]))
    assert list(record.epsilons.values()) == pytest.approx([1e-3 / 1.6] * 2)


def test_what_belongs_to_the_ramp_chooses_it(model):
    for options in ({"b": 50.0}, {"k_max": 4}):
        assert smooth_(model, epsilon=0.1, **options).gate == "ramp"
        unsmooth_(model)


def test_slots_grow_to_what_a_batch_needs(model):
    """Tokens with every expert tied keep all of them, with equal shares; others use two."""
    smooth_(model, epsilon=1e-9)
    router = next(iter(find_routers(model).values()))
    rows = torch.randn(3, 32)
    with torch.inference_mode():
        two = router(rows)
        assert two[1].shape == two[2].shape == (3, 2)
        rows[1] = 0  # every logit is 0
        all_eight = router(rows)
    assert all_eight[2].shape == (3, 8)
    assert (all_eight[1] != 0).sum(dim=1).tolist() == [2, 8, 2]
    torch.testing.assert_close(all_eight[1][1], torch.full((8,), 2 / 8 / 8))  # p_i · k/E


def test_records_of_older_versions_are_ramps(model):
    facts = smooth_(model, epsilon=0.1, gate="ramp").to_dict()
    assert facts["version"] == 1
    del facts["gate"]
    assert read_smoothing(facts).gate == "ramp"
    with pytest.raises(UnsupportedModelError, match="its version is 1"):
        read_smoothing({**facts, "gate": "projected"})
    with pytest.raises(UnsupportedModelError, match="its gate is 'other'"):
        read_smoothing({**facts, "gate": "other"})
