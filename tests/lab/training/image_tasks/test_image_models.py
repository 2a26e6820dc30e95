"""Shapes, gradients and the sizes that the paper states of the image classifiers."""

import pytest
import torch

from tieline.core.errors import TielineError
from tieline.lab.training.config import GateConfig, MixtureConfig, PatchConfig
from tieline.lab.training.image_tasks import MixtureClassifier, PatchClassifier
from tieline.routing import CosineRouter, MoE, SmoothTopK, collect_routing

HARD = GateConfig(name="hard", k=2)
COSINE = GateConfig(
    name="smooth",
    k=2,
    router="cosine",
    router_options={"d_proj": 4, "tau": (0.1, 0.1)},
    gate="smooth",
    gate_options={"b": 50.0},
)
MIXTURE = MixtureConfig(layers=2, n_experts=4, d_hidden=8, side=4, classes=3)
PATCHES = PatchConfig(d_model=8, heads=2, d_hidden=8, side=8, classes=3)


def batch(side, n=5):
    return {
        "pixels": torch.randint(0, 256, (n, side, side, 3), dtype=torch.uint8),
        "labels": torch.arange(n) % 3,
    }


@pytest.mark.parametrize("gate", [HARD, COSINE], ids=["hard", "smooth cosine"])
@pytest.mark.parametrize(
    ("kind", "shape", "routed"), [(MixtureClassifier, MIXTURE, 2), (PatchClassifier, PATCHES, 2)]
)
def test_logits_loss_gradients_and_routed_layers(kind, shape, routed, gate):
    model = kind(shape, gate)
    with collect_routing(model) as records:
        output = model(**batch(shape.side))
    assert output.logits.shape == (5, 3)
    assert len(records) == routed
    expected = torch.nn.functional.cross_entropy(output.logits, torch.arange(5) % 3)
    torch.testing.assert_close(output.loss, expected)
    output.loss.backward()
    assert model.head.weight.grad.abs().sum() > 0
    for record in records:
        assert record.layer.router.weight.grad.abs().sum() > 0
        assert (record.routing.active >= 2).all()


def test_without_labels_there_is_no_loss():
    model = MixtureClassifier(MIXTURE, HARD)
    assert model(pixels=batch(4)["pixels"]).loss is None


def test_only_the_last_blocks_route_and_as_the_gate_says():
    model = PatchClassifier(PatchConfig(layers=3, routed=1), COSINE)
    kinds = [isinstance(block.mlp, MoE) for block in model.blocks]
    assert kinds == [False, False, True]
    layer = model.blocks[2].mlp
    assert isinstance(layer.router, CosineRouter)
    assert layer.router.tau == (0.1, 0.1)
    assert isinstance(layer.gate, SmoothTopK)
    assert layer.gate.b == 50


def test_the_papers_layer_has_its_sizes():
    shape = MixtureConfig()
    with torch.device("meta"):
        model = MixtureClassifier(shape, GateConfig(name="hard", k=4))
    layer = model.layers[0]
    assert (layer.router.d_model, layer.router.n_experts) == (3072, 32)
    assert layer.experts.d_hidden == 128
    assert len(model.layers) == 4
    assert sum(p.numel() for p in layer.experts.parameters()) == 32 * (2 * 3072 * 128 + 128 + 3072)


def test_the_layers_are_residual():
    model = MixtureClassifier(MIXTURE, HARD).eval()
    for layer in model.layers:
        torch.nn.init.zeros_(layer.experts.w_out)
    pixels = batch(4)["pixels"]
    straight = model.head(model.norms[-1](pixels.float().flatten(1) / 127.5 - 1))
    torch.testing.assert_close(model(pixels=pixels).logits, straight)


@pytest.mark.parametrize(
    "fields", [{"routed": 4}, {"routed": 0}, {"heads": 5}, {"side": 30}], ids=str
)
def test_impossible_shapes_are_refused(fields):
    with pytest.raises(TielineError, match=str(next(iter(fields.values())))):
        PatchConfig(**fields)
    with pytest.raises(TielineError, match="layers=0"):
        MixtureConfig(layers=0)
