"""Section 5: parts of the risk, misrouting, recovery, saddles, and the assumptions of 5.4."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from scipy.optimize import minimize

from tieline.core.numerics import one_thread
from tieline.lab.claims.claim import ClaimRun, Verdict, claim
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
from tieline.lab.claims.paper0.limit import crossing_pair
from tieline.lab.claims.routing_problems import bounded_mixture, drawn_pupil
from tieline.lab.limits.recovery import (
    match_experts,
    misrouting_bound,
    recovery_errors,
    specialisation_gap,
)
from tieline.lab.limits.risk import (
    MoESample,
    cell_control,
    evaluate,
    hard_predictions,
    risk_decomposition,
)
from tieline.lab.limits.saddle import (
    derivative_transfer,
    find_critical_points,
    offset_curvature,
    perturbed_curvature,
)
from tieline.lab.limits.two_cells import (
    TwoCells,
    gaussian_inputs,
    gaussian_profile,
    gaussian_risk,
    two_cells,
)
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
    off = wall_variation(student, teacher, torch.tensor([0.3, -0.5, 1.0], dtype=torch.float64))
    on = wall_variation(teacher, teacher, shift)
    first, second = _swapped_experts_variation()
    return Evidence.of(
        near("derivative at 0⁻ is that at 0⁺, on the teacher's wall", on.left, on.right, 1e-6),
        qualified(
            near("formula and difference at 0⁺, off", off.right, off.right_difference, 1e-5),
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
    """The derivative of the hard risk of four experts, by the wall's layer and by differences."""
    sample = bounded_mixture(run, run.size(400_000, 4_000_000))
    change = torch.tensor([1.0, -0.5, 0.0, 0.2], dtype=torch.float64)
    forth = MoESample(sample.scores + 0.02 * change, sample.outputs, sample.target)
    back = MoESample(sample.scores - 0.02 * change, sample.outputs, sample.target)
    rate = sampled_wall_derivative(sample, change.expand_as(sample.scores), 0.05)
    pair = _hard_square_errors(forth) - _hard_square_errors(back)
    difference, error = pair.mean().item() / 0.04, pair.std().item() / 0.04 / len(pair) ** 0.5
    both = math.hypot(error, rate.standard_error or 0.0)
    return within(
        "sampled derivative of 4 experts",
        rate.value or math.nan,
        both,
        difference,
        resolution=0.3,
        bias=0.02 * abs(difference),
    )


def _hard_square_errors(sample: MoESample) -> torch.Tensor:
    """Squared errors of the hard predictions, one per input."""
    return (sample.target - hard_predictions(sample)).square()


def _swapped_experts_variation() -> tuple[float, float]:
    """First and second difference of L_0 when a wall turns, its experts on the wrong sides.

    μ = |x_1| and experts ∓x_2/2 on the two sides of x_2 = 0: on the wall both are 0, so nothing is
    lost to first order, and any turn helps.
    """
    teacher = two_cells(normal=[1.0, 0.0], slopes=[[1.0, 0.0], [-1.0, 0.0]])
    risks = []
    for angle in (-0.01, 0.0, 0.01):
        normal = [math.sin(angle), math.cos(angle)]
        student = two_cells(normal=normal, slopes=[[0.0, -0.5], [0.0, 0.5]])
        risks.append(gaussian_risk(student, teacher).item())
    return (risks[2] - risks[0]) / 0.02, (risks[2] - 2 * risks[1] + risks[0]) / 0.01**2


TEACHER = two_cells(normal=[1.0, 0.0], slopes=[[0.3, 0.5], [-0.7, -0.4]], intercepts=[1.0, -0.5])
TAU, CONFIDENT = 0.05, 0.05
"""Temperature and ε of section 5.4."""


@claim("p0-lem5.16", "confident misrouting costs risk", expected=Verdict.FAILS)
def confident_misrouting_cost(run: ClaimRun) -> Evidence:
    """For every parameter and every permutation π, L̃_int >= γ/4 (P(E_mis(π)) - K(K-1)η).

    Setting: its hypotheses are met: bounded, specialised experts, 2ε B_stu <= √γ/2; every parameter
        and every permutation, as printed
    Tested: The student that equals its teacher, under the identity and under a swap of two experts;
        the corrected bound γ/4 P(E_mis ∖ E_gap) on students at four distances.
    Overturned by: a statement for the best permutation only, or E_gap at the actual θ
    """
    gamma, n = 0.05, run.size(50_000, 500_000)
    teacher = drawn_pupil(run, n, 0.0)
    eta = specialisation_gap(teacher.sample, teacher.labels, [gamma]).etas[0]
    same, swap = (
        misrouting_bound(
            teacher.sample, teacher.labels, TAU, CONFIDENT, gamma=gamma, eta=eta, permutation=p
        )
        for p in ((0, 1, 2), (1, 0, 2))
    )
    excess = _corrected_excess(run, n, gamma, eta)
    interior = swap.interior.value or 0.0
    return Evidence.of(
        at_most(
            "printed bound less L̃_int, π the identity", same.paper_bound, same.interior.value or 0.0
        ),
        at_most("printed bound less L̃_int, π a swap", swap.paper_bound, interior),
        corrected(
            at_most("largest excess of the corrected bound", max(excess), 0),
            near("the hypothesis 2ε B_stu <= √γ/2 holds", float(swap.admissible), 1, 0),
        ),
        paper=swap.paper_bound,
        corrected=swap.corrected_bound.value,
        measured=interior,
        note="Counterexample: the student is the teacher, π exchanges two experts. The printed "
        f"bound asks for an interior risk of {swap.paper_bound:.2e}; it is {interior:.2e}.",
    )


