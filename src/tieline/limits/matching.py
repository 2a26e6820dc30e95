"""Which student expert plays which teacher expert, and what confident misrouting costs.

    agreement_kj = P(Ω*_k ∩ {p_j >= 1 - ε})                              to be matched
    E_mis(π) = ∪_k Ω*_k ∩ {p_j >= 1 - ε, j ≠ π(k)}                       eq. 5.8
    E_gap(π) = ∪_k {x ∈ Ω*_k : (f_j - f*_k)² <= γ for the leading j}     eq. 5.12, at the actual θ

The best permutation minimises P(E_mis), which is the Hungarian assignment of `agreement`.

**Lemma 5.16 as printed is wrong.** It claims L̃_int >= γ/4 (P(E_mis(π)) - K(K-1)η) for *every* π,
η being the mass on which a wrong expert imitates the right one. Take the student that equals the
teacher, and π the swap: L̃_int = 0 while P(E_mis(π)) is nearly 1, because the experts that are
"wrong" by π are the right functions, which Assumption 5.11 says nothing about. What holds at the
actual θ, for every π, is L̃_int >= γ/4 · P(E_mis ∖ E_gap). Both are given.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from tieline.errors import require
from tieline.limits.decomposition import check_labels, confident_expert, risk_decomposition
from tieline.limits.risk import MoESample
from tieline.numerics import Estimate, mean_estimate

__all__ = [
    "Matching",
    "Misrouting",
    "match_experts",
    "misrouting_bound",
]


@dataclass(frozen=True, eq=False)
class Matching:
    """The best relabelling of a student.

    Attributes:
        permutation: student expert π(k) of each teacher cell k.
        agreement: (E, E) P(Ω*_k ∩ {p_j >= 1 - ε}), rows k.
        misrouted: P(E_mis(π)).
    """

    permutation: tuple[int, ...]
    agreement: Float[Tensor, "experts experts"]
    misrouted: Estimate


def match_experts(sample: MoESample, labels: Int[Tensor, " n"], tau: float, eps: float) -> Matching:
    """Hungarian matching of student experts to teacher cells by confident agreement.

    Args:
        sample: the student.
        labels: (n,) teacher cell of each input.
        tau: temperature.
        eps: an expert leads where its weight exceeds 1 - ε.
    """
    check_labels(labels, sample)
    n, experts = sample.scores.shape
    leader = confident_expert(sample, tau, eps)
    sure = leader >= 0
    counts = torch.zeros(experts, experts, dtype=torch.float64)
    counts.index_put_((labels[sure], leader[sure]), counts.new_ones(()), accumulate=True)
    _, columns = linear_sum_assignment(counts.numpy(), maximize=True)
    permutation = tuple(int(j) for j in columns)
    wrong = _misrouted(leader, labels, permutation)
    return Matching(permutation, counts / n, mean_estimate(wrong.double()))


def _misrouted(leader: Tensor, labels: Tensor, permutation: Sequence[int]) -> Tensor:
    return (leader >= 0) & (leader != torch.tensor(list(permutation))[labels])


@dataclass(frozen=True)
class Misrouting:
    """The paper's bound (5.9) and the corrected one, beside L̃_int.

    Attributes:
        permutation: π.
        interior: L̃_int.
        misrouted: P(E_mis(π)).
        imitated: P(E_mis ∩ E_gap), where the leading expert is within √γ of the target.
        exception: K(K-1)η, the paper's allowance for imitation.
        paper_bound: γ/4 max(P(E_mis) - K(K-1)η, 0), eq. 5.9.
        corrected_bound: γ/4 P(E_mis ∖ E_gap).
        admissible: whether 2ε B_stu <= √γ/2, which both bounds ask.
    """

    permutation: tuple[int, ...]
    interior: Estimate
    misrouted: Estimate
    imitated: Estimate
    exception: float
    paper_bound: float
    corrected_bound: Estimate
    admissible: bool


def misrouting_bound(
    sample: MoESample,
    labels: Int[Tensor, " n"],
    tau: float,
    eps: float,
    *,
    gamma: float,
    eta: float,
    permutation: Sequence[int],
) -> Misrouting:
    """Lemma 5.16 for one permutation, as printed and corrected.

    Args:
        sample: the student, with the noiseless target.
        labels: (n,) teacher cell of each input.
        tau: temperature.
        eps: 0 < ε < 1/2.
        gamma: γ_gap > 0.
        eta: η_gap of Assumption 5.11 under the teacher's labels (`specialisation_gap`).
        permutation: π, student expert of each cell.
    """
    check_labels(labels, sample)
    experts = sample.scores.shape[1]
    require(gamma > 0 and 0 <= eta < 1, f"need gamma > 0 and 0 <= eta < 1, got {gamma=}, {eta=}")
    require(
        sorted(permutation) == list(range(experts)),
        f"need a permutation of 0 … {experts - 1}, got {list(permutation)}",
    )
    leader = confident_expert(sample, tau, eps)
    wrong = _misrouted(leader, labels, permutation)
    value = sample.outputs.gather(1, leader.clamp(min=0)[:, None]).squeeze(1)
    imitates = wrong & ((value - sample.target).square() <= gamma)
    misrouted, exception = mean_estimate(wrong.double()), experts * (experts - 1) * eta
    assert misrouted.value is not None
    return Misrouting(
        tuple(permutation),
        risk_decomposition(sample, tau, eps).interior,
        misrouted,
        mean_estimate(imitates.double()),
        exception,
        gamma / 4 * max(misrouted.value - exception, 0.0),
        mean_estimate((wrong & ~imitates).double()).times(gamma / 4),
        4 * eps * sample.outputs.abs().max().item() <= gamma**0.5,
    )
