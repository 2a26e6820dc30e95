"""Sections 3, A.3 and 4.1: cells, ties and their orders, and the densities of slices."""

import itertools
import math

import numpy as np
import torch
from scipy.optimize import nnls
from scipy.special import betainc
from torch import Tensor

from tieline.core.ranking import gap, kth_largest, sets_differ, stable_topk, topk_mask
from tieline.lab.claims.claim import ClaimRun, Verdict, claim
from tieline.lab.claims.evidence import (
    Check,
    Evidence,
    at_least,
    at_most,
    chart,
    corrected,
    dots,
    near,
    none_of,
    qualified,
    sampled,
)
from tieline.lab.claims.routing_problems import orthonormal_rows, router_from_stream
from tieline.lab.geometry import (
    distance_to_tie,
    nearest_tie_point,
    sampled_slice_density,
    slice_bounds,
    slice_density,
    tie_order,
)
from tieline.lab.geometry.ties import tie_flat
from tieline.lab.power_law import exponent


def lattice_scores(run: ClaimRun, n: int, experts: int) -> Tensor:
    """Draw scores on a coarse lattice, where ties of all orders are common."""
    draw = torch.randint(0, 4, (n, experts), generator=run.generator(5))
    return draw.double() / 4


@claim("p1-def3.1", "order statistics", number="Def. 3.1, A.4")
def order_statistics(run: ClaimRun) -> Evidence:
    """z_[1] >= ... >= z_[E] are the sorted scores; equal ones keep the order of indices.

    Setting: all scores, ties included
    Tested: Values and indices against a plain sort of (−score, index) on a lattice full of ties.
    Overturned by: an order of tied scores that is not by index
    """
    scores, wrong = lattice_scores(run, run.size(500, 5_000), 6), 0
    for k in range(1, 7):
        ranked = stable_topk(scores, k)
        for row, indices in zip(scores.tolist(), ranked.indices.tolist(), strict=True):
            wrong += indices != sorted(range(6), key=lambda i: (-row[i], i))[:k]
    return Evidence.of(none_of("rows that differ", wrong), paper="a sort", measured=wrong)


def _order_by_definition(row: list[float], k: int, exact: bool) -> set[int]:
    """Orders n of the discontinuity at these scores by Def. 3.2, or by Def. A.5 (exact)."""
    ranked = sorted(row, reverse=True)
    if ranked[k - 1] != ranked[k]:
        return set()
    tied = sum(value == ranked[k] for value in row)
    return {tied - 1} if exact else set(range(1, tied))


@claim("p1-def3.2", "order of a discontinuity", number="Def. 3.2, A.5")
def discontinuity_order(run: ClaimRun) -> Evidence:
    """x has order n if n+1 scores tie at the threshold between ranks k and k+1.

    Setting: Def. 3.2 and Def. A.5, which the paper calls equivalent, on scores full of ties
    Tested: Both definitions by enumeration on a lattice full of ties, k = 1 included; the order of
        the library against them.
    Overturned by: one of the two definitions in place of both
    Condition: the order is the maximal one, and k may be 1: by Def. 3.2 an order-2 point is of
        order 1 as well, by Def. A.5 it is not
    """
    scores, differ, wrong = lattice_scores(run, run.size(500, 5_000), 6), 0, 0
    for k in range(1, 6):
        tie_orders = tie_order(scores, k, 1e-9).tolist()
        for row, order in zip(scores.tolist(), tie_orders, strict=True):
            loose, strict = (_order_by_definition(row, k, exact) for exact in (False, True))
            differ += loose != strict
            wrong += {order} - {0} != strict
    inside = tie_order(torch.tensor([[2.0, 2.0, 1.0]], dtype=torch.float64), 2, 0.5).item()
    return Evidence.of(
        none_of("rows on which the two definitions differ", differ),
        qualified(
            none_of("rows on which the maximal order is not that of Def. A.5", wrong),
            near("order of a tie inside the chosen set", inside, 0, 0),
        ),
        paper="one order",
        corrected="the maximal order",
        measured=f"definitions differ on {differ} rows",
    )


