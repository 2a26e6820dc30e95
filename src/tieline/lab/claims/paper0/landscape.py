"""Sections 5.2 to 5.4: parts of the risk, motions of a wall, and the profiled problem."""

import math
from typing import Any

import torch

from tieline.lab.claims.claim import ClaimRun, claim
from tieline.lab.claims.evidence import (
    Check,
    Evidence,
    at_least,
    at_most,
    chart,
    corrected,
    dots,
    line,
    near,
    none_of,
    qualified,
    within,
)
from tieline.lab.claims.paper0.soft_to_hard_limit import crossing_pair
from tieline.lab.claims.routing_problems import bounded_mixture, drawn_pupil
from tieline.lab.limits.recovery import specialisation_gap
from tieline.lab.limits.risk import MoESample, cell_control, hard_predictions, risk_decomposition
from tieline.lab.limits.saddle import derivative_transfer, offset_curvature, perturbed_curvature
from tieline.lab.limits.two_cells import TwoCells, gaussian_profile, gaussian_risk, two_cells
from tieline.lab.limits.wall_integrals import moved, sampled_wall_derivative, wall_variation
from tieline.lab.power_law import exponent

EPSILON = 0.1


@claim("p0-lem5.5", "risk of the interior and of the boundary layer")
def interior_boundary_risk(run: ClaimRun) -> Evidence:
    """L̃ splits into an interior and a boundary part; the latter is at most C(ε, B, B_stu) BM(τ;
    ε).

    Setting: bounded students and teachers, any ε; students at one distance, four temperatures
    Tested: The two parts on drawn students against the whole, and against the paper's constant 2B²
        + 2B_stu² and the sharp (B + B_stu)².
    Overturned by: a boundary part above C · BM
    """
    gap, sharp, paper = 0.0, [], []
    for tau in (1.0, 0.3, 0.1, 0.03):
        split = risk_decomposition(
            drawn_pupil(run, run.size(50_000, 500_000), 0.7).sample, tau, EPSILON
        )
        values = [e.value or 0.0 for e in (split.total, split.interior, split.boundary)]
        gap = max(gap, abs(values[0] - values[1] - values[2]))
        sharp.append(values[2] / (split.sharp_bound.value or math.nan))
        paper.append(values[2] / (split.paper_bound.value or math.nan))
    return Evidence.of(
        at_most("whole minus parts", gap, 1e-12),
        at_most("boundary part over the paper's bound", max(paper), 1),
        corrected(
            at_most("boundary part over (B + B_stu)² BM", max(sharp), 1),
            at_least("boundary part is there", min(paper), 1e-6),
        ),
        paper="at most 1, constant 2B² + 2B_stu²",
        corrected="constant (B + B_stu)², no ε",
        measured=max(sharp),
    )


@claim("p0-prop5.8", "cellwise control on the dominated interior")
def cellwise_control(run: ClaimRun) -> Evidence:
    """On Ω*_k ∩ {p_k >= 1-ε} the risk is at least half the squared error of expert k, less 4 B_stu²
    ε² times its mass.

    Setting: bounded students, every cell; students at four distances, two temperatures
    Tested: Both sides in every cell of students at four distances from the teacher.
    Overturned by: a cell with negative slack
    """
    slacks, masses = [], []
    for distance in (0.0, 0.2, 0.5, 1.0):
        student = drawn_pupil(run, run.size(30_000, 300_000), distance)
        for tau in (0.3, 0.05):
            cells = cell_control(student.sample, student.labels, tau, EPSILON)
            slacks += [cell.slack.value or 0.0 for cell in cells]
            masses += [cell.mass.value or 0.0 for cell in cells]
    checks = [
        at_least("smallest slack", min(slacks), 0),
        *corrected(at_least("largest mass of a dominated cell", max(masses), 0.1)),
    ]
    return Evidence.of(checks, paper="at least 0", measured=min(slacks))


