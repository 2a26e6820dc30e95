"""How far a student is from its teacher after the best relabelling.

    η(γ) = max_{k≠l} P(Ω*_k ∩ {(f_l - f*_k)² <= γ})                      Assumption 5.11
    Σ_k E[(f_π(k) - f*_k)² 1_{Ω*_k}]                                     eq. 5.13
    Σ_k P((Ω_π(k) Δ Ω*_k) ∩ G_ε)                                         eq. 5.14

Theorem 5.17 bounds both errors of a global minimiser by constants C_1, C_2 times boundary masses,
η and ε²; the constants are not given, so they are measured here as ratios.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tieline.errors import ShapeError, require
from tieline.limits.decomposition import ambiguous, check_labels
from tieline.limits.matching import Matching, match_experts
from tieline.limits.risk import MoESample
from tieline.numerics import Estimate, mean_estimate

__all__ = ["Recovery", "SpecialisationGap", "recovery_errors", "specialisation_gap"]


@dataclass(frozen=True, eq=False)
class SpecialisationGap:
    """η(γ) of Assumption 5.11 for given experts.

    Attributes:
        gammas: thresholds of the squared difference.
        masses: (gammas, E, E) P(Ω*_k ∩ {(f_l - f*_k)² <= γ}), rows k.
        etas: largest entry off the matched pairs, one per γ.
    """

    gammas: tuple[float, ...]
    masses: Float[Tensor, "gammas experts experts"]
    etas: tuple[float, ...]


def specialisation_gap(
    sample: MoESample,
    labels: Int[Tensor, " n"],
    gammas: Sequence[float],
    permutation: Sequence[int] | None = None,
) -> SpecialisationGap:
    """η_gap against γ_gap at the experts of the sample, whose target is f*_k on cell k.

    The assumption takes the supremum over all parameters of expert l. If Θ_l holds the teacher's
    own expert k, as any shared family of experts does, that supremum is P(Ω*_k): it is useful only
    for experts confined to neighbourhoods. Hence the masses are those of the experts given.
    """
    check_labels(labels, sample)
    require(all(g > 0 for g in gammas), f"need gammas > 0, got {list(gammas)}")
    experts = sample.scores.shape[1]
    cells = torch.nn.functional.one_hot(labels, experts).double()
    squared = (sample.outputs - sample.target[:, None]).square()
    near = torch.stack([(squared <= gamma).double() for gamma in gammas])
    masses = torch.einsum("nk,gnl->gkl", cells, near) / len(labels)
    matched = torch.zeros(experts, experts, dtype=torch.bool)
    order = list(range(experts)) if permutation is None else list(permutation)
    matched[torch.arange(experts), order] = True
    etas = masses.masked_fill(matched, 0.0).amax(dim=(1, 2))
    return SpecialisationGap(tuple(gammas), masses, tuple(etas.tolist()))


@dataclass(frozen=True)
class Recovery:
    """Errors (5.13), (5.14) of a student and what they are compared with in Theorem 5.17.

    Attributes:
        matching: π and the agreement behind it.
        experts: Σ_k E[(f_π(k) - f*_k)² 1_{Ω*_k}].
        partition: Σ_k P((Ω_π(k) Δ Ω*_k) ∩ G_ε).
        student_mass: BM_φ(τ; ε).
        teacher_mass: BM_φ*(τ; ε).
        expert_ratio: measured C_1, experts / (BM_φ* + BM_φ + η + ε²).
        partition_ratio: measured C_2, partition / (BM_φ* + η + ε²).
    """

    matching: Matching
    experts: Estimate
    partition: Estimate
    student_mass: Estimate
    teacher_mass: Estimate
    expert_ratio: float
    partition_ratio: float


def recovery_errors(
    sample: MoESample,
    teacher_scores: Float[Tensor, "n experts"],
    tau: float,
    eps: float,
    eta: float = 0.0,
) -> Recovery:
    """Recovery errors of Theorem 5.17 with the constants C_1, C_2 as measured ratios.

    Args:
        sample: the student, with the noiseless target.
        teacher_scores: (n, E) scores of the teacher's router; its cells are their winners.
        tau: temperature.
        eps: 0 < ε < 1/2.
        eta: η_gap of Assumption 5.11.
    """
    require(
        teacher_scores.shape == sample.scores.shape,
        "teacher and student scores differ in shape",
        ShapeError,
    )
    require(0 <= eta < 1, f"need 0 <= eta < 1, got {eta=}")
    teacher = MoESample(teacher_scores, sample.outputs, sample.target)
    labels = teacher.winner
    matching = match_experts(sample, labels, tau, eps)
    order = torch.tensor(matching.permutation)
    own = sample.outputs.gather(1, order[labels][:, None]).squeeze(1)
    unsure = ambiguous(sample, tau, eps)
    apart = (sample.winner != order[labels]) & ~unsure
    experts = mean_estimate((own - sample.target).square())
    # a point in the wrong cell lies in two symmetric differences
    partition = mean_estimate(2.0 * apart.double())
    masses = mean_estimate(unsure.double()), mean_estimate(ambiguous(teacher, tau, eps).double())
    here, there = (mass.value or 0.0 for mass in masses)
    return Recovery(
        matching,
        experts,
        partition,
        *masses,
        (experts.value or 0.0) / (there + here + eta + eps**2),
        (partition.value or 0.0) / (there + eta + eps**2),
    )
