"""Slices through the hidden states of real models, against their routers."""

import numpy as np
import pytest
import torch

from tests.analysis.zoo import Letters, words
from tests.models.tiny import lively, tiny_model
from tieline.analysis.inspect import inspect
from tieline.core.errors import TielineError
from tieline.lab.on_model.slice import SliceChoice, coalition_at, router_choice
from tieline.lab.tropical.pictures import plane_through, slice_router
from tieline.run.corpus import tokenise

FAMILIES = ["mixtral", "qwen3_moe", "gpt_oss"]


def cut_model(family, choice, tokens=120):
    model = lively(tiny_model(family))
    options = {"tokens": tokens, "sequence_length": 40, "jumps": False, "cut": choice}
    return model, inspect((model, Letters()), text=words(tokens), **options)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_router_chooses_the_coalitions_of_the_picture(family):
    _, found = cut_model(family, SliceChoice(1))
    drawn = found.slice
    assert drawn.layer == found.measures.layers[1].name
    assert drawn.checked >= 1000
    assert drawn.agreed + drawn.undecided == drawn.checked
    assert drawn.undecided <= 5
    assert len(drawn.cut.cells) > 1


def test_a_router_in_bfloat16_is_judged_by_its_own_precision():
    model = lively(tiny_model("mixtral")).bfloat16()
    options = {"tokens": 120, "sequence_length": 40, "jumps": False, "cut": SliceChoice(1)}
    drawn = inspect((model, Letters()), text=words(120), **options).slice
    assert drawn.agreed + drawn.undecided == drawn.checked
    assert drawn.undecided <= 0.05 * drawn.checked


def test_a_wrong_picture_is_found_out():
    model, found = cut_model("mixtral", SliceChoice(0, (1, 50, 90)))
    router = model.get_submodule(found.slice.layer)
    points = torch.randn(3, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    turned = slice_router(points, router.weight.flip(0), None, 2)
    right = slice_router(points, router.weight, None, 2)
    random = np.random.default_rng(1)
    flat = np.array(right.window[0]) + random.random((500, 2)) * np.ptp(right.window, axis=0)
    plane = plane_through(points)
    _, chosen = router_choice(model, router, torch.from_numpy(plane.origin + flat @ plane.axes))
    chosen = chosen.sort(dim=1).values
    assert torch.equal(coalition_at(right, flat), chosen)
    assert not torch.equal(coalition_at(turned, flat), chosen)


def test_the_three_tokens_are_named_and_the_band_is_the_noise():
    _, found = cut_model("mixtral", SliceChoice(0, (1, 50, 90)))
    drawn = found.slice
    assert [(p.document, p.position) for p in drawn.points] == [(0, 1), (1, 10), (2, 10)]
    pieces = tokenise(Letters(), words(120), 120, 40).pieces
    assert [p.text for p in drawn.points] == [pieces[i] for i in (1, 50, 90)]
    for point, place in zip(drawn.points, (1, 50, 90), strict=True):
        seen = found.trace.layers[0].experts[place, :2].sort().values
        assert point.experts == tuple(seen.tolist())
    assert drawn.cut.epsilon == found.noise.layers[0].epsilon > 0
    assert 0 < drawn.cut.band_share < 1


@pytest.mark.parametrize(
    ("choice", "tokens", "why"),
    [
        (SliceChoice(), 2, "three tokens, the text has 2"),
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
