"""Softening: the terms of the prediction by brute force, and their sum against measured losses."""

import math

import pytest
import torch

from tests.analysis.zoo import Letters, random_text
from tests.models.tiny import lively, tiny_model
from tieline.core.errors import TielineError
from tieline.lab.on_model import soften as module
from tieline.lab.on_model.soft_choice import (
    MOMENTS,
    WallTokens,
    change_parts,
    soft_share,
    softened_routers,
)
from tieline.lab.on_model.soften import (
    COST_UNIT_TOKENS,
    SoftenSizes,
    sizes_for_tokens,
    soften,
    soften_cost,
    soften_sample,
)
from tieline.lab.on_model.subject import Subject
from tieline.lab.report.soften import soften_sentences
from tieline.models import find_routers
from tieline.run.corpus import tokenise


def subject(model, tokens, length):
    text = tokenise(Letters(), random_text(tokens), tokens, length)
    return Subject(model, Letters(), "tiny", tuple(find_routers(model)), text, {})


SMALL = SoftenSizes(tokens=960, length=24, first=0.04, levels=3, near=0.2, exact=10_000)


def top1():
    model = lively(tiny_model("olmoe", num_experts_per_tok=1))
    return louder(model)


def louder(model):
    """Scale up the experts, so that their outputs matter to the loss."""
    for name, weight in model.named_parameters():
        if "experts" in name or "lm_head" in name:
            weight.mul_(4)
    return model


MODELS = {"one": top1, "two": lambda: louder(lively(tiny_model("mixtral")))}


@pytest.fixture(scope="module", params=list(MODELS))
def work(request):
    model = MODELS[request.param]()
    names = tuple(find_routers(model))
    sample = subject(model, SMALL.tokens, SMALL.length)
    return model, module._SoftenRun(sample, names, SMALL, 8, None)


@pytest.mark.parametrize("form", list(MOMENTS))
def test_moments_are_those_of_the_share(form):
    k = 1 if form == "softmax" else 2
    u = torch.linspace(0, 60, 600_001, dtype=torch.float64)
    share = soft_share(u, 1.0, k)
    for power, moment in enumerate(MOMENTS[form], start=1):
        assert torch.trapezoid(share**power, u).item() == pytest.approx(moment, rel=1e-6)


def test_the_gradient_is_the_slope_of_a_single_swap(work):
    _, run = work
    layer = run._sample.trace.layers[0]
    form = "softmax" if layer.facts.k == 1 else "projection"
    gradient = run._output_gradients([layer])[layer.name]
    walls = run._wall_tokens(layer, gradient, form)
    indices = torch.arange(0, len(walls.tokens), 12)
    tiny = 0.01
    slopes = run._loss_changes(layer, walls.tokens[indices], tiny) / tiny
    scale = walls.first.abs().median().item()
    assert (
        torch.isclose(slopes, walls.first[indices], rtol=0.1, atol=0.1 * scale).double().mean()
        > 0.8
    )


def test_a_softened_run_is_the_sum_of_its_tokens(work):
    model, run = work
    layer = run._sample.trace.layers[-1]
    k, gaps = layer.facts.k, layer.gap
    width = gaps.quantile(0.05).item() * (1.0 if k > 1 else 0.1)
    near = (gaps < width * (1.0 if k > 1 else 12.0)).nonzero().squeeze(1)
    total = 0.0
    for token in near:
        share = soft_share(gaps[token], width, k).item()
        total += run._loss_changes(layer, token[None], share).item()
    with softened_routers(model, {layer.name: width}), torch.inference_mode():
        moved = (run._sequence_losses() - run._sample.losses).sum().item()
    assert moved == pytest.approx(total, rel=0.1, abs=1e-4)