@claim("p0-prop5.10", "shape derivative of the hard risk", seconds=1)
def hard_risk_shape_derivative(run: ClaimRun) -> Evidence:
    """Moving a wall changes the hard risk at the rate ∫ [φ₊ D(μ_l) - φ₋ D(μ_k)] p; where it
    vanishes and the second variation is negative, the risk falls.

    Setting: a wall away from junctions, one-sided traces of μ; the paper writes d/dε at 0, which
        has two sides
    Tested: Two affine experts under a Gaussian: the formula against differences on both sides, at a
        wall of the teacher and off it, and by sampling; the second variation at a wall whose first
        one vanishes.
    Overturned by: a formula for the derivative at 0⁻ as well, or the words 'at 0⁺' in the statement
    Condition: it is the derivative at 0⁺ along the motion; at a wall of the teacher that at 0⁻ has
        the traces exchanged and the other sign
    """
    student, teacher = crossing_pair()
    shift = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64)
    variation = wall_variation(
        student, teacher, torch.tensor([0.3, -0.5, 1.0], dtype=torch.float64)
    )
    on = wall_variation(teacher, teacher, shift)
    first, second = _swapped_experts_variation()
    return Evidence.of(
        near("derivative at 0⁻ is that at 0⁺, on the teacher's wall", on.left, on.right, 1e-6),
        qualified(
            near(
                "formula and difference at 0⁺, off",
                variation.right,
                variation.right_difference,
                1e-5,
            ),
            near("formula and difference at 0⁺, on", on.right, on.right_difference, 1e-5),
        ),
        corrected(
            near("formula and difference at 0⁻, on", on.left, on.left_difference, 1e-5),
            at_most("product of the two sides, on", on.left * on.right, 0),
        ),
        qualified(
            _sampled_derivative(run),
            near("first variation, experts exchanged", first, 0, 1e-9),
            at_most("second variation there", second, -0.1),
        ),
        paper=on.right,
        corrected=f"0⁺: {on.right:.6f}, 0⁻: {on.left:.6f}",
        measured=f"0⁺: {on.right_difference:.6f}, 0⁻: {on.left_difference:.6f}",
    )


def _sampled_derivative(run: ClaimRun) -> Check:
    """Check the sampled derivative of the hard risk of four experts against differences."""
    sample = bounded_mixture(run, run.size(400_000, 4_000_000))
    change = torch.tensor([1.0, -0.5, 0.0, 0.2], dtype=torch.float64)
    forth = MoESample(sample.scores + 0.02 * change, sample.outputs, sample.target)
    back = MoESample(sample.scores - 0.02 * change, sample.outputs, sample.target)
    rate = sampled_wall_derivative(sample, change.expand_as(sample.scores), 0.05)
    pair = _hard_square_errors(forth) - _hard_square_errors(back)
    difference, error = pair.mean().item() / 0.04, pair.std().item() / 0.04 / len(pair) ** 0.5
    joint_error = math.hypot(error, rate.standard_error or 0.0)
    return within(
        "sampled derivative of 4 experts",
        rate.value or math.nan,
        joint_error,
        difference,
        resolution=0.3,
        bias=0.02 * abs(difference),
    )


def _hard_square_errors(sample: MoESample) -> torch.Tensor:
    """Squared errors of the hard predictions, one per input."""
    return (sample.target - hard_predictions(sample)).square()


def _swapped_experts_variation() -> tuple[float, float]:
    """First and second difference of L_0 as a wall with its experts on the wrong sides turns.

    μ = |x_1| and experts ∓x_2/2 on the two sides of x_2 = 0: both are 0 on the wall, so L_0 does
    not change to first order, and any turn lowers it.
    """
    teacher = two_cells(normal=[1.0, 0.0], slopes=[[1.0, 0.0], [-1.0, 0.0]])
    risks = []
    for angle in (-0.01, 0.0, 0.01):
        normal = [math.sin(angle), math.cos(angle)]
        student = two_cells(normal=normal, slopes=[[0.0, -0.5], [0.0, 0.5]])
        risks.append(gaussian_risk(student, teacher).item())
    return (risks[2] - risks[0]) / 0.02, (risks[2] - 2 * risks[1] + risks[0]) / 0.01**2


