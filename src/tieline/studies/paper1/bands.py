"""Bands measured in scores instead of inputs, and their orders against each other."""

import itertools

import torch
from scipy import optimize
from torch import Tensor

from tieline.geometry import (
    band_ratio,
    linf_distance,
)
from tieline.ranking import gap
from tieline.studies.checks import at_most, none_of, within
from tieline.studies.claim import Evidence, Run, Verdict
from tieline.studies.paper1.problems import BIAS, extrapolated, in_ball
from tieline.studies.registry import claim


def _linf_by_programmes(scores: list[float], k: int) -> float:
    """Inf over y ∈ Γ of ‖z(x) - z(y)‖_∞ by linear programmes over all facets."""
    n, best = len(scores), float("inf")
    for chosen in itertools.combinations(range(n), k):
        rest = [j for j in range(n) if j not in chosen]
        for i, j in itertools.product(chosen, rest):
            rows, limits = [], []
            for m in range(n):
                for sign in (1.0, -1.0):
                    row = [0.0] * (n + 1)
                    row[m], row[n] = sign, -1.0
                    rows.append(row)
                    limits.append(sign * scores[m])
                if m in (i, j):
                    continue
                row = [0.0] * (n + 1)
                row[m], row[i] = (-1.0, 1.0) if m in chosen else (1.0, -1.0)
                rows.append(row)
                limits.append(0.0)
            equal = [0.0] * (n + 1)
            equal[i], equal[j] = 1.0, -1.0
            done = optimize.linprog(
                [0.0] * n + [1.0], rows, limits, [equal], [0.0], bounds=[(None, None)] * (n + 1)
            )
            best = min(best, done.fun)
    return best


@claim(
    "p1-def4.6",
    "Def. 4.6",
    "distance to a tie in scores",
    statement="dist_∞(x, Γ) = inf over y in Γ of ‖z(x) - z(y)‖_∞.",
    tested="Linear programmes over all facets of 4 experts against half of the gap.",
    seconds=0.6,
)
def score_distance(run: Run) -> Evidence:
    """Distance by programmes, by the library and by half the gap."""
    scores = run.normal(run.size(6, 60), 4, stream=1)
    programmes = torch.tensor(
        [_linf_by_programmes(row, 2) for row in scores.tolist()], dtype=torch.float64
    )
    ours, half = linf_distance(scores, 2), gap(scores, 2) / 2
    return Evidence(
        [
            at_most("programmes and the library", (programmes - ours).abs().max().item(), 1e-8),
            at_most("programmes and half of the gap", (programmes - half).abs().max().item(), 1e-8),
        ],
        paper="an infimum",
        corrected="half of the gap, for W of full row rank",
        measured=programmes[0].item() / half[0].item() / 2,
        note="In units of the gap.",
    )


@claim(
    "p1-propA.20",
    "Prop. A.20",
    "band test by the gap",
    statement="x is in the ℓ∞ band of width ε exactly if some expert outside the top k is less "
    "than ε below z_[k].",
    tested="Both sides on draws, with the distance of Def. 4.6; and with 2ε.",
    expected=Verdict.FAILS,
)
def band_test(run: Run) -> Evidence:
    """Inputs on which the two tests differ."""
    scores, eps = run.normal(run.size(20_000, 200_000), 8, stream=1), 0.1
    inside = linf_distance(scores, 2) <= eps
    stated, twice = (gap(scores, 2) < width for width in (eps, 2 * eps))
    return Evidence(
        [
            none_of("inputs on which they differ", (inside != stated).sum().item()),
            none_of(
                "inputs on which a gap below 2ε differs",
                (inside != twice).sum().item(),
                part="corrected",
            ),
        ],
        paper="gap < ε",
        corrected="gap <= 2ε; the product uses gap < ε and says so",
        measured=f"{(inside != stated).double().mean().item():.4f} of the inputs differ",
    )


def _bands(run: Run, eps: float, n: int) -> tuple[Tensor, Tensor]:
    """Indicators of the ℓ∞ bands of Def. 4.6, orders 1 and 2."""
    scores = in_ball(run, n, 5)[:, :4]
    return tuple(  # type: ignore[return-value]
        (linf_distance(scores, 2, order) <= eps).double() for order in (1, 2)
    )


