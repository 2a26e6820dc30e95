"""Statements about trained models: another router, a soft choice, structured perturbations.

    linear_router_is_cosine  (w_e - c)·x = r ‖x‖ cos(w_e - c, x) with ‖w_e - c‖ = r for all e
    cosine_lipschitz_at_zero  ‖x/(‖x‖ + τ) - y/(‖y‖ + τ)‖ <= ‖x - y‖/τ
    slope    dL/dε at 0⁺ = f_gap(0) E[ ∫ ℓ(a(u)) du | gap = 0 ],  ℓ(a) = L(y + a Δ) - L(y)

The third is Theorem 4.5 of paper 0 with layers above the choice: L is any function of the output y.
Only tokens next to a wall enter, by ∫ ℓ = M₁ ℓ'(0) + M₂ (ℓ(a*) - a* ℓ'(0))/a*².

Structured perturbations, which paper 1 names as open, are those of real hidden states; the proofs
are in docs/boundary-geometry.md.

`combinatorial_gain_ends`: from which k on a top-k layer cannot have a share of C(N, k) cells.
The cells of a top-k router are the faces at level k of N hyperplanes t = z_i(x) of R^{d+1}. By
Clarkson's and Shor's sampling, with exact constants (docs/tropical.md):

    V_q <= min over r of u(r, d+1) C(N, r) / C(N-d-1-q, r-d-1)      vertices with q experts above
    cells <= Σ_{q=k-d}^{k-1} V_q C(d+1, k-q)

u(r, D) being the most vertices of a polyhedron with r facets in R^D (upper bound theorem).
"""

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from tieline.core.ranking import topk_mask
from tieline.core.statistics import mean_estimate
from tieline.lab.claims.claim import ClaimRun, claim
from tieline.lab.claims.demo_router_inputs import RouterStates, router_states
from tieline.lab.claims.evidence import (
    Check,
    Evidence,
    at_least,
    at_most,
    chart,
    dots,
    line,
    near,
    none_of,
    within,
)
from tieline.lab.claims.routing_problems import numpy_router, one_wall_cell
from tieline.lab.geometry.exit_time import exit_curve, top_k_cell
from tieline.lab.geometry.perturbations import (
    PerturbationLaw,
    drifting_exit,
    flip_rate,
    pair_noise,
    perturbation_law,
    structured_bounds,
    whitened_router,
    worst_step,
)
from tieline.lab.limits.two_cells import normal_density
from tieline.lab.power_law import exponent
from tieline.lab.tropical import count_cells, sharp_bound, zaslavsky
from tieline.routing import CosineRouter

DIM = 12
TEMPERATURE, TAU = 0.1, (0.3, 0.2)


def router_sphere_centre(rows: Tensor) -> Tensor:
    """Fit the centre of the sphere through the rows of a router, as `reroute` does."""
    from tieline.lab.on_model.router_fit import sphere_centre

    return sphere_centre(rows)


def other_ranks(run: ClaimRun, n_experts: int, tokens: int) -> tuple[float, float]:
    """Spread of the radii, and share of tokens that a cosine router ranks differently."""
    rows = run.normal(n_experts, DIM, stream=n_experts)
    lengths = run.normal(tokens, 1, stream=2).mul(2).exp()
    x = run.normal(tokens, DIM, stream=1) * lengths
    moved = rows - router_sphere_centre(rows)
    radii = moved.norm(dim=1)
    cosine = (x / x.norm(dim=1, keepdim=True)) @ (moved / radii[:, None]).T
    differ = ((x @ rows.T).argsort(dim=1) != cosine.argsort(dim=1)).any(dim=1)
    return (radii.max() / radii.min() - 1).item(), differ.double().mean().item()


@claim("p5-sphere", "a linear router is a cosine router about another centre", number="sphere")
def linear_router_is_cosine(run: ClaimRun) -> Evidence:
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
    """Build a cosine router with drawn rows."""
    router = CosineRouter(DIM, 6, temperature=TEMPERATURE, tau=tau).double().requires_grad_(False)
    router.weight.copy_(run.normal(6, DIM, stream=3))
    return router


