"""Shapes of noise: nothing in sound noise, and each planted shape by its name."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import tieline as tl
from tests.analysis.planted import layer_of, trace_of
from tieline.analysis.noise_shapes import (
    NoiseShape,
    Outlier,
    TokenKeys,
    find_noise_patterns,
    find_patterns_without_reference,
    flip_lag,
    measure_noise_shape,
)
from tieline.analysis.score_noise import layer_noise

TOKENS, LENGTH, EXPERTS = 4096, 256, 12
PLACES = TokenKeys(np.arange(TOKENS) // LENGTH, np.arange(TOKENS) % LENGTH)
EVERY = np.ones(TOKENS, dtype=bool)


def scores(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(TOKENS, EXPERTS, generator=generator).double()


def shape_of(size, before=None, bias=None, added=0.0):
    """Shape of normal noise of this size (a number, or one per token), plus something added."""
    z = scores(0)
    other = z + torch.as_tensor(size).reshape(-1, 1) * scores(1) + added
    noise = layer_noise(layer_of(z, 3, "x"), layer_of(other, 3, "x"))
    return measure_noise_shape("x", noise, EVERY, PLACES, before, bias)


def kinds(*shapes):
    return [pattern.kind for pattern in find_noise_patterns(shapes)]


def quiet(name="w", relative=0.05):
    return NoiseShape(name, relative, TOKENS)


def test_sound_noise_has_no_shape():
    sizes = 0.05 * scores(2)[:, 0].exp()
    level = layer_noise(layer_of(scores(0), 3, "x"), layer_of(scores(0), 3, "x")).level
    before = (level, scores(3).argsort(dim=1)[:, :3].numpy())
    shape = shape_of(sizes, before, bias=scores(4)[0].numpy())
    assert kinds(quiet(), shape) == []
    assert abs(shape.rise[0]) < 1
    assert shape.offset < 0.05


@pytest.mark.parametrize("power", [1.0, -1.0])
def test_growth_along_positions_is_found(power):
    positions = torch.from_numpy(PLACES.positions).double()
    shape = shape_of(0.2 * ((positions + 1) / 32) ** power)
    assert kinds(shape, quiet()) == ["positions"]
    assert find_noise_patterns([shape])[0].effect == shape.rise[0]
    assert shape.rise[0] == pytest.approx(2 * power * math.log(256 / 3), rel=0.1)
    faint = kinds(shape._replace(relative=0.01), quiet("w", 0.01))
    assert faint == (["positions"] if power < 0 else [])  # another attention kernel may do it


def test_one_document_is_found_and_two_are_not_one():
    loud = torch.where(torch.from_numpy(PLACES.documents == 5), 0.5, 0.05)
    shape = shape_of(loud)
    assert kinds(shape) == ["document"]
    assert shape.document.group == 5
    many = torch.where(torch.from_numpy(PLACES.documents % 2 == 0), 0.5, 0.05)
    assert kinds(shape_of(many)) == []


def test_the_loudest_of_several_loud_documents_is_measured_against_the_median_one():
    few = np.isin(PLACES.documents, [2, 5, 6])
    noise = np.where(PLACES.documents == 5, 0.6, np.where(few, 0.5, 0.05))
    shape = shape_of(torch.from_numpy(noise))
    assert kinds(shape) == []
    assert shape.loud_document.number == 5
    assert shape.loud_document.ratio == pytest.approx(12, rel=0.1)
    assert shape.loud_document.relative == pytest.approx(12 * shape.relative, rel=0.2)


def test_an_expert_of_the_layer_before_is_found():
    chosen = scores(3).argsort(dim=1)[:, :3].numpy()
    level = np.full(TOKENS, -6.0)
    loud = np.where((chosen == 4).any(1) | (chosen == 7).any(1), 0.3, 0.05)
    shape = shape_of(torch.from_numpy(loud), (level, chosen))
    assert kinds(quiet(), shape) == ["expert"]
    pattern = find_noise_patterns([quiet("before"), shape])[0]
    assert pattern.layer == "before"
    assert shape.expert.group in (4, 7)


def test_one_row_of_a_router_is_found():
    row = torch.zeros(EXPERTS).double()
    row[2] = 1.0
    shape = shape_of(0.01, added=row * scores(5))
    assert kinds(shape) == ["row"]
    assert shape.row.group == 2


def test_offsets_of_experts_are_found_by_themselves_and_by_the_bias():
    bias = 0.5 * scores(6)[0]
    alone = shape_of(0.05, added=-bias)
    assert kinds(alone, quiet()) == ["offset"]
    assert alone.offset > 0.8
    assert kinds(alone._replace(offset=0.75), quiet()) == ["layer"]  # coarse rows of a router
    like = shape_of(0.3, added=-bias, bias=bias.numpy())
    assert like.likeness > 0.9
    rounded = shape_of(1e-5, added=-0.01 * bias, bias=bias.numpy())
    assert rounded.offset > 0.35
    assert rounded.likeness is None
    assert kinds(like, like._replace(name="y")) == ["offset"]
    everywhere = [alone, alone._replace(name="y")]
    assert "offset" not in kinds(*everywhere)  # rounded router weights may shift every layer


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([0.01, 0.02, 0.03], []),
        ([0.01, 0.05, 0.012], ["layer"]),
        ([0.05, 0.01, 0.01], ["layer"]),
        ([0.01, 0.1, 0.1], []),  # the first after what is rounded
        ([0.0, 0.1, 0.1], []),
        ([0.0, 0.1, 0.02], ["layer"]),
        ([None, 0.1, None], []),
    ],
)
def test_a_layer_stands_out_from_those_beside_it(sizes, expected):
    shapes = [quiet(str(i), size) for i, size in enumerate(sizes)]
    assert kinds(*shapes) == expected
    few = [shape._replace(tokens=30) for shape in shapes]
    assert kinds(*few) == []


def test_the_most_specific_pattern_is_named_and_uncertain_ones_are_not():
    loud = quiet()._replace(document=Outlier(1, 9.0, 0.1), expert=Outlier(2, 5.0, 0.1))
    assert kinds(quiet("v"), loud) == ["expert"]
    assert kinds(quiet("v"), loud._replace(expert=Outlier(2, 5.0, 2.0))) == []


def test_patterns_in_the_rounding_of_float32_that_flip_no_token_are_none():
    loud = quiet()._replace(relative=1e-6, document=Outlier(1, 9.0, 0.1))
    assert kinds(loud) == []
    assert kinds(loud._replace(flips=0.01)) == ["document"]
    assert kinds(loud._replace(relative=1e-3)) == ["document"]


def test_flips_that_have_the_experts_of_a_neighbour_are_a_lag():
    chosen = scores(3).argsort(dim=1)[:, :3].numpy()
    late = np.roll(chosen, 1, axis=0)
    flipped = (np.sort(late, 1) != np.sort(chosen, 1)).any(1)
    lag, share, count = flip_lag(chosen, late, flipped, PLACES)
    assert (lag, count) == (1, int(flipped.sum()) - 16)
    assert share > 0.95
    assert flip_lag(chosen, np.roll(chosen, -1, axis=0), flipped, PLACES)[0] == -1
    other = scores(9).argsort(dim=1)[:, :3].numpy()
    assert flip_lag(chosen, other, flipped, PLACES)[1] < 0.1
    assert flip_lag(chosen, late, np.zeros(TOKENS, dtype=bool), PLACES) is None
    late_shape = NoiseShape("x", None, 0, lag=(1, 0.9, 500))
    assert kinds(late_shape) == ["lag"]
    (pattern,) = find_noise_patterns([late_shape])
    assert (pattern.number, pattern.effect, pattern.flips) == (1, 0.9, 500)


def test_beside_reference_runs_a_lag_and_the_bias_alone_are_shapes():
    loud = quiet()._replace(document=Outlier(1, 9.0, 0.1), offset=0.5, likeness=0.9)
    assert [x.kind for x in find_patterns_without_reference([loud])] == ["offset"]
    assert find_patterns_without_reference([loud._replace(likeness=0.1)]) == ()
    late = NoiseShape("x", None, 0, lag=(1, 0.9, 500))
    assert [x.kind for x in find_patterns_without_reference([loud, late])] == ["lag"]


def test_a_bias_that_one_side_holds_in_16_bits_is_no_other_bias():
    bias = 0.3 * scores(6)[0].float()
    rounded = bias.bfloat16().float()
    exact = [scores(seed)[:400] for seed in (0, 1)]
    coarse = [z + (rounded - bias) + 1e-4 * scores(2)[:400] for z in exact]
    a, b = (
        replace(x, layers=tuple(replace(layer, bias=y) for layer in x.layers))
        for x, y in ((trace_of(exact), bias), (trace_of(coarse), rounded))
    )
    assert not tl.diff(a, b, expect="bf16").causes.alarm
