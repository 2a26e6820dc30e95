"""The boundary loss of section 6 and Figures 4, 5: how ε finds its budget."""

import math

import torch
from torch import Tensor

from tieline.geometry import (
    gaussian_budget_epsilon,
    gaussian_near_ties,
)
from tieline.routing import SmoothTopK, boundary_loss
from tieline.studies.checks import at_most, near
from tieline.studies.claim import Evidence, Run, Verdict
from tieline.studies.figure import chart, line
from tieline.studies.registry import claim
from tieline.training.controllers import BudgetSchedule

A, B = 1.0, 50.0
"""Exponents of the paper's experiments."""


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


def _train(run: Run, budgets: list[float], scale: float, rate: float) -> tuple[Tensor, Tensor]:
    """ε and K along descent on the boundary loss, fresh normal scores at each step."""
    gate = SmoothTopK(2).double()
    assert gate.theta is not None
    widths, counts = [], []
    for step, budget in enumerate(budgets):
        scores = scale * run.normal(512, 16, stream=10_000 + step)
        weights = gate(scores)
        (slope,) = torch.autograd.grad(boundary_loss(gate.epsilon, weights, budget), gate.theta)
        with torch.no_grad():
            gate.theta.sub_(rate * slope)
        widths.append(gate.epsilon.item())
        counts.append((weights > 0).double().sum(dim=1).mean().item())
    return torch.tensor(widths).double(), torch.tensor(counts).double()


@claim(
    "p1-fig4",
    "Figure 4",
    "boundary loss holds the number of experts",
    statement="ε grows until the mean number of active experts reaches k* = 2.5, in every layer, "
    "and stays there.",
    tested="Descent with the library's gate and loss on normal scores of four scales, 16 experts, "
    "top 2; the ε it must reach is known by quadrature.",
    seconds=2,
)
def figure_four(run: Run) -> Evidence:
    """Last K and ε of four scales."""
    checks, series, steps = [], [], run.size(150, 600)
    for scale in (0.5, 1.0, 2.0, 4.0):
        widths, counts = _train(run, [2.5] * steps, scale, 3.0 / min(scale, 1.0))
        checks.append(near(f"K, scale {scale}", counts[-50:].mean().item(), 2.5, 0.04))
        wanted = scale * gaussian_budget_epsilon(16, 2, 0.5)
        checks.append(
            near(f"ε over its value, scale {scale}", widths[-50:].mean().item() / wanted, 1, 0.1)
        )
        series.append(line(f"scale {scale}", range(steps), counts))
    return Evidence(
        checks, paper=2.5, measured=checks[2].measured, figure=chart("step", "K", series)
    )


@claim(
    "p1-fig5",
    "Figure 5, sec. 7.5",
    "annealing to hard top-k",
    statement="K follows the budget: 2.5, then linearly down to 2, then 2, where ε tends to 0.",
    tested="The same descent under the schedule; the rate at which ε dies out at k* = 2.",
    seconds=1.5,
)
def figure_five(run: Run) -> Evidence:
    """K in each of the three stages, and the exponent of ε in the last."""
    steps = run.size(400, 1_600)
    schedule = BudgetSchedule(2.5, 2.0, steps // 4, steps // 2)
    widths, counts = _train(run, [schedule(step) for step in range(steps)], 1.0, 10.0)
    quarter = steps // 4
    middle = counts[quarter + quarter // 2 - 10 : quarter + quarter // 2 + 10].mean().item()
    return Evidence(
        [
            near(
                "K at the end of the first stage",
                counts[quarter - 40 : quarter].mean().item(),
                2.5,
                0.05,
            ),
            near("K in the middle of the second", middle, 2.25, 0.1),
            at_most("K at the end", counts[-20:].mean().item(), 2.05),
            at_most("ε at the end over that at 2.5", (widths[-1] / widths[quarter]).item(), 0.25),
        ],
        paper=2,
        corrected="ε dies out like t^(-½) under plain descent, for K - k vanishes with it",
        measured=counts[-20:].mean().item(),
        figure=chart(
            "step",
            "K",
            [
                line("active experts", range(steps), counts),
                line("budget", range(steps), [schedule(s) for s in range(steps)], dashed=True),
            ],
        ),
    )
