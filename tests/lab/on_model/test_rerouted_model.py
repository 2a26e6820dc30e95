"""Other routers and gates on transformers' models: the interface is kept; changes can be undone."""

import pytest
import torch

from tests.models.tiny import SUPPORTED, batch, lively, tiny_model
from tieline.core.errors import ParameterError, UnsupportedModelError
from tieline.lab.on_model.rerouted_model import reroute_, unreroute_
from tieline.models import capture, find_routers, load_pretrained, load_smoothed, smooth_, unsmooth_
from tieline.models.saved_models import changes_of
from tieline.routing import CosineRouter, TopK
from tieline.routing.layer import GATES

PATTERNS = ["deepseek_v3", "gemma4", "gpt_oss", "minimax_m2", "mixtral", "olmoe"]
REFUSED = {"dbrx", "inkling", "jetmoe", "llama4", "phimoe", "zaya"}
ALL = [
    pytest.param(name, marks=[] if name in PATTERNS else [pytest.mark.slow])
    for name in SUPPORTED
    if name not in REFUSED
]
NOT_AFFINE = {"diffusion_gemma", "gemma4", "laguna", "muse_spark"}  # more than Wx
pytestmark = pytest.mark.filterwarnings("ignore")


def logits(model):
    with torch.no_grad():
        return model(input_ids=batch())[0]


def classes(model):
    return [type(module) for module in model.modules()]


@pytest.mark.parametrize("family", ALL)
@pytest.mark.parametrize("router", ["linear", "quadratic"])
def test_a_router_that_starts_as_the_old_one_changes_nothing(family, router):
    """The family's own rule on the same scores: scoring, bias, groups and scale."""
    model = lively(tiny_model(family))
    before, kinds = logits(model), classes(model)
    record = reroute_(model, router=router)
    after = logits(model)
    if family not in NOT_AFFINE:
        torch.testing.assert_close(after, before, rtol=1e-3, atol=1e-4)
    record.undo()
    assert classes(model) == kinds
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize("family", PATTERNS)
@pytest.mark.parametrize("gate", ["relu", "sigmoid", "smooth"])
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "tieline"])
def test_a_varying_number_of_experts_is_exact_in_every_implementation(family, gate, implementation):
    """Against the dense sum over all experts, computed from the block's own experts one by one."""
    model = lively(tiny_model(family))
    options = {"epsilon": 0.3} if gate == "smooth" else {}
    model.set_experts_implementation(implementation)
    router = "linear" if family == "gemma4" and gate != "smooth" else None
    reroute_(model, router=router, gate=gate, gate_options=options)
    name = next(iter(find_routers_of(model)))
    router = model.get_submodule(name)
    experts = model.get_submodule(name.rpartition(".")[0]).experts
    calls = []
    handle = experts.register_forward_hook(lambda m, args, out: calls.append((args, out)))
    logits(model)
    handle.remove()
    (x, ids, weights), out = calls[0]
    used = weights != 0
    assert used.any()
    experts.config._experts_implementation = "eager"
    expected = torch.zeros_like(out)
    for e in range(8):
        share = (weights * ((ids == e) & used)).sum(1, keepdim=True)
        with torch.no_grad():
            expert_output = experts(
                x, torch.full((len(x), 1), e), torch.ones(len(x), 1, dtype=x.dtype)
            )
        expected += share.to(expert_output) * expert_output
    torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-5)
    assert router.tieline_gate is not None


def find_routers_of(model):
    return {n: m for n, m in model.named_modules() if hasattr(m, "tieline_gate")}


@pytest.mark.parametrize("gate", sorted(GATES))
def test_every_gate_runs_and_gives_its_own_weights(gate):
    model = lively(tiny_model("olmoe"))
    reroute_(model, gate=gate, gate_options={"epsilon": 0.2} if gate == "smooth" else {})
    router = model.model.layers[0].mlp.gate
    x = torch.randn(6, 32)
    scores, weights, ids = router(x)
    dense = torch.zeros(6, 9).scatter_add(1, ids, weights)[:, :8]
    torch.testing.assert_close(dense, router.tieline_gate(scores))
    assert logits(model).isfinite().all()


def test_the_perturbed_cosine_scores_by_its_definition_and_trains():
    model = lively(tiny_model("mixtral"))
    reroute_(model, router="perturbed_cosine", router_options={"temperature": 0.5})
    router = model.model.layers[0].mlp.gate
    new = router.tieline_router
    assert isinstance(new, CosineRouter)
    assert new.tau == (0.1, 0.1)
    x = torch.randn(5, 32)
    scores, weights, ids = router(x)
    w = router.weight
    expected = (x @ w.T) / ((w.norm(dim=1) + 0.1) * (x.norm(dim=1, keepdim=True) + 0.1)) / 0.5
    torch.testing.assert_close(scores, expected)
    torch.testing.assert_close(
        torch.zeros(5, 8).scatter(1, ids, weights), TopK(2)(scores), rtol=1e-4, atol=1e-6
    )
    model.requires_grad_(True)
    model(input_ids=batch(), labels=batch()).loss.backward()
    assert new.weight.grad.abs().sum() > 0


