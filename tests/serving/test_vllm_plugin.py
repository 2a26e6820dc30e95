"""The plug-in of vLLM: its arithmetic here, vLLM itself where it is installed."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import tieline
from tests.models.tiny import lively, tiny_model
from tieline.core.errors import TielineError
from tieline.engines.engine_registry import engine_named, environment_of, find_python
from tieline.lab.on_model.rerouted_model import reroute_, unreroute_
from tieline.models.demo import load_demo_model
from tieline.models.saved_models import changes_of
from tieline.models.smoothed_model import portable_rules, smooth_
from tieline.serving import vllm_rerouted
from tieline.serving.modeling_tieline import CHANGED, smooth_choice
from tieline.serving.vllm_plugin import (
    ReroutedModelConfig,
    SmoothedModelConfig,
    factory_with_rules,
    refuse_unserved,
    register,
    routes_are_returned,
    routing_function,
    slot_count,
)
from tieline.serving.vllm_rerouted import (
    require_router_tensors,
    rerouted_function,
    rerouted_rules,
    store_router_tensor,
)

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module", params=["projected", "ramp"])
def rule(request):
    model = lively(tiny_model("mixtral"))
    smooth_(model, 0.3, gate=request.param)
    return portable_rules(model)[0]


def test_fixed_slots_hold_the_same_choice(rule):
    logits = torch.randn(200, 8, generator=torch.Generator().manual_seed(0))
    weights, ids = routing_function(rule, 8)(logits, logits, 8, True)
    assert (weights.dtype, ids.dtype) == (torch.float32, torch.int32)
    assert weights.shape == ids.shape == (200, 8)
    expected, experts, _ = smooth_choice(rule, logits)
    dense = torch.zeros(200, 8).scatter_add(1, experts, expected)
    served = torch.zeros(200, 8).scatter_add(1, ids.long(), weights)
    assert torch.equal(served > 0, dense > 0)
    torch.testing.assert_close(served, dense, rtol=1e-6, atol=1e-7)  # sums over more columns
    assert bool(((dense > 0).sum(1) > 2).any())


def test_slots_are_bounded(rule, monkeypatch):
    assert slot_count(rule, 8) == 8
    assert slot_count(rule, 128) == 10
    monkeypatch.setenv("TIELINE_VLLM_SLOTS", "4")
    assert slot_count(rule, 128) == 4
    for slots in ("2", "200", "many"):
        monkeypatch.setenv("TIELINE_VLLM_SLOTS", slots)
        with pytest.raises(ValueError, match="TIELINE_VLLM_SLOTS"):
            slot_count(rule, 128)


def test_rules_that_vllm_finishes_elsewhere_are_refused():
    model = lively(tiny_model("deepseek_v3"))
    smooth_(model, 0.1)
    with pytest.raises(ValueError, match="vLLM cannot serve"):
        refuse_unserved(portable_rules(model))


def test_the_configuration_is_that_of_the_model_itself(rule):
    inner = json.loads(tiny_model("mixtral").config.to_json_string())
    fields = {"model_type": "tieline", "tieline": {"config": inner, "rules": [rule]}}
    config = SmoothedModelConfig.from_dict(fields)
    assert (config.model_type, config.tieline_rules) == ("mixtral", [rule])
    with pytest.raises(ValueError, match="no rules"):
        SmoothedModelConfig.from_dict({"model_type": "tieline"})


def test_only_layers_with_a_rule_are_built_otherwise(rule):
    built = []

    def factory(num_experts, top_k, prefix="", custom_routing_function=None):
        built.append((top_k, custom_routing_function is not None))

    block = rule["name"].rpartition(".")[0]
    wrapped = factory_with_rules(factory, lambda: [rule])
    wrapped(8, 2, prefix=f"{block}.experts")
    wrapped(num_experts=8, top_k=2, prefix="model.layers.9.block.experts")
    factory_with_rules(factory, lambda: None)(8, 2, prefix=f"{block}.experts")
    assert built == [(8, True), (2, False), (2, False)]
    with pytest.raises(ValueError, match="without --enable-return-routed-experts"):
        factory_with_rules(factory, lambda: [rule], lambda: True)(8, 2, prefix=f"{block}.experts")
    factory_with_rules(factory, lambda: None, lambda: True)(8, 2, prefix=f"{block}.experts")


@pytest.mark.parametrize("part", ["aux_output_config", "model_config"])
def test_a_server_that_returns_routes_is_known_by_its_settings(part, vllm):
    config = SimpleNamespace(model_config=SimpleNamespace())
    vllm({"vllm.config": {"get_current_vllm_config": lambda: config}})
    assert not routes_are_returned()
    setattr(config, part, SimpleNamespace(enable_return_routed_experts=True))
    assert routes_are_returned()


ROUTERS = {"linear": {}, "perturbed_cosine": {}, "cosine": {"d_proj": 6, "temperature": 0.5}}


@pytest.fixture(params=ROUTERS)
def rerouted(request):
    model = lively(tiny_model("mixtral"))
    options = {"router_options": ROUTERS[request.param]}
    reroute_(model, router=request.param, keep_start=False, **options)
    return model


def test_a_rerouted_layer_has_the_weights_of_transformers(rerouted, monkeypatch):
    rules = rerouted_rules(changes_of(rerouted.config))
    router = rerouted.get_submodule(rules[0]["name"])
    monkeypatch.setattr(vllm_rerouted, "TENSORS", {})
    for name, tensor in rerouted.state_dict().items():
        assert store_router_tensor(name, tensor) == (".tieline_router." in name)
    require_router_tensors(rules)
    tokens = torch.randn(50, 32, generator=torch.Generator().manual_seed(0))
    tokens[0] = 0
    with torch.no_grad():
        _, expected, experts = router(tokens)
        weights, ids = rerouted_function(rules[0])(tokens, tokens, 2, True)
    assert torch.equal(ids.long(), experts)
    torch.testing.assert_close(weights, expected, rtol=1e-6, atol=1e-7)


def test_a_rerouted_layer_keeps_its_number_of_experts(rerouted):
    built, rule = [], rerouted_rules(changes_of(rerouted.config))[0]

    def factory(
        num_experts, top_k, prefix="", custom_routing_function=None, scoring_func="softmax"
    ):
        built.append((top_k, custom_routing_function is not None))

    build = factory_with_rules(factory, lambda: [rule])
    prefix = f"{rule['name'].rpartition('.')[0]}.experts"
    build(8, 2, prefix=prefix)
    assert built == [(2, True)]
    with pytest.raises(ValueError, match="has scoring_func='sigmoid', which vLLM applies"):
        build(8, 2, prefix=prefix, scoring_func="sigmoid")


def test_a_rerouted_folder_is_read_as_the_model_itself(rerouted):
    fields = json.loads(rerouted.config.to_json_string())
    assert fields["model_type"] == CHANGED.format(kind="mixtral", changes="reroute")
    config = ReroutedModelConfig.from_dict(fields)
    assert (config.model_type, len(config.tieline_rules)) == ("mixtral", 2)


def test_what_vllm_cannot_choose_is_refused():
    model = lively(tiny_model("mixtral"))
    reroute_(model, router="quadratic")
    with pytest.raises(ValueError, match=r"\(quadratic\): only new routers of the kinds linear"):
        rerouted_rules(changes_of(model.config))
    unreroute_(model)
    reroute_(model, gate="relu")
    with pytest.raises(ValueError, match=r"\(relu\): only new routers"):
        rerouted_rules(changes_of(model.config))
    with pytest.raises(ValueError, match=r"no layers\.0\.gate\.tieline_router\.weight"):
        require_router_tensors([{"name": "layers.0.gate", "router": "linear"}])


def build_experts(num_experts, top_k, prefix="", custom_routing_function=None):
    return num_experts


FUSED_MOE, CONFIG = "vllm.model_executor.layers.fused_moe", "vllm.transformers_utils.config"
LOADER = "vllm.model_executor.model_loader.default_loader"


def vllm_modules():
    """Modules of vLLM that the plug-in uses, with what it takes from them."""
    loader = type("DefaultModelLoader", (), {"get_all_weights": build_experts})
    return {
        "vllm": {"__version__": "0.99.0"},
        "vllm.config": {"get_current_vllm_config": build_experts},
        CONFIG: {"_CONFIG_REGISTRY": {}},
        FUSED_MOE: {},
        f"{FUSED_MOE}.layer": {"FusedMoEFactory": build_experts},
        LOADER: {"DefaultModelLoader": loader},
    }


@pytest.fixture
def vllm(monkeypatch):
    """Stands for vLLM: install(changes) puts its modules in place, and returns the registry."""

    def install(changes):
        modules = vllm_modules() | changes
        for name, content in modules.items():
            module: Any = None if content is None else ModuleType(name)
            if module is not None:
                vars(module).update(content)
            monkeypatch.setitem(sys.modules, name, module)
        return modules[CONFIG].get("_CONFIG_REGISTRY")

    return install


@pytest.mark.parametrize(
    "changes",
    [
        {f"{FUSED_MOE}.layer": None},
        {f"{FUSED_MOE}.layer": {}},
        {f"{FUSED_MOE}.layer": {"FusedMoEFactory": lambda num_experts, top_k: num_experts}},
        {LOADER: {"DefaultModelLoader": object}},
        {"vllm.config": {}},
    ],
)
def test_another_version_refuses_changed_models_and_serves_others(changes, vllm):
    registry = vllm(changes)
    register()
    for kind in ("tieline", CHANGED.format(kind="mixtral", changes="reroute")):
        with pytest.raises(ValueError, match=r"knows vLLM 0\.32, this is 0\.99\.0: .* cannot"):
            registry[kind].from_dict({"model_type": kind})
    assert "mixtral" not in registry
    assert build_experts(8, 2) == 8


def test_a_version_without_a_registry_says_how_to_turn_the_plug_in_off(vllm):
    vllm({CONFIG: {}})
    with pytest.raises(RuntimeError, match=r"this is 0\.99\.0: .*VLLM_PLUGINS= turns"):
        register()


def test_a_version_with_the_same_interfaces_is_served_and_changed_once(vllm, rule):
    registry = vllm({})
    register()
    register()
    layer = sys.modules[f"{FUSED_MOE}.layer"]
    assert registry["tieline"] is SmoothedModelConfig
    assert layer.FusedMoEFactory is sys.modules[FUSED_MOE].FusedMoEFactory
    assert layer.FusedMoEFactory.__wrapped__ is build_experts


def test_the_plug_in_needs_nothing_of_tieline_but_its_room():
    code = (
        "import sys, tieline.serving.vllm_plugin;"
        "assert not [m for m in sys.modules if m.startswith('tieline.models')], 'heavy';"
        "assert 'jaxtyping' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


PROGRAM = """
import sys, torch
from tieline.serving.vllm_plugin import register
register()
from vllm import LLM, SamplingParams
folder, target = sys.argv[1:]
llm = LLM(model=folder, dtype="float32", enforce_eager=True, max_model_len=64, max_num_seqs=16,
          skip_tokenizer_init=True)