def cosine_steepness(run: ClaimRun, router: CosineRouter, size: float) -> float:
    """Largest ratio of a score change to the Lipschitz bound, for tokens of this size."""
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
def cosine_lipschitz_at_zero(run: ClaimRun) -> Evidence:
    """The score of the perturbed cosine router has the Lipschitz constant ‖w‖/((‖w‖ + τ1) τ2 t),
    attained at the zero vector, where it is 0. The plain cosine jumps there by 2/t between opposite
    tokens, however small.

    Setting: the scores alone, without projection; every pair of tokens
    Tested: Pairs of tokens of sizes 1e-9 to 10, and the rows themselves against zero.
    Overturned by: a pair of tokens above the bound
    """
    router, unperturbed = cosine_router(run, TAU), cosine_router(run, (0.0, 0.0))
    sizes = [10.0**p for p in range(-9, 2)]
    ratios = [cosine_steepness(run, router, size) for size in sizes]
    small = 1e-9 * unperturbed.weight
    jump = (unperturbed.score(small) - unperturbed.score(-small)).diagonal().min().item()
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


def ramp_moments(form: str) -> tuple[float, float, float]:
    """Moments M₁, M₂, M₃ of a ramp, as `soften` uses them."""
    from tieline.lab.on_model.soft_choice import MOMENTS

    return MOMENTS[form]


SHARES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda u: torch.sigmoid(-u),
    "projection": lambda u: (1 - u).clamp(min=0) / 2,
}
"""Share of the second expert at gap u ε."""


