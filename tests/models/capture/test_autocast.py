"""Capture, replay and monitor under autocast, which makes float32 logits bfloat16."""

import pytest
import torch

from tests.models.tiny import SUPPORTED, batch, lively, tiny_model
from tieline.analysis.monitor import RoutingMonitor
from tieline.models import capture
from tieline.models.replay import replay

IDS = batch(64)
FAST = ("deepseek_v3", "minimax_m2", "mistral_large4", "longcat_flash", "olmoe")
FAMILIES = [
    pytest.param(name, marks=[] if name in FAST else [pytest.mark.slow])
    for name in SUPPORTED
    if name != "dbrx"  # its experts add bfloat16 to float32 and raise without Tieline too
]


def states(model):
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        output = model(input_ids=IDS)
    return output.logits if hasattr(output, "logits") else output.last_hidden_state


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", FAMILIES)
def test_autocast_is_captured_replayed_and_watched(family):
    model = lively(tiny_model(family))
    plain = states(model)
    with capture(model) as recorder:
        assert torch.equal(states(model), plain)
    for weights in ("live", "recorded"):
        with replay(model, recorder.trace(), weights) as replayed:
            assert torch.equal(states(model), plain)
        assert set(replayed.changed.values()) == {0}
    with RoutingMonitor(model, every=1, training_only=False, check_losses=False) as monitor:
        states(model)
        assert "routing/gap_p50" in monitor.step()


def test_distances_are_not_rounded_by_autocast():
    """d = gap / |w_i - w_j| of the scores as captured, whose products autocast would round."""
    model = lively(tiny_model("olmoe"))
    with capture(model, ranks="all") as recorder:
        states(model)
    for layer in recorder.trace().layers:
        weight = model.get_submodule(layer.name).weight.double().cpu()
        k, scores, experts = layer.facts.k, layer.scores.double(), layer.experts.long()
        inside, outside = weight[experts[:, :k]], weight[experts[:, k:]]
        length = (inside[:, :, None] - outside[:, None]).norm(dim=-1)
        gaps = scores[:, :k, None] - scores[:, None, k:]
        nearest = (gaps / length).flatten(1).amin(dim=1)
        torch.testing.assert_close(layer.distance.double(), nearest, rtol=1e-4, atol=1e-6)
