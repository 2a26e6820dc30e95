"""Bounds on the number of pieces, exact integers all of them.

    zaslavsky         Φ(n, d) = Σ_{j<=d} C(n, j)                                    Def. 3.2
    capacity_bound    C(N, k) Φ(kH, d), the paper's bound for top-k                 Thm. 4.17
    paper_capacities  its four columns: dense, top-1, top-k, normalised            Table 1
    sharp_bound       B*, a rigorous bound that knows how few cells there are       ours
    attainability     whether C(N, k) cells can exist at all                        Lemma 4.18
    group_coalitions  choices that group-limited routing leaves                     ours

Numbers of definitions are those of paper 3. Its bound multiplies the cells C(N, k), which exist
only for d >= N - 1, by the pieces of a whole arrangement in each of them.
"""

import math
from functools import lru_cache
from typing import Literal, NamedTuple

from tieline.core.errors import require

comb = lru_cache(maxsize=256)(math.comb)
"""Binomials, kept: those of many experts have tens of thousands of digits and come again."""

Attainability = Literal["by every generic router", "by some routers", "by none", "not decided"]


class PaperCapacities(NamedTuple):
    """The bounds of Table 1 for one shape; in `normalised` a coalition runs H neurons in all."""

    dense: int
    top_1: int
    top_k: int
    normalised: int


def zaslavsky(n: int, dim: int) -> int:
    """Φ(n, d) = Σ_{j=0}^{d} C(n, j): regions of n hyperplanes in general position in R^d."""
    require(n >= 0 and dim >= 0, f"need n >= 0 and dim >= 0, got {n=}, {dim=}")
    return sum(comb(n, j) for j in range(min(n, dim) + 1))


def capacity_bound(n_experts: int, k: int, hidden: int, dim: int) -> int:
    """C(N, k) Φ(kH, d): the paper's bound on the linear regions of a top-k layer (Thm. 4.17)."""
    check_shape(n_experts, k, dim, hidden)
    return comb(n_experts, k) * zaslavsky(k * hidden, dim)


def paper_capacities(n_experts: int, k: int, hidden: int, dim: int) -> PaperCapacities:
    """Φ(kH, d), N Φ(kH, d), C(N, k) Φ(kH, d), C(N, k) Φ(H, d): the columns of Table 1.

    Dense and top-1 get the width kH, so that the first three run the same number of neurons per
    input, as in Example 4.21: (16, 4, 5, 5) gives 21,700, 347,200 and 39,494,000.
    """
    top_k, active = capacity_bound(n_experts, k, hidden, dim), zaslavsky(k * hidden, dim)
    per_coalition = zaslavsky(hidden, dim)
    return PaperCapacities(active, n_experts * active, top_k, comb(n_experts, k) * per_coalition)


def sharp_bound(n_experts: int, k: int, hidden: int, dim: int) -> int:
    """B* = Σ_{j<=d} Σ_a n(j, a) min(C(N-a, k-a), U(N, k, d-j)), never above `capacity_bound`.

    Every piece is counted on a flat where j neurons vanish: n(j, a) sets of j neurons touch exactly
    a experts, and on their flat, of dimension d - j, at most C(N-a, k-a) coalitions hold these
    experts and at most U(N, k, d-j) cells exist at all (`cell_bound`).
    """
    check_shape(n_experts, k, dim, hidden)
    total = 0
    for j in range(dim + 1):
        cells = cell_bound(n_experts, k, dim - j)
        for a in range(min(j, k) + 1):
            owners = comb(n_experts, a) * _choices_touching_all(a, hidden, j)
            total += owners * min(comb(n_experts - a, k - a), cells)
    return total


def cell_bound(n_experts: int, k: int, dim: int) -> int:
    """U(N, k, d) = min(C(N, k), Φ(N, d+1) - N) for d >= 1, and 1 for d = 0.

    Cells over all k = 0 ... N number Φ(N, d+1), and each of the N other k has one at least.
    """
    check_shape(n_experts, k, dim)
    if dim == 0:
        return 1
    return min(comb(n_experts, k), zaslavsky(n_experts, dim + 1) - n_experts)


def attainability(n_experts: int, k: int, dim: int) -> Attainability:
    """Whether an affine router on R^d can have all C(N, k) cells, as the paper assumes.

    d >= N - 1: every generic one has. k or N - k at most (d+1)/2: some have, with weights on the
    moment curve. k >= ⌊(d+3)/2⌋ and N - k >= d + 2, or the same with k and N - k exchanged: none,
    since a Radon partition of d + 3 experts names a coalition that no input chooses.
    """
    check_shape(n_experts, k, dim)
    rest = n_experts - k
    if dim >= n_experts - 1 or min(k, rest) == 0:
        return "by every generic router"
    if 2 * min(k, rest) <= dim + 1:
        return "by some routers"
    # here k and N - k are both at least ⌊(d+3)/2⌋
    if max(k, rest) >= dim + 2:
        return "by none"
    return "not decided"


def group_coalitions(n_experts: int, k: int, n_groups: int, k_groups: int) -> int:
    """Sets of k experts that touch at most k_groups of n_groups equal groups (DeepSeek-V3)."""
    check_shape(n_experts, k, 1)
    require(
        1 <= k_groups <= n_groups and n_experts % n_groups == 0,
        f"need equal groups and 1 <= k_groups <= n_groups, got {k_groups} of {n_groups} groups "
        f"for {n_experts} experts",
    )
    size = n_experts // n_groups
    return sum(
        comb(n_groups, a) * _choices_touching_all(a, size, k) for a in range(min(k, k_groups) + 1)
    )


def check_shape(n_experts: int, k: int, dim: int, hidden: int = 1) -> None:
    """Refuse N, k, H, d out of range, saying which."""
    require(
        n_experts >= 1 and 0 <= k <= n_experts, f"need 0 <= k <= N, N >= 1, got {k=}, N={n_experts}"
    )
    require(dim >= 0, f"need a dimension d >= 0, got {dim}")
    require(hidden >= 1, f"need experts of width H >= 1, got {hidden}")


def _choices_touching_all(blocks: int, size: int, chosen: int) -> int:
    """Ways to choose from `blocks` blocks of `size` so that no block is left out."""
    return sum(
        (-1) ** i * comb(blocks, i) * comb((blocks - i) * size, chosen) for i in range(blocks + 1)
    )
