"""Cones of inputs: known caps, sampled caps, and ties that a ball of inputs really meets."""

import math

import pytest
import torch

from tieline.measure.distance import (
    angular_spread,
    expert_distances,
    log_cap_fraction,
    nearest_tie,
)


def test_caps_of_low_dimension_are_known():
    for angle in (0.1, 0.7, 1.5):
        sine = math.sin(angle)
        assert math.exp(log_cap_fraction(sine, 2)) == pytest.approx(angle / math.pi)
        assert math.exp(log_cap_fraction(sine, 3)) == pytest.approx((1 - math.cos(angle)) / 2)


def test_cap_is_the_share_of_random_directions():
    directions = torch.randn(200_000, 5, dtype=torch.float64)
    cosine = directions[:, 0] / directions.norm(dim=1)
    share = (cosine > math.cos(0.9)).double().mean().item()
    assert math.exp(log_cap_fraction(math.sin(0.9), 5)) == pytest.approx(share, rel=0.03)


def test_caps_of_great_width_have_logarithms():
    log_fraction = log_cap_fraction(0.5, 2049)
    # leading term C(d) sin^(d-1) / cos of Paper 3, Prop. 5.6
    leading = 2048 * math.log(0.5) - 0.5 * math.log(2 * math.pi * 2048) - 0.5 * math.log(0.75)
    assert log_fraction == pytest.approx(leading, abs=1e-3)
    assert log_cap_fraction(1.0, 9) == 0
    assert log_cap_fraction(math.inf, 9) == 0
    assert log_cap_fraction(0.0, 9) == -math.inf


def test_spread_of_known_inputs():
    inputs = torch.tensor([[3.0, 1.0], [3.0, -1.0]])
    spread = angular_spread(inputs, 4, 2)
    assert spread.mean_norm == 3
    assert spread.radius == spread.largest_radius == 1
    assert spread.mean_over_radius == 3
    assert spread.mean_cosine == pytest.approx(3 / math.sqrt(10))
    assert spread.cap_fraction == pytest.approx(math.asin(1 / 3) / math.pi)
    assert spread.log10_cap_fraction == pytest.approx(math.log10(spread.cap_fraction))


def test_radii_differ_and_equal_inputs_have_none():
    spread = angular_spread(torch.tensor([[2.0, 2.0], [2.0, -2.0], [2.0, 0.0]]), 4, 1)
    assert spread.radius == pytest.approx(math.sqrt(8 / 3))
    assert spread.largest_radius == 2
    assert spread.cap_fraction == 1
    same = angular_spread(torch.ones(3, 2), 4, 1)
    assert same.mean_over_radius == math.inf
    assert same.expected_ties == 0
    assert angular_spread(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]), 4, 1).mean_cosine == 0
    assert angular_spread(torch.ones(3, 2), 4, 4).expected_ties == 0


@pytest.mark.parametrize("ratio", [0.02, 0.01])
def test_expected_ties_are_those_that_balls_meet(ratio):
    width, experts, k = 24, 8, 2
    away = torch.randn(400, width, dtype=torch.float64)
    away = away / away.norm(dim=1, keepdim=True)
    away = torch.cat([away, -away])
    mean = torch.zeros(width, dtype=torch.float64)
    mean[0] = 1 / ratio
    spread = angular_spread(away + mean, experts, k)
    assert spread.mean_over_radius == pytest.approx(1 / ratio)
    met = 0
    for _ in range(1200):
        weight = torch.randn(experts, width, dtype=torch.float64)
        centre = (weight @ mean)[None]
        met += nearest_tie(centre, k, expert_distances(weight)).distance.item() <= 1
    assert met / 1200 == pytest.approx(spread.expected_ties, rel=0.25)


@pytest.mark.parametrize(
    "call",
    [
        lambda: angular_spread(torch.zeros(0, 3), 4, 1),
        lambda: angular_spread(torch.zeros(2, 1), 4, 1),
        lambda: log_cap_fraction(-0.1, 3),
    ],
)
def test_senseless_arguments_are_refused(call):
    with pytest.raises(ValueError, match="need"):
        call()
