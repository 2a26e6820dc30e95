"""Continuity of whole lines of input, across ties of order one and two."""

import pytest
import torch

from tests.routing.zoo import EXPERTS, TOPK_VARIANTS, smooth
from tieline import Experts, LinearRouter, MoE, SmoothTopK, TopK
from tieline.routing import smoothstep

TIES = {  # scores at t = 0 and direction; k = 3
    "order 1": ([3.0, 2.0, 1.0, 1.0, -1.0, -2.0, -1.5, -3.0], [0.1, 0, 1, -1, 0, 0.3, 0, 0.1]),
    "order 2": ([3.0, 2.0, 1.0, 1.0, 1.0, -2.0, -1.5, -3.0], [0.1, 0, 1, -1, 0.5, 0.3, 0, 0.1]),
    "between groups": ([2.0, 0.0, 1.0, 1.0, 0.5, 1.5, -1.0, -2.0], [0, 0, 0.7, 0, 0.4, -1, 0, 0]),
}
FINEST = 1e-10


def layer_of(gate):
    """A layer whose scores are its inputs, in float64."""
    torch.manual_seed(3)
    layer = MoE(LinearRouter(EXPERTS, EXPERTS), gate, Experts(EXPERTS, EXPERTS, 6)).double()
    with torch.no_grad():
        layer.router.weight.copy_(torch.eye(EXPERTS))
    return layer


def steepest(f, low, high):
    """Largest |f(t+h) - f(t)| over the line at each h, by following the worst intervals down."""
    starts = torch.linspace(low, high, 1025, dtype=torch.float64)[:-1]
    h, steps = (high - low) / 1024, {}
    while h >= FINEST:
        step = (f(starts + h) - f(starts)).norm(dim=-1)
        steps[h] = step.max().item()
        worst = starts[step.argsort(descending=True)[:8]]
        h /= 8
        starts = (worst[:, None] + h * torch.arange(8, dtype=torch.float64)).flatten()
    return steps


def along(gate, tie):
    point, direction = (torch.tensor(v, dtype=torch.float64) for v in TIES[tie])
    layer = layer_of(gate)
    with torch.no_grad():
        return steepest(lambda t: layer(point + t[:, None] * direction), -1.0, 1.0)


@pytest.mark.parametrize("tie", TIES)
@pytest.mark.parametrize("name", TOPK_VARIANTS)
def test_the_output_step_of_smooth_topk_shrinks_with_the_input_step(name, tie):
    steps = along(smooth(name), tie)
    lipschitz = max(step / h for h, step in steps.items() if h > 1e-4)
    assert min(steps) < 8 * FINEST
    for h, step in steps.items():
        assert step <= 1.5 * lipschitz * h + 1e-13  # 1e-13: rounding of the output itself


@pytest.mark.parametrize("tie", ["order 1", "order 2"])
@pytest.mark.parametrize("name", TOPK_VARIANTS)
def test_the_output_step_of_topk_does_not(name, tie):
    steps = along(TopK(3, **TOPK_VARIANTS[name]), tie)
    assert steps[min(steps)] > 1e-3


@pytest.mark.parametrize("tie", ["order 1"])
def test_a_bound_on_the_experts_keeps_continuity(tie):
    steps = along(SmoothTopK(3, epsilon=3.0, k_max=4), tie)
    assert steps[min(steps)] < 1e-7


def test_the_smoothstep_has_the_ramp_of_the_paper():
    ends = torch.tensor([0.0275, 0.0883], dtype=torch.float64)
    low, high = smoothstep(ends, 1.0, 50.0).tolist()
    assert low == pytest.approx(0.1, abs=5e-3)
    assert high == pytest.approx(0.9, abs=5e-3)


@pytest.mark.parametrize(("a", "b"), [(1.0, 1.0), (0.5, 0.5), (2.0, 50.0)])
def test_the_smoothstep_and_its_gradient_are_finite_everywhere(a, b):
    u = torch.tensor([-1.0, 0.0, 1e-300, 0.5, 1.0, 2.0], dtype=torch.float64, requires_grad=True)
    s = smoothstep(u, a, b)
    s.sum().backward()
    assert s.tolist()[:2] == [0, 0]
    assert s.tolist()[-2:] == [1, 1]
    assert u.grad.isfinite().all()


def test_the_derivative_matches_its_closed_form():
    u = torch.linspace(0.01, 0.99, 50, dtype=torch.float64, requires_grad=True)
    a, b = 1.5, 7.0
    s = smoothstep(u, a, b)
    (grad,) = torch.autograd.grad(s.sum(), u)
    torch.testing.assert_close(grad, (s * (1 - s) * (a / u + b / (1 - u))).detach())
