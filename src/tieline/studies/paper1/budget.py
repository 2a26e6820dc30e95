"""The boundary loss of section 6: how ε finds its budget (Figures 4 and 5: `courses`)."""

import math

import torch

from tieline.geometry import (
    gaussian_budget_epsilon,
    gaussian_near_ties,
)
from tieline.routing import boundary_loss
from tieline.studies.checks import at_most, near
from tieline.studies.claim import Evidence, Run, Verdict
from tieline.studies.registry import claim


@claim(
    "p1-sec6-loss",
    "sec. 6",
    "boundary loss",
    statement="α ε (K - k*) drives ε down while more than k* experts are in use and up while "
    "fewer.",
    tested="Its gradient in ε for both signs; plain descent on ε = softplus(θ) with the exact K(ε) "
    "of normal scores, at rates below and above the limit ηαK'(ε*)(1 - e^(-ε*))² < 2.",
    expected=Verdict.CONDITION,
    condition="the rate is below the limit of stability; above it ε never settles",
)
def loss(run: Run) -> Evidence:
    """Signs, and convergence on both sides of the limit."""
    epsilon = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    slopes = []
    for active in (2, 4):
        weights = torch.zeros(5, 8, dtype=torch.float64)
        weights[:, :active] = 1.0
        slopes.append(torch.autograd.grad(boundary_loss(epsilon, weights, 2.5), epsilon)[0].item())
    target = gaussian_budget_epsilon(16, 2, 0.5)
    rise = (
        gaussian_near_ties(16, 2, target + 1e-4) - gaussian_near_ties(16, 2, target - 1e-4)
    ) / 2e-4
    limit = 2 / (rise * (1 - math.exp(-target)) ** 2)
    calm, wild = (_settle(rate * limit, target) for rate in (0.75, 1.3))
    return Evidence(
        [
            at_most("distance from ε* after 400 steps at 1.3 of the limit", wild, 1e-3),
            near("gradient with 2 experts in use", slopes[0], -0.5, 1e-12, part="condition"),
            near("gradient with 4 experts in use", slopes[1], 1.5, 1e-12, part="condition"),
            at_most(
                "distance from ε* after 400 steps at 0.75 of the limit",
                calm,
                1e-6,
                part="condition",
            ),
        ],
        paper="ε → ε*",
        corrected=f"stable for ηα < {limit:.2f} here",
        measured=f"{calm:.1e} below the limit, {wild:.3f} above",
    )


def _settle(rate: float, target: float) -> float:
    """|ε - ε*| after 400 steps of descent from near ε*, with K(ε) exact."""
    theta = math.log(math.expm1(target * 1.05))
    for _ in range(400):
        epsilon = math.log1p(math.exp(theta))
        excess = gaussian_near_ties(16, 2, epsilon) - 0.5
        theta -= rate * excess * (1 - math.exp(-epsilon))
    return abs(math.log1p(math.exp(theta)) - target)