@claim("p1-propA.2", "cells are full-dimensional")
def cells_are_full_dimensional(run: ClaimRun) -> Evidence:
    """Every cell C_S is an open set of full dimension (full row rank, E < D).

    Setting: affine scores with linearly independent rows, the paper's assumption, 6 experts in R⁸
    Tested: A point of each of the C(6,3) cells of a drawn router by solving for its scores, with a
        ball around it; and how many cells are left when E > D + 1.
    Overturned by: a coalition without a ball
    """
    weight, bias = router_from_stream(run, 6, 8)
    radii = []
    for coalition in itertools.combinations(range(6), 3):
        target = torch.zeros(6, dtype=torch.float64)
        target[list(coalition)] = 1.0
        x = torch.linalg.lstsq(weight, (target - bias)[:, None]).solution.T
        same = topk_mask(x @ weight.T + bias, 3)[0].nonzero().flatten().tolist() == list(coalition)
        radii.append(distance_to_tie(x, weight, bias, 3).item() if same else 0.0)
    flat, shift = router_from_stream(run, 6, 1, stream=2)
    line = torch.linspace(-60, 60, 200_001, dtype=torch.float64)[:, None]
    line_cells = len(topk_mask(line @ flat.T + shift, 3).unique(dim=0))
    return Evidence.of(
        near("cells with a ball", sum(r > 0 for r in radii), math.comb(6, 3), 0),
        at_least("smallest radius", min(radii), 1e-6),
        corrected(at_most("cells of 6 experts on a line", line_cells, 19)),
        paper=math.comb(6, 3),
        corrected="only if rank [W 1] = E",
        measured=f"{sum(r > 0 for r in radii)}; {line_cells} on a line",
    )


@claim("p1-propA.3", "ties have measure zero")
def ties_have_measure_zero(run: ClaimRun) -> Evidence:
    """The discontinuity set Γ has Lebesgue measure zero.

    Setting: affine scores with linearly independent rows, the paper's assumption, 8 experts in R¹²
    Tested: Exact ties among draws in float64, and the share of inputs within distance ε of Γ, which
        falls like ε.
    Overturned by: a tube whose mass does not fall with ε
    """
    weight, bias = router_from_stream(run, 8, 12)
    x = run.normal(run.size(100_000, 1_000_000), 12, stream=3)
    ties = (gap(x @ weight.T + bias, 2) == 0).sum().item()
    distance = distance_to_tie(x, weight, bias, 2)
    widths = [0.1, 0.03, 0.01, 0.003]
    shares = [(distance < w).double().mean().item() for w in widths]
    checks = [
        none_of("exact ties", ties),
        near("exponent of the mass of the tube", exponent(widths[1:], shares[1:]), 1, 0.07),
    ]
    figure = chart("ε", "share within ε of Γ", dots("counted", widths, shares), log="xy")
    return Evidence.of(checks, paper=0, measured=ties, figure=figure)


@claim("p1-propA.6", "dimension of order-n sets")
def tie_set_dimension(run: ClaimRun) -> Evidence:
    """A component of order n lies in a flat of codimension n and has dimension D - n.

    Setting: affine scores with linearly independent rows, the paper's assumption, orders 1 to 3 of
        6 experts in R⁸
    Tested: Rank of the equations of every tie set of 6 experts in D = 8, n = 1, 2, 3, and a
        positive share of directions on each flat; then 6 experts in D = 2.
    Overturned by: a flat of another codimension
    """
    weight, bias = router_from_stream(run, 6, 8)
    wrong, least = 0, math.inf
    for n in (1, 2, 3):
        for experts in itertools.combinations(range(6), n + 1):
            wrong += tie_flat(weight, bias, experts).basis.shape[1] != n
        share = sampled_slice_density(weight, 3, tuple(range(n + 1)), 2_000, seed=run.seed)
        least = min(least, share.value or 0.0)
    narrow, _ = router_from_stream(run, 6, 2, stream=2)
    rank = torch.linalg.matrix_rank(narrow[1:4] - narrow[0]).item()
    return Evidence.of(
        none_of("flats of another codimension", wrong),
        at_least("smallest share of a flat that is a tie", least, 1e-3),
        corrected(near("rank of three equations in D = 2", rank, 2, 0)),
        paper="D - n",
        corrected="for rows that are linearly independent (the paper's assumption)",
        measured=f"{wrong} wrong; slices >= {least:.3f}",
    )


