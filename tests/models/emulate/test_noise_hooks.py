"""Noise where it was asked for, of the size that was asked for, and nowhere afterwards."""

import pytest
import torch

from tests.models.tiny import WIDTH, batch, lively, tiny_model
from tieline.core.errors import ParameterError, UnsupportedModelError
from tieline.models import find_routers
from tieline.models.emulate import score_noise, state_noise


def noise_source():
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize("family", ["olmoe", "gpt_oss", "deepseek_v3"])
def test_logits_get_noise_of_the_standard_deviation_asked_for(family):
    router = next(iter(find_routers(lively(tiny_model(family))).values()))
    x = torch.randn(4000, WIDTH)
    clean = router(x)[0]
    with torch.inference_mode(), score_noise(router, 0.25, noise_source()):
        noise = router(x)[0] - clean
    assert noise.std().item() == pytest.approx(0.25, rel=0.02)
    assert torch.equal(router(x)[0], clean)


def test_router_inputs_get_noise_in_proportion_to_their_size():
    router = next(iter(find_routers(lively(tiny_model("olmoe"))).values()))
    inputs = []
    x = torch.randn(3000, WIDTH) * torch.tensor([0.1, 10.0]).repeat(1500)[:, None]
    with state_noise(router, 0.5, noise_source()):
        handle = router.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
        router(x)
        handle.remove()
    added = (inputs[0] - x) / x.square().mean(dim=1, keepdim=True).sqrt()
    assert added[::2].std().item() == pytest.approx(0.5, rel=0.02)
    assert added[1::2].std().item() == pytest.approx(0.5, rel=0.02)


def test_noise_of_the_whole_model_is_on_what_a_layer_hands_on():
    model, inputs = lively(tiny_model("olmoe")), []
    model.model.layers[1].register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    model(input_ids=batch())
    with state_noise(model, 0.1, noise_source(), "all"):
        model(input_ids=batch())
    with state_noise(model, 1e-7, noise_source()):
        model(input_ids=batch())
    model(input_ids=batch())
    change = (inputs[1] - inputs[0]).norm() / inputs[0].norm()
    assert change.item() == pytest.approx(0.1, rel=0.1)
    assert torch.allclose(inputs[2], inputs[0], atol=1e-6)
    assert torch.equal(inputs[3], inputs[0])


def test_what_cannot_be_perturbed_is_refused():
    model = tiny_model("olmoe")
    with pytest.raises(ParameterError, match="sigma=-1"), score_noise(model, -1.0, noise_source()):
        pass
    with pytest.raises(ParameterError, match="ratio=-1"), state_noise(model, -1.0, noise_source()):
        pass
    with pytest.raises(UnsupportedModelError), score_noise(tiny_model("dbrx"), 1.0, noise_source()):
        pass
