"""Sections 5.1, 5.5 and 7: assumptions on the teacher, its recovery, saddles, and minimisers."""

import itertools
import math
from collections.abc import Sequence

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

from tieline.core.numerics import one_thread
from tieline.lab.claims.claim import ClaimRun, Verdict, claim
from tieline.lab.claims.evidence import (
    Evidence,
    at_least,
    at_most,
    chart,
    corrected,
    dots,
    near,
    none_of,
    qualified,
)
from tieline.lab.claims.routing_problems import drawn_pupil
from tieline.lab.limits.recovery import (
    match_experts,
    misrouting_bound,
    recovery_errors,
    specialisation_gap,
)
from tieline.lab.limits.risk import evaluate, risk_decomposition
from tieline.lab.limits.saddle import find_critical_points
from tieline.lab.limits.two_cells import (
    TwoCells,
    gaussian_inputs,
    gaussian_profile,
    gaussian_risk,
    two_cells,
)

TEACHER = two_cells(normal=[1.0, 0.0], slopes=[[0.3, 0.5], [-0.7, -0.4]], intercepts=[1.0, -0.5])


TAU, CONFIDENT = 0.05, 0.05
"""Temperature and ε of section 5.4."""


@claim("p0-asm5.1", "standing conditions on the teacher")
def teacher_cells_and_bound(run: ClaimRun) -> Evidence:
    """The teacher's cells are a partition up to a null set and |μ| is bounded almost surely.

    Setting: an assumption; three bounded experts under a linear router, and affine ones under a
        Gaussian beside them
    Tested: Inputs in no cell or in two; the largest |μ| of bounded experts; the largest of affine
        experts over 10³ and 10⁶ Gaussian inputs.
    Overturned by: a bound for affine experts under a law without compact support
    Condition: experts with bounded outputs, or inputs of bounded support
    """
    teacher = drawn_pupil(run, run.size(20_000, 200_000), 0.0)
    best = teacher.teacher_scores.amax(dim=1, keepdim=True)
    cells = (teacher.teacher_scores == best).sum(dim=1)
    bound = teacher.experts.abs().max().item()
    small, large = (largest_affine_output(run, n) for n in (1_000, 1_000_000))
    return Evidence.of(
        at_most("affine experts, Gaussian inputs: largest |μ|, 10⁶ over 10³", large / small, 1.05),
        qualified(
            none_of("inputs in no cell or in two", (cells != 1).sum().item()),
            at_most("bounded experts: largest |μ|", bound, 0.9),
        ),
        paper="|μ| <= B",
        measured=f"{bound:.2f} bounded; affine {small:.2f} at 10³, {large:.2f} at 10⁶",
    )


def largest_affine_output(run: ClaimRun, n: int) -> float:
    """Largest |μ| of two affine experts over n Gaussian inputs."""
    return TEACHER.value(run.normal(n, 2, stream=41)).abs().max().item()


@claim("p0-asm5.2", "the student can be the teacher")
def student_can_be_teacher(run: ClaimRun) -> Evidence:
    """Some student has the teacher's experts on their cells, and outputs are bounded.

    Setting: an assumption; two affine experts under a Gaussian, and a class without intercepts
    Tested: Hard risk of the teacher's own wall with its best affine experts, and with the best
        experts without intercept.
    Overturned by: a class without the teacher's experts whose best risk is 0
    Condition: the student's class holds the teacher's experts
    """
    affine_risk = gaussian_profile(TEACHER, TEACHER).value.item()
    origin_risk = through_origin_risk(run, run.size(50_000, 500_000))
    return Evidence.of(
        at_most("class without intercepts: least risk", origin_risk, 1e-6),
        qualified(at_most("affine class: least risk at the teacher's wall", affine_risk, 1e-9)),
        corrected(at_least("what a missing intercept leaves", origin_risk, 0.05)),
        paper=0,
        measured=f"{affine_risk:.1g} with intercepts, {origin_risk:.3f} without",
    )


def through_origin_risk(run: ClaimRun, n: int) -> float:
    """Least risk of linear experts without intercept on the teacher's cells."""
    x = run.normal(n, 2, stream=42)
    cell, target, squares = TEACHER.cell(x), TEACHER.value(x), 0.0
    for index in (0, 1):
        rows, values = x[cell == index], target[cell == index]
        fit = torch.linalg.lstsq(rows, values[:, None]).solution
        squares += ((rows @ fit).squeeze(1) - values).square().sum().item()
    return squares / n