@claim(
    "p1-eqA.7", "order statistic as min of max", number="proof of Prop. A.7", expected=Verdict.FAILS
)
def order_statistic_min_max(run: ClaimRun) -> Evidence:
    """z_[k] = min over sets J of k experts of max over J of z_i.

    Setting: the displayed identity inside the proof, as printed; drawn scores, k = 2
    Tested: The formula on drawn scores against z_[k]; and max over J of min over J.
    Overturned by: nothing: it is the k-th smallest score. The proposition itself stands
    """
    scores, k = run.normal(run.size(500, 5_000), 6, stream=1), 2
    sets = list(itertools.combinations(range(6), k))
    stated = torch.stack([scores[:, list(j)].amax(dim=1) for j in sets]).amin(dim=0)
    right = torch.stack([scores[:, list(j)].amin(dim=1) for j in sets]).amax(dim=0)
    true = kth_largest(scores, k).squeeze(1)
    smallest = scores.sort(dim=1).values[:, k - 1]
    return Evidence.of(
        near("largest error of min max", (stated - true).abs().max().item(), 0, 1e-12),
        corrected(
            near("largest error of max min", (right - true).abs().max().item(), 0, 1e-12),
            near("min max and the k-th smallest", (stated - smallest).abs().max().item(), 0, 1e-12),
        ),
        paper="min max",
        corrected="max min",
        measured=f"off by up to {(stated - true).abs().max().item():.3f}",
        note="The printed formula is the k-th smallest score. The proof stands with max min, which "
        "is as continuous.",
    )


@claim("p1-def4.1", "Euclidean thickening")
def euclidean_thickening(run: ClaimRun) -> Evidence:
    """T_ε(Γ) is the set of inputs nearer than ε to Γ.

    Setting: exact distances to ties of orders 1 and 2, 6 experts in R⁸
    Tested: The distance of the library: its point lies on Γ at that distance, and no direction
        leaves the cell earlier, for orders 1 and 2.
    Overturned by: a shorter way to a tie
    """
    weight, bias = router_from_stream(run, 6, 8)
    x = run.normal(run.size(60, 400), 8, stream=3)
    first, second = (nearest_tie_point(x, weight, bias, 2, order) for order in (1, 2))
    scores = x @ weight.T + bias
    at_tie = gap(first.point @ weight.T + bias, 2).max().item()
    length = ((x - first.point).norm(dim=1) - first.distance).abs().max().item()
    low = (tie_order(second.point @ weight.T + bias, 2, 1e-9) < 2).sum().item()
    away = run.normal(len(x), 200, 8, stream=4)
    away = away / away.norm(dim=2, keepdim=True)
    inside = x[:, None] + 0.999 * first.distance[:, None, None] * away
    same = topk_mask(inside @ weight.T + bias, 2) == topk_mask(scores, 2)[:, None]
    out = x + 1.001 * (first.point - x)
    crossed = sets_differ(topk_mask(out @ weight.T + bias, 2), topk_mask(scores, 2))
    checks = [
        at_most("gap at the nearest point", at_tie, 1e-9),
        at_most("error of its distance", length, 1e-9),
        none_of("directions that leave earlier", (~same).any(dim=2).sum().item()),
        none_of("inputs that stay beyond the point", (~crossed).sum().item()),
        none_of("order-2 points of a lower order", low),
        none_of("order-2 distances below order-1", (second.distance < first.distance).sum().item()),
    ]
    return Evidence.of(checks, paper="an infimum", measured=at_tie)


