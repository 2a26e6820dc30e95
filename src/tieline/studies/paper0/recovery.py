"""Section 5.4: misrouting, recovery of the teacher, strict saddles."""

from tieline.limits.cells import TwoCells, gaussian_inputs, two_cells
from tieline.limits.matching import match_experts, misrouting_bound
from tieline.limits.recovery import recovery_errors, specialisation_gap
from tieline.limits.risk import evaluate
from tieline.limits.saddle import CriticalPoint, find_critical_points
from tieline.studies.checks import at_least, at_most, near, none_of
from tieline.studies.claim import Evidence, Run, Verdict
from tieline.studies.figure import chart, dots
from tieline.studies.paper0.problems import pupil
from tieline.studies.registry import claim

TEACHER = two_cells(normal=[1.0, 0.0], slopes=[[0.3, 0.5], [-0.7, -0.4]], intercepts=[1.0, -0.5])
TAU, EPS = 0.05, 0.05


@claim(
    "p0-lem5.16",
    "Lemma 5.16",
    "confident misrouting costs risk",
    statement="For every parameter and every permutation π, L̃_int >= γ/4 (P(E_mis(π)) - K(K-1)η).",
    tested="The student that equals its teacher, under the identity and under a swap of two "
    "experts; the corrected bound γ/4 P(E_mis ∖ E_gap) on students at four distances.",
    expected=Verdict.FAILS,
)
def misrouting(run: Run) -> Evidence:
    """Interior risk against the printed and the corrected bound."""
    gamma, n = 0.05, run.size(50_000, 500_000)
    teacher = pupil(run, n, 0.0)
    eta = specialisation_gap(teacher.sample, teacher.labels, [gamma]).etas[0]
    same, swap = (
        misrouting_bound(
            teacher.sample, teacher.labels, TAU, EPS, gamma=gamma, eta=eta, permutation=p
        )
        for p in ((0, 1, 2), (1, 0, 2))
    )
    excess = _corrected_excess(run, n, gamma, eta)
    interior = swap.interior.value or 0.0
    return Evidence(
        [
            at_most(
                "printed bound less L̃_int, π the identity",
                same.paper_bound,
                same.interior.value or 0.0,
            ),
            at_most("printed bound less L̃_int, π a swap", swap.paper_bound, interior),
            at_most("largest excess of the corrected bound", max(excess), 0, part="corrected"),
            near(
                "the hypothesis 2ε B_stu <= √γ/2 holds",
                float(swap.admissible),
                1,
                0,
                part="corrected",
            ),
        ],
        paper=swap.paper_bound,
        corrected=swap.corrected_bound.value,
        measured=interior,
        note="Counterexample: the student is the teacher, π exchanges two experts. The printed "
        f"bound asks for an interior risk of {swap.paper_bound:.2e}; it is {interior:.2e}.",
    )


def _corrected_excess(run: Run, n: int, gamma: float, eta: float) -> list[float]:
    """Corrected bound less L̃_int, for students at four distances and three permutations."""
    excess = []
    for distance in (0.0, 0.3, 0.7, 1.5):
        student = pupil(run, n, distance)
        sample, labels = student.sample, student.labels
        for p in ((0, 1, 2), (1, 0, 2), (2, 0, 1)):
            found = misrouting_bound(sample, labels, TAU, EPS, gamma=gamma, eta=eta, permutation=p)
            excess.append((found.corrected_bound.value or 0.0) - (found.interior.value or 0.0))
    return excess


@claim(
    "p0-thm5.17-matching",
    "sec. 5.4, after (5.16)",
    "matching of student and teacher experts",
    statement="The permutation that minimises confident misrouting matches students to teachers.",
    tested="A teacher with relabelled experts: the Hungarian assignment of confident agreement "
    "must find the relabelling, and beat all others on a distant student.",
)
def matching(run: Run) -> Evidence:
    """Wrong matches, and the best of all permutations."""
    from itertools import permutations

    student, wrong = pupil(run, run.size(20_000, 200_000), 0.1), 0
    for p in permutations(range(3)):
        order = list(p)
        sample = type(student.sample)(
            student.sample.scores[:, order], student.sample.outputs[:, order], student.sample.target
        )
        found = match_experts(sample, student.labels, TAU, EPS)
        wrong += tuple(order[j] for j in found.permutation) != (0, 1, 2)
    far = pupil(run, run.size(20_000, 200_000), 1.5)
    best = match_experts(far.sample, far.labels, TAU, EPS)
    sums = [sum(best.agreement[k, p[k]].item() for k in range(3)) for p in permutations(range(3))]
    chosen = sum(best.agreement[k, j].item() for k, j in enumerate(best.permutation))
    return Evidence(
        [
            none_of("relabellings not found", wrong),
            near("agreement of the match is the largest", chosen, max(sums), 1e-12),
        ],
        paper="argmin over permutations",
        measured=f"{wrong} of 6 wrong",
    )


