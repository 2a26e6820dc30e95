"""Remarks and standing assumptions of section 5, (5.15), and section 7."""

import math

import torch
from torch import Tensor

from tieline.lab.claims.claim import ClaimRun, claim
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
from tieline.lab.claims.paper0.landscape import TEACHER, least_risk_student, wall_at
from tieline.lab.claims.routing_problems import drawn_pupil
from tieline.lab.limits.risk import risk_decomposition
from tieline.lab.limits.two_cells import gaussian_profile, gaussian_risk
from tieline.lab.power_law import exponent


@claim("p0-asm5.1", "standing conditions on the teacher")
def standing_teacher(run: ClaimRun) -> Evidence:
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
    small, large = (affine_maximum(run, n) for n in (1_000, 1_000_000))
    return Evidence.of(
        at_most("affine experts, Gaussian inputs: largest |μ|, 10⁶ over 10³", large / small, 1.05),
        qualified(
            none_of("inputs in no cell or in two", (cells != 1).sum().item()),
            at_most("bounded experts: largest |μ|", bound, 0.9),
        ),
        paper="|μ| <= B",
        measured=f"{bound:.2f} bounded; affine {small:.2f} at 10³, {large:.2f} at 10⁶",
    )


def affine_maximum(run: ClaimRun, n: int) -> float:
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
    own = gaussian_profile(TEACHER, TEACHER).value.item()
    missing = through_origin_risk(run, run.size(50_000, 500_000))
    return Evidence.of(
        at_most("class without intercepts: least risk", missing, 1e-6),
        qualified(at_most("affine class: least risk at the teacher's wall", own, 1e-9)),
        corrected(at_least("what a missing intercept leaves", missing, 0.05)),
        paper=0,
        measured=f"{own:.1g} with intercepts, {missing:.3f} without",
    )


def through_origin_risk(run: ClaimRun, n: int) -> float:
    """Least squares of μ by linear experts without intercept on the teacher's cells."""
    x = run.normal(n, 2, stream=42)
    cell, target, left = TEACHER.cell(x), TEACHER.value(x), 0.0
    for index in (0, 1):
        rows, values = x[cell == index], target[cell == index]
        fit = torch.linalg.lstsq(rows, values[:, None]).solution
        left += ((rows @ fit).squeeze(1) - values).square().sum().item()
    return left / n


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
    """Least mass misrouted by a linear wall over 64 angles, every offset, both sides."""
    least, n = 1.0, len(x)
    for angle in torch.linspace(0, math.pi, 65, dtype=torch.float64)[:-1]:
        score = x @ torch.stack([angle.cos(), angle.sin()])
        sides = inside[score.argsort()].double()
        wrong = torch.cat([torch.zeros(1, dtype=torch.float64), (1 - 2 * sides).cumsum(0)])
        errors = (wrong + sides.sum()) / n
        least = min(least, errors.min().item(), (1 - errors).min().item())
    return least


def conditional_square(width: float, power: float) -> float:
    """E[f² | |S| <= w] for f = |S|^-power, S uniform on [-1, 1]: w^(-2 power) / (1 - 2 power)."""
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
    s = 2 * torch.rand(run.size(400_000, 4_000_000), dtype=torch.float64) - 1
    s = s + centre  # the law around the centre is that of S around 0
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


@claim("p0-rem5.18", "generic descent escapes the saddles", seconds=1)
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
    here = torch.tensor([angle, offset], dtype=torch.float64)
    speed, value = torch.zeros(2, dtype=torch.float64), math.inf
    for _ in range(steps):
        values = []
        for shift in ((0.0, 0.0), (1e-4, 0.0), (0.0, 1e-4)):
            wall = wall_at((here + torch.tensor(shift, dtype=torch.float64)).tolist())
            values.append(gaussian_profile(wall, TEACHER, tau=tau).value.item())
        value, slope = values[0], torch.tensor([values[1], values[2]], dtype=torch.float64)
        speed = 0.8 * speed - 0.25 * (slope - value) / 1e-4
        here = here + speed.clamp(-0.3, 0.3)
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
            parts = risk_decomposition(teacher.sample, tau, epsilon)
            mass = parts.mass.value or 0.0
            ratios.append((parts.total.value or 0.0) / (bound * (mass + epsilon**2)))
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
    """Distance of the wall of least L̃_τ from the teacher's, and how the risk rises around it."""
    best = least_risk_student(tau)
    sign = 1 if float(best.normal @ TEACHER.normal) > 0 else -1
    away = torch.cat([sign * best.normal - TEACHER.normal, sign * best.offset[None]]).norm().item()
    angle, offset = math.atan2(best.normal[1].item(), best.normal[0].item()), best.offset.item()
    here = gaussian_profile(wall_at((angle, offset)), TEACHER, tau=tau).value.item()
    around = [
        gaussian_profile(wall_at((angle + a, offset + b)), TEACHER, tau=tau).value.item()
        for a, b in ((0.02, 0), (-0.02, 0), (0, 0.02), (0, -0.02))
    ]
    return away, min(around) - here