def _choice_share(weight: Tensor, tied: tuple[int, ...], above: set[int], run: ClaimRun) -> float:
    """Share of directions of S_J on which exactly the experts of `above` are above the tie."""
    flat = tie_flat(weight, None, tied)
    x = run.normal(run.size(50_000, 500_000), weight.shape[1], stream=9)
    x = x - (x @ flat.basis) @ flat.basis.T
    level = (x @ weight[tied[0]])[:, None]
    others = [i for i in range(len(weight)) if i not in tied]
    signs = torch.tensor([i in above for i in others])
    return ((x @ weight[others].T > level) == signs).all(dim=1).double().mean().item()


def polyhedron_bound(weight: Tensor, tied: tuple[int, ...], above: set[int]) -> float:
    """Lower bound ½ I_{4s²(1-s²)}((d-1)/2, ½) for one choice, s = min(1/√2, ρ/4L).

    ρ is the length of the shortest point of the convex hull of the signed normals inside the flat,
    found by non-negative least squares; L is the longest normal.
    """
    flat = tie_flat(weight, None, tied)
    others = [i for i in range(len(weight)) if i not in tied]
    raw = weight[others] - weight[tied[0]]
    signs = torch.tensor([1.0 if i in above else -1.0 for i in others], dtype=torch.float64)
    normals = (signs[:, None] * (raw - (raw @ flat.basis) @ flat.basis.T)).numpy()
    system = np.vstack([normals.T, 1e3 * np.ones(len(normals))])
    target = np.append(np.zeros(normals.shape[1]), 1e3)
    shares = nnls(system, target)[0]
    rho = float(np.linalg.norm(normals.T @ shares) / shares.sum())
    s = min(1 / math.sqrt(2), rho / (4 * raw.norm(dim=1).max().item()))
    dim = weight.shape[1] - len(tied) + 1
    return 0.5 * float(betainc((dim - 1) / 2, 0.5, 4 * s * s * (1 - s * s)))


@claim("p1-lemA.16", "slice density of one polyhedron")
def one_polyhedron(run: ClaimRun) -> Evidence:
    """A polyhedron in a flat, cut out by inequalities that some direction satisfies strictly, has
    density between ½ I_{4s²(1-s²)}((d-1)/2, ½) and ½.

    Setting: polyhedra of a drawn router, and the case without inequalities that the lemma allows
    Tested: Each of the eight choices of experts above a tie in a drawn router, its density by
        sampling directions against its own bounds; and a flat with no inequality at all, as for
        E = n + 1.
    Overturned by: the words 'at least one inequality' in the lemma
    Condition: there is at least one inequality; without any the density is 1
    """
    weight, _ = router_from_stream(run, 5, 7)
    others = (2, 3, 4)
    choices: list[set[int]] = [
        {*above} for size in range(4) for above in itertools.combinations(others, size)
    ]
    shares = [_choice_share(weight, (0, 1), above, run) for above in choices]
    bounds = [polyhedron_bound(weight, (0, 1), above) for above in choices]
    ratios = [share / bound for share, bound in zip(shares, bounds, strict=True)]
    lower = slice_bounds(weight, 2, (0, 1)).lower
    unbounded = sampled_slice_density(weight[:2], 1, (0, 1), 1_000, seed=run.seed).value or 0.0
    return Evidence.of(
        at_most("density without inequalities, E = 2", unbounded, 0.5),
        qualified(
            at_most("largest density of a choice", max(shares), 0.5),
            at_least("least density of a choice over its own bound", min(ratios), 1),
            at_least("the least of the lower bounds is positive", min(bounds), 1e-12),
        ),
        corrected(
            near("the choices share out the flat", sum(shares), 1, 1e-9),
            at_most("bound of the slice over the largest of these", lower / max(bounds), 1 + 1e-9),
        ),
        paper=f"[{min(bounds):.2e}, 0.5]",
        measured=f"{min(shares):.4f} to {max(shares):.4f}; {unbounded:g} without inequalities",
    )


