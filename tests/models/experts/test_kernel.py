"""The experts kernel against transformers' own loop, on the experts of every family."""

import pytest
import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from tests.models.tiny import SUPPORTED, batch, lively, tiny_model
from tieline.core.errors import ParameterError, UnsupportedModelError
from tieline.models.experts import KERNEL, dense_weights, experts_forward, register_kernel
from tieline.routing import dispatch

LAYOUTS = [
    "aria",  # transposed
    "beam",  # a gate in float32
    "deepseek_v4",  # clamped
    "gemma4",  # tanh gelu
    "gpt_oss",  # transposed, interleaved, biases, clamped
    "mixtral",
    "muse_spark",  # a norm after each expert
    "nemotron_h",  # no gate
    "openai_privacy_filter",  # transposed, biases
    "zaya",
]
SINGLE = {"beam", "muse_spark", "openai_privacy_filter"}  # compute in float32 for any input
WITHOUT_INTERFACE = {"dbrx", "doge", "jetmoe", "llama4", "longcat_flash", "step3p7"}
INTERFACE = [name for name in SUPPORTED if name not in WITHOUT_INTERFACE]
ALL = [
    pytest.param(name, marks=[] if name in LAYOUTS else [pytest.mark.slow]) for name in INTERFACE
]
pytestmark = pytest.mark.filterwarnings("ignore")
CLOSE = {
    torch.float64: {"rtol": 1e-10, "atol": 1e-12},
    torch.float32: {"rtol": 1e-4, "atol": 1e-5},
}


def experts_of(family, dtype=torch.float64):
    """The first experts of a tiny model, with numbers of order one in every tensor."""
    model = tiny_model(family)
    experts = next(m for m in model.modules() if hasattr(m, "_is_expert_parallel"))
    torch.manual_seed(3)
    for parameter in experts.parameters():
        parameter.data = torch.randn(parameter.shape, dtype=dtype) / parameter.shape[-1] ** 0.5
        parameter.requires_grad_()
    return experts


def width_of(experts):
    first = experts.gate_up_proj if experts.has_gate else experts.up_proj
    return first.shape[1 if experts.is_transposed else 2], len(first)


def routing(experts, dtype, tokens=11, k=3):
    """Distinct experts per token, one expert left without any token, and a loss's probe."""
    width, n_experts = width_of(experts)
    torch.manual_seed(4)
    x = torch.randn(tokens, width).to(dtype)
    indices = torch.rand(tokens, n_experts - 1).argsort(dim=1)[:, :k]
    weights = torch.rand(tokens, k).to(dtype) + 0.1
    return x, indices, weights, torch.randn(tokens, width).to(dtype)


def run(experts, name, x, indices, weights, probe):
    """Output, and gradients in tokens, weights and parameters."""
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    experts.config._experts_implementation = name
    y = experts(x, indices.clone(), weights)
    leaves = [x, weights, *experts.parameters()]
    return [y, *torch.autograd.grad((y * probe).sum(), leaves)]


def assert_all_close(ours, theirs, dtype):
    for mine, expected in zip(ours, theirs, strict=True):
        assert mine.dtype == expected.dtype
        torch.testing.assert_close(mine, expected, **CLOSE[dtype])


def rounding(family):
    return torch.float32 if family in SINGLE else torch.float64


@pytest.mark.parametrize("family", ALL)
def test_output_and_gradients_are_those_of_eager(family):
    experts = experts_of(family)
    case = routing(experts, torch.float64)
    assert_all_close(run(experts, KERNEL, *case), run(experts, "eager", *case), rounding(family))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "nemotron_h"])
def test_in_other_precisions_the_rounding_is_no_worse_than_that_of_eager(family, dtype):
    experts = experts_of(family, dtype)
    case = routing(experts, dtype)
    ours, theirs = run(experts, KERNEL, *case), run(experts, "eager", *case)
    exact = run(
        experts.double(), "eager", *(t.double() if t.is_floating_point() else t for t in case)
    )
    for mine, eager, truth in zip(ours, theirs, exact, strict=True):
        assert mine.dtype == eager.dtype == dtype
        size = truth.norm()
        assert (mine - truth).norm() <= 2 * (eager - truth).norm() + 1e-7 * size
        assert (mine - truth).norm() <= 0.05 * size


