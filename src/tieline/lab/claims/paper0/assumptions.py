"""The assumptions of section 5.4, each with the measurement that decides it, and Lemma 5.15."""

import math
from typing import Any

import torch

from tieline.lab.claims.checks import at_least, at_most, corrected, near, none_of, qualified
from tieline.lab.claims.claim import ClaimRun, Evidence, chart, dots, line
from tieline.lab.claims.paper0.limit import crossing_pair
from tieline.lab.claims.problems import pupil
from tieline.lab.claims.registry import claim
from tieline.lab.limits.recovery import specialisation_gap
from tieline.lab.limits.saddle import derivative_transfer, offset_curvature, perturbed_curvature
from tieline.lab.limits.shape import moved
from tieline.lab.limits.two_cells import TwoCells, gaussian_profile, gaussian_risk, two_cells
from tieline.lab.power_law import exponent


def turned(angle: float, offset: float = 0.0) -> TwoCells:
    """A wall in the plane with a unit normal at that angle; its experts are zero."""
    normal = [math.cos(angle), math.sin(angle)]
    return two_cells(normal=normal, offset=offset, slopes=[[0.0, 0.0], [0.0, 0.0]])


@claim("p0-asm5.11", "specialisation gap")
def gap(run: ClaimRun) -> Evidence:
    """Whatever its parameters, a wrong expert is within √γ of the right one on mass η of a cell at
    most.

    Setting: an assumption on all student parameters; bounded experts of one family
    Tested: η(γ) at the teacher's own experts; and with the wrong expert free to take the right
        one's parameters, which every family shared by the experts allows.
    Overturned by: a family that gives every expert its own range of functions
    Condition: experts are confined to neighbourhoods; if they share one family the supremum is the
        mass of the cell
    """
    teacher = pupil(run, run.size(50_000, 500_000), 0.0)
    gammas = [1e-4, 1e-3, 1e-2, 1e-1]
    specialised = specialisation_gap(teacher.sample, teacher.labels, gammas)
    cells = torch.bincount(teacher.labels, minlength=3).double() / len(teacher.labels)
    return Evidence.of(
        at_most("η(0.001) with free parameters", cells.max().item(), 0.1),
        qualified(
            at_most("η(0.001) at the teacher's experts", specialised.etas[1], 0.1),
            at_most("η falls with γ", specialised.etas[0], specialised.etas[3]),
        ),
        paper="an assumption",
        measured=f"η(0.001) = {specialised.etas[1]:.4f}; free: {cells.max().item():.3f}",
        figure=chart(
            "γ",
            "η",
            dots("at the teacher's experts", gammas, specialised.etas),
            line("free parameters", gammas, [cells.max().item()] * 4, dashed=True),
            log="xy",
        ),
    )


@claim("p0-asm5.12", "velocities that a router can realise")
def velocities(run: ClaimRun) -> Evidence:
    """A linear router moves its wall by a finite-dimensional space of normal velocities, the affine
    functions of the input on it, and by no others.

    Setting: an assumption with the linear router as its example, D = 4
    Tested: Rank of the velocities over points of a wall in D = 4, and what is left of a quadratic
        one.
    Overturned by: a realised velocity that is not affine on the wall
    """
    width, n = 4, run.size(500, 5_000)
    normal, offset = run.normal(width, stream=1), 0.4
    x = run.normal(n, width, stream=2)
    x = x - ((x @ normal + offset) / normal.square().sum())[:, None] * normal
    columns = torch.cat([x, torch.ones(n, 1, dtype=torch.float64)], dim=1) / normal.norm()
    values = torch.linalg.svdvals(columns)
    rank = (values > 1e-10 * values[0]).sum().item()
    bent = x[:, 0].square()
    left = bent - columns @ torch.linalg.lstsq(columns, bent[:, None]).solution.squeeze(1)
    joined = torch.cat([columns, x @ run.normal(width, 1, stream=3) + 1.0], dim=1)
    again = torch.linalg.svdvals(joined)
    return Evidence.of(
        near("dimension of the velocities, D = 4", rank, width, 0),
        near(
            "dimension with one more affine velocity",
            (again > 1e-10 * again[0]).sum().item(),
            width,
            0,
        ),
        at_least(
            "share of a quadratic velocity that is not realised",
            left.norm().item() / bent.norm().item(),
            0.05,
        ),
        paper="finite",
        corrected="D: the motion along (n, b) itself leaves the wall in place",
        measured=rank,
    )


