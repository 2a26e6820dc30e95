"""Slices through the hidden states of real models, against their routers."""

import numpy as np
import pytest
import torch

from tests.analysis.zoo import Letters, random_text
from tests.models.tiny import lively, tiny_model
from tieline.analysis.rounded_runs import measure_router_noise
from tieline.core.errors import TielineError
from tieline.lab.on_model.slice import SliceChoice, coalitions_at, router_choice, slice_model
from tieline.lab.tropical.plane_cells import plane_through, slice_router
from tieline.models import capture, find_routers
from tieline.run.corpus import tokenise

FAMILIES = ["mixtral", "qwen3_moe", "gpt_oss"]


def cut_model(family, choice, tokens=120):
    model = lively(tiny_model(family))
    return model, slice_of(model, choice, tokens)


def slice_of(model, choice, tokens=120):
    options = {"text": random_text(tokens), "tokens": tokens, "sequence_length": 40}
    return slice_model((model, Letters()), layer=choice.layer, places=choice.tokens, **options)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_router_chooses_the_coalitions_of_the_picture(family):
    model, drawn = cut_model(family, SliceChoice(1))
    assert drawn.layer == list(find_routers(model))[1]
    assert drawn.checked >= 1000
    assert drawn.agreed + drawn.undecided == drawn.checked
    assert drawn.undecided <= 5
    assert len(drawn.cut.cells) > 1


def test_a_router_in_bfloat16_is_judged_by_its_own_precision():
    model = lively(tiny_model("mixtral")).bfloat16()
    drawn = slice_of(model, SliceChoice(1))
    assert drawn.agreed + drawn.undecided == drawn.checked
    assert drawn.undecided <= 0.05 * drawn.checked


def test_a_wrong_picture_is_found_out():
    model, drawn = cut_model("mixtral", SliceChoice(0, (1, 50, 90)))
    router = model.get_submodule(drawn.layer)
    points = torch.randn(3, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    turned = slice_router(points, router.weight.flip(0), None, 2)
    right = slice_router(points, router.weight, None, 2)
    random = np.random.default_rng(1)
    flat = np.array(right.window[0]) + random.random((500, 2)) * np.ptp(right.window, axis=0)
    plane = plane_through(points)
    _, chosen = router_choice(model, router, torch.from_numpy(plane.origin + flat @ plane.axes))
    chosen = chosen.sort(dim=1).values
    assert torch.equal(coalitions_at(right, flat), chosen)
    assert not torch.equal(coalitions_at(turned, flat), chosen)


def test_the_three_tokens_are_named_and_the_band_is_the_noise():
    model, drawn = cut_model("mixtral", SliceChoice(0, (1, 50, 90)))
    text = tokenise(Letters(), random_text(120), 120, 40)
    assert [(p.document, p.position) for p in drawn.points] == [(0, 1), (1, 10), (2, 10)]
    assert [p.text for p in drawn.points] == [text.pieces[i] for i in (1, 50, 90)]
    with torch.inference_mode(), capture(model) as recorder:
        model(input_ids=torch.stack(text.sequences))
    for point, token in zip(drawn.points, (1, 50, 90), strict=True):
        chosen = recorder.trace().layers[0].experts[token, :2].sort().values
        assert point.experts == tuple(chosen.tolist())
    noise = measure_router_noise(model, tuple(find_routers(model)), text, 8)
    assert drawn.cut.epsilon == noise.layers[0].epsilon > 0
    assert 0 < drawn.cut.band_share < 1


@pytest.mark.parametrize(
    ("choice", "tokens", "why"),
    [
        (SliceChoice(), 2, "tokens must be at least 3, got 2"),
        (SliceChoice(0, (1, 1, 2)), 40, "three different tokens, got 1, 1, 2"),
        (SliceChoice(0, (1, 2)), 40, "three different tokens, got 1, 2"),
        (SliceChoice(0, (1, 2, 40)), 40, "no tokens 1, 2, 40: the text has tokens 0 to 39"),
        (SliceChoice(7), 40, "no layer 7"),
        (SliceChoice("gate"), 40, "no layer 'gate'"),
    ],
)
def test_what_cannot_be_cut_is_refused(choice, tokens, why):
    with pytest.raises(TielineError, match=why):
        cut_model("mixtral", choice, tokens)


def test_walls_that_are_not_flat_are_refused_with_the_reason():
    with pytest.raises(TielineError, match="no slice: not answerable: experts are chosen within"):
        cut_model("deepseek_v3", SliceChoice())