@pytest.mark.parametrize("family", LAYOUTS)
@pytest.mark.parametrize("flag", [False, True])
@pytest.mark.parametrize("how", ["index", "weight"])
def test_skipped_slots_are_exact_in_every_layout(family, flag, how, monkeypatch):
    """Slots are dropped at random; what remains equals the same experts in fewer columns."""
    experts = experts_of(family)
    monkeypatch.setattr(experts, "_is_expert_parallel", flag)
    x, indices, weights, probe = routing(experts, torch.float64)
    skipped = torch.rand(indices.shape) < 0.4
    skipped[0] = True  # a token without any expert
    marked = indices.masked_fill(skipped, width_of(experts)[1]) if how == "index" else indices
    without = weights.masked_fill(skipped, 0)
    ours = run(experts, KERNEL, x, marked, without, probe)
    expected = run(experts, "eager", x, indices, without, probe)
    expected[2] = expected[2].masked_fill(skipped, 0)  # skipped slots give no gradient
    assert_all_close(ours, expected, rounding(family))
    assert (ours[0][0] == 0).all()


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_skipped_slots_are_not_computed(family, monkeypatch):
    experts = experts_of(family)
    x, indices, weights, _ = routing(experts, torch.float64)
    experts.config._experts_implementation = KERNEL
    rows, product = [], torch.mm

    def counted(left, right, **options):
        rows.append(len(left))
        return product(left, right, **options)

    monkeypatch.setattr(torch, "mm", counted)
    added = torch.addmm
    monkeypatch.setattr(
        torch,
        "addmm",
        lambda b, *two, **options: rows.append(len(two[0])) or added(b, *two, **options),
    )
    with torch.no_grad():
        experts(x, indices, weights)
        full = sum(rows)
        rows.clear()
        experts(x, torch.full_like(indices, width_of(experts)[1]), weights)
    assert full >= indices.numel()
    assert sum(rows) == 0


def test_no_grad_and_training_give_the_same_output():
    experts = experts_of("mixtral")
    x, indices, weights, _ = routing(experts, torch.float64)
    experts.config._experts_implementation = KERNEL
    with torch.no_grad():
        plain = experts(x, indices, weights)
    with torch.inference_mode():
        inferred = experts(x, indices, weights)
    # the pass that keeps its slopes multiplies in another order
    torch.testing.assert_close(plain, experts(x, indices, weights).detach(), **CLOSE[torch.float64])
    assert torch.equal(plain, inferred)


@pytest.mark.parametrize("family", ALL)
def test_a_whole_model_is_switched_and_agrees(family):
    model = lively(tiny_model(family))
    outputs = []
    for name in ("eager", KERNEL):
        model.set_experts_implementation(name)
        with torch.no_grad():
            outputs.append(model(input_ids=batch())[0])
    torch.testing.assert_close(*outputs, rtol=1e-3, atol=1e-4)


def test_autocast_runs_the_products_in_its_dtype():
    experts = experts_of("mixtral", torch.float32)
    x, indices, weights, _ = routing(experts, torch.float32)
    experts.config._experts_implementation = KERNEL
    plain = experts(x, indices, weights)
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        low = experts(x, indices, weights)
    assert low.dtype == plain.dtype
    torch.testing.assert_close(low, plain, rtol=0.1, atol=0.05)
    assert not torch.equal(low, plain)


def test_dense_weights_add_up_what_names_an_expert_twice():
    indices = torch.tensor([[0, 0, 2], [3, 9, 1]])
    weights = torch.tensor([[0.25, 0.5, 1.0], [0.5, 0.5, 2.0]])
    dense = dense_weights(indices, weights, 3)
    assert dense.tolist() == [[0.75, 0.0, 1.0], [0.0, 2.0, 0.0]]


def test_the_usual_layout_runs_by_dispatch_and_others_by_groups(monkeypatch):
    options = []
    monkeypatch.setattr(
        "tieline.models.experts.dispatch", lambda *a, **n: options.append(n) or dispatch(*a, **n)
    )
    for family in ("mixtral", "gpt_oss"):
        experts = experts_of(family)
        x, indices, weights, _ = routing(experts, torch.float64)
        experts_forward(experts, x, indices, weights)
    assert options == [{"activation": "swiglu"}]


def test_experts_in_another_layout_are_refused_by_name():
    experts = experts_of("mixtral")
    case = routing(experts, torch.float64)[:3]
    del experts.down_proj
    with pytest.raises(UnsupportedModelError, match=r"MixtralExperts.*'down_proj'.*None"):
        experts_forward(experts, *case)
    experts.down_proj = torch.zeros(8, 4, 4, dtype=torch.int8)
    with pytest.raises(UnsupportedModelError, match="int8"):
        experts_forward(experts, *case)


def test_registering_twice_is_fine_and_taking_a_name_is_refused():
    register_kernel()
    assert ALL_EXPERTS_FUNCTIONS[KERNEL] is experts_forward
    for name in ("grouped_mm", "eager"):
        with pytest.raises(ParameterError, match=name):
            register_kernel(name)
