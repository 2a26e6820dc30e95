"""Renumbered experts, estimated from the choices of two runs.

C[i, j] counts the tokens that choose i in A and j in B. The best renumbering maximises
Σ C[i, π(i)] (an assignment problem). Experts that it moves are accepted only in whole cycles, and
only if every member that is seen often enough really goes there:

    κ(i) = (C[i, π(i)] - n_i m_j / T) / (min(n_i, m_j) - n_i m_j / T) > 1/2,   j = π(i)

with n_i and m_j the tokens that choose i in A and j in B: their overlap beyond what the loads
explain. A few flips therefore never look like a renumbering.

Experts with equal or nearly equal rows of the router are chosen together, or exchanged by any
noise: C[i, j] is as large as C[i, i]. So a cycle must at least halve the disagreement, and experts
that A scores alike or chooses together in most tokens keep their numbers.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Int
from scipy.optimize import linear_sum_assignment

from tieline.trace.record import LayerTrace

SEEN = 5
"""Tokens that must choose an expert on both sides before it counts as evidence."""
NEAR = 0.05
"""Distance of the scores of two experts, over the spread of a token's scores, that is a tie."""
MOST_MATCHED = 2048
"""Most experts for which a renumbering is searched: the table of pairs has their square."""

Table = Int[np.ndarray, "experts experts"]


class ExpertPermutation(NamedTuple):
    """Number in B of each expert of A, and how well the choices agree under it.

    Attributes:
        to_b: π.
        agreement: share of chosen experts in common, of the smaller k.
        chance: the same for independent choices of these loads.
        unseen: moved experts that were too rare to count as evidence.
    """

    to_b: Int[np.ndarray, " experts"]
    agreement: float
    chance: float
    unseen: int

    @property
    def beyond_chance(self) -> float | None:
        """(agreement - chance) / (1 - chance); None where all choices must agree."""
        if self.chance >= 1 - 1e-12:
            return None
        return (self.agreement - self.chance) / (1 - self.chance)


def co_occurrence(
    in_a: Int[np.ndarray, "tokens k_a"], in_b: Int[np.ndarray, "tokens k_b"], experts: int
) -> Table:
    """C: tokens that choose i in A and j in B."""
    pairs = in_a.astype(np.int64)[:, :, None] * experts + in_b.astype(np.int64)[:, None, :]
    return np.bincount(pairs.ravel(), minlength=experts**2).reshape(experts, experts)


def estimate_permutation(
    in_a: Int[np.ndarray, "tokens k_a"],
    in_b: Int[np.ndarray, "tokens k_b"],
    experts: int,
    are_tied: Callable[[int, int], bool] = lambda i, j: False,
) -> ExpertPermutation:
    """Estimate the expert permutation from both runs' choices.

    Args:
        in_a: experts chosen in A.
        in_b: experts chosen in B.
        experts: number of experts, both sides.
        are_tied: whether two experts of A have nearly the same scores.
    """
    loads = [np.bincount(ids.ravel(), minlength=experts) for ids in (in_a, in_b)]
    identity, sizes = np.arange(experts), (len(in_a), min(in_a.shape[1], in_b.shape[1]))
    if experts > MOST_MATCHED:
        common = int((in_a[:, :, None] == in_b[:, None, :]).sum())
        return _permutation_agreement(identity, common, loads, sizes, 0)
    table = co_occurrence(in_a, in_b, experts)
    bonus = table * (experts + 1) + np.eye(experts, dtype=np.int64)  # of equals, the identity
    best = linear_sum_assignment(bonus, maximize=True)[1]
    together = co_occurrence(in_a, in_a, experts)

    def tied_or_joined(i: int, j: int) -> bool:
        """Whether A scores two experts alike, or chooses them together."""
        joined = _is_moved_together(i, j, together, loads[:1] * 2, len(in_a))
        return bool(joined) or are_tied(i, j)

    best = _without_ties(best, table, loads, tied_or_joined)
    to_b, unseen = _supported_cycles(best, table, loads, len(in_a))
    return _permutation_agreement(to_b, int(table[identity, to_b].sum()), loads, sizes, unseen)


def _permutation_agreement(
    to_b: np.ndarray, common: int, loads: list[np.ndarray], sizes: tuple[int, int], unseen: int
) -> ExpertPermutation:
    """Agreement and chance of a matching; `sizes` are tokens and experts per token."""
    tokens, k = max(sizes[0], 1), sizes[1]
    chance = float(loads[0] @ loads[1][to_b]) / (tokens * tokens * k)
    return ExpertPermutation(to_b, common / (tokens * k), min(chance, 1.0), unseen)


def _without_ties(
    best: np.ndarray,
    table: np.ndarray,
    loads: list[np.ndarray],
    are_tied: Callable[[int, int], bool],
) -> np.ndarray:
    """The assignment without cycles of tied experts, which any noise exchanges."""
    to_b = best.copy()
    for cycle in _permutation_cycles(best):
        kept, moved = table[cycle, cycle].sum(), table[cycle, best[cycle]].sum()
        apart = min(load[cycle].sum() for load in loads)
        halved = apart - moved < 0.5 * (apart - kept)
        if not halved or all(are_tied(i, int(best[i])) for i in cycle):
            to_b[cycle] = cycle
    return to_b


def _supported_cycles(
    best: np.ndarray, table: np.ndarray, loads: list[np.ndarray], tokens: int
) -> tuple[np.ndarray, int]:
    """Keep the cycles of `best` that all evidence supports; also count experts without evidence."""
    to_b, unseen = np.arange(len(best)), 0
    for cycle in _permutation_cycles(best):
        witness = [_is_moved_together(i, int(best[i]), table, loads, tokens) for i in cycle]
        supported = [agrees for agrees in witness if agrees is not None]
        if supported and all(supported):
            to_b[cycle] = best[cycle]
            unseen += len(cycle) - len(supported)
    return to_b, unseen


def _is_moved_together(
    i: int, j: int, table: np.ndarray, loads: list[np.ndarray], tokens: int
) -> bool | None:
    """Whether κ > 1/2; None if the expert is too rare on one side."""
    n, m, both = int(loads[0][i]), int(loads[1][j]), int(table[i, j])
    if min(n, m) < SEEN:
        return None
    chance, most = n * m / tokens, min(n, m)
    return both - chance > 0.5 * (most - chance) or both == n == m


def _permutation_cycles(permutation: np.ndarray) -> list[list[int]]:
    """Cycles of more than one element."""
    left, cycles = set(np.flatnonzero(permutation != np.arange(len(permutation))).tolist()), []
    while left:
        cycle, at = [], min(left)
        while at in left:
            left.discard(at)
            cycle.append(at)
            at = int(permutation[at])
        cycles.append(cycle)
    return cycles


def have_equal_scores(layer: LayerTrace, i: int, j: int) -> bool:
    """Whether two experts have nearly equal scores in most tokens that kept both."""
    if layer.scores is None:
        return False
    of_i, of_j = (layer.experts == i), (layer.experts == j)
    rows = of_i.any(1) & of_j.any(1)
    if int(rows.sum()) < SEEN:
        return False
    scores = layer.scores[rows].double().nan_to_num(neginf=0.0)
    apart = ((scores * of_i[rows]).sum(1) - (scores * of_j[rows]).sum(1)).abs()
    return bool(apart.median() <= NEAR * scores.std(1).median())
