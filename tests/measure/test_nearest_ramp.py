"""How many times cheaper a straight ramp makes flips."""

import pytest
import torch

from tieline import TielineError
from tieline.lab.limits.continuity_cost import hard_sensitivity, projected_cost
from tieline.measure.nearest_ramp import flip_reduction, nearest_ramp


@pytest.mark.parametrize("scale", [0.5, 1.0, 4.0, 32.0])
def test_the_reduction_is_that_of_the_law_of_continuity(scale):
    cost = projected_cost(1.0, 1.0, 1.0, scale)
    assert flip_reduction(scale) == hard_sensitivity(1.0, 1.0, 1.0) / cost.sensitivity


def test_wide_ramps_divide_the_cost_by_their_width():
    assert flip_reduction(64.0) == pytest.approx(2 * 64 * (2 / 3.141592653589793) ** 0.5, rel=0.02)


def test_the_nearest_ramp_of_normal_noise_is_that_of_the_least_distance():
    noise = torch.special.ndtri((torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000)
    ramp = nearest_ramp(0.01 * noise)
    assert ramp.least == pytest.approx(0.5**0.5, rel=1e-3)
    assert ramp.epsilon == pytest.approx(0.0154, rel=0.02)
    assert ramp.share == pytest.approx(0.7119, abs=5e-4)


@pytest.mark.parametrize(("power", "least"), [(1.0, 2 / 3), (0.0, 0.5)])
def test_the_least_share_is_that_of_the_law_of_the_noise(power, least):
    """Uniform noise, and noise of two values."""
    u = (torch.arange(10_000, dtype=torch.float64) + 0.5) / 5_000 - 1
    ramp = nearest_ramp(u.sign() * u.abs() ** power)
    assert ramp.least == pytest.approx(least, rel=1e-3)
    assert ramp.least <= ramp.share < 1


def test_a_ramp_by_brute_force_is_nowhere_nearer():
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(400, dtype=torch.float64, generator=generator) ** 3
    u = torch.linspace(-60, 60, 6001, dtype=torch.float64)
    above = (noise[:, None] <= u).double()
    ramp = nearest_ramp(noise)
    for scale in (0.3, 1.0, 3.0):
        rise = (0.5 + u / (2 * scale * ramp.epsilon)).clamp(0, 1)
        distance = torch.trapezoid((rise - above).square().mean(dim=0), u)
        share = (distance / noise.abs().mean()).item()
        assert share >= ramp.share - 2e-3
        assert scale != 1 or share == pytest.approx(ramp.share, abs=5e-3)


@pytest.mark.parametrize("noise", [torch.zeros(4), torch.empty(0), torch.tensor([1.0, torch.inf])])
def test_noise_that_is_none_is_refused(noise):
    with pytest.raises(TielineError, match="finite and not zero"):
        nearest_ramp(noise)
