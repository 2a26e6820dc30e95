"""Another router in place of a model's own: what is kept, saved and refused, on real models."""

import copy

import pytest
import torch

from tests.analysis.zoo import Letters, demo, random_text
from tests.models.tiny import lively, tiny_model
from tieline.core.errors import TielineError
from tieline.lab.command_settings import RerouteSettings
from tieline.lab.on_model.reroute import NEAR_ZERO, Rerouted, jump_at_zero, reroute
from tieline.lab.on_model.rerouted_model import ROUTER
from tieline.models.demo import demo_text
from tieline.models.model import Model
from tieline.models.saved_models import load_pretrained

FEW = {"fit_tokens": 256, "tokens": 256, "batch_size": 2}
pytestmark = pytest.mark.filterwarnings("ignore")


def routers_of(model):
    return [m for name, m in model.named_modules() if name.endswith(ROUTER)]


@pytest.fixture(scope="module")
def results():
    loaded = demo()
    names = ("cosine", "perturbed", "quadratic", "linear")
    return {name: reroute((loaded.module, loaded.tokenizer), router=name, **FEW) for name in names}


@pytest.mark.parametrize("router", ["cosine", "perturbed"])
def test_the_demo_model_keeps_nearly_all_choices(results, router):
    result = results[router]
    assert result.kept.value > 0.97
    assert abs(result.loss_change.value) < 0.02
    assert 0 < result.moved.value < 0.01
    for layer in result.layers:
        assert layer.kept.value > 0.95
        assert layer.fit.temperature > 0
        assert layer.gap_after == pytest.approx(layer.gap_before, rel=0.3)


@pytest.mark.parametrize("router", ["linear", "quadratic"])
def test_routers_that_contain_the_old_one_change_nothing(results, router):
    result = results[router]
    assert result.kept.value > 0.999
    assert result.moved.value < 1e-6


def test_the_original_is_left_alone(results):
    assert not routers_of(demo().module)


def test_scores_at_the_zero_vector_follow_the_law(results):
    """|z(δx̂)| <= δ / (τ2 t) if τ2 > 0; a plain cosine stays as large however small the token is."""
    for router in routers_of(results["perturbed"].rerouted):
        jump = jump_at_zero(router, torch.randn(64, router.d_model))
        assert 0 < jump <= NEAR_ZERO / (router.tau[1] * router.temperature)
    for router in routers_of(results["cosine"].rerouted):
        x = torch.randn(64, router.d_model)
        assert jump_at_zero(router, x) > 0.1
        torch.testing.assert_close(router(1e-6 * x), router(x), rtol=1e-3, atol=1e-4)
    at = {name: result.metrics["at_zero"] for name, result in results.items()}
    assert at["cosine"] > 1 > 1e-3 > at["perturbed"]


@pytest.fixture(scope="module")
def routers_with_inputs(results):
    """The perturbed routers of the demo model, in float64, each with the inputs that it meets."""
    result, calls = results["perturbed"], []
    model, ids = result.rerouted, demo().tokenizer(demo_text(), verbose=False)["input_ids"][:400]
    hooks = [
        router.register_forward_pre_hook(lambda router, args: calls.append((router, args[0])))
        for router in routers_of(model)
    ]
    with torch.no_grad():
        model(input_ids=torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    assert len(calls) == 4
    wide = [copy.deepcopy(router).double().requires_grad_(False) for router, _ in calls]
    return [(r, x.reshape(-1, r.d_model).double()) for r, (_, x) in zip(wide, calls, strict=True)]


def lipschitz(router):
    """‖w_e‖ / ((‖w_e‖ + τ1) τ2 t) of each expert, the steepest slope of its score."""
    length = router.weight.norm(dim=1)
    return length / ((length + router.tau[0]) * router.tau[1] * router.temperature)


def test_perturbed_scores_are_continuous_between_the_models_own_tokens(routers_with_inputs):
    """|z(x) − z(y)| <= 2 ‖x − y‖ / ((‖x‖ + τ2) t), and never above the Lipschitz constant."""
    for router, x in routers_with_inputs:
        pairs = [(x, x.roll(1, 0)), (x, x + 1e-6 * x.roll(7, 0)), (x, -x), (1e-3 * x, x)]
        for a, b in pairs:
            moved, step = (router(a) - router(b)).abs(), (a - b).norm(dim=1, keepdim=True)
            assert (moved <= step * lipschitz(router) * (1 + 1e-9)).all()
            near = 2 * step / ((a.norm(dim=1, keepdim=True) + router.tau[1]) * router.temperature)
            assert (moved <= near * (1 + 1e-9)).all()


def test_perturbed_scores_of_the_models_own_tokens_vanish_at_zero_at_the_rate_of_the_law(
    routers_with_inputs,
):
    """z(δx) = δ w·x / ((‖w‖ + τ1) τ2 t) to first order in δ, and z(0) = 0 exactly."""
    for router, x in routers_with_inputs:
        assert router(0 * x).abs().max() == 0
        length = router.weight.norm(dim=1) + router.tau[0]
        slope = x @ router.weight.T / (length * router.tau[1] * router.temperature)
        size = x.norm(dim=1, keepdim=True)
        for delta in (1e-3, 1e-6, 1e-9):
            scale = delta * router.tau[1] / size
            law = scale * slope / (1 + delta)
            torch.testing.assert_close(router(scale * x), law, rtol=1e-9, atol=0)
            assert (router(scale * x).abs() <= scale * size * lipschitz(router)).all()


@pytest.mark.parametrize("family", ["olmoe", "qwen3_moe", "deepseek_v3"])
def test_other_families_are_rerouted_and_saved(family, tmp_path):
    source = (lively(tiny_model(family)), Letters())
    result = reroute(source, router="perturbed", text=random_text(2000), **FEW)
    softmax = family != "deepseek_v3"
    assert result.kept.value > (0.97 if softmax else 0.6)
    result.rerouted.save_pretrained(tmp_path)
    again = load_pretrained(tmp_path).eval()
    ids = torch.arange(3, 35).view(2, 16)
    with torch.no_grad():
        assert torch.equal(again(input_ids=ids)[0], result.rerouted(input_ids=ids)[0])
    temperatures = [router.temperature for router in routers_of(again)]
    assert temperatures == [layer.fit.temperature for layer in result.layers]


def test_a_saved_model_is_loaded_by_name_and_not_rerouted_twice(results, tmp_path):
    results["perturbed"].save(tmp_path / "new")
    loaded = Model.open(tmp_path / "new")
    assert len(routers_of(loaded.module)) == len(results["perturbed"].layers)
    with pytest.raises(TielineError, match="rerouted already"):
        reroute(tmp_path / "new", router="cosine", **FEW)


def test_the_result_reads_back_and_is_drawn(results, tmp_path):
    result = results["perturbed"]
    again = Rerouted.from_dict({k: v for k, v in result.to_dict().items() if k != "format"})
    assert again.layers == result.layers
    assert "zero vector" in result.to_html()
    assert "perturbed cosine" in repr(result)
    with pytest.raises(TielineError, match="no model to save"):
        again.save(tmp_path / "x")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"router": "spherical"}, "spherical"),
        ({"router": "linear", "temperature": 0.1}, "temperature is an option of another router"),
        ({"router": "cosine", "tau": (0.1, 0.1)}, "tau is an option of another router"),
        ({"router": "perturbed", "rank": 4}, "rank is an option of another router"),
    ],
)
def test_options_of_another_router_are_refused(options, reason):
    with pytest.raises(TielineError, match=reason):
        RerouteSettings(**options)
