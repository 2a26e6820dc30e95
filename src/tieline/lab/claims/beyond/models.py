"""Statements behind `reroute` and `soften`: another router, and a soft choice.

    sphere   (w_e - c)·x = r ‖x‖ cos(w_e - c, x) with ‖w_e - c‖ = r for all e
    zero     ‖x/(‖x‖ + τ) - y/(‖y‖ + τ)‖ <= ‖x - y‖/τ
    slope    dL/dε at 0⁺ = f_gap(0) E[ ∫ ℓ(a(u)) du | gap = 0 ],  ℓ(a) = L(y + a Δ) - L(y)

The third is Theorem 4.5 of paper 0 with layers above the choice: L is any function of the output y.
Only what stands beside a wall enters, by ∫ ℓ = M₁ ℓ'(0) + M₂ (ℓ(a*) - a* ℓ'(0))/a*².
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from tieline.lab.claims.checks import at_least, at_most, none_of
from tieline.lab.claims.claim import ClaimRun, Evidence
from tieline.lab.claims.registry import claim
from tieline.routing import CosineRouter

DIM = 12
TEMPERATURE, TAU = 0.1, (0.3, 0.2)


def centre(rows: Tensor) -> Tensor:
    """The centre of the sphere through the rows of a router, as `reroute` fits it."""
    from tieline.lab.on_model.router_fit import sphere_centre

    return sphere_centre(rows)


def other_ranks(run: ClaimRun, n_experts: int, tokens: int) -> tuple[float, float]:
    """Spread of the radii, and share of tokens whose experts a cosine ranks in another order."""
    rows = run.normal(n_experts, DIM, stream=n_experts)
    lengths = run.normal(tokens, 1, stream=2).mul(2).exp()
    x = run.normal(tokens, DIM, stream=1) * lengths
    moved = rows - centre(rows)
    radii = moved.norm(dim=1)
    cosine = (x / x.norm(dim=1, keepdim=True)) @ (moved / radii[:, None]).T
    differ = ((x @ rows.T).argsort(dim=1) != cosine.argsort(dim=1)).any(dim=1)
    return (radii.max() / radii.min() - 1).item(), differ.double().mean().item()


@claim("p5-sphere", "a linear router is a cosine router about another centre", number="sphere")
def sphere(run: ClaimRun) -> Evidence:
    """For E <= D + 1 rows in general position there is c with equal ‖w_e - c‖, and the cosine
    router of the rows w_e - c ranks the experts of every token as the linear one, whatever the
    token's norm. For more experts there is none in general.

    Setting: softmax scores, where a vector may be subtracted from all rows; rows in general
        position
    Tested: Ranks of all experts for drawn tokens of norms over two decades, E = 2 ... D + 1 rows;
        and with twice as many experts as dimensions.
    Overturned by: a token whose experts are ranked in another order
    """
    tokens = run.size(500, 5000)
    results = [other_ranks(run, n, tokens) for n in range(2, DIM + 2)]
    beyond = other_ranks(run, 2 * DIM, tokens)[1]
    return Evidence.of(
        at_most("radii differ by", max(spread for spread, _ in results), 1e-9),
        none_of("share of tokens with another order, E <= D + 1", max(s for _, s in results)),
        at_least("the same with E = 2D", beyond, 0.5),
        paper="two routers",
        corrected="one up to the softmax's temperature",
        measured=beyond,
    )


def cosine_router(run: ClaimRun, tau: tuple[float, float]) -> CosineRouter:
    """A router of drawn rows."""
    router = CosineRouter(DIM, 6, temperature=TEMPERATURE, tau=tau).double().requires_grad_(False)
    router.weight.copy_(run.normal(6, DIM, stream=3))
    return router


def steepness(run: ClaimRun, router: CosineRouter, size: float) -> float:
    """Largest change of a score over the bound of the law, for pairs of tokens of this size."""
    x, step = (size * run.normal(run.size(300, 3000), DIM, stream=s) for s in (4, 5))
    pairs = [(x, x + step), (x, x * 1e-3), (size * router.weight, 0 * router.weight)]
    length = router.weight.norm(dim=1)
    bound = length / ((length + TAU[0]) * TAU[1] * TEMPERATURE)
    ratios = [
        (router.score(a) - router.score(b)).abs() / (bound * (a - b).norm(dim=1, keepdim=True))
        for a, b in pairs
    ]
    return max(ratio.max().item() for ratio in ratios)


@claim("p5-zero", "the perturbed cosine is Lipschitz, at the zero vector too", number="zero")
def zero(run: ClaimRun) -> Evidence:
    """The score of the perturbed cosine router has the Lipschitz constant ‖w‖/((‖w‖ + τ1) τ2 t),
    attained at the zero vector, where it is 0. The plain cosine jumps there by 2/t between opposite
    tokens, however small.

    Setting: the scores alone, without projection; every pair of tokens
    Tested: Pairs of tokens of sizes 1e-9 to 10, and the rows themselves against zero.
    Overturned by: a pair of tokens above the bound
    """
    router, plain = cosine_router(run, TAU), cosine_router(run, (0.0, 0.0))
    sizes = [10.0**p for p in range(-9, 2)]
    ratios = [steepness(run, router, size) for size in sizes]
    small = 1e-9 * plain.weight
    jump = (plain.score(small) - plain.score(-small)).diagonal().min().item()
    at_zero = router.score(torch.zeros(1, DIM, dtype=torch.float64)).abs().max().item()
    return Evidence.of(
        at_most("largest change over the bound", max(ratios), 1 + 1e-6),
        at_least("the same at 1e-9 from zero", ratios[0], 0.999),
        none_of("score of the zero vector", at_zero),
        at_least("jump of the plain cosine times t/2", jump * TEMPERATURE / 2, 1 - 1e-9),
        paper="continuous where a token is zero",
        corrected="‖w‖/((‖w‖ + τ1) τ2 t)",
        measured=max(ratios),
    )


def moments(form: str) -> tuple[float, float, float]:
    """M₁, M₂, M₃ of a form, as `soften` uses them."""
    from tieline.lab.on_model.soften_walls import MOMENTS

    return MOMENTS[form]


SHARES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda u: torch.sigmoid(-u),
    "projection": lambda u: (1 - u).clamp(min=0) / 2,
}
"""Share of the second expert at gap u ε."""


def experts(x: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs of the expert that is chosen at x and of the other one; the wall is at 0."""
    left, right = torch.cos(x), 1.5 - x.sin()
    return torch.where(x < 0, left, right), torch.where(x < 0, right, left)


LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "cubic": lambda y: 0.3 * y**3 - y**2 + 0.7 * y,
    "layers": lambda y: torch.log1p(torch.exp(-2 * torch.tanh(3 * y - 4))),
}
"""Losses of an output: a polynomial, and two layers with a logistic loss."""


def soft_change(form: str, loss: Callable[[Tensor], Tensor], width: float) -> float:
    """Change of the mean loss at this width, by quadrature over x ~ N(0, 1)."""
    u = torch.linspace(0, 40, 80_001, dtype=torch.float64)
    total = 0.0
    for side in (-1.0, 1.0):
        x = side * torch.clamp(u * width, min=1e-12)
        mine, other = experts(x)
        moved = loss(mine + SHARES[form](u) * (other - mine)) - loss(mine)
        density = torch.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
        total += width * torch.trapezoid(density * moved, u).item()
    return total


def measured_slope(form: str, loss: Callable[[Tensor], Tensor], width: float = 5e-4) -> float:
    """Slope at width 0, from two widths."""
    half, full = (soft_change(form, loss, w) / w for w in (width / 2, width))
    return 2 * half - full


def predicted_slope(form: str, loss: Callable[[Tensor], Tensor]) -> tuple[float, float]:
    """Slope from the wall alone, and its part by the gradient."""
    first, second, third = moments(form)
    share, slopes = third / second, []
    for side in (-1.0, 1.0):
        mine, other = experts(torch.tensor(side * 1e-12, dtype=torch.float64))
        y = mine.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(loss(y), y)
        linear = gradient * (other - mine)
        change = loss(mine + share * (other - mine)) - loss(mine)
        bend = second * (change - share * linear) / share**2
        slopes.append(((first * linear + bend).item(), (first * linear).item()))
    total, linear = (sum(column) / math.sqrt(2 * math.pi) for column in zip(*slopes, strict=True))
    return total, linear


@claim("p5-soft-slope", "the slope of softness with layers above", number="slope", seconds=0.2)
def soft_slope(run: ClaimRun) -> Evidence:
    """For any loss L of a layer's output the soft choice of width ε changes the loss by ε f_gap(0)
    E[∫ L(y + a(u)Δ) - L(y) du | gap = 0] + o(ε), a the share of the second expert; a gradient and
    one more value per token give it exactly for L of degree three.

    Setting: one wall, a density and experts that are continuous beside it, L smooth; layers above
        that choose themselves add their own walls
    Tested: Two experts on the line, softmax and projection, a cubic L and two layers with a
        logistic loss; slopes by quadrature at two widths.
    Overturned by: a loss of degree three whose slope differs
    """
    errors, without = {}, []
    for form in SHARES:
        for name, loss in LOSSES.items():
            measured, (predicted, linear) = measured_slope(form, loss), predicted_slope(form, loss)
            errors[form, name] = abs(predicted / measured - 1)
            without.append(abs(linear / measured - 1))
    checks = [
        at_most(f"{form}, {name}: off by", error, 1e-4 if name == "cubic" else 0.05)
        for (form, name), error in errors.items()
    ]
    return Evidence.of(
        checks,
        at_least("by the gradient alone, at least", min(without), 0.05),
        paper="squared loss of one layer",
        corrected="any loss of its output",
        measured=max(errors.values()),
    )