ids = torch.randint(3, 500, (64, 12), generator=torch.Generator().manual_seed(5)).tolist()
settings = SamplingParams(
    max_tokens=12, temperature=0, logprobs=0, detokenize=False, ignore_eos=True
)
answers = llm.generate([{"prompt_token_ids": row} for row in ids], settings, use_tqdm=False)
tokens = torch.tensor([list(a.outputs[0].token_ids) for a in answers])
torch.save((tokens, torch.tensor([a.outputs[0].cumulative_logprob for a in answers])), target)
"""
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


@pytest.mark.skipif(
    not os.environ.get("TIELINE_TEST_ENGINES"),
    reason="set TIELINE_TEST_ENGINES=1 (make test-engines)",
)
@pytest.mark.parametrize("change", ["smoothed", "rerouted"])
def test_vllm_generates_what_transformers_does(change, tmp_path):
    try:
        python = find_python(engine_named("vllm"))
    except TielineError as problem:
        pytest.skip(str(problem))
    model = load_demo_model().eval()
    if change == "smoothed":
        smooth_(model, 0.2)
    else:
        reroute_(model, router="perturbed_cosine", router_options={"temperature": 0.1})
    model.save_pretrained(tmp_path / change)
    source = {"PYTHONPATH": str(Path(tieline.__file__).parents[1])}
    environment = environment_of(engine_named("vllm"), python) | SETTINGS | source
    target = tmp_path / "answers.pt"
    command = [str(python), "-c", PROGRAM, str(tmp_path / change), str(target)]
    subprocess.run(command, env=environment, cwd=tmp_path, check=True, capture_output=True)
    tokens, scores = torch.load(target)
    ids = torch.randint(3, 500, (64, 12), generator=torch.Generator().manual_seed(5))
    with torch.inference_mode():
        logits = model(input_ids=torch.cat([ids, tokens], dim=1)).logits[:, 11:-1]
    assert torch.equal(logits.argmax(dim=-1), tokens)
    expected = logits.log_softmax(-1).gather(-1, tokens[..., None]).sum((1, 2))
    torch.testing.assert_close(scores, expected.to(scores), rtol=0, atol=1e-4)
