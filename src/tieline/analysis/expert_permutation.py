"""Estimate how one run numbers the experts of another, from the choices of both.

C[i, j] counts the tokens that choose i in A and j in B. The best permutation maximises
Σ C[i, π(i)] (an assignment problem). Moved experts are accepted only in whole cycles, and only if
every member with enough tokens satisfies

    κ(i) = (C[i, π(i)] - n_i m_j / T) / (min(n_i, m_j) - n_i m_j / T) > 1/2,   j = π(i)

where n_i and m_j count the tokens that choose i in A and j in B: κ is their overlap beyond what
the loads explain. A few flips therefore never look like a permutation.

Experts with equal or nearly equal rows of the router are chosen together, or exchanged by any
noise: C[i, j] is as large as C[i, i]. A cycle must therefore at least halve the disagreement, and
experts that A scores alike or chooses together in most tokens keep their numbers. So do experts
that nearly all tokens choose, whose exchange changes hardly a choice: a cycle must bring at least
five choices and a twentieth of its choices into agreement.
"""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np
from jaxtyping import Int
from scipy.optimize import linear_sum_assignment

from tieline.trace.record import LayerTrace

FEWEST_CHOICES = 5
"""Tokens that must choose an expert on each side for it to count as evidence."""
LEAST_GAIN = 0.05
"""Least share of a cycle's choices that must agree under it and not without."""
TIED_DISTANCE = 0.05
"""Largest distance of two tied experts' scores, over the spread of a token's scores."""
MOST_PERMUTED_EXPERTS = 2048
"""Most experts for which a permutation is estimated: C has their square of entries."""


class ExpertPermutation(NamedTuple):
    """Permutation of the experts and agreement of the choices under it.

    Attributes:
        to_b: π, the number in B of each expert of A.
        agreement: share of chosen experts in common, of the smaller k.
        chance: expected agreement of independent choices with these loads.
        unseen: moved experts with too few tokens to count as evidence.
    """

    to_b: Int[np.ndarray, " experts"]
    agreement: float
    chance: float
    unseen: int

    @property
    def beyond_chance(self) -> float | None:
        """(agreement - chance) / (1 - chance); None if all choices must agree."""
        if self.chance >= 1 - 1e-12:
            return None
        return (self.agreement - self.chance) / (1 - self.chance)


def co_occurrence_counts(
    experts_a: Int[np.ndarray, "tokens k_a"], experts_b: Int[np.ndarray, "tokens k_b"], experts: int
) -> Int[np.ndarray, "experts experts"]:
    """C[i, j], the number of tokens that choose i in A and j in B."""
    pairs = (
        experts_a.astype(np.int64)[:, :, None] * experts + experts_b.astype(np.int64)[:, None, :]
    )
    return np.bincount(pairs.ravel(), minlength=experts**2).reshape(experts, experts)


def estimate_expert_permutation(
    experts_a: Int[np.ndarray, "tokens k_a"],
    experts_b: Int[np.ndarray, "tokens k_b"],
    experts: int,
    are_tied: Callable[[int, int], bool] = lambda i, j: False,
) -> ExpertPermutation:
    """Estimate the expert permutation from both runs' choices.

    Args:
        experts_a: experts chosen in A.
        experts_b: experts chosen in B.
        experts: number of experts, both sides.
        are_tied: whether two experts of A have nearly the same scores.
    """
    loads = [np.bincount(ids.ravel(), minlength=experts) for ids in (experts_a, experts_b)]
    identity, sizes = (
        np.arange(experts),
        (len(experts_a), min(experts_a.shape[1], experts_b.shape[1])),
    )
    if experts > MOST_PERMUTED_EXPERTS:
        common = int((experts_a[:, :, None] == experts_b[:, None, :]).sum())
        return _permutation_with_agreement(identity, common, loads, sizes, 0)
    table = co_occurrence_counts(experts_a, experts_b, experts)
    bonus = table * (experts + 1) + np.eye(experts, dtype=np.int64)  # of equals, the identity
    best = linear_sum_assignment(bonus, maximize=True)[1]

    @cache
    def together() -> np.ndarray:
        """Tokens of A that choose two experts."""
        return co_occurrence_counts(experts_a, experts_a, experts)

    def tied_or_joined(i: int, j: int) -> bool:
        """Whether A scores two experts alike or chooses them together."""
        joined = _overlap_exceeds_chance(i, j, together(), loads[:1] * 2, len(experts_a))
        return bool(joined) or are_tied(i, j)

    best = _without_tied_cycles(best, table, loads, tied_or_joined)
    to_b, unseen = _supported_cycles(best, table, loads, len(experts_a))
    return _permutation_with_agreement(to_b, int(table[identity, to_b].sum()), loads, sizes, unseen)