@claim("p0-asm5.13", "gradient and Hessian transfer", seconds=1)
def transfer(run: ClaimRun) -> Evidence:
    """∇L_τ and ∇²L_τ tend to those of L_0 near every critical point.

    Setting: an assumption near critical points; two affine experts under a Gaussian
    Tested: Derivatives of two affine experts under a Gaussian by quadrature, off the teacher's wall
        and at the teacher, τ over two decades.
    Overturned by: a bounded Hessian of L_τ at the teacher as τ falls
    Condition: the student's wall is not the teacher's: there the Hessian grows like E[d·[μ] | S =
        0]/2 · p_S(0)/τ
    """
    student, teacher = crossing_pair()
    taus = [0.1, 0.03, 0.01, 0.003]
    off = derivative_transfer(student, teacher, taus)
    limit = offset_curvature(teacher, teacher, taus).limit
    on = [_shift_curvature(teacher, tau) for tau in taus]
    return Evidence.of(
        at_most("∂²L_τ/∂b² at the teacher, τ = 0.003", on[-1], 10.0),
        qualified(
            at_least(
                "exponent of ‖∇L_τ - ∇L_0‖, off", exponent(taus, list(off.gradient_gaps)), 0.9
            ),
            at_least(
                "exponent of ‖∇²L_τ - ∇²L_0‖, off", exponent(taus, list(off.hessian_gaps)), 0.9
            ),
        ),
        corrected(near("τ ∂²L_τ/∂b² at the teacher", taus[-1] * on[-1] / limit, 1, 0.02)),
        paper="r(τ) → 0",
        corrected=f"{limit:.6f}/τ at the teacher",
        measured=f"{on[-1]:.3f} at τ = 0.003",
        figure=chart(
            "τ",
            "difference of Hessians",
            dots("off the teacher's wall", taus, off.hessian_gaps),
            dots("at the teacher, ∂²/∂b²", taus, on),
            line("limit/τ", taus, [limit / t for t in taus], dashed=True),
            log="xy",
        ),
    )


def _shift_curvature(teacher: TwoCells, tau: float) -> float:
    """∂²L_τ/∂b² at the teacher by differences over a twentieth of the layer."""
    step = tau / 20
    shift = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64)
    low, middle, high = (
        gaussian_risk(moved(teacher, shift, k * step), teacher, tau=tau).item() for k in (-1, 0, 1)
    )
    return (high - 2 * middle + low) / step**2


@claim("p0-asm5.14", "geometry of the profiled hard problem", seconds=0.7)
def profiled(run: ClaimRun) -> Evidence:
    """For every wall the experts have one minimiser with curvature at least α_fr; at every wall but
    the teacher's some motion has zero first and negative second variation.

    Setting: an assumption on every wall that is not the teacher's; all walls through the origin
    Tested: Ψ_0 over all walls through the origin by quadrature: α_fr, and the curvature along the
        motion (turn and shift) whose first variation vanishes; then the same at critical walls.
    Overturned by: a neutral motion with negative second variation at every wall
    Condition: the wall is a critical one of Ψ_0; at others the motion of zero first variation may
        well have positive second variation
    """
    teacher = two_cells(normal=[1.0, 0.0], slopes=[[1.0, 0.5], [-0.7, 0.4]], intercepts=[0.2, 0.1])
    angles = [math.pi * (i + 0.5) / run.size(18, 90) for i in range(run.size(18, 90))]
    values = [_variation(teacher, angle) for angle in angles]
    worst = max(neutral for _, _, neutral, _ in values)
    top = max(range(len(angles)), key=lambda i: gaussian_profile(turned(angles[i]), teacher).value)
    critical = _nearby_maximum(teacher, angles[top])
    gradient, least, _, _ = _variation(teacher, critical)
    fixed = min(curvature for *_, curvature in values)
    return Evidence.of(
        at_most("largest second variation along a neutral motion", worst, 0),
        qualified(
            at_least("α_fr over all walls", fixed, 0.1),
            near("gradient of Ψ_0 at the critical wall", gradient, 0, 1e-3),
            at_most("least eigenvalue there", least, -0.1),
        ),
        paper="λ_nd > 0 at every wall",
        corrected=f"at the critical wall: {-least:.3f}",
        measured=f"neutral second variation up to {worst:.3f}; α_fr = {fixed:.4f}",
        figure=chart(
            "angle of the wall",
            "second variation",
            dots("least eigenvalue", angles, [value[1] for value in values]),
            dots("along the neutral motion", angles, [value[2] for value in values]),
        ),
    )


