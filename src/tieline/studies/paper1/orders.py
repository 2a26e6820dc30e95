"""Slice densities, and Euclidean tubes of different orders against each other."""

import itertools

import torch
from torch import Tensor

from tieline.geometry import (
    distance_to_tie,
    sampled_slice_density,
    slice_bounds,
    slice_density,
    tube_ratio,
)
from tieline.geometry.ties import tie_flat
from tieline.studies.checks import at_least, at_most, near, none_of, within
from tieline.studies.claim import Check, Evidence, Run, Verdict
from tieline.studies.figure import chart, dots, line
from tieline.studies.paper1.problems import BIAS, extrapolated, in_ball, orthonormal, router
from tieline.studies.registry import claim


def _choice_share(weight: Tensor, tied: tuple[int, ...], above: set[int], run: Run) -> float:
    """Share of directions of S_J on which exactly the experts of `above` are above the tie."""
    flat = tie_flat(weight, None, tied)
    x = run.normal(run.size(50_000, 500_000), weight.shape[1], stream=9)
    x = x - (x @ flat.basis) @ flat.basis.T
    level = (x @ weight[tied[0]])[:, None]
    others = [i for i in range(len(weight)) if i not in tied]
    wanted = torch.tensor([i in above for i in others])
    return ((x @ weight[others].T > level) == wanted).all(dim=1).double().mean().item()


@claim(
    "p1-lemA.16",
    "Lemma A.16",
    "slice density of one polyhedron",
    statement="A polyhedron in a flat, cut out by inequalities that some direction satisfies "
    "strictly, has density between ½ I_{4s²(1-s²)}((d-1)/2, ½) and ½.",
    tested="All choices of experts above a tie in a drawn router, by sampling directions; and a "
    "flat with no inequality at all, as for E = n + 1.",
    expected=Verdict.CONDITION,
    condition="there is at least one inequality; without any the density is 1",
)
def one_polyhedron(run: Run) -> Evidence:
    """Densities of single choices against the two bounds."""
    weight, _ = router(run, 5, 7)
    shares = [
        _choice_share(weight, (0, 1), set(above), run)
        for size in range(4)
        for above in itertools.combinations((2, 3, 4), size)
    ]
    lower = slice_bounds(weight, 2, (0, 1)).lower
    whole = sampled_slice_density(weight[:2], 1, (0, 1), 1_000, seed=run.seed).value or 0.0
    return Evidence(
        [
            at_most("density without inequalities, E = 2", whole, 0.5),
            at_most("largest density of a choice", max(shares), 0.5, part="condition"),
            at_least(
                "densities of the admissible choices over the bound",
                max(shares) / max(lower, 1e-300),
                1,
                part="condition",
            ),
            at_least("the lower bound is positive", lower, 1e-12, part="condition"),
            near("the choices share out the flat", sum(shares), 1, 1e-9, part="corrected"),
        ],
        paper=f"[{lower:.2e}, 0.5]",
        measured=f"{min(shares):.4f} to {max(shares):.4f}; {whole:g} without inequalities",
    )


@claim(
    "p1-lemA.17",
    "Lemma A.17",
    "top-k slices have a recession direction",
    statement="With independent rows, every top-k slice has a direction u with c_j·u < 0 for the "
    "chosen and d_m·u > 0 for the other experts.",
    tested="All tie sets and choices of 5 experts in D = 7: directions of both signs by solving "
    "for the scores; which of them stays in the slice.",
)
def recession(run: Run) -> Evidence:
    """Missing directions, and which sign leads into the slice."""
    weight, _ = router(run, 5, 7)
    missing = inward = outward = total = 0
    for size in (2, 3):
        for tied in itertools.combinations(range(5), size):
            others = [i for i in range(5) if i not in tied]
            for signs in itertools.product((1.0, -1.0), repeat=len(others)):
                wanted = torch.zeros(5, dtype=torch.float64)
                wanted[others] = torch.tensor(signs, dtype=torch.float64)
                u = torch.linalg.lstsq(weight, wanted[:, None]).solution.squeeze(1)
                found = weight @ u
                missing += not torch.allclose(found, wanted, atol=1e-9)
                total += 1
                inward += bool((found[others].sign() == wanted[others]).all())
                outward += bool(((weight @ -u)[others].sign() == wanted[others]).all())
    return Evidence(
        [
            none_of("choices without a direction", missing),
            near("choices whose slice the direction u stays in", inward, total, 0),
            none_of("choices whose slice -u stays in", outward, part="corrected"),
        ],
        paper="a direction",
        corrected="with the signs of the slice, not their opposites",
        measured=f"{total - missing} of {total}",
        note="Step 4 of the proof turns u round; the turned direction leaves the slice. Both "
        "exist, and by symmetry the bound of Lemma A.16 has the same value.",
    )