def _permutation_with_agreement(
    to_b: np.ndarray, common: int, loads: list[np.ndarray], sizes: tuple[int, int], unseen: int
) -> ExpertPermutation:
    """The permutation with its agreement and chance; `sizes` are (tokens, experts per token)."""
    tokens, k = max(sizes[0], 1), sizes[1]
    chance = float(loads[0] @ loads[1][to_b]) / (tokens * tokens * k)
    return ExpertPermutation(to_b, common / (tokens * k), min(chance, 1.0), unseen)


def _without_tied_cycles(
    best: np.ndarray,
    table: np.ndarray,
    loads: list[np.ndarray],
    are_tied: Callable[[int, int], bool],
) -> np.ndarray:
    """The permutation without cycles of tied experts, which any noise exchanges."""
    to_b = best.copy()
    for cycle in _permutation_cycles(best):
        same_number, new_number = table[cycle, cycle].sum(), table[cycle, best[cycle]].sum()
        chosen = min(load[cycle].sum() for load in loads)
        halved = chosen - new_number < 0.5 * (chosen - same_number)
        halved &= new_number - same_number >= max(FEWEST_CHOICES, LEAST_GAIN * chosen)
        if not halved or all(are_tied(i, int(best[i])) for i in cycle):
            to_b[cycle] = cycle
    return to_b


def _supported_cycles(
    best: np.ndarray, table: np.ndarray, loads: list[np.ndarray], tokens: int
) -> tuple[np.ndarray, int]:
    """Keep the cycles of `best` that all evidence supports, and count experts without evidence."""
    to_b, unseen = np.arange(len(best)), 0
    for cycle in _permutation_cycles(best):
        checks = [_overlap_exceeds_chance(i, int(best[i]), table, loads, tokens) for i in cycle]
        supported = [check for check in checks if check is not None]
        if supported and all(supported):
            to_b[cycle] = best[cycle]
            unseen += len(cycle) - len(supported)
    return to_b, unseen


def _overlap_exceeds_chance(
    i: int, j: int, table: np.ndarray, loads: list[np.ndarray], tokens: int
) -> bool | None:
    """Whether κ > 1/2; None if an expert is too rare."""
    n, m, common = int(loads[0][i]), int(loads[1][j]), int(table[i, j])
    if min(n, m) < FEWEST_CHOICES:
        return None
    by_chance, largest_overlap = n * m / tokens, min(n, m)
    return common - by_chance > 0.5 * (largest_overlap - by_chance) or common == n == m


def _permutation_cycles(permutation: np.ndarray) -> list[list[int]]:
    """Cycles with more than one element."""
    remaining, cycles = set(np.flatnonzero(permutation != np.arange(len(permutation))).tolist()), []
    while remaining:
        cycle, element = [], min(remaining)
        while element in remaining:
            remaining.discard(element)
            cycle.append(element)
            element = int(permutation[element])
        cycles.append(cycle)
    return cycles


def have_equal_scores(layer: LayerTrace, i: int, j: int) -> bool:
    """Whether two experts have nearly equal scores in most tokens that recorded both."""
    if layer.scores is None:
        return False
    is_i, is_j = (layer.experts == i), (layer.experts == j)
    rows = is_i.any(1) & is_j.any(1)
    if int(rows.sum()) < FEWEST_CHOICES:
        return False
    scores = layer.scores[rows].double().nan_to_num(neginf=0.0)
    distances = ((scores * is_i[rows]).sum(1) - (scores * is_j[rows]).sum(1)).abs()
    return bool(distances.median() <= TIED_DISTANCE * scores.std(1).median())