def _variation(teacher: TwoCells, angle: float) -> tuple[float, float, float, float]:
    """|∇Ψ_0|, least eigenvalue of its Hessian in (angle, offset), neutral curvature, α_fr."""
    h = 1e-2
    grid = [
        [gaussian_profile(turned(angle + i * h, j * h), teacher) for j in (-1, 0, 1)]
        for i in (-1, 0, 1)
    ]
    f = torch.tensor([[cell.value.item() for cell in row] for row in grid], dtype=torch.float64)
    gradient = torch.stack([f[2, 1] - f[0, 1], f[1, 2] - f[1, 0]]) / (2 * h)
    cross = (f[2, 2] - f[2, 0] - f[0, 2] + f[0, 0]) / 4
    rows = [f[2, 1] - 2 * f[1, 1] + f[0, 1], cross, cross, f[1, 2] - 2 * f[1, 1] + f[1, 0]]
    hessian = torch.stack(rows).reshape(2, 2) / h**2
    neutral = torch.stack([-gradient[1], gradient[0]]) / gradient.norm().clamp_min(1e-12)
    least = torch.linalg.eigvalsh(hessian)[0].item()
    along = (neutral @ hessian @ neutral).item()
    return gradient.norm().item(), least, along, grid[1][1].curvature


def _nearby_maximum(teacher: TwoCells, angle: float) -> float:
    """The nearby angle of largest Ψ_0 among walls through the origin."""
    from scipy.optimize import minimize_scalar

    maximum: Any = minimize_scalar(
        lambda a: -gaussian_profile(turned(a), teacher).value.item(),
        bounds=(angle - 0.3, angle + 0.3),
        method="bounded",
        options={"xatol": 1e-8},
    )
    return float(maximum.x)


@claim("p0-lem5.15", "negative curvature persists")
def curvature(run: ClaimRun) -> Evidence:
    """λ_min(H) <= λ_min(H_0) + ‖H - H_0‖; with λ_min(H_0) <= -λ and a change of λ/2 at most,
    λ_min(H) <= -λ/2.

    Setting: symmetric matrices, any size; 6 × 6 drawn and the extreme case
    Tested: Drawn symmetric matrices, and the extreme case H = H_0 + η vvᵀ with v the eigenvector.
    Overturned by: one eigenvalue above the bound
    """
    violations = 0
    for i in range(run.size(100, 2_000)):
        a, b = run.normal(6, 6, stream=2 * i), 0.3 * run.normal(6, 6, stream=2 * i + 1)
        bound = perturbed_curvature(a + a.T, a + a.T + b + b.T)
        violations += bound.least > bound.bound + 1e-12
    a = run.normal(6, 6, stream=99_999)
    values, vectors = torch.linalg.eigh(a + a.T)
    extreme = a + a.T + 0.1 * torch.outer(vectors[:, 0], vectors[:, 0])
    bound = perturbed_curvature(a + a.T, extreme)
    half = perturbed_curvature(a + a.T, a + a.T - values[0] / 2 * torch.eye(6, dtype=torch.float64))
    checks = [
        none_of("violations", violations),
        near("the bound is attained", bound.least, bound.bound, 1e-12),
        at_most("half of the curvature stays", half.least, values[0].item() / 2, 1e-9),
    ]
    return Evidence.of(checks, paper="a bound", measured=f"{violations} violations, attained")
