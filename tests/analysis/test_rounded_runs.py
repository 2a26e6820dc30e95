"""The noise of rounding the whole model: its size, and the tie orders at that size."""

import math
from contextlib import nullcontext

import pytest
import torch

from tests.analysis.zoo import Letters, random_text
from tests.models.tiny import lively, tiny_model
from tieline.analysis.rounded_runs import measure_router_noise, measure_serving
from tieline.measure.boundary import order_shares, tie_order
from tieline.models import capture, find_routers
from tieline.models.emulate import emulate
from tieline.models.model import Model
from tieline.run.corpus import tokenise


def report(model, tokens=240):
    text = tokenise(Letters(), random_text(tokens), tokens, 40)
    return measure_router_noise(model, tuple(find_routers(model)), text, 3), text


@pytest.fixture(scope="module")
def mixtral():
    return lively(tiny_model("mixtral"))


@pytest.fixture(scope="module")
def reported(mixtral):
    return report(mixtral)


def by_hand(model, text):
    """Scores (T, E) of the second router, clean and rounded, and the changes of its input."""
    runs = []
    for rounded in (False, True):
        how = emulate(model, "bf16", "all") if rounded else nullcontext()
        with torch.inference_mode(), how, capture(model, keep="inputs", ranks="all") as recorder:
            model(input_ids=torch.stack(text.sequences).to(model.device))
        layer = recorder.trace().layers[1]
        scores = torch.zeros_like(layer.scores, dtype=torch.float64)
        runs.append((scores.scatter_(1, layer.experts.long(), layer.scores.double()), layer))
    return runs


def test_sizes_orders_and_flips_are_those_of_two_runs_by_hand(mixtral, reported):
    effects, text = reported
    (clean, layer), (rounded, other) = by_hand(mixtral, text)
    top = layer.experts[:, 1:3].long()
    delta = (rounded - clean).gather(1, top).diff(dim=1).abs()
    noise = effects.layers[1]
    assert noise.epsilon == pytest.approx(delta.median().item() / 0.6745, rel=1e-9)
    assert noise.orders == pytest.approx(
        order_shares(tie_order(clean, 2, noise.epsilon), 6).tolist()
    )
    assert math.isclose(sum(noise.orders), 1)
    flips = (layer.experts[:, :2].sort().values != other.experts[:, :2].sort().values).any(dim=1)
    assert noise.flipped.value == flips.double().mean().item()


def test_what_cannot_be_measured_says_why():
    half, _ = report(lively(tiny_model("mixtral")).to(torch.bfloat16))
    assert not half.layers
    assert "runs in bfloat16" in half.status
    inside, _ = report(lively(tiny_model("dbrx")))
    assert "no module of its own" in inside.status


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_in_half_precision_is_served_as_the_same_in_float32(dtype):
    half = lively(tiny_model("mixtral")).to(dtype)
    stored = {name: x.data_ptr() for name, x in half.named_parameters()}
    exact = lively(tiny_model("mixtral")).to(dtype).float()
    text = tokenise(Letters(), random_text(240), 240, 40)
    (served, noise), (expected, _) = (
        measure_serving(Model(model), tuple(find_routers(model)), text, 3, "bf16")
        for model in (half, exact)
    )
    assert served == expected
    assert (served.kl.value or 0) > 0
    assert noise.status == "ok"
    assert {name: x.data_ptr() for name, x in half.named_parameters()} == stored
    assert {x.dtype for x in half.parameters()} == {dtype}