@claim(
    "p1-thm4.4-alpha",
    "Thm 4.4",
    "slice densities are at most ½",
    statement="α_{J,r} lies in [lower bound, ½].",
    tested="Exact densities for orthonormal rows and sampled ones; E = 4, k = 2, r = 2, where "
    "every place of the flat is a tie.",
    expected=Verdict.FAILS,
)
def density_bound(run: Run) -> Evidence:
    """Exact and sampled densities over E, k and r."""
    checks: list[Check] = [at_most("α at E = 4, k = 2, r = 2", slice_density(4, 2, 2), 0.5)]
    n = run.size(20_000, 400_000)
    for experts, k, r in ((4, 2, 2), (4, 2, 1), (8, 2, 1), (8, 3, 3), (16, 4, 2)):
        exact = slice_density(experts, k, r)
        found = sampled_slice_density(
            orthonormal(experts, experts + 1), k, tuple(range(r + 1)), n, seed=run.seed
        )
        words = f"sampled α at E = {experts}, k = {k}, r = {r}"
        checks.append(
            within(
                words,
                found.value or 0,
                found.standard_error or 0,
                exact,
                bias=1e-9,
                part="corrected",
            )
        )
    bounds = slice_bounds(orthonormal(5, 7), 2, (0, 1))
    checks.append(
        at_most(
            "lower bound and α, E = 5, k = 2, r = 1",
            bounds.lower,
            slice_density(5, 2, 1),
            part="corrected",
        )
    )
    return Evidence(
        checks,
        paper="at most 0.5",
        corrected="at most 1 (the paper's own Thm A.18)",
        measured=slice_density(4, 2, 2),
    )


def _tube_shares(run: Run, eps: float, n: int) -> tuple[Tensor, Tensor]:
    """Indicators of order-1 and order-2 tubes of E = 4, k = 2 in D = 5 at uniform points."""
    weight, x = orthonormal(4, 5), in_ball(run, n, 5)
    return tuple(  # type: ignore[return-value]
        (distance_to_tie(x, weight, None, 2, order) < eps).double() for order in (1, 2)
    )


@claim(
    "p1-thm4.4",
    "Thm 4.4, A.18",
    "tubes of different orders",
    statement="U_n/U_m = Σα_n/Σα_m · ω_{D-n}ω_n/(ω_{D-m}ω_m) (ε/R)^(n-m) (1 + O(1/R)).",
    tested="E = 4, k = 2, orthonormal rows in D = 5: exact distances at uniform points of the "
    "ball, two widths extrapolated to zero.",
    seconds=3,
)
def tube_orders(run: Run) -> Evidence:
    """Sampled ratio over ε against the formula."""
    n, widths = run.size(300_000, 3_000_000), (0.04, 0.08)
    shares = {eps: _tube_shares(run, eps, n) for eps in widths}
    value, error = extrapolated(shares)
    stated = tube_ratio(4, 2, dim=5, orders=(2, 1), eps=1.0, radius=1.0).paper
    raw = [(two.mean() / one.mean()).item() / eps for eps, (one, two) in shares.items()]
    return Evidence(
        [within("U_2/U_1 over ε/R", value, error, stated, bias=BIAS)],
        paper=stated,
        measured=value,
        figure=chart(
            "ε/R",
            "U_2/U_1 over ε/R",
            [
                line("formula", [0.0, *widths], [stated] * 3, dashed=True),
                dots("sampled", widths, raw),
            ],
        ),
    )