def test_random_starts_depend_on_the_seed_alone():
    numbers = []
    for seed in (1, 1, 2):
        model = tiny_model("mixtral")
        reroute_(model, router="linear", keep_start=False, seed=seed)
        numbers.append(model.model.layers[0].mlp.gate.tieline_router.weight.clone())
    assert torch.equal(numbers[0], numbers[1])
    assert not torch.equal(numbers[0], numbers[2])


def test_a_rerouted_model_is_captured_without_the_old_matrix():
    model = lively(tiny_model("mixtral"))
    reroute_(model, router="cosine")
    with torch.inference_mode(), capture(model) as recorder:
        model(input_ids=batch())
    layer = recorder.trace().layers[0]
    assert layer.distance is None
    unreroute_(model)
    reroute_(model, router="linear")
    with torch.inference_mode(), capture(model) as recorder:
        model(input_ids=batch())
    assert recorder.trace().layers[0].distance is not None


def test_capture_refuses_a_gate_that_is_no_top_k():
    model = tiny_model("mixtral")
    reroute_(model, gate="relu")
    with pytest.raises(UnsupportedModelError, match="gate was replaced"), capture(model):
        pass


def test_a_rerouted_model_is_smoothed_and_both_are_undone_in_order(tmp_path):
    model = lively(tiny_model("mixtral"))
    before = logits(model)
    reroute_(model, router="perturbed_cosine")
    rerouted = logits(model)
    smooth_(model, epsilon=0.05)
    smoothed = logits(model)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(load_smoothed(tmp_path)), smoothed)
    with pytest.raises(ParameterError, match="call `unsmooth_` first"):
        unreroute_(model)
    unsmooth_(model)
    assert torch.equal(logits(model), rerouted)
    unreroute_(model)
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize(
    "options",
    [
        {"router": "perturbed_cosine"},
        {"gate": "relu"},
        {"router": "quadratic", "router_options": {"rank": 2}, "gate": "smooth"},
    ],
)
def test_a_saved_model_is_loaded_as_it_was_and_never_without_tieline(options, tmp_path):
    model = lively(tiny_model("olmoe"))
    reroute_(model, **options)
    router = model.model.layers[1].mlp.gate
    for parameter in router.parameters():
        parameter.data += 0.01
    model.save_pretrained(tmp_path)
    again = load_pretrained(tmp_path).eval()
    assert torch.equal(logits(again), logits(model))
    with pytest.raises(OSError, match=r"no file named model\.safetensors"):
        type(model).from_pretrained(tmp_path)
    unreroute_(again)
    assert torch.equal(logits(again), logits_undone(model))


def logits_undone(model):
    unreroute_(model)
    assert changes_of(model.config) == {}
    return logits(model)


@pytest.mark.parametrize("flag", [False, True])
def test_the_flag_of_the_experts_comes_back(flag):
    model = tiny_model("mixtral")
    experts = model.model.layers[0].mlp.experts
    experts._is_expert_parallel = flag
    reroute_(model, gate="relu")
    assert experts._is_expert_parallel
    unreroute_(model)
    assert experts._is_expert_parallel is flag


def test_only_the_named_layers_change():
    model = tiny_model("mixtral")
    names = list(find_routers(model))
    record = reroute_(model, router="cosine", layers=[names[1]])
    assert record.layers == (names[1],)
    assert not hasattr(model.get_submodule(names[0]), "tieline_router")


BAD = [
    ({}, ParameterError, "a router, a gate, or both"),
    ({"router": "mlp"}, ParameterError, "router='mlp'"),
    ({"gate": "best"}, ParameterError, "gate='best'"),
    ({"gate": "relu", "router_options": {"tau": 1}}, ParameterError, "options without a router"),
    ({"router": "cosine", "gate_options": {"k": 1}}, ParameterError, "options without a gate"),
    ({"router": "cosine", "router_options": {"size": 3}}, ParameterError, "do not fit"),
    ({"router": "cosine", "router_options": {"temperature": 0.0}}, ParameterError, "temperature"),
    ({"gate": "topk", "gate_options": {"selection_bias": {1, 2}}}, ParameterError, "plain numbers"),
    ({"router": "cosine", "layers": ["gate"]}, ParameterError, "no routers named"),
]


@pytest.mark.parametrize(("options", "error", "message"), BAD, ids=[m for *_, m in BAD])
def test_bad_input_is_refused_and_leaves_the_model_alone(options, error, message):
    model = tiny_model("mixtral")
    kinds, config = classes(model), model.config.to_dict()
    with pytest.raises(error, match=message):
        reroute_(model, **options)
    assert classes(model) == kinds
    assert model.config.to_dict() == config


@pytest.mark.parametrize("family", sorted(REFUSED))
def test_families_of_another_form_are_refused_by_name(family):
    model = tiny_model(family)
    with pytest.raises(UnsupportedModelError, match=f"'{family}' cannot be rerouted"):
        reroute_(model, router="cosine")


def test_a_gate_that_needs_logits_is_refused_where_there_are_only_probabilities():
    model = tiny_model("gemma4")
    with pytest.raises(UnsupportedModelError, match="'relu' needs a new router"):
        reroute_(model, gate="relu")


def test_rerouting_twice_and_undoing_nothing_are_refused():
    model = tiny_model("mixtral")
    with pytest.raises(ParameterError, match="not rerouted"):
        unreroute_(model)
    reroute_(model, router="cosine")
    with pytest.raises(ParameterError, match="rerouted already"):
        reroute_(model, router="linear")