@claim("p0-asm5.3", "the router can be the teacher's")
def router_can_be_teachers(run: ClaimRun) -> Evidence:
    """Some router parameter induces the teacher's partition, with regular interfaces.

    Setting: an assumption; linear routers and teachers whose wall is straight or a circle
    Tested: Least misrouted mass over linear walls of a straight teacher and of a circle's inside.
    Overturned by: a linear router that separates a disc
    Condition: the teacher's walls are level sets of the router's family
    """
    x = run.normal(run.size(20_000, 200_000), 2, stream=43)
    straight = least_misrouted(x, TEACHER.cell(x) == 0)
    circle = least_misrouted(x, x.norm(dim=1) < math.sqrt(2 * math.log(2)))
    return Evidence.of(
        at_most("circle: least misrouted mass of a linear wall", circle, 1e-3),
        qualified(at_most("straight wall: least misrouted mass", straight, 1e-3)),
        corrected(at_least("what a circle leaves to a linear router", circle, 0.2)),
        paper=0,
        measured=f"{straight:.1g} straight, {circle:.2f} circle",
    )


def least_misrouted(x: Tensor, inside: Tensor) -> float:
    """Least mass misrouted by a straight wall, over 64 angles, all offsets, both labellings."""
    least, n = 1.0, len(x)
    for angle in torch.linspace(0, math.pi, 65, dtype=torch.float64)[:-1]:
        score = x @ torch.stack([angle.cos(), angle.sin()])
        sides = inside[score.argsort()].double()
        wrong = torch.cat([torch.zeros(1, dtype=torch.float64), (1 - 2 * sides).cumsum(0)])
        errors = (wrong + sides.sum()) / n
        least = min(least, errors.min().item(), (1 - errors).min().item())
    return least


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
    """Corrected bound minus L̃_int, for students at four distances and three permutations."""
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
    student, wrong = drawn_pupil(run, run.size(20_000, 200_000), 0.1), 0
    for p in itertools.permutations(range(3)):
        order = list(p)
        sample = type(student.sample)(
            student.sample.scores[:, order], student.sample.outputs[:, order], student.sample.target
        )
        match = match_experts(sample, student.labels, TAU, CONFIDENT)
        wrong += tuple(order[j] for j in match.permutation) != (0, 1, 2)
    far = drawn_pupil(run, run.size(20_000, 200_000), 1.5)
    best = match_experts(far.sample, far.labels, TAU, CONFIDENT)
    orders = itertools.permutations(range(3))
    sums = [sum(best.agreement[k, p[k]].item() for k in range(3)) for p in orders]
    agreement = sum(best.agreement[k, j].item() for k, j in enumerate(best.permutation))
    checks = [
        none_of("relabellings not found", wrong),
        near("agreement of the match is the largest", agreement, max(sums), 1e-12),
    ]
    return Evidence.of(checks, paper="argmin over permutations", measured=f"{wrong} of 6 wrong")


def wall_at(coordinates: Sequence[float]) -> TwoCells:
    """The wall of length 1 at an angle and an offset; its experts are the teacher's."""
    angle, offset = (torch.tensor(float(value), dtype=torch.float64) for value in coordinates)
    return TwoCells(torch.stack([angle.cos(), angle.sin()]), offset, TEACHER.experts)


