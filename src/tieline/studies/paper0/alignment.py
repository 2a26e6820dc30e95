"""Sections 6.2 to 6.5: the reduced update, its instability and its rate of alignment."""

import math

import torch

from tieline.limits.symmetry import (
    alignment_rate,
    alignment_step,
    operator,
)
from tieline.studies.checks import at_least, at_most, near, none_of
from tieline.studies.claim import Evidence, Run, Verdict
from tieline.studies.figure import chart, line
from tieline.studies.registry import claim

V = torch.tensor([0.8, 0.6], dtype=torch.float64)
D = torch.tensor([1.0, 0.3], dtype=torch.float64)
SIGMA = torch.tensor([[1.5, 0.4], [0.4, 0.8]], dtype=torch.float64)


@claim(
    "p0-eq6.6",
    "eq. 6.6",
    "reduced update",
    statement="u_{t+1} = (I + (η/τ) M) u_t to first order.",
    tested="Fifty steps of the update against its spectral form.",
)
def update(run: Run) -> Evidence:
    """Distance of the iterated update from its closed form."""
    found = operator(V, D, SIGMA)
    u, push = torch.tensor([0.3, -0.7], dtype=torch.float64), 0.05
    parts = found.eigenvectors.T @ u
    for _ in range(50):
        u = alignment_step(u, found.matrix, push)
    closed = found.eigenvectors @ ((1 + push * found.eigenvalues) ** 50 * parts)
    distance = ((u - closed).norm() / closed.norm()).item()
    return Evidence(
        [at_most("relative distance", distance, 1e-12)], paper="equal", measured=distance
    )


@claim(
    "p0-prop6.3",
    "Prop. 6.3",
    "instability of the symmetric router",
    statement="If d·Σv > 0, M has a positive eigenvalue whose eigenvector is not orthogonal to v, "
    "and the reduced update grows along it by 1 + ηλ/τ a step, more for smaller τ.",
    tested="Drawn teachers in three dimensions: signs, overlaps, and the growth of the iterated "
    "update.",
    expected=Verdict.CONDITION,
    condition="d·Σv > 0, which is no loss of generality only in words (eq. 6.7), and the reduced "
    "model, not the true descent (eq. 6.3)",
)
def instability(run: Run) -> Evidence:
    """Teachers with positive and negative product."""
    stable, unstable, worst, least = 0, 0, math.inf, math.inf
    for i in range(run.size(100, 1_000)):
        v, d = run.normal(3, stream=2 * i), run.normal(3, stream=2 * i + 1)
        v = v / v.norm()
        found = operator(v, d)
        positive = (d @ v).item() > 0
        stable += not positive and found.rayleigh < 0
        unstable += positive and found.rayleigh <= 0
        if positive:
            worst = min(worst, found.eigenvalues[0].item())
            growing = found.overlap[found.eigenvalues > 0]
            least = min(least, growing.max().item())
    found = operator(V, D, SIGMA)
    slow, quick = (alignment_rate(found.eigenvalues, 0.1, tau).amplification for tau in (1.0, 0.1))
    return Evidence(
        [
            none_of("teachers with vᵀMv < 0", stable),
            none_of("teachers with d·Σv > 0 and vᵀMv <= 0", unstable, part="condition"),
            at_least("smallest leading eigenvalue, d·Σv > 0", worst, 1e-6, part="condition"),
            at_least("smallest overlap with v", least, 1e-6, part="condition"),
            near(
                "growth per step at τ = 1",
                slow,
                1 + 0.1 * found.eigenvalues[0].item(),
                1e-12,
                part="condition",
            ),
            at_least("growth at τ = 0.1 over that at τ = 1", quick, slow, part="condition"),
        ],
        paper="λ_+ > 0",
        corrected="if d·Σv > 0",
        measured=f"smallest λ_1 = {worst:.4f}; {stable} teachers with vᵀMv < 0",
    )


@claim(
    "p0-eq6.8",
    "eq. 6.8, 6.9",
    "spectral form and alignment",
    statement="Components grow like (1 + ηλ_i/τ)^t; u/‖u‖ tends to the leading eigenvector.",
    tested="The iterated update: ratio of components after t steps against ρ^t, and the angle.",
)
def alignment(run: Run) -> Evidence:
    """Ratio of the components after twenty steps."""
    found = operator(V, D, SIGMA)
    rate = alignment_rate(found.eigenvalues, 0.1, 0.5)
    u = torch.tensor([0.1, -0.9], dtype=torch.float64)
    start = found.eigenvectors.T @ u
    angles, steps, parts = [], 15, start
    for _ in range(steps):
        u = alignment_step(u, found.matrix, 0.2)
        parts = found.eigenvectors.T @ u
        angles.append((parts[0].abs() / u.norm()).item())
    stated = (rate.ratio**steps * start[1] / start[0]).item()
    return Evidence(
        [
            near("ratio of components", (parts[1] / parts[0]).item() / stated, 1, 1e-9),
            at_least("cosine with the leading eigenvector", angles[-1], 0.999),
            near("the sign condition holds", float(rate.sign_stable), 1, 0),
        ],
        paper=stated,
        measured=(parts[1] / parts[0]).item(),
        figure=chart("step", "|cos(u, w_1)|", [line("reduced model", range(1, steps + 1), angles)]),
    )


@claim(
    "p0-eq6.10",
    "eq. 6.10, 6.11",
    "rate of alignment and its saturation",
    statement="ρ(τ) = (1 + ηλ_2/τ)/(1 + ηλ_1/τ) = 1 - (η/τ)(λ_1 - λ_2) + O((η/τ)²), "
    "t_align ≍ τ/(η(λ_1 - λ_2)); for τ → 0 it saturates at λ_2/λ_1.",
    tested="The expansion's order, the time to shrink the ratio by e, and the limit.",
)
def rate(run: Run) -> Evidence:
    """Order of the expansion, time scale, and limit."""
    values = operator(V, D, SIGMA).eigenvalues
    pushes = [0.004, 0.002, 0.001]
    rates = [alignment_rate(values, push, 1.0) for push in pushes]
    errors = [abs(r.ratio - r.ratio_first_order) for r in rates]
    order = math.log(errors[0] / errors[2]) / math.log(4)
    both = torch.tensor([2.0, 0.5], dtype=torch.float64)
    taus = [10.0**k for k in (1, 0, -1, -2, -3, -4)]
    curve = [alignment_rate(both, 0.1, tau).ratio for tau in taus]
    return Evidence(
        [
            near("order of the error of the expansion", order, 2, 0.05),
            near(
                "t_align over the exact time at η/τ = 0.001",
                rates[-1].steps / rates[-1].steps_exact,
                1,
                0.05,
            ),
            near("ρ at τ = 1e-4", curve[-1], 0.25, 1e-3),
        ],
        paper=0.25,
        measured=curve[-1],
        figure=chart("τ", "ρ(τ)", [line("λ = 2, ½; η = 0.1", taus, curve)], x_scale="log"),
    )