@claim("p0-asm5.11", "specialisation gap")
def specialisation_gap_claim(run: ClaimRun) -> Evidence:
    """Whatever its parameters, a wrong expert is within √γ of the right one on mass η of a cell at
    most.

    Setting: an assumption on all student parameters; bounded experts of one family
    Tested: η(γ) at the teacher's own experts; and with the wrong expert free to take the right
        one's parameters, which every family shared by the experts allows.
    Overturned by: a family that gives every expert its own range of functions
    Condition: experts are confined to neighbourhoods; if they share one family the supremum is the
        mass of the cell
    """
    teacher = drawn_pupil(run, run.size(50_000, 500_000), 0.0)
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
def realisable_velocities(run: ClaimRun) -> Evidence:
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
    residual = bent - columns @ torch.linalg.lstsq(columns, bent[:, None]).solution.squeeze(1)
    joined = torch.cat([columns, x @ run.normal(width, 1, stream=3) + 1.0], dim=1)
    joint_values = torch.linalg.svdvals(joined)
    return Evidence.of(
        near("dimension of the velocities, D = 4", rank, width, 0),
        near(
            "dimension with one more affine velocity",
            (joint_values > 1e-10 * joint_values[0]).sum().item(),
            width,
            0,
        ),
        at_least(
            "share of a quadratic velocity that is not realised",
            residual.norm().item() / bent.norm().item(),
            0.05,
        ),
        paper="finite",
        corrected="D: the motion along (n, b) itself leaves the wall in place",
        measured=rank,
    )


@claim("p0-asm5.13", "gradient and Hessian transfer")
def curvature_transfer(run: ClaimRun) -> Evidence:
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
    transfer = derivative_transfer(student, teacher, taus)
    limit = offset_curvature(teacher, teacher, taus).limit
    on = [_shift_curvature(teacher, tau) for tau in taus]
    return Evidence.of(
        at_most("∂²L_τ/∂b² at the teacher, τ = 0.003", on[-1], 10.0),
        qualified(
            at_least(
                "exponent of ‖∇L_τ - ∇L_0‖, off", exponent(taus, list(transfer.gradient_gaps)), 0.9
            ),
            at_least(
                "exponent of ‖∇²L_τ - ∇²L_0‖, off", exponent(taus, list(transfer.hessian_gaps)), 0.9
            ),
        ),
        corrected(near("τ ∂²L_τ/∂b² at the teacher", taus[-1] * on[-1] / limit, 1, 0.02)),
        paper="r(τ) → 0",
        corrected=f"{limit:.6f}/τ at the teacher",
        measured=f"{on[-1]:.3f} at τ = 0.003",
        figure=chart(
            "τ",
            "difference of Hessians",
            dots("off the teacher's wall", taus, transfer.hessian_gaps),
            dots("at the teacher, ∂²/∂b²", taus, on),
            line("limit/τ", taus, [limit / t for t in taus], dashed=True),
            log="xy",
        ),
    )


def _shift_curvature(teacher: TwoCells, tau: float) -> float:
    """Curvature ∂²L_τ/∂b² at the teacher, by differences over a twentieth of the layer."""
    step = tau / 20
    shift = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64)
    low, middle, high = (
        gaussian_risk(moved(teacher, shift, k * step), teacher, tau=tau).item() for k in (-1, 0, 1)
    )
    return (high - 2 * middle + low) / step**2


