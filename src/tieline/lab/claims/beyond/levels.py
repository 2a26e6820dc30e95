"""From which k on a top-k layer cannot have a share of C(N, k) cells: k-levels of arrangements.

The cells of a top-k router are the faces at level k of N hyperplanes t = z_i(x) of R^{d+1}. By
Clarkson's and Shor's sampling, with exact constants (docs/tropical.md):

    V_q <= min over r of u(r, d+1) C(N, r) / C(N-d-1-q, r-d-1)      vertices with q experts above
    cells <= Σ_{q=k-d}^{k-1} V_q C(d+1, k-q)

u(r, D) being the most vertices of a polyhedron with r facets in R^D (upper bound theorem).
"""

import math

import numpy as np

from tieline.lab.claims.claim import ClaimRun, claim
from tieline.lab.claims.evidence import Evidence, at_least, at_most, chart, line, near, none_of
from tieline.lab.claims.routing_problems import numpy_router
from tieline.lab.power_law import exponent
from tieline.lab.tropical import count_cells, sharp_bound, zaslavsky


def most_vertices(facets: int, dim: int) -> int:
    """Most vertices of a polyhedron with the given number of facets, more than `dim`."""
    low, high = dim // 2, (dim + 1) // 2
    return math.comb(facets - high, low) + math.comb(facets - low - 1, high - 1)


def vertices_bound(n_experts: int, above: int, dim: int) -> float:
    """Most points at which d + 1 experts tie with `above` experts over them."""
    best, size = math.inf, dim + 2
    while size <= n_experts - above:
        share = _log_binomial(n_experts - dim - 1 - above, size - dim - 1) - _log_binomial(
            n_experts, size
        )
        best = min(best, math.log(most_vertices(size, dim + 1)) - share)
        size = max(size + 1, int(size * 1.05))
    return math.exp(best) if math.isfinite(best) else math.inf


def _log_binomial(n: int, k: int) -> float:
    """Log of C(n, k)."""
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


def level_bound(n_experts: int, k: int, dim: int) -> int | float:
    """Most cells of a top-k router: C(N, k), Φ(N, d+1) - N or the sum over vertices."""
    levels = range(max(0, k - dim), k)
    summed = sum(vertices_bound(n_experts, q, dim) * math.comb(dim + 1, k - q) for q in levels)
    return min(math.comb(n_experts, k), zaslavsky(n_experts, dim + 1) - n_experts, summed)


def moment_curve_cells(n_experts: int, k: int, dim: int) -> int:
    """Cells of the router on the moment curve, z_i = Σ x_m t_i^m - t_i^{d+1}."""
    t = np.linspace(-1, 1, n_experts)
    return int(
        count_cells(np.stack([t**m for m in range(1, dim + 1)], axis=1), -(t ** (dim + 1)), k)
    )


MANY, HUGE = [2**p for p in (10, 12, 14, 16, 18)], [2**p for p in (24, 26, 28, 30)]
"""Numbers of experts at which the bounds are compared, and those that show their order."""


@claim("p5-levels", "the combinatorial gain ends at k = (d+1)/2", number="levels", seconds=1)
def combinatorial_gain_ends(run: ClaimRun) -> Evidence:
    """For k > (d+1)/2 the cells of every top-k router are O(N^⌊(d+1)/2⌋), a vanishing share of C(N,
    k), so that Thm 4.19 of paper 3 fails for each such k and not only for k > d + 1; for k <=
    (d+1)/2 routers on the moment curve have all C(N, k) cells. Pieces are at most cells times Φ(kH,
    d), which is sharper than B*.

    Setting: affine routers, every position; N grows with d and k fixed
    Tested: The bound with its constants: exponent in N for d = 1 ... 5 and k = ⌊(d+1)/2⌋ + 1; exact
        counts of drawn routers, d = 1, 2, 3, all k, and of moment curves against it.
    Overturned by: a router with more cells than the bound
    """
    powers = {}
    for dim in range(1, 6):
        k = (dim + 1) // 2 + 1
        powers[dim] = exponent(HUGE, [level_bound(n, k, dim) for n in HUGE])
    above = 0
    for stream in range(run.size(6, 60)):
        for dim in (1, 2, 3):
            W, b = numpy_router(run, 40 + stream, 10, dim)
            above += sum(int(count_cells(W, b, k)) > level_bound(10, k, dim) for k in range(1, 10))
    share = [level_bound(n, 4, 2) / math.comb(n, 4) for n in MANY]
    pieces = level_bound(4096, 4, 2) * zaslavsky(32, 2)
    checks = [
        near(
            f"exponent of the bound, d = {dim}, k = {(dim + 1) // 2 + 1}",
            power,
            (dim + 1) // 2,
            0.02,
        )
        for dim, power in powers.items()
    ]
    return Evidence.of(
        checks,
        none_of("drawn routers above the bound", above),
        near("moment curve, d = 3, k = 2, N = 9", moment_curve_cells(9, 2, 3), math.comb(9, 2), 0),
        near("moment curve, d = 5, k = 3, N = 8", moment_curve_cells(8, 3, 5), math.comb(8, 3), 0),
        at_most("share of C(N, 4), d = 2, N = 2¹⁸", share[-1], 1e-9),
        at_least(
            "B* over the new bound, N = 4096, k = 4, H = 8, d = 2",
            sharp_bound(4096, 4, 8, 2) / pieces,
            100,
        ),
        paper="k > d + 1",
        corrected="k > (d+1)/2",
        measured=f"B* {sharp_bound(4096, 4, 8, 2):.3g} against {pieces:.3g} pieces",
        figure=chart("N", "bound / C(N, 4), d = 2", line("cells", MANY, share), log="xy"),
    )
