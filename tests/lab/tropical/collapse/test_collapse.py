"""Collapse: caps, balls that meet ties, and what centring does."""

import math

import numpy as np
import pytest
import torch

from tieline.core.errors import TielineError
from tieline.core.ranking import stable_topk
from tieline.lab.tropical import (
    ball_meets_tie,
    cap_constant,
    cap_fraction,
    centring,
    centring_of_layer,
    saturation,
    wall_density,
    walls_in_ball,
)
from tieline.trace import LayerFacts, LayerTrace


@pytest.mark.parametrize("angle", [0.05, 0.7, math.pi / 2])
def test_caps_of_the_circle_and_the_sphere(angle):
    assert cap_fraction(2, math.sin(angle)) == pytest.approx(angle / math.pi)
    assert cap_fraction(3, math.sin(angle)) == pytest.approx((1 - math.cos(angle)) / 2)


@pytest.mark.parametrize("dim", [2, 3, 8, 60])
def test_small_caps_have_the_papers_constant(dim):
    s = 1e-4
    assert cap_fraction(dim, s) / s ** (dim - 1) == pytest.approx(cap_constant(dim), rel=1e-3)


def test_walls_fall_like_the_first_power_in_every_dimension():
    for dim in (3, 8, 64):
        few, more = walls_in_ball(16, 4, dim, 1e-5), walls_in_ball(16, 4, dim, 1e-4)
        assert math.log10(more / few) == pytest.approx(1, abs=1e-6)
    # in the plane a ball is an arc of 2θ, and a half-circle meets ρ walls
    assert walls_in_ball(16, 4, 2, 0.1) == pytest.approx(
        wall_density(16, 4) * 2 * math.asin(0.1) / math.pi
    )


@pytest.mark.parametrize(("dim", "sine"), [(3, 0.03), (32, 0.01), (32, 0.03)])
def test_the_chance_to_meet_a_tie_is_near_that_of_random_routers(dim, sine):
    draws = 1500
    W = np.random.default_rng(0).standard_normal((draws, 16, dim))
    W = np.take_along_axis(W, np.argsort(-W[:, :, :1], axis=1), axis=1)  # by score at (1, 0, ...)
    rise = W[:, :4, None, 0] - W[:, None, 4:, 0]
    apart = np.linalg.norm(W[:, :4, None] - W[:, None, 4:], axis=-1)
    near = (rise / apart).min(axis=(1, 2)) <= sine
    chance = ball_meets_tie(16, 4, dim, sine)
    assert abs(np.mean(near) - chance) < 0.05 * chance + 3 * math.sqrt(0.25 / draws)


def test_saturation_of_data_by_hand():
    W, b = np.array([[1.0, 0], [0, 1]]), None
    points = np.array([[3.0, 1], [2, 1], [1, 5]])
    measures = saturation(points, W, b, 1)
    assert measures.smallest == pytest.approx(1 / math.sqrt(2))
    assert measures.median == pytest.approx(math.sqrt(2))
    assert (measures.tokens, measures.coalitions, measures.commonest) == (
        3,
        2,
        pytest.approx(2 / 3),
    )
    assert measures.effective == pytest.approx(3 / 2 ** (2 / 3))
    spread = math.sqrt(((points - points.mean(0)) ** 2).sum(1).mean())
    assert measures.offset == pytest.approx(np.linalg.norm(points.mean(0)) / spread)
    assert measures.relative == pytest.approx(math.sqrt(2) / spread)


def test_centring_and_a_bias_revive_a_router_and_a_shared_expert_does_not():
    r = np.random.default_rng(0)
    W, data = r.standard_normal((16, 8)), r.standard_normal((800, 8)) + 300 * np.eye(8)[0]
    comparison = centring(data, W, None, 4)
    assert comparison.as_is.coalitions < 20 < 200 < comparison.centred.coalitions
    assert comparison.as_is.commonest > 0.3 > 0.05 > comparison.centred.commonest
    assert comparison.as_is.smallest > 0
    assert comparison.shared_expert == comparison.as_is
    assert comparison.router_bias.coalitions == comparison.centred.coalitions
    assert comparison.router_bias.median == pytest.approx(comparison.centred.median)
    assert (
        comparison.centred.offset
        < 1e-12
        < 90
        < comparison.as_is.offset
        == comparison.router_bias.offset
    )


def test_centring_of_a_captured_layer_uses_its_inputs():
    r = np.random.default_rng(1)
    inputs = torch.from_numpy(r.standard_normal((50, 4))).float()
    W = r.standard_normal((6, 4))
    ranked = stable_topk(inputs.double() @ torch.from_numpy(W).T, 6)
    layer = LayerTrace("gate", LayerFacts(6, 2), ranked.indices, inputs=inputs)
    assert centring_of_layer(layer, W) == centring(inputs, W, None, 2)
    with pytest.raises(TielineError, match="keeps no inputs"):
        centring_of_layer(LayerTrace("gate", LayerFacts(6, 2), ranked.indices), W)
    curved = LayerTrace("gate", LayerFacts(6, 2, affine=False), ranked.indices, inputs=inputs)
    with pytest.raises(TielineError, match="no affine scores"):
        centring_of_layer(curved, W)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: cap_fraction(1, 0.1), "d >= 2"),
        (lambda: cap_fraction(3, 1.1), "R/‖μ‖"),
        (lambda: walls_in_ball(4, 4, 3, 0.1), "1 <= k < N"),
        (lambda: saturation(np.eye(3), np.eye(3), None, 3), "nothing ties"),
        (lambda: centring(np.eye(3)[:1], np.eye(3), None, 1), "at least 2"),
    ],
)
def test_numbers_out_of_range_are_refused(call, message):
    with pytest.raises(TielineError, match=message):
        call()