@pytest.mark.parametrize("name", list(MODELS))
def test_the_predicted_slope_is_that_of_the_smallest_widths(name):
    model = MODELS[name]()
    softening = soften_sample(subject(model, SMALL.tokens, SMALL.length), SMALL)
    for layer in softening.layers:
        assert layer.status == "ok"
        assert layer.form == ("softmax" if name == "one" else "projection")
        assert [level.agrees for level in layer.levels] == [True] * 3
        assert layer.near == layer.exact > 100
        assert layer.constant >= abs(layer.levels[0].change.value) / layer.levels[0].width
        assert 1 <= layer.half <= layer.near
        sizes = [abs(token.effect) for token in layer.deciding]
        assert len(sizes) == 5
        first = layer.levels[0].ratio
        assert abs(first.value - 1) <= max(0.15, 3 * first.standard_error)
    # no layer above can flip: the same tokens, hard and soft, differ by third order alone
    for level in softening.layers[-1].levels[:2]:
        assert level.ratio.value == pytest.approx(1, abs=0.15)
        left = level.ratio.standard_error * abs(level.expected.value)
        assert left < 0.2 * level.slope.standard_error
    assert all(level.agrees for level in softening.together)
    total = sum(x.predicted.value * x.levels[0].width for x in softening.layers)
    assert softening.predicted.value == pytest.approx(total)
    assert "oft choice would" in soften_sentences(softening)[0]


def test_the_change_of_a_width_is_that_of_its_tokens_and_unknown_beyond_the_near_ones():
    gaps = torch.tensor([0.1, 0.4, 0.9], dtype=torch.float64)
    first, bend = torch.tensor([2.0, -1.0, 5.0]), torch.tensor([1.0, 3.0, 7.0])
    near = torch.arange(3)
    walls = WallTokens(near, gaps, first, first, first.double(), bend.double(), near)
    for form, k in (("softmax", 1), ("projection", 2)):
        width = 0.15 if k == 1 else 0.5
        share = soft_share(gaps, width, k)
        expected = share * first + share**2 * bend
        assert torch.allclose(change_parts(walls, form, width), expected)
        half = walls._replace(exact=near[:1], bend=torch.tensor([1.0, 0.0, 0.0]).double())
        assert change_parts(half, form, width)[0] == share[0] * 2 + 3 * share[0] ** 2
        assert change_parts(walls, form, 1.0) is None


def test_a_larger_sample_computes_more_tokens_again():
    assert sizes_for_tokens(4096) == SoftenSizes()
    assert sizes_for_tokens(65536).exact == 1024
    assert sizes_for_tokens(512).exact == 64


def test_a_model_in_low_precision_is_told_to_run_in_float32():
    sizes = SoftenSizes(levels=1, exact=4)
    for model in (MODELS["two"](), MODELS["two"]().bfloat16()):
        softening = soften_sample(subject(model, 240, 24), sizes)
        assert ("--dtype fp32" in soften_sentences(softening)[-1]) == (
            model.dtype == torch.bfloat16
        )


def test_groups_are_measured_and_not_predicted():
    model = lively(tiny_model("deepseek_v3"))
    softening = soften_sample(subject(model, 240, 24), SoftenSizes(levels=1))
    assert all("groups" in layer.status for layer in softening.layers)
    assert all(layer.levels[0].missed is None for layer in softening.layers)
    assert softening.predicted.value is None


def test_dense_experts_cost_more_and_a_high_cost_is_refused_before_any_run():
    top1_model, topk_model = top1(), lively(tiny_model("olmoe"))
    settings = SoftenSizes(tokens=1000, exact=0)
    costs = [soften_cost(m, tuple(find_routers(m)), settings) for m in (top1_model, topk_model)]
    assert costs[1] == pytest.approx((4 + 5 * 3) * 1000 / COST_UNIT_TOKENS)
    assert costs[0] > costs[1]
    with pytest.raises(TielineError, match=r"about \d+ times a forward pass .*max_cost 0.01"):
        soften((top1_model, Letters()), text=random_text(400), sizes=settings, max_cost=0.01)


def test_a_softening_of_a_model_is_a_result():
    sizes = SoftenSizes(tokens=240, length=24, levels=1, exact=8)
    steps = []
    softening = soften(
        (MODELS["two"](), Letters()),
        text=random_text(240),
        sizes=sizes,
        progress=lambda *step: steps.append(step),
    )
    again = type(softening).from_dict(
        {k: v for k, v in softening.to_dict().items() if k not in ("format", "version")}
    )
    assert again == softening
    assert math.isclose(softening.tokens, 240)
    assert any(stage.startswith("soften, about") for stage, *_ in steps)
    assert "Soft or hard" in softening.to_html()
    assert soften_sentences(softening)[0] in softening.to_html()
    assert softening.metrics["loss"] == softening.loss.value