def _corrected_excess(run: ClaimRun, n: int, gamma: float, eta: float) -> list[float]:
    """Corrected bound less L̃_int, for students at four distances and three permutations."""
    excess = []
    for distance in (0.0, 0.3, 0.7, 1.5):
        student = drawn_pupil(run, n, distance)
        sample, labels = student.sample, student.labels
        for p in ((0, 1, 2), (1, 0, 2), (2, 0, 1)):
            bound = misrouting_bound(
                sample, labels, TAU, CONFIDENT, gamma=gamma, eta=eta, permutation=p
            )
            excess.append((bound.corrected_bound.value or 0.0) - (bound.interior.value or 0.0))
    return excess


@claim(
    "p0-thm5.17-matching",
    "matching of student and teacher experts",
    number="sec. 5.4, after (5.16)",
)
def expert_matching(run: ClaimRun) -> Evidence:
    """The permutation that minimises confident misrouting matches students to teachers.

    Setting: the definition of π in the proof; 3 experts, all relabellings
    Tested: A teacher with relabelled experts: the Hungarian assignment of confident agreement must
        find the relabelling, and beat all others on a distant student.
    Overturned by: a relabelling that the assignment does not find
    """
    from itertools import permutations

    student, wrong = drawn_pupil(run, run.size(20_000, 200_000), 0.1), 0
    for p in permutations(range(3)):
        order = list(p)
        sample = type(student.sample)(
            student.sample.scores[:, order], student.sample.outputs[:, order], student.sample.target
        )
        match = match_experts(sample, student.labels, TAU, CONFIDENT)
        wrong += tuple(order[j] for j in match.permutation) != (0, 1, 2)
    far = drawn_pupil(run, run.size(20_000, 200_000), 1.5)
    best = match_experts(far.sample, far.labels, TAU, CONFIDENT)
    sums = [sum(best.agreement[k, p[k]].item() for k in range(3)) for p in permutations(range(3))]
    chosen = sum(best.agreement[k, j].item() for k, j in enumerate(best.permutation))
    checks = [
        none_of("relabellings not found", wrong),
        near("agreement of the match is the largest", chosen, max(sums), 1e-12),
    ]
    return Evidence.of(checks, paper="argmin over permutations", measured=f"{wrong} of 6 wrong")


def wall_at(coordinates: Sequence[float]) -> TwoCells:
    """The wall of length 1 at an angle and an offset; its experts are the teacher's."""
    angle, offset = (torch.tensor(float(value), dtype=torch.float64) for value in coordinates)
    return TwoCells(torch.stack([angle.cos(), angle.sin()]), offset, TEACHER.experts)


def least_risk_student(tau: float) -> TwoCells:
    """The student of least L̃_τ: over all walls, experts being the best ones of each.

    By a grid of angles and offsets, then Nelder and Mead's simplex from its best wall.
    """

    def profile(coordinates: Sequence[float]) -> float:
        return float(gaussian_profile(wall_at(coordinates), TEACHER, tau=tau).value)

    grid = itertools.product(np.linspace(0.02, 6.2, 24), np.linspace(-1.6, 1.6, 9))
    with one_thread():
        start = min(grid, key=profile)
        best = minimize(profile, start, method="Nelder-Mead", options={"xatol": 1e-7}).x
        wall = wall_at(best)
        return wall.with_experts(gaussian_profile(wall, TEACHER, tau=tau).experts)


