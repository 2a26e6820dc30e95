"""Rounding: bit for bit against torch's own types, and rates against what rounding does."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.measure.problems import layer_of, normal_scores
from tests.strategies import seeds
from tieline.core.numerics import PRECISIONS, grid_step, round_to
from tieline.core.ranking import gap, ranked_scores, sets_differ, stable_topk, topk_mask
from tieline.measure.boundary import gap_density
from tieline.measure.noise_flips import logit_view
from tieline.measure.rounding_flips import (
    emulated_choice,
    precision_flips,
    shared_cell_flip_probability,
    shared_cell_probability,
)

NATIVE = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


@pytest.mark.parametrize("precision", NATIVE)
@given(seed=seeds)
def test_floats_round_as_the_native_type_does(precision, seed):
    generator = torch.Generator().manual_seed(seed)
    exponent = torch.randint(-20, 9, (64, 8), generator=generator)
    values = torch.ldexp(torch.rand(64, 8, generator=generator) * 2 - 1, exponent)
    values[0] = torch.tensor([0.0, -0.0, 1.0, 1.0625, 1.1875, 2.0**-9, 3 * 2.0**-11, 440.0])
    largest = PRECISIONS[precision].largest
    native = values.clamp(-largest, largest).to(NATIVE[precision])
    assert torch.equal(round_to(values, precision), native.double())


@pytest.mark.parametrize("precision", NATIVE)
def test_numbers_beyond_the_largest_saturate(precision):
    largest = PRECISIONS[precision].largest
    assert torch.finfo(NATIVE[precision]).max == largest
    beyond = torch.tensor([[largest * 1.01, -largest * 4, torch.inf, largest]], dtype=torch.float64)
    assert round_to(beyond, precision).tolist() == [[largest, -largest, largest, largest]]


@pytest.mark.parametrize(("precision", "levels"), [("int8", 127), ("int4", 7)])
def test_integers_have_one_symmetric_scale_per_token(precision, levels):
    scores = torch.tensor([[7.0, -1.0, 0.5, 3.49], [-14.0, 1.0, 0.0, -torch.inf]])
    step = grid_step(scores, precision)
    assert step[:, 0].tolist() == pytest.approx([7 / levels, 14 / levels])
    rounded = round_to(scores, precision)
    finite = rounded[:, :3] / step[:, :3]
    assert torch.allclose(finite, finite.round())
    assert (finite.abs() <= levels).all()
    assert ((rounded - scores).abs() <= step / 2 + 1e-12)[scores.isfinite()].all()
    assert rounded[1, 3] == -torch.inf
    assert rounded[:, 0].tolist() == pytest.approx([7.0, -14.0])


def test_tokens_of_zeros_stay_zeros():
    for precision in PRECISIONS:
        assert round_to(torch.zeros(1, 3), precision).tolist() == [[0.0] * 3]


@pytest.mark.parametrize("precision", NATIVE)
def test_the_step_is_that_of_neighbours(precision):
    values = torch.tensor([[0.3, 1.0, 2.9, -5.0]])
    low = round_to(values, precision)
    above = round_to(low + grid_step(low, precision), precision)
    halfway = round_to(low + 0.49 * grid_step(low, precision), precision)
    assert torch.equal(halfway, low)
    assert torch.equal(above - low, grid_step(low, precision))


@given(st.floats(0.0, 2.0))
def test_a_cell_is_shared_as_often_as_its_place_allows(gap_in_steps):
    positions = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    low, high = (positions - 0.5).floor(), (positions + gap_in_steps - 0.5).floor()
    chance = shared_cell_probability(torch.tensor([gap_in_steps]), torch.ones(1))
    assert chance.item() == pytest.approx((low == high).double().mean().item(), abs=2e-3)


def test_equal_scores_always_share_and_no_step_never_does():
    gaps = torch.tensor([0.0, 0.0, 1.0, torch.inf])
    assert shared_cell_probability(gaps, torch.tensor([1.0, 0.0, 0.0, 1.0])).tolist() == [
        1,
        1,
        0,
        0,
    ]


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp8_e4m3", "int8"])
def test_rates_are_those_of_rounded_scores(precision):
    scores = normal_scores(60_000, 16).float()
    ranked = stable_topk(scores, 8)
    rounded = round_to(scores, precision).gather(1, ranked.indices)
    step = grid_step(scores, precision).gather(1, ranked.indices)[:, 1]
    choice = emulated_choice(rounded, 2, ranked.indices)
    gaps = gap(scores, 2)
    tie, flip = (
        shared_cell_probability(gaps, step),
        shared_cell_flip_probability(ranked.values, 2, step),
    )
    for chance, event in ((tie, choice.tied), (flip, choice.flipped)):
        error = math.sqrt(event.sum().item() + 1) / 60_000
        # coarse grids are not placed at random: the int8 and fp8 grids hold zero
        assert abs(chance.mean() - event.double().mean()) < 4 * error + 0.03 * chance.mean()
    if precision == "bf16":
        density = gap_density(gaps / step)
        for rate, event in (
            (density.times(0.5), choice.tied),
            (density.times(0.25), choice.flipped),
        ):
            error = math.hypot(rate.standard_error, math.sqrt(event.sum().item()) / 60_000)
            assert abs(rate.value - event.double().mean().item()) < 3 * error


def test_fine_grids_flip_half_of_their_ties():
    scores = ranked_scores(normal_scores(2000, 16), 8)
    step = torch.full((2000,), 1e-3, dtype=torch.float64)
    tie, flip = (
        shared_cell_probability(scores[:, 1] - scores[:, 2], step),
        shared_cell_flip_probability(scores, 2, step),
    )
    assert flip.sum().item() == pytest.approx(tie.sum().item() / 2, rel=0.02)
    assert (flip >= tie / 2 - 1e-12).all()


def test_ties_of_many_flip_unless_the_index_picks_the_same_set():
    scores = torch.zeros(1, 5, dtype=torch.float64)
    assert shared_cell_flip_probability(scores, 2, torch.ones(1)).item() == pytest.approx(
        1 - 1 / 10
    )
    assert shared_cell_flip_probability(scores - torch.arange(5) * 9, 2, torch.ones(1)).item() == 0


@given(seeds, st.integers(1, 7))
def test_emulation_compares_with_the_choice_before(seed, k):
    scores = normal_scores(40, 8, seed)
    ranked = stable_topk(scores, 8)
    same = emulated_choice(ranked.values, k, ranked.indices)
    assert not same.flipped.any()
    rounded = scores.round()
    choice = emulated_choice(rounded.gather(1, ranked.indices), k, ranked.indices)
    before, after = (stable_topk(x, k).indices.sort(dim=1).values for x in (scores, rounded))
    assert torch.equal(choice.flipped, (before != after).any(dim=1))
    assert torch.equal(choice.tied, gap(rounded, k) == 0)
    assert (choice.tied | ~choice.flipped).all()  # rounding alone never reverses two scores


def test_unknown_formats_are_refused_by_name():
    with pytest.raises(ValueError, match=r"'fp4'.*bf16"):
        round_to(torch.zeros(1, 1), "fp4")


@given(seeds, st.integers(1, 5), st.booleans())
def test_emulated_choice_is_that_of_the_ranking(seed, k, coarse):
    generator = torch.Generator().manual_seed(seed)
    ranked = stable_topk(torch.randn(40, 8, generator=generator), 7)
    noisy = ranked.values.double() + 0.5 * torch.randn(40, 7, generator=generator)
    rounded = noisy.round() if coarse else noisy
    choice = emulated_choice(rounded, k, ranked.indices)
    every = torch.full((40, 8), -torch.inf, dtype=torch.float64)
    every.scatter_(1, ranked.indices, rounded)
    before = torch.zeros(40, 8, dtype=torch.bool).scatter_(1, ranked.indices[:, :k], True)
    assert torch.equal(choice.flipped, sets_differ(topk_mask(every, k), before))
    assert torch.equal(choice.tied, gap(rounded, k) == 0)


@pytest.mark.parametrize("precision", PRECISIONS)
@given(seeds, st.sampled_from([0.01, 1.0, 300.0]))
def test_tokens_far_from_a_cell_need_no_emulation(precision, seed, scale):
    scores = scale * torch.randn(60, 8, generator=torch.Generator().manual_seed(seed))
    layer = layer_of(scores, 3)
    view = logit_view(layer)
    record, flipped = precision_flips(layer, view, precision)
    choice = emulated_choice(round_to(view.logits, precision), 3, layer.experts)
    assert torch.equal(flipped, choice.flipped.double())
    assert record.tie_emulated.value == choice.tied.double().mean().item()
