"""The walk of Figure 1: a hard layer jumps at the tie, a smooth one does not."""

import math

import pytest
import torch

from tests.measure.routers import inputs, router
from tieline.core.ranking import topk_mask
from tieline.lab.geometry.ties import (
    difference_by_step,
    nearest_tie_point,
    step_exponent,
    walk_across,
)
from tieline.routing.smooth_gates import SmoothTopK

WEIGHT, BIAS = router(6, 8, 2)
EXPERTS = torch.arange(18, dtype=torch.float64).reshape(6, 3).sin()


def hard(x):
    """Constant experts behind a top-2 softmax router."""
    scores = x @ WEIGHT.T + BIAS
    masked = scores.masked_fill(~topk_mask(scores, 2), -torch.inf)
    return masked.softmax(dim=-1) @ EXPERTS


def smooth(x):
    """The same with experts that fade in."""
    gate = SmoothTopK(2, epsilon=0.5, a=1.0, b=1.0)
    return gate(x @ WEIGHT.T + BIAS) @ EXPERTS


TIES = nearest_tie_point(inputs(30, 8), WEIGHT, BIAS, 2)


def test_a_hard_layer_jumps_at_the_tie_by_what_the_swap_costs():
    crossing = walk_across(hard, TIES.point[0], TIES.normal[0], reach=1e-6, steps=400)
    assert abs(crossing.jump_at) < 1e-8
    scores = TIES.point[0] @ WEIGHT.T + BIAS
    tied = TIES.experts[0]
    first = scores.masked_fill(scores < scores[tied].min() - 1e-9, -torch.inf)
    weights = [first.clone() for _ in tied]
    for weight, out in zip(weights, tied.tolist(), strict=True):
        weight[out] = -torch.inf
    ends = [weight.softmax(dim=0) @ EXPERTS for weight in weights]
    assert crossing.jump == pytest.approx((ends[0] - ends[1]).norm().item(), rel=1e-5)
    assert crossing.outputs.shape == (400, 3)


def test_exponents_tell_a_jump_from_a_lipschitz_map():
    jumps = difference_by_step(hard, TIES.point, TIES.normal)
    fades = difference_by_step(smooth, TIES.point, TIES.normal)
    assert step_exponent(jumps) == pytest.approx(0, abs=1e-3)
    assert step_exponent(fades) == pytest.approx(1, abs=0.05)
    assert jumps.largest[0] > 0.1 > fades.largest[0] * 1e6
    assert (jumps.median <= jumps.largest).all()
    assert jumps.steps[0] == 1e-9


def test_a_constant_has_no_exponent():
    differences = difference_by_step(lambda x: torch.zeros_like(x), TIES.point, TIES.normal)
    assert math.isnan(step_exponent(differences))


def test_bad_steps_are_named():
    with pytest.raises(ValueError, match="reach=0"):
        walk_across(hard, TIES.point[0], TIES.normal[0], reach=0.0)
    with pytest.raises(ValueError, match="step"):
        difference_by_step(hard, TIES.point, TIES.normal, torch.tensor([0.0, 1.0]))