def _minimiser(run: Run, tau: float) -> TwoCells:
    """The critical point of least risk; further starts where the first ones lead nowhere."""
    points: tuple[CriticalPoint, ...] = ()
    for attempt in range(5):
        seed = run.seed + 1_000 * attempt
        points = points or find_critical_points(TEACHER, tau, starts=run.size(6, 12), seed=seed)
    return min(points, key=lambda point: point.risk).student


@claim(
    "p0-thm5.17-recovery",
    "Thm 5.17, (5.13), (5.14)",
    "global minimisers recover the teacher",
    statement="A global minimiser of L_τ has expert error at most C_1 (BM* + BM + η + ε²) and "
    "partition error at most C_2 (BM* + η + ε²).",
    tested="The best critical point of a two-expert problem in the plane at three temperatures; "
    "C_1 and C_2 as measured ratios.",
    seconds=12,
)
def recovery(run: Run) -> Evidence:
    """Errors and measured constants as τ falls."""
    taus, experts, partition, first, second = [0.6, 0.45, 0.3], [], [], [], []
    for tau in taus:
        best = _minimiser(run, tau)
        inputs = gaussian_inputs(run.size(100_000, 1_000_000), 2, run.seed)
        sample = evaluate(best.scores, best.outputs, TEACHER.value, inputs)
        found = recovery_errors(sample, TEACHER.scores(inputs), tau, EPS)
        experts.append(found.experts.value or 0.0)
        partition.append(found.partition.value or 0.0)
        first.append(found.expert_ratio)
        second.append(found.partition_ratio)
    return Evidence(
        [
            at_most("C_1 at every τ", max(first), 1.0),
            at_most("C_2 at every τ", max(second), 1.0),
            at_most("expert error falls with τ", experts[2], experts[0]),
            at_most("partition error in the interior", max(partition), 0.05),
        ],
        paper="some C_1, C_2",
        measured=f"C_1 = {max(first):.3f}, C_2 = {max(second):.4f}",
        figure=chart(
            "τ",
            "error",
            [dots("experts (5.13)", taus, experts), dots("partition (5.14)", taus, partition)],
        ),
        note="The experts are affine, not bounded; under a Gaussian their moments stand in.",
    )


@claim(
    "p0-thm5.17-saddles",
    "Thm 5.17, last part",
    "other critical points are strict saddles",
    statement="Every critical point of L_τ whose hard partition is not the teacher's has a "
    "negative eigenvalue.",
    tested="Newton's method on the gradient of L_τ from random walls, two experts in the plane: "
    "kind of every critical point against how much it misroutes.",
    expected=Verdict.CONDITION,
    condition="the partition differs by more than O(τ): the minimiser of L_τ itself has a slightly "
    "different partition than the teacher",
    seconds=20,
)
def saddles(run: Run) -> Evidence:
    """Minima by how much they misroute."""
    points = find_critical_points(TEACHER, 0.3, starts=run.size(16, 40), seed=run.seed)
    minima = [p for p in points if p.least_eigenvalue > 0]
    far = [p for p in points if p.misrouted > 0.1 and p.student.offset.abs() < 3]
    different = sum(p.misrouted > 1e-4 for p in minima)
    least = max((p.least_eigenvalue for p in far), default=float("nan"))
    return Evidence(
        [
            none_of("minima with another partition than the teacher's", different),
            at_least("critical points found far from the teacher", len(far), 1, part="condition"),
            at_most("their largest least eigenvalue", least, -1e-3, part="condition"),
            at_most(
                "their largest drop",
                max((p.drop for p in far), default=0.0),
                -1e-4,
                part="condition",
            ),
            at_most(
                "what the minima misroute", max(p.misrouted for p in minima), 0.05, part="corrected"
            ),
        ],
        paper="all strict saddles",
        corrected="all beyond O(τ) of the teacher",
        measured=f"λ_min = {least:.4f}; minima misroute {max(p.misrouted for p in minima):.4f}",
        figure=chart(
            "misrouted mass",
            "least eigenvalue",
            [
                dots(
                    "critical points",
                    [p.misrouted for p in points],
                    [p.least_eigenvalue for p in points],
                )
            ],
        ),
    )