def _fibres(run: Run, eps: float, n: int, slices: bool) -> tuple[Tensor, Tensor]:
    """Indicators of {‖A_J x - d_J‖_∞ <= ε}, over slices or over whole flats, orders 1 and 2."""
    z = in_ball(run, n, 5)[:, :4]
    found = []
    for r in (1, 2):
        hit = torch.zeros(n, dtype=torch.bool)
        for tied in itertools.combinations(range(4), r + 1):
            near_ = ((z[:, list(tied[1:])] - z[:, tied[:1]]).abs() <= eps).all(dim=1)
            above = (z > z[:, list(tied)].mean(dim=1, keepdim=True)).double()
            above[:, list(tied)] = 0
            count = above.sum(dim=1)
            valid = (count >= max(0, 2 - r)) & (count <= 1)
            hit |= near_ & (valid if slices else torch.ones_like(valid))
        found.append(hit.double())
    return found[0], found[1]


@claim(
    "p1-thm4.7",
    "Thm 4.7",
    "ℓ∞ bands of different orders",
    statement="U_n/U_m = Σκα_n/Σκα_m · ω_{D-n}/ω_{D-m} (2ε/R)^(n-m) for the bands of Def. 4.6.",
    tested="E = 4, k = 2, orthonormal rows in D = 5, at uniform points of the ball, two widths "
    "extrapolated to zero.",
    expected=Verdict.FAILS,
    seconds=1.5,
)
def band_orders(run: Run) -> Evidence:
    """Sampled ratio over ε against the printed and the corrected formula."""
    n = run.size(400_000, 4_000_000)
    value, error = extrapolated({eps: _bands(run, eps, n) for eps in (0.025, 0.05)})
    stated = band_ratio(4, 2, dim=5, orders=(2, 1), eps=1.0, radius=1.0)
    return Evidence(
        [
            within(
                "U_2/U_1 over ε/R and the printed formula",
                value,
                error,
                stated.paper,
                bias=BIAS,
            ),
            within(
                "U_2/U_1 over ε/R and (n+1)/(m+1) times as much",
                value,
                error,
                stated.value,
                bias=BIAS,
                part="corrected",
            ),
        ],
        paper=stated.paper,
        corrected=stated.value,
        measured=value,
        note="Moving all n+1 scores by at most ε reaches a range of 2ε: the fibre has volume "
        "(n+1)(2ε)^n, not (2ε)^n.",
    )


@claim(
    "p1-thmA.19",
    "Thm A.19",
    "ℓ∞ bands measured by A_J",
    statement="The same ratio for bands {x : inf over y in Γ_J of ‖A_J x - A_J y‖_∞ <= ε}, with "
    "κ_J.",
    tested="Both readings at uniform points of the ball: the distance as defined, which does not "
    "see where on the flat the slice is, and fibres over the slice, as in the proof.",
    expected=Verdict.CONDITION,
    condition="the band consists of the fibres over the slice; by the definition as written A_J y "
    "is d_J for every y, so that the band is that of the whole flat",
    seconds=2,
)
def fibre_orders(run: Run) -> Evidence:
    """Sampled ratio over ε by both readings."""
    n = run.size(400_000, 4_000_000)
    stated = band_ratio(4, 2, dim=5, orders=(2, 1), eps=1.0, radius=1.0).paper
    flats = extrapolated({eps: _fibres(run, eps, n, slices=False) for eps in (0.025, 0.05)})
    slices = extrapolated({eps: _fibres(run, eps, n, slices=True) for eps in (0.025, 0.05)})
    return Evidence(
        [
            within("U_2/U_1 over ε/R, the definition as written", *flats, stated, bias=BIAS),
            within(
                "U_2/U_1 over ε/R, fibres over the slice",
                *slices,
                stated,
                bias=BIAS,
                part="condition",
            ),
        ],
        paper=stated,
        corrected="without α for the definition as written",
        measured=f"{flats[0]:.3f} as written, {slices[0]:.3f} by fibres",
    )
