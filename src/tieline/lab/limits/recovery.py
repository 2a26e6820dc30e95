"""Match student experts to teacher experts, and measure the errors of the student.

    agreement_kj = P(Ω*_k ∩ {p_j >= 1 - ε})                              match_experts
    E_mis(π) = ∪_k Ω*_k ∩ {p_j >= 1 - ε, j ≠ π(k)}                       eq. 5.8
    E_gap(π) = ∪_k {x ∈ Ω*_k : (f_j - f*_k)² <= γ for the leading j}     eq. 5.12, at the actual θ
    η(γ) = max_{k≠l} P(Ω*_k ∩ {(f_l - f*_k)² <= γ})                      Assumption 5.11
    Σ_k E[(f_π(k) - f*_k)² 1_{Ω*_k}]                                     eq. 5.13
    Σ_k P((Ω_π(k) Δ Ω*_k) ∩ G_ε)                                         eq. 5.14

The best permutation minimises P(E_mis): it is the Hungarian assignment of `agreement`. Theorem 5.17
bounds the errors (5.13) and (5.14) of a global minimiser by constants C_1, C_2 times boundary
masses, η and ε²; the paper gives no constants, so they are measured as ratios.

**Lemma 5.16 as printed is wrong.** It claims L̃_int >= γ/4 (P(E_mis(π)) - K(K-1)η) for *every* π,
η being the mass on which a wrong expert imitates the right one. Take the student that equals the
teacher, and π the swap: L̃_int = 0 while P(E_mis(π)) is nearly 1, because the experts that are
"wrong" by π are the right functions, which Assumption 5.11 does not cover. What holds at the
actual θ, for every π, is L̃_int >= γ/4 · P(E_mis ∖ E_gap). Both are given.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from tieline.core.errors import ShapeError, require
from tieline.core.statistics import Estimate, mean_estimate
from tieline.lab.limits.risk import (
    MoESample,
    ambiguous,
    check_labels,
    confident_expert,
    risk_decomposition,
)

__all__ = [
    "ExpertMatching",
    "Misrouting",
    "Recovery",
    "SpecialisationGap",
    "match_experts",
    "misrouting_bound",
    "recovery_errors",
    "specialisation_gap",
]


@dataclass(frozen=True, eq=False)
class ExpertMatching:
    """The best relabelling of a student."""

    permutation: tuple[int, ...]  # student expert π(k) of each teacher cell k
    agreement: Float[Tensor, "experts experts"]  # (E, E) P(Ω*_k ∩ {p_j >= 1 - ε}), rows k
    misrouted: Estimate  # P(E_mis(π))


@dataclass(frozen=True)
class Misrouting:
    """The paper's bound (5.9) and the corrected one, beside L̃_int."""

    permutation: tuple[int, ...]  # π
    interior: Estimate  # L̃_int
    misrouted: Estimate  # P(E_mis(π))
    imitated: Estimate  # P(E_mis ∩ E_gap), where the leading expert is within √γ of the target
    exception: float  # K(K-1)η, the paper's allowance for imitation
    paper_bound: float  # γ/4 max(P(E_mis) - K(K-1)η, 0), eq. 5.9
    corrected_bound: Estimate  # γ/4 P(E_mis ∖ E_gap)
    admissible: bool  # whether 2ε B_stu <= √γ/2, which both bounds require


@dataclass(frozen=True, eq=False)
class SpecialisationGap:
    """η(γ) of Assumption 5.11 for given experts."""

    gammas: tuple[float, ...]  # thresholds of the squared difference
    # (gammas, E, E) P(Ω*_k ∩ {(f_l - f*_k)² <= γ}), rows k
    masses: Float[Tensor, "gammas experts experts"]
    etas: tuple[float, ...]  # largest entry off the matched pairs, one per γ


@dataclass(frozen=True)
class Recovery:
    """Errors (5.13), (5.14) of a student and the terms of Theorem 5.17."""

    matching: ExpertMatching  # π and the agreement behind it
    experts: Estimate  # Σ_k E[(f_π(k) - f*_k)² 1_{Ω*_k}]
    partition: Estimate  # Σ_k P((Ω_π(k) Δ Ω*_k) ∩ G_ε)
    student_mass: Estimate  # BM_φ(τ; ε)
    teacher_mass: Estimate  # BM_φ*(τ; ε)
    expert_ratio: float  # measured C_1, experts / (BM_φ* + BM_φ + η + ε²)
    partition_ratio: float  # measured C_2, partition / (BM_φ* + η + ε²)


def match_experts(
    sample: MoESample, labels: Int[Tensor, " n"], tau: float, epsilon: float
) -> ExpertMatching:
    """Hungarian matching of student experts to teacher cells by confident agreement.

    `labels` (n,) are the teacher cells of the inputs; an expert leads where its weight exceeds 1 -
    ε.
    """
    check_labels(labels, sample)
    n, experts = sample.scores.shape
    leader = confident_expert(sample, tau, epsilon)
    sure = leader >= 0
    counts = torch.zeros(experts, experts, dtype=torch.float64)
    counts.index_put_((labels[sure], leader[sure]), counts.new_ones(()), accumulate=True)
    _, columns = linear_sum_assignment(counts.numpy(), maximize=True)
    permutation = tuple(int(j) for j in columns)
    wrong = _misrouted_tokens(leader, labels, permutation)
    return ExpertMatching(permutation, counts / n, mean_estimate(wrong.double()))