@claim(
    "p0-thm5.17-recovery",
    "global minimisers recover the teacher",
    number="Thm 5.17, (5.13), (5.14)",
    seconds=3,
)
def teacher_recovery(run: ClaimRun) -> Evidence:
    """A global minimiser of L_τ has expert error at most C_1 (BM* + BM + η + ε²) and partition
    error at most C_2 (BM* + η + ε²).

    Setting: global minimisers, small τ (0.3, 0.15 and 0.08, where BM is well below 1); two affine
        experts in the plane (moments stand for bounds), a router of length 1, some C_1 and C_2
    Tested: The least risk over all walls, a two-expert problem in the plane at three temperatures;
        C_1 and C_2 as measured ratios, and the share of ambiguous inputs.
    Overturned by: errors that grow as τ falls, or ratios without a bound
    """
    taus, experts, partition, first, second = [0.3, 0.15, 0.08], [], [], [], []
    ambiguous_share = 1.0
    for tau in taus:
        best = least_risk_student(tau)
        inputs = gaussian_inputs(run.size(100_000, 1_000_000), 2, run.seed)
        sample = evaluate(best.scores, best.outputs, TEACHER.value, inputs)
        errors = recovery_errors(sample, TEACHER.scores(inputs), tau, CONFIDENT)
        experts.append(errors.experts.value or 0.0)
        partition.append(errors.partition.value or 0.0)
        first.append(errors.expert_ratio)
        second.append(errors.partition_ratio)
        ambiguous_share = errors.student_mass.value or 0.0
    return Evidence.of(
        at_most("C_1 at every τ", max(first), 1.0),
        at_most("C_2 at every τ", max(second), 1.0),
        at_most("expert error falls with τ", experts[2], experts[0]),
        at_most("partition error in the interior", max(partition), 0.05),
        corrected(at_most("ambiguous inputs at the smallest τ", ambiguous_share, 0.3)),
        paper="some C_1, C_2",
        measured=f"C_1 = {max(first):.3f}, C_2 = {max(second):.4f}",
        figure=chart(
            "τ",
            "error",
            dots("experts (5.13)", taus, experts),
            dots("partition (5.14)", taus, partition),
        ),
        note="The experts are affine, not bounded; under a Gaussian their moments stand in.",
    )


@claim(
    "p0-thm5.17-saddles",
    "other critical points are strict saddles",
    number="Thm 5.17, last part",
    seconds=3,
)
def strict_saddles(run: ClaimRun) -> Evidence:
    """Every critical point of L_τ whose hard partition is not the teacher's has a negative
    eigenvalue.

    Setting: all critical points with another partition than the teacher's, however slightly; two
        experts in the plane at τ = 0.3
    Tested: Newton's method on the gradient of L_τ from random walls, two experts in the plane: kind
        of every critical point against how much it misroutes.
    Overturned by: the words 'further than O(τ) from the teacher' in the statement, or a minimum far
        from it
    Condition: the partition differs by more than O(τ): the minimiser of L_τ itself has a slightly
        different partition than the teacher
    """
    points = find_critical_points(TEACHER, 0.3, starts=run.size(16, 40), seed=run.seed)
    minima = [p for p in points if p.least_eigenvalue > 0]
    far = [p for p in points if p.misrouted > 0.1 and p.student.offset.abs() < 3]
    different = sum(p.misrouted > 1e-4 for p in minima)
    least = max((p.least_eigenvalue for p in far), default=float("nan"))
    return Evidence.of(
        none_of("minima with another partition than the teacher's", different),
        qualified(
            at_least("critical points found far from the teacher", len(far), 1),
            at_most("their largest least eigenvalue", least, -1e-3),
            at_most("their largest drop", max((p.drop for p in far), default=0.0), -1e-4),
        ),
        corrected(at_most("what the minima misroute", max(p.misrouted for p in minima), 0.05)),
        paper="all strict saddles",
        corrected="all beyond O(τ) of the teacher",
        measured=f"λ_min = {least:.4f}; minima misroute {max(p.misrouted for p in minima):.4f}",
        figure=chart(
            "misrouted mass",
            "least eigenvalue",
            dots(
                "critical points",
                [p.misrouted for p in points],
                [p.least_eigenvalue for p in points],
            ),
        ),
    )


def turned_wall(angle: float, offset: float = 0.0) -> TwoCells:
    """A wall in the plane with a unit normal at that angle; its experts are zero."""
    normal = [math.cos(angle), math.sin(angle)]
    return two_cells(normal=normal, offset=offset, slopes=[[0.0, 0.0], [0.0, 0.0]])


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
        range(len(angles)), key=lambda i: gaussian_profile(turned_wall(angles[i]), teacher).value
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


def _profile_derivatives(teacher: TwoCells, angle: float) -> tuple[float, float, float, float]:
    """|∇Ψ_0|, least eigenvalue of its Hessian in (angle, offset), neutral curvature, α_fr."""
    h = 1e-2
    grid = [
        [gaussian_profile(turned_wall(angle + i * h, j * h), teacher) for j in (-1, 0, 1)]
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
        lambda a: -gaussian_profile(turned_wall(a), teacher).value.item(),
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
