"""Low-precision matrix products: the noise model against the product itself."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.measure.problems import linear_router
from tieline.core.numerics import grid_step, round_to
from tieline.core.ranking import stable_topk
from tieline.measure import rounding_flips as product
from tieline.measure.rounding_flips import (
    emulated_choice,
    product_effect,
    product_flip_probability,
    shared_cell_probability,
)


def test_emulation_is_the_native_product():
    inputs, weight, _ = linear_router(tokens=64, experts=8, dim=16)
    effect = product_effect(inputs, weight)
    exact = inputs.double() @ weight.double().T
    emulated = round_to(exact + effect.error, "bf16")
    native = (inputs.bfloat16() @ weight.bfloat16().T).double()
    # float32 sums of 16 products may fall on the other side of a rounding boundary
    assert (emulated == native).double().mean() > 0.98
    assert ((emulated - native).abs() <= grid_step(native, "bf16")).all()


def test_noise_is_the_size_of_the_error():
    inputs, weight, _ = linear_router(tokens=3000, experts=16, dim=64)
    effect = product_effect(inputs, weight)
    common = effect.error.mean(dim=1, keepdim=True)
    spread = (effect.error - common).square().mean().sqrt()
    assert spread.item() == pytest.approx(effect.noise.square().mean().sqrt().item(), rel=0.06)


def test_numbers_that_fit_the_format_make_no_noise():
    inputs, weight, _ = linear_router(tokens=50)
    effect = product_effect(inputs.bfloat16().float(), weight.bfloat16().float())
    assert effect.noise.max() == 0
    assert effect.error.abs().max() == 0


def test_what_all_experts_share_makes_no_noise():
    inputs, weight, _ = linear_router(tokens=50)
    same = weight[:1].bfloat16().float().expand(16, -1)
    assert product_effect(inputs, same).noise.max() < 1e-12


def test_chunks_join(monkeypatch):
    inputs, weight, _ = linear_router(tokens=50)
    effect = product_effect(inputs, weight)
    monkeypatch.setattr(product, "CHUNK", 7 * 32)
    for chunked, unchunked in zip(product_effect(inputs, weight), effect, strict=True):
        assert torch.allclose(chunked, unchunked, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("shift", [0.0, 2.0])
def test_flips_are_those_of_the_product(shift):
    tokens, k = 40_000, 4
    inputs, weight, logits = linear_router(tokens, experts=16, dim=64, shift=shift)
    ranked = stable_topk(logits, 12)
    effect = product_effect(inputs, weight)
    noise = effect.noise.gather(1, ranked.indices)
    step = grid_step(ranked.values, "bf16")[:, k - 1]
    chance = product_flip_probability(ranked.values, k, noise, step)
    rounded = round_to(ranked.values + effect.error.gather(1, ranked.indices), "bf16")
    flipped = emulated_choice(rounded, k, ranked.indices).flipped
    error = math.sqrt(flipped.sum().item()) / tokens
    assert abs(chance.mean() - flipped.double().mean()) < 4 * error + 0.03 * chance.mean()


@given(st.floats(0.0, 3.0), st.floats(0.01, 3.0))
def test_rounding_after_noise_is_its_integral(gap_in_steps, noise_in_steps):
    u = torch.linspace(-30, 30, 60_001, dtype=torch.float64)
    spread = math.sqrt(2) * noise_in_steps
    weight = (-(((u - gap_in_steps) / spread) ** 2) / 2).exp()
    cell = (1 - u.abs()).clamp(min=0) / 2
    flips = torch.where(u > 0, cell, 1 - cell)
    exact = (flips * weight).sum() / weight.sum()
    ranked = torch.tensor([[gap_in_steps, 0.0]], dtype=torch.float64)
    noise = torch.full((1, 2), noise_in_steps, dtype=torch.float64)
    probability = product_flip_probability(ranked, 1, noise, torch.ones(1, dtype=torch.float64))
    assert probability.item() == pytest.approx(exact.item(), abs=2e-3)


def test_without_noise_only_ties_flip_and_without_rounding_only_noise_does():
    ranked = torch.tensor([[0.3, 0.0], [torch.inf, 0.0]], dtype=torch.float64)
    none, step = torch.zeros(2, 2, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    finite = ranked.clamp(max=50.0)
    flips = product_flip_probability(finite, 1, none, step)
    assert flips.tolist() == pytest.approx(
        (shared_cell_probability(finite[:, 0], step) / 2).tolist()
    )
    noisy = product_flip_probability(finite, 1, none + 0.2, 0 * step)
    assert noisy[0].item() == pytest.approx(0.5 * math.erfc(0.3 / 0.2 / 2), rel=1e-6)


def test_grids_of_their_own_make_rounding_more_noise():
    ranked = torch.tensor([[0.3, 0.0]], dtype=torch.float64)
    noise, step = torch.full((1, 2), 0.1, dtype=torch.float64), torch.full((1,), 0.5).double()
    probability = product_flip_probability(ranked, 1, noise, step, same_grid=False).item()
    spread = math.sqrt(2 * (0.01 + 0.25 / 12))
    assert probability == pytest.approx(0.5 * math.erfc(0.3 / spread / math.sqrt(2)), rel=1e-6)


@pytest.mark.usefixtures("no_axis_checks")
def test_another_width_is_refused():
    with pytest.raises(ValueError, match="dimension"):
        product_effect(torch.zeros(1, 2), torch.zeros(1, 3))