def wall_expert_outputs(x: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs of the chosen and the other expert at x; the wall is at 0."""
    first, second = torch.cos(x), 1.5 - x.sin()
    return torch.where(x < 0, first, second), torch.where(x < 0, second, first)


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
        mine, other = wall_expert_outputs(x)
        moved = loss(mine + SHARES[form](u) * (other - mine)) - loss(mine)
        total += width * torch.trapezoid(normal_density(x) * moved, u).item()
    return total


def predicted_slope(form: str, loss: Callable[[Tensor], Tensor]) -> tuple[float, float]:
    """Predicted slope from the wall alone, and its gradient part."""
    first, second, third = ramp_moments(form)
    share, slopes = third / second, []
    for side in (-1.0, 1.0):
        mine, other = wall_expert_outputs(torch.tensor(side * 1e-12, dtype=torch.float64))
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
            half, full = (soft_change(form, loss, w) / w for w in (5e-4 / 2, 5e-4))
            measured, (predicted, linear) = (2 * half - full), predicted_slope(form, loss)
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


FORM = "fp8_e4m3"
"""The perturbation: the model in eight bits, which changes the experts of a few tokens in 100."""


def demo_router_moves(run: ClaimRun) -> list[tuple[RouterStates, Tensor]]:
    """Inputs of every router of the demo model, and their change when it runs in eight bits."""
    tokens = run.size(2_048, 16_384)
    pairs = zip(router_states(tokens), router_states(tokens, FORM), strict=True)
    return [(clean, other.inputs - clean.inputs) for clean, other in pairs]


@claim(
    "p5-structured",
    "exit of a cell under structured perturbations",
    number="structured",
    seconds=3,
    together="trained-states",
)
def structured_exit(run: ClaimRun) -> Evidence:
    """Let x move by m t + Σ^½ B_t, Σ of any rank. The wall of experts i, j is met by t with the
    inverse Gaussian law of gap z_i - z_j, drift (w_i - w_j)·m and deviation s_ij = √((w_i -
    w_j)ᵀΣ(w_i - w_j)); the exit time lies between the likeliest wall and their sum; and min (z_i -
    z_j)/s_ij is the exact length, in the metric of Σ, of the smallest step that changes the set.

    Setting: affine routers, top k, any drift and any covariance; the trained model in the box, its
        first router, with m and Σ of fp8
    Tested: The model in the box, m and Σ of the perturbations that its router inputs have in fp8:
        simulated paths of its tokens against the bounds and, for two experts, the law; steps of the
        stated length in the stated direction, and shorter ones in drawn directions.
    Overturned by: a path law outside the bounds, or a shorter step that changes the set
    """
    states, steps = demo_router_moves(run)[0]
    law = perturbation_law(steps)
    scores = states.scores()
    every = torch.arange(0, len(scores), len(scores) // run.size(12, 60))
    checks = [
        none_of(
            "simulated paths outside the bounds", _tokens_outside_bounds(run, states, law, every)
        )
    ]
    checks += [*_one_wall_checks(run), *_worst_step_checks(run, states, law)]
    return Evidence.of(
        checks,
        paper="m = 0, Σ invertible",
        corrected="any m, any Σ ⪰ 0",
        measured=f"rank {law.root().shape[1]} of {len(law.mean)}, tr(Σ)²/tr(Σ²) = "
        f"{(law.covariance.trace() ** 2 / law.covariance.square().sum()).item():.0f}",
    )


def _tokens_outside_bounds(
    run: ClaimRun, states: RouterStates, law: PerturbationLaw, tokens: Tensor
) -> int:
    """Count tokens whose simulated exit probability violates the bounds by four standard errors.

    Time is in units in which the typical token is one deviation away from its nearest wall.
    """
    scores = states.scores()[tokens]
    horizon = worst_step(scores, states.k, states.weight, law).length.median().item() ** 2
    times = torch.tensor([horizon], dtype=torch.float64)
    bounds = structured_bounds(scores, states.k, states.weight, law, times)
    deviation, drift = pair_noise(states.weight, law)
    rows, outside = whitened_router(states.weight, law), 0
    for index, token in enumerate(scores):
        cell = top_k_cell(token, states.k, rows)
        pair = cell.faces[:, 0], cell.faces[:, 1]
        speed = drift[pair] / deviation[pair]
        curve = exit_curve(cell, horizon, 16, run.size(1_000, 20_000), run.seed, drift=speed)
        slack = 4 * curve.stderr[-1] + 2e-3  # of the bridges of walls that are nearly parallel
        low, high = bounds.lower[index, 0] - slack, bounds.upper[index, 0] + slack
        outside += not bool(low <= curve.value[-1] <= high)
    return outside


def _one_wall_checks(run: ClaimRun) -> list[Check]:
    """Check simulated paths with a drift against the exact probability for one wall."""
    cell, unit, checks = one_wall_cell(), torch.ones(1, dtype=torch.float64), []
    for speed in (-0.8, 0.8):
        drift = speed * unit
        curve = exit_curve(cell, 1.0, 4, run.size(20_000, 400_000), run.seed, drift=drift)
        share, error = curve.value[-1].item(), curve.stderr[-1].item()
        law = drifting_exit(unit, unit, drift).item()
        checks.append(within(f"one wall, drift {speed:+g}", share, error, law))
    return checks


def _worst_step_checks(run: ClaimRun, states: RouterStates, law: PerturbationLaw) -> list[Check]:
    """Check that the stated step reaches a tie and that shorter drawn steps do not."""
    rows = slice(0, run.size(200, 2_000))
    x, scores = states.inputs[rows], states.scores()[rows]
    worst = worst_step(scores, states.k, states.weight, law)
    before = topk_mask(scores, states.k)

    def changed(steps: Tensor) -> Tensor:
        return (topk_mask((x + steps) @ states.weight.T, states.k) != before).any(dim=1)

    root, shorter = law.root(), 0
    for stream in range(20):
        directions = run.normal(len(x), root.shape[1], stream=50 + stream)
        directions *= 0.999 * worst.length[:, None] / directions.norm(dim=1, keepdim=True)
        shorter += int(changed(directions @ root.T).sum())
    beyond, before_it = changed(1.000001 * worst.step), changed(0.999999 * worst.step)
    return [
        none_of("tokens kept by 1.000001 of the stated step", int((~beyond).sum())),
        none_of("tokens changed by 0.999999 of it", int(before_it.sum())),
        none_of("tokens changed by shorter steps in drawn directions", shorter),
    ]


@claim(
    "p5-real-noise",
    "flips of real perturbations follow their covariance",
    number="real noise",
    seconds=2,
    together="trained-states",
)
def real_noise(run: ClaimRun) -> Evidence:
    """Flips of a trained router under the perturbations of low precision are those of N(m, Σ), m
    and Σ measured on other tokens; isotropic noise of the same power flips the first router too
    rarely.

    Setting: the trained model in the box, the whole of it in fp8 (e4m3), perturbations of each
        router's input; tokens of the law and of the test apart
    Tested: The model in the box in fp8, router by router: m and Σ from every other token, share of
        flips of the tokens between them, measured and drawn; isotropic noise of the same power.
    Overturned by: a router whose flips differ from those of N(m, Σ) by more than a tenth and four
        standard errors
    """
    rows = [_flip_shares(run, states, steps) for states, steps in demo_router_moves(run)]
    checks = [
        within(
            f"router {index}: share of flips against N(m, Σ)",
            row["measured"],
            row["error"],
            row["N(m, Σ)"],
            resolution=0.25,
            bias=0.1 * row["N(m, Σ)"],
        )
        for index, row in enumerate(rows)
    ]
    low = rows[0]["N(m, Σ)"] / rows[0]["isotropic"]
    checks.append(at_least("router 0: flips of N(m, Σ) over isotropic ones", low, 1.25))
    indices = [float(index) for index in range(len(rows))]
    shares = {name: [row[name] for row in rows] for name in rows[0]}
    laws = ("N(m, Σ)", "isotropic")
    return Evidence.of(
        checks,
        paper="isotropic diffusion",
        corrected="the covariance that the perturbations have",
        measured="; ".join(
            f"{name} {', '.join(f'{share:.3f}' for share in shares[name])}"
            for name in ("measured", *laws)
        ),
        figure=chart(
            "router",
            "share of tokens that change experts in fp8",
            dots("measured", indices, shares["measured"], shares["error"]),
            *(line(name, indices, shares[name], dashed=name == laws[1]) for name in laws),
        ),
    )


def _flip_shares(run: ClaimRun, states: RouterStates, steps: Tensor) -> dict[str, float]:
    """Flip rates of odd tokens: measured, and by laws fitted to the steps of even tokens."""
    law, scores = perturbation_law(steps[::2]), states.scores()[1::2]
    moved_scores = scores + steps[1::2] @ states.weight.T
    flips = (topk_mask(moved_scores, states.k) != topk_mask(scores, states.k)).any(dim=1).double()
    measured = mean_estimate(flips)
    shares = {"measured": measured.value or 0.0, "error": measured.standard_error or 0.0}
    for name, noise in (("N(m, Σ)", law), ("isotropic", law.isotropic())):
        rate = flip_rate(scores, states.k, states.weight, noise, 8, run.seed)
        shares[name] = rate.value if rate.value is not None else math.nan
    return shares


def most_vertices(facets: int, dim: int) -> int:
    """Largest number of vertices of a polyhedron with `facets` > `dim` facets."""
    low, high = dim // 2, (dim + 1) // 2
    return math.comb(facets - high, low) + math.comb(facets - low - 1, high - 1)


def vertices_bound(n_experts: int, above: int, dim: int) -> float:
    """Bound on the points at which d + 1 experts tie with `above` experts over them."""
    best, size = math.inf, dim + 2
    while size <= n_experts - above:
        share = _log_binomial(n_experts - dim - 1 - above, size - dim - 1) - _log_binomial(
            n_experts, size
        )
        best = min(best, math.log(most_vertices(size, dim + 1)) - share)
        size = max(size + 1, int(size * 1.05))
    return math.exp(best) if math.isfinite(best) else math.inf


def _log_binomial(n: int, k: int) -> float:
    """Logarithm of C(n, k)."""
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


def level_bound(n_experts: int, k: int, dim: int) -> int | float:
    """Bound on the cells of a top-k router: C(N, k), Φ(N, d+1) - N or the sum over vertices."""
    levels = range(max(0, k - dim), k)
    summed = sum(vertices_bound(n_experts, q, dim) * math.comb(dim + 1, k - q) for q in levels)
    return min(math.comb(n_experts, k), zaslavsky(n_experts, dim + 1) - n_experts, summed)


def moment_curve_cells(n_experts: int, k: int, dim: int) -> int:
    """Count cells of the router on the moment curve, z_i = Σ x_m t_i^m - t_i^{d+1}."""
    t = np.linspace(-1, 1, n_experts)
    return int(
        count_cells(np.stack([t**m for m in range(1, dim + 1)], axis=1), -(t ** (dim + 1)), k)
    )


MANY, HUGE = [2**p for p in (10, 12, 14, 16, 18)], [2**p for p in (24, 26, 28, 30)]
"""Numbers of experts for comparing the bounds, and for their asymptotic order."""


@claim("p5-levels", "the combinatorial gain ends at k = (d+1)/2", number="levels")
def combinatorial_gain_ends(run: ClaimRun) -> Evidence:
    """For k > (d+1)/2 the cells of every top-k router are O(N^⌊(d+1)/2⌋), a vanishing share of C(N,
    k), so that Thm 4.19 of paper 3 fails for each such k and not only for k > d + 1; for k <=
    (d+1)/2 routers on the moment curve have all C(N, k) cells. Pieces are at most cells times Φ(kH,
    d), which is sharper than B*.

    Setting: affine routers, every position; N grows with d and k fixed
    Tested: The bound with its constants: exponent in N for d = 1 ... 5 and k = ⌊(d+1)/2⌋ + 1; exact
        counts of drawn routers, d = 1, 2, 3, all k, and of moment curves against it.
    Overturned by: a router with more cells than the bound
    """
    powers = {}
    for dim in range(1, 6):
        k = (dim + 1) // 2 + 1
        powers[dim] = exponent(HUGE, [level_bound(n, k, dim) for n in HUGE])
    above = 0
    for stream in range(run.size(6, 60)):
        for dim in (1, 2, 3):
            W, b = numpy_router(run, 40 + stream, 10, dim)
            above += sum(int(count_cells(W, b, k)) > level_bound(10, k, dim) for k in range(1, 10))
    share = [level_bound(n, 4, 2) / math.comb(n, 4) for n in MANY]
    pieces = level_bound(4096, 4, 2) * zaslavsky(32, 2)
    checks = [
        near(
            f"exponent of the bound, d = {dim}, k = {(dim + 1) // 2 + 1}",
            power,
            (dim + 1) // 2,
            0.02,
        )
        for dim, power in powers.items()
    ]
    return Evidence.of(
        checks,
        none_of("drawn routers above the bound", above),
        near("moment curve, d = 3, k = 2, N = 9", moment_curve_cells(9, 2, 3), math.comb(9, 2), 0),
        near("moment curve, d = 5, k = 3, N = 8", moment_curve_cells(8, 3, 5), math.comb(8, 3), 0),
        at_most("share of C(N, 4), d = 2, N = 2¹⁸", share[-1], 1e-9),
        at_least(
            "B* over the new bound, N = 4096, k = 4, H = 8, d = 2",
            sharp_bound(4096, 4, 8, 2) / pieces,
            100,
        ),
        paper="k > d + 1",
        corrected="k > (d+1)/2",
        measured=f"B* {sharp_bound(4096, 4, 8, 2):.3g} against {pieces:.3g} pieces",
        figure=chart("N", "bound / C(N, 4), d = 2", line("cells", MANY, share), log="xy"),
    )