def misrouting_bound(
    sample: MoESample,
    labels: Int[Tensor, " n"],
    tau: float,
    epsilon: float,
    *,
    gamma: float,
    eta: float,
    permutation: Sequence[int],
) -> Misrouting:
    """Lemma 5.16 for one permutation, as printed and corrected.

    Arguments as for `match_experts`, the target being noiseless; γ = γ_gap > 0, η = η_gap under the
    teacher's labels (`specialisation_gap`), and π is the student expert of each cell.
    """
    check_labels(labels, sample)
    experts = sample.scores.shape[1]
    require(gamma > 0 and 0 <= eta < 1, f"need gamma > 0 and 0 <= eta < 1, got {gamma=}, {eta=}")
    require(
        sorted(permutation) == list(range(experts)),
        f"need a permutation of 0 … {experts - 1}, got {list(permutation)}",
    )
    leader = confident_expert(sample, tau, epsilon)
    wrong = _misrouted_tokens(leader, labels, permutation)
    value = sample.outputs.gather(1, leader.clamp(min=0)[:, None]).squeeze(1)
    imitates = wrong & ((value - sample.target).square() <= gamma)
    misrouted, exception = mean_estimate(wrong.double()), experts * (experts - 1) * eta
    assert misrouted.value is not None
    return Misrouting(
        tuple(permutation),
        risk_decomposition(sample, tau, epsilon).interior,
        misrouted,
        mean_estimate(imitates.double()),
        exception,
        gamma / 4 * max(misrouted.value - exception, 0.0),
        mean_estimate((wrong & ~imitates).double()).times(gamma / 4),
        4 * epsilon * sample.outputs.abs().max().item() <= gamma**0.5,
    )


def specialisation_gap(
    sample: MoESample,
    labels: Int[Tensor, " n"],
    gammas: Sequence[float],
    permutation: Sequence[int] | None = None,
) -> SpecialisationGap:
    """η_gap against γ_gap at the experts of the sample, whose target is f*_k on cell k.

    The assumption takes the supremum over all parameters of expert l. If Θ_l contains the teacher's
    own expert k, as any shared family of experts does, that supremum is P(Ω*_k). Hence the masses
    are those of the given experts.
    """
    check_labels(labels, sample)
    require(all(g > 0 for g in gammas), f"need gammas > 0, got {list(gammas)}")
    experts = sample.scores.shape[1]
    cells = torch.nn.functional.one_hot(labels, experts).double()
    squared = (sample.outputs - sample.target[:, None]).square()
    imitations = torch.stack([(squared <= gamma).double() for gamma in gammas])
    masses = torch.einsum("nk,gnl->gkl", cells, imitations) / len(labels)
    matched = torch.zeros(experts, experts, dtype=torch.bool)
    order = list(range(experts)) if permutation is None else list(permutation)
    matched[torch.arange(experts), order] = True
    etas = masses.masked_fill(matched, 0.0).amax(dim=(1, 2))
    return SpecialisationGap(tuple(gammas), masses, tuple(etas.tolist()))


def recovery_errors(
    sample: MoESample,
    teacher_scores: Float[Tensor, "n experts"],
    tau: float,
    epsilon: float,
    eta: float = 0.0,
) -> Recovery:
    """Recovery errors of Theorem 5.17 with the constants C_1, C_2 as measured ratios.

    The teacher's cells are the winners of its scores (n, E); the target is noiseless, 0 < ε < 1/2,
    and η is that of Assumption 5.11.
    """
    require(
        teacher_scores.shape == sample.scores.shape,
        "teacher and student scores differ in shape",
        ShapeError,
    )
    require(0 <= eta < 1, f"need 0 <= eta < 1, got {eta=}")
    teacher = MoESample(teacher_scores, sample.outputs, sample.target)
    labels = teacher.winner
    matching = match_experts(sample, labels, tau, epsilon)
    order = torch.tensor(matching.permutation)
    matched = sample.outputs.gather(1, order[labels][:, None]).squeeze(1)
    unsure = ambiguous(sample, tau, epsilon)
    misplaced = (sample.winner != order[labels]) & ~unsure
    experts = mean_estimate((matched - sample.target).square())
    # a point in the wrong cell lies in two symmetric differences
    partition = mean_estimate(2.0 * misplaced.double())
    masses = (
        mean_estimate(unsure.double()),
        mean_estimate(ambiguous(teacher, tau, epsilon).double()),
    )
    student_mass, teacher_mass = (mass.value or 0.0 for mass in masses)
    return Recovery(
        matching,
        experts,
        partition,
        *masses,
        (experts.value or 0.0) / (teacher_mass + student_mass + eta + epsilon**2),
        (partition.value or 0.0) / (teacher_mass + eta + epsilon**2),
    )


def _misrouted_tokens(leader: Tensor, labels: Tensor, permutation: Sequence[int]) -> Tensor:
    """Mark tokens whose confident expert is not the one matched to their teacher cell."""
    return (leader >= 0) & (leader != torch.tensor(list(permutation))[labels])
