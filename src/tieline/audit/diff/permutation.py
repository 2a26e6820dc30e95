"""Which expert of B is which expert of A, found from what the two choose together.

C[i, j] counts the tokens that choose i in A and j in B. The best renumbering maximises Σ C[i, π(i)]
(an assignment problem); experts that it moves are believed only in whole cycles, and only if every
member that is seen often enough really goes there:

    κ(i) = (C[i, π(i)] - n_i m_j / T) / (min(n_i, m_j) - n_i m_j / T) > 1/2,   j = π(i)

with n_i and m_j the tokens that choose i in A and j in B: what the two have in common beyond what
their loads explain. A few flips therefore never look like a renumbering.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Int
from scipy.optimize import linear_sum_assignment

__all__ = ["Matching", "co_occurrence", "match_experts"]

SEEN = 5
"""Tokens that must choose an expert on both sides before it bears witness."""
MOST_MATCHED = 2048
"""Experts up to which a renumbering is looked for: the table of pairs has their square."""

Table = Int[np.ndarray, "experts experts"]


class Matching(NamedTuple):
    """Number in B of each expert of A, and how well the choices agree under it.

    Attributes:
        to_b: π.
        agreement: share of chosen experts in common, of the smaller k.
        chance: the same for independent choices of these loads.
        unseen: moved experts that were too rare to bear witness.
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


def match_experts(
    in_a: Int[np.ndarray, "tokens k_a"], in_b: Int[np.ndarray, "tokens k_b"], experts: int
) -> Matching:
    """The renumbering that the choices of the same tokens bear witness to.

    Args:
        in_a: experts chosen in A.
        in_b: experts chosen in B.
        experts: number of experts, both sides.
    """
    loads = [np.bincount(ids.ravel(), minlength=experts) for ids in (in_a, in_b)]
    identity, sizes = np.arange(experts), (len(in_a), min(in_a.shape[1], in_b.shape[1]))
    if experts > MOST_MATCHED:
        common = int((in_a[:, :, None] == in_b[:, None, :]).sum())
        return _matching(identity, common, loads, sizes, 0)
    table = co_occurrence(in_a, in_b, experts)
    bonus = table * (experts + 1) + np.eye(experts, dtype=np.int64)  # of equals, the identity
    best = linear_sum_assignment(bonus, maximize=True)[1]
    to_b, unseen = _believed(best, table, loads, len(in_a))
    return _matching(to_b, int(table[identity, to_b].sum()), loads, sizes, unseen)


def _matching(
    to_b: np.ndarray, common: int, loads: list[np.ndarray], sizes: tuple[int, int], unseen: int
) -> Matching:
    """What the matching explains; `sizes` are the tokens and the experts of each."""
    tokens, k = max(sizes[0], 1), sizes[1]
    chance = float(loads[0] @ loads[1][to_b]) / (tokens * tokens * k)
    return Matching(to_b, common / (tokens * k), min(chance, 1.0), unseen)


def _believed(
    best: np.ndarray, table: np.ndarray, loads: list[np.ndarray], tokens: int
) -> tuple[np.ndarray, int]:
    """The cycles of `best` whose every witness goes where it says, and the experts without one."""
    to_b, unseen = np.arange(len(best)), 0
    for cycle in _cycles(best):
        witness = [_witness(i, int(best[i]), table, loads, tokens) for i in cycle]
        heard = [agrees for agrees in witness if agrees is not None]
        if heard and all(heard):
            to_b[cycle] = best[cycle]
            unseen += len(cycle) - len(heard)
    return to_b, unseen


def _witness(
    i: int, j: int, table: np.ndarray, loads: list[np.ndarray], tokens: int
) -> bool | None:
    """Whether κ > 1/2; None if the expert is too rare on one side to tell."""
    n, m, both = int(loads[0][i]), int(loads[1][j]), int(table[i, j])
    if min(n, m) < SEEN:
        return None
    chance, most = n * m / tokens, min(n, m)
    return both - chance > 0.5 * (most - chance) or both == n == m


def _cycles(permutation: np.ndarray) -> list[list[int]]:
    """Cycles of more than one element."""
    left, found = set(np.flatnonzero(permutation != np.arange(len(permutation))).tolist()), []
    while left:
        cycle, at = [], min(left)
        while at in left:
            left.discard(at)
            cycle.append(at)
            at = int(permutation[at])
        found.append(cycle)
    return found