@claim("p1-lemA.17", "top-k slices have a recession direction")
def slice_recession_direction(run: ClaimRun) -> Evidence:
    """With independent rows, every top-k slice has a direction u with c_j·u < 0 for the chosen and
    d_m·u > 0 for the other experts.

    Setting: affine scores with linearly independent rows, the paper's assumption, all ties and
        choices of 5 experts in R⁷
    Tested: All tie sets and choices of 5 experts in D = 7: directions of both signs by solving for
        the scores; which of them stays in the slice.
    Overturned by: a slice without one
    """
    weight, _ = router_from_stream(run, 5, 7)
    missing = inward = outward = total = 0
    for size in (2, 3):
        for tied in itertools.combinations(range(5), size):
            others = [i for i in range(5) if i not in tied]
            for signs in itertools.product((1.0, -1.0), repeat=len(others)):
                target = torch.zeros(5, dtype=torch.float64)
                target[others] = torch.tensor(signs, dtype=torch.float64)
                u = torch.linalg.lstsq(weight, target[:, None]).solution.squeeze(1)
                products = weight @ u
                missing += not torch.allclose(products, target, atol=1e-9)
                total += 1
                inward += bool((products[others].sign() == target[others]).all())
                outward += bool(((weight @ -u)[others].sign() == target[others]).all())
    return Evidence.of(
        none_of("choices without a direction", missing),
        near("choices whose slice the direction u stays in", inward, total, 0),
        corrected(none_of("choices whose slice -u stays in", outward)),
        paper="a direction",
        corrected="with the signs of the slice, not their opposites",
        measured=f"{total - missing} of {total}",
        note="Step 4 of the proof turns u round; the turned direction leaves the slice. Both "
        "exist, and by symmetry the bound of Lemma A.16 has the same value.",
    )


@claim("p1-thm4.4-alpha", "slice densities are at most ½", expected=Verdict.FAILS)
def density_bound(run: ClaimRun) -> Evidence:
    """α_{J,r} lies in [lower bound, ½].

    Setting: the bounds that Thm 4.4 states for α, inside its hypotheses: E = 4, k = 2, r = 2
    Tested: Exact densities for orthonormal rows and sampled ones; E = 4, k = 2, r = 2, where every
        place of the flat is a tie.
    Overturned by: the upper end 1, as in the paper's own Thm A.18
    """
    checks: list[Check] = [at_most("α at E = 4, k = 2, r = 2", slice_density(4, 2, 2), 0.5)]
    n = run.size(20_000, 400_000)
    for experts, k, r in ((4, 2, 2), (4, 2, 1), (8, 2, 1), (8, 3, 3), (16, 4, 2)):
        exact = slice_density(experts, k, r)
        estimate = sampled_slice_density(
            orthonormal_rows(experts, experts + 1), k, tuple(range(r + 1)), n, seed=run.seed
        )
        name = f"sampled α at E = {experts}, k = {k}, r = {r}"
        checks += corrected(sampled(name, estimate, exact, bias=1e-9))
    bounds = slice_bounds(orthonormal_rows(5, 7), 2, (0, 1))
    checks += corrected(
        at_most("lower bound and α, E = 5, k = 2, r = 1", bounds.lower, slice_density(5, 2, 1))
    )
    return Evidence.of(
        checks,
        paper="at most 0.5",
        corrected="at most 1 (the paper's own Thm A.18)",
        measured=slice_density(4, 2, 2),
    )
