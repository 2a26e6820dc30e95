"""Sections 5.1 to 5.3: where the risk comes from, and how it moves with a wall."""

import math

import torch

from tieline.limits.cells import two_cells
from tieline.limits.decomposition import cell_control, risk_decomposition
from tieline.limits.gaussian import gaussian_risk
from tieline.limits.risk import MoESample, hard_predictions
from tieline.limits.shape import sampled_wall_derivative, wall_variation
from tieline.studies.checks import at_least, at_most, near, within
from tieline.studies.claim import Check, Evidence, Run, Verdict
from tieline.studies.paper0.limit import crossing_pair
from tieline.studies.paper0.problems import mixture, pupil
from tieline.studies.registry import claim

EPS = 0.1


@claim(
    "p0-lem5.5",
    "Lemma 5.5",
    "risk of the interior and of the boundary layer",
    statement="L̃ splits into an interior and a boundary part; the latter is at most C(ε, B, "
    "B_stu) BM(τ; ε).",
    tested="The two parts on drawn students against the whole, and against the paper's constant "
    "2B² + 2B_stu² and the sharp (B + B_stu)².",
)
def decomposition(run: Run) -> Evidence:
    """Sum of the parts; boundary part over both bounds."""
    gap, sharp, paper = 0.0, [], []
    for tau in (1.0, 0.3, 0.1, 0.03):
        parts = risk_decomposition(pupil(run, run.size(50_000, 500_000), 0.7).sample, tau, EPS)
        values = [e.value or 0.0 for e in (parts.total, parts.interior, parts.boundary)]
        gap = max(gap, abs(values[0] - values[1] - values[2]))
        sharp.append(values[2] / (parts.sharp_bound.value or math.nan))
        paper.append(values[2] / (parts.paper_bound.value or math.nan))
    return Evidence(
        [
            at_most("whole minus parts", gap, 1e-12),
            at_most("boundary part over the paper's bound", max(paper), 1),
            at_most("boundary part over (B + B_stu)² BM", max(sharp), 1, part="corrected"),
            at_least("boundary part is there", min(paper), 1e-6, part="corrected"),
        ],
        paper="at most 1, constant 2B² + 2B_stu²",
        corrected="constant (B + B_stu)², no ε",
        measured=max(sharp),
    )


@claim(
    "p0-prop5.8",
    "Prop. 5.8",
    "cellwise control on the dominated interior",
    statement="On Ω*_k ∩ {p_k >= 1-ε} the risk is at least half the squared error of expert k, "
    "less 4 B_stu² ε² times its mass.",
    tested="Both sides in every cell of students at four distances from the teacher.",
)
def cellwise(run: Run) -> Evidence:
    """Smallest slack over cells, distances and temperatures."""
    slacks, masses = [], []
    for distance in (0.0, 0.2, 0.5, 1.0):
        student = pupil(run, run.size(30_000, 300_000), distance)
        for tau in (0.3, 0.05):
            cells = cell_control(student.sample, student.labels, tau, EPS)
            slacks += [cell.slack.value or 0.0 for cell in cells]
            masses += [cell.mass.value or 0.0 for cell in cells]
    return Evidence(
        [
            at_least("smallest slack", min(slacks), 0),
            at_least("largest mass of a dominated cell", max(masses), 0.1, part="corrected"),
        ],
        paper="at least 0",
        measured=min(slacks),
    )


@claim(
    "p0-prop5.10",
    "Prop. 5.10",
    "shape derivative of the hard risk",
    statement="Moving a wall changes the hard risk at the rate ∫ [φ₊ D(μ_l) - φ₋ D(μ_k)] p; where "
    "it vanishes and the second variation is negative, the risk falls.",
    tested="Two affine experts under a Gaussian: the formula against differences on both sides, at "
    "a wall of the teacher and off it, and by sampling; the second variation at a wall whose first "
    "one vanishes.",
    expected=Verdict.CONDITION,
    condition="it is the derivative at 0⁺ along the motion; at a wall of the teacher that at 0⁻ "
    "has the traces exchanged and the other sign",
    seconds=1,
)
def shape(run: Run) -> Evidence:
    """One-sided derivatives by formula and by differences."""
    student, teacher = crossing_pair()
    shift = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64)
    off = wall_variation(student, teacher, torch.tensor([0.3, -0.5, 1.0], dtype=torch.float64))
    on = wall_variation(teacher, teacher, shift)
    first, second = _wrong_way_round()
    return Evidence(
        [
            near("derivative at 0⁻ is that at 0⁺, on the teacher's wall", on.left, on.right, 1e-6),
            near(
                "formula and difference at 0⁺, off",
                off.right,
                off.right_difference,
                1e-5,
                part="condition",
            ),
            near(
                "formula and difference at 0⁺, on",
                on.right,
                on.right_difference,
                1e-5,
                part="condition",
            ),
            near(
                "formula and difference at 0⁻, on",
                on.left,
                on.left_difference,
                1e-5,
                part="corrected",
            ),
            at_most("product of the two sides, on", on.left * on.right, 0, part="corrected"),
            _sampled_check(run),
            near("first variation, experts exchanged", first, 0, 1e-9, part="condition"),
            at_most("second variation there", second, -0.1, part="condition"),
        ],
        paper=on.right,
        corrected=f"0⁺: {on.right:.6f}, 0⁻: {on.left:.6f}",
        measured=f"0⁺: {on.right_difference:.6f}, 0⁻: {on.left_difference:.6f}",
    )


def _sampled_check(run: Run) -> Check:
    """The derivative of the hard risk of four experts, by the wall's layer and by differences."""
    sample = mixture(run, run.size(400_000, 4_000_000))
    change = torch.tensor([1.0, -0.5, 0.0, 0.2], dtype=torch.float64)
    forth = MoESample(sample.scores + 0.02 * change, sample.outputs, sample.target)
    back = MoESample(sample.scores - 0.02 * change, sample.outputs, sample.target)
    rate = sampled_wall_derivative(sample, change.expand_as(sample.scores), 0.05)
    pair = _hard_losses(forth) - _hard_losses(back)
    difference, error = pair.mean().item() / 0.04, pair.std().item() / 0.04 / len(pair) ** 0.5
    both = math.hypot(error, rate.standard_error or 0.0)
    return within(
        "sampled derivative of 4 experts",
        rate.value or math.nan,
        both,
        difference,
        resolution=0.3,
        bias=0.02 * abs(difference),
        part="condition",
    )


def _hard_losses(sample: MoESample) -> torch.Tensor:
    return (sample.target - hard_predictions(sample)).square()


def _wrong_way_round() -> tuple[float, float]:
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