def least_risk_student(tau: float) -> TwoCells:
    """Student of least L̃_τ over all walls, each with its best experts.

    By a grid of angles and offsets, then Nelder-Mead from the best wall.
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


@claim("p0-rem5.18", "generic descent escapes the saddles", seconds=3)
def descent_escapes_saddles(_run: ClaimRun) -> Evidence:
    """Descent from generic points approaches the minimising set or escapes by negative curvature.

    Setting: a remark, called consistent and not proved; two experts in the plane, profiled risk at
        τ = 0.3, descent over the wall
    Tested: Gradient descent on the profiled risk from six walls all around: risk at the
        end over the least of all walls.
    Overturned by: a start from which descent stays above the least risk
    """
    tau, least = 0.3, float(gaussian_risk(least_risk_student(0.3), TEACHER, tau=0.3))
    ends = [descended_risk(angle, 0.3, tau) for angle in torch.linspace(0.1, 6.1, 6).tolist()]
    swapped = [end - least for end in ends]
    return Evidence.of(
        at_most("largest risk at the end less the least of all walls", max(swapped), 1e-3),
        paper="the minimising set",
        measured=f"{max(swapped):.1g} above the least, {least:.4f}",
    )


def descended_risk(angle: float, offset: float, tau: float, steps: int = 80) -> float:
    """Profiled risk after gradient descent with momentum over the angle and offset of a wall."""
    position = torch.tensor([angle, offset], dtype=torch.float64)
    speed, value = torch.zeros(2, dtype=torch.float64), math.inf
    for _ in range(steps):
        values = []
        for shift in ((0.0, 0.0), (1e-4, 0.0), (0.0, 1e-4)):
            wall = wall_at((position + torch.tensor(shift, dtype=torch.float64)).tolist())
            values.append(gaussian_profile(wall, TEACHER, tau=tau).value.item())
        value, slope = values[0], torch.tensor([values[1], values[2]], dtype=torch.float64)
        speed = 0.8 * speed - 0.25 * (slope - value) / 1e-4
        position = position + speed.clamp(-0.3, 0.3)
    return value


@claim("p0-eq5.15", "risk of the teacher's own parameters", number="(5.15)")
def teacher_risk(run: ClaimRun) -> Evidence:
    """L̃_τ(θ*, φ*) <= C_0 BM(τ; ε) + C_0 ε².

    Setting: three bounded experts; C_0 = (2B)², which Lemma 5.5 and 1 - p <= ε give
    Tested: The ratio of both sides at four temperatures and two ε, the student being the teacher.
    Overturned by: a ratio above 1
    """
    teacher = drawn_pupil(run, run.size(50_000, 500_000), 0.0)
    bound, ratios = (2 * teacher.experts.abs().max().item()) ** 2, []
    for tau in (0.4, 0.1, 0.03, 0.01):
        for epsilon in (0.05, 0.2):
            decomposition = risk_decomposition(teacher.sample, tau, epsilon)
            mass = decomposition.mass.value or 0.0
            ratios.append((decomposition.total.value or 0.0) / (bound * (mass + epsilon**2)))
    return Evidence.of(at_most("largest ratio", max(ratios), 1), paper=1, measured=max(ratios))


@claim("p0-sec7", "a stable hard minimiser has a soft one nearby", number="sec. 7", seconds=2)
def soft_minimiser_nearby(_run: ClaimRun) -> Evidence:
    """If the profiled hard objective has a stable local minimiser, the soft one has a local
    minimiser nearby for small τ.

    Setting: the statement of section 7 in its own words; two experts in the plane, whose hard
        objective has its minimum at the teacher's wall
    Tested: Distance of the wall of least L̃_τ from the teacher's at τ = 0.3, 0.15 and 0.08; least
        rise of the profiled risk around it.
    Overturned by: a distance that does not fall with τ
    """
    taus = [0.3, 0.15, 0.08]
    distances, rises = zip(*(soft_minimum(tau) for tau in taus), strict=True)
    return Evidence.of(
        at_most("distance at τ = 0.08 over that at 0.3", distances[-1] / distances[0], 0.5),
        at_least("least rise of the risk 0.02 away, over the three", min(rises), 1e-8),
        at_most("distance at τ = 0.08", distances[-1], 0.01),
        paper="nearby",
        measured=", ".join(f"{d:.2g} at {t}" for d, t in zip(distances, taus, strict=True)),
        figure=chart("τ", "distance of the walls", dots("measured", taus, distances), log="xy"),
    )


def soft_minimum(tau: float) -> tuple[float, float]:
    """Distance of the best wall for L̃_τ from the teacher's, and the least rise around it."""
    best = least_risk_student(tau)
    sign = 1 if float(best.normal @ TEACHER.normal) > 0 else -1
    distance = (
        torch.cat([sign * best.normal - TEACHER.normal, sign * best.offset[None]]).norm().item()
    )
    angle, offset = math.atan2(best.normal[1].item(), best.normal[0].item()), best.offset.item()
    best_risk = gaussian_profile(wall_at((angle, offset)), TEACHER, tau=tau).value.item()
    nearby_risks = [
        gaussian_profile(wall_at((angle + a, offset + b)), TEACHER, tau=tau).value.item()
        for a, b in ((0.02, 0), (-0.02, 0), (0, 0.02), (0, -0.02))
    ]
    return distance, min(nearby_risks) - best_risk