@claim("p0-asm5.14", "geometry of the profiled hard problem", seconds=0.7)
def profiled_geometry(run: ClaimRun) -> Evidence:
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
    values = [_profile_derivatives(teacher, angle) for angle in angles]
    worst = max(neutral for _, _, neutral, _ in values)
    top = max(
        range(len(angles)), key=lambda i: gaussian_profile(wall_at_angle(angles[i]), teacher).value
    )
    critical = _nearby_maximum(teacher, angles[top])
    gradient, least, _, _ = _profile_derivatives(teacher, critical)
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


def wall_at_angle(angle: float, offset: float = 0.0) -> TwoCells:
    """A wall in the plane with a unit normal at that angle; its experts are zero."""
    normal = [math.cos(angle), math.sin(angle)]
    return two_cells(normal=normal, offset=offset, slopes=[[0.0, 0.0], [0.0, 0.0]])


def _profile_derivatives(teacher: TwoCells, angle: float) -> tuple[float, float, float, float]:
    """Return |∇Ψ_0|, least Hessian eigenvalue in (angle, offset), neutral curvature, α_fr."""
    h = 1e-2
    grid = [
        [gaussian_profile(wall_at_angle(angle + i * h, j * h), teacher) for j in (-1, 0, 1)]
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
    """Angle near the given one with the largest Ψ_0, among walls through the origin."""
    from scipy.optimize import minimize_scalar

    maximum: Any = minimize_scalar(
        lambda a: -gaussian_profile(wall_at_angle(a), teacher).value.item(),
        bounds=(angle - 0.3, angle + 0.3),
        method="bounded",
        options={"xatol": 1e-8},
    )
    return float(maximum.x)


@claim("p0-lem5.15", "negative curvature persists")
def negative_curvature_persists(run: ClaimRun) -> Evidence:
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


def conditional_square(width: float, power: float) -> float:
    """E[f² | |S| <= w] = w^(-2 power) / (1 - 2 power) for f = |S|^-power, S uniform on [-1, 1]."""
    return width ** (-2 * power) / (1 - 2 * power)


@claim(
    "p0-rem5.9",
    "fourth moments do not bound what confident events cost",
    statement="A version of Prop. 5.8 on fourth moments alone would need local integrability where "
    "the router is nearly deterministic.",
    tested="f = |S - 1|^-1/5 beside S = 1, where the router is nearly deterministic for small τ: "
    "the same two numbers.",
    given={"region": "confident"},
)
@claim("p0-rem5.6", "fourth moments do not bound what ties cost")
def moments_alone(run: ClaimRun, region: str = "ambiguous") -> Evidence:
    """A bound on E f⁴ does not bound E[f² | U_ε] over the shrinking ambiguity sets.

    Setting: one dimension, S uniform on [-1, 1], the region |S - c| <= w, c = 0
    Tested: f = |S|^-1/5: E f⁴ by closed form and by sampling; exponent in w of E[f² | |S| <= w],
        sampled.
    Overturned by: a conditional moment that stays bounded
    """
    centre, power = (0.0 if region == "ambiguous" else 1.0), 0.2
    draws = torch.rand(
        run.size(400_000, 4_000_000), dtype=torch.float64, generator=run.generator(44)
    )
    s = 2 * draws - 1 + centre  # the law around the centre is that of S around 0
    f = (s - centre).abs() ** -power
    widths = [0.4, 0.1, 0.025]
    means = [f[(s - centre).abs() <= w].square().mean().item() for w in widths]
    growth = exponent(widths, means)
    exact = [conditional_square(w, power) for w in widths]
    return Evidence.of(
        at_most("E f⁴", (f**4).mean().item(), 20),
        at_least("E[f² | U] at the least width over that at the largest", means[-1] / means[0], 2),
        corrected(
            near("exponent of E[f² | U] in the width", growth, -2 * power, 0.03),
            near("sampled over exact, least width", means[-1] / exact[-1], 1, 0.05),
        ),
        paper="no uniform bound",
        measured=f"E[f² | U] grows like w^{growth:.2f}",
        figure=chart("w", "E[f² | U]", dots("sampled", widths, means), log="xy"),
    )
