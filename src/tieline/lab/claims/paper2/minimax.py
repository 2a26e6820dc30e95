"""Minimax statements of papers 2 and 4, their consequences, and steps of their proofs.

Le Cam's two points: with two measures G, G' of functions f, f' the largest of the two expected
losses of any estimator is at least L(G, G')/8 · exp(-n ‖f - f'‖²/(2ν)), up to the constant of the
loss's weak triangle inequality.
"""

import math
from typing import cast

import numpy as np
import torch
from scipy.optimize import brentq

from tieline.lab.claims.claim import ClaimRun, Verdict, claim
from tieline.lab.claims.evidence import (
    Evidence,
    at_least,
    at_most,
    chart,
    corrected,
    dots,
    line,
    near,
    qualified,
)
from tieline.lab.claims.mixture_splits import (
    drawn_mixture,
    largest_gap,
    longer_rows,
    sparse_mixture,
    split_scale,
)
from tieline.lab.estimation import MoEModel, MoEParameters, voronoi_loss

SIZES = (10**2, 10**4, 10**6, 10**8)
NOISE = 0.01
"""ν of the papers' designs."""


def measures_of_one_function(
    run: ClaimRun, paper: int, copies: int
) -> tuple[MoEModel, MoEParameters, MoEParameters]:
    """A model and two measures: longer cosine rows (paper 2), or a split power (paper 4)."""
    if paper == 4:
        model = MoEModel("quadratic", "sigmoid", "polynomial", 2, 3, power=1)
        truth = sparse_mixture(run, model)
        return model, truth, split_scale(model, truth, 0.3)
    model = MoEModel("cosine", "softmax", "tanh", 2, 3)
    truth = drawn_mixture(run, model)
    return model, truth, longer_rows(truth, 1.5, copies)


def le_cam(loss: float, gap: float, n: int) -> float:
    """Le Cam's bound L/8 · e^(-n gap²/(2ν)) on the larger expected loss of any estimator."""
    return loss / 8 * math.exp(-n * gap**2 / (2 * NOISE))


@claim(
    "p4-thm2-minimax",
    "polynomial experts: the minimax bound",
    number="Thm 2",
    statement="inf sup E[L_{2,r}] >= c n^-1/2 over measures of N* to N atoms, for powers and every "
    "r >= 1.",
    setting="full score, sparse; the statement itself, not what is drawn from it (`p4-thm2-rate`)",
    given={"paper": 4, "copies": 0},
)
@claim(
    "p2-thm5-minimax",
    "vanilla cosine, exact: the minimax bound",
    number="Thm 5",
    statement="inf sup E[L_{1,r}] >= c n^-1/2 over measures of k* atoms, for every r >= 1.",
    setting="exact, vanilla cosine; the statement itself, not what is drawn from it",
    given={"paper": 2, "copies": 0},
)
@claim(
    "p2-thm2-minimax",
    "vanilla cosine, over-specified: the minimax bound",
    number="Thm 2",
    given={"paper": 2, "copies": 1},
)
def minimax_bounds(run: ClaimRun, paper: int, copies: int) -> Evidence:
    """inf sup E[L_{1,r}] >= c n^-1/2 over measures of k* to k atoms, for every r >= 1.

    Setting: over-specified, vanilla cosine; the statement itself, not what is drawn from it
    Tested: Le Cam's bound from two measures of one function, r = 1, 2, 3, n = 10² to 10⁸: √n times
        the bound.
    Overturned by: two such measures whose functions differ
    """
    model, truth, other = measures_of_one_function(run, paper, copies)
    x = run.uniform(2000, 2)
    gap, kind = largest_gap(model, other, truth, x), "L1" if paper == 2 else "L2"
    losses = [voronoi_loss(other, truth, kind, paper, r).value for r in (1, 2, 3)]
    scaled = [math.sqrt(n) * le_cam(min(losses), gap, n) for n in SIZES]
    return Evidence.of(
        at_least("√n times the bound, least over n", min(scaled), 1e-3),
        corrected(
            at_most("|f - f'| of the two measures", gap, 1e-12),
            at_least("the bound at n = 10⁸ over that at 10²", scaled[-1] / scaled[0], 100),
        ),
        paper="c n^-1/2",
        corrected="a constant: the two measures are one function, whatever n",
        measured=f"loss {min(losses):.2g} between measures that differ by {gap:.1g} in f",
        figure=chart(
            "n",
            "least loss of the worse truth",
            dots("two points", SIZES, [le_cam(min(losses), gap, n) for n in SIZES]),
            line("n^-1/2", SIZES, [1 / math.sqrt(n) for n in SIZES], dashed=True),
            log="xy",
        ),
    )


@claim("p2-lem2", "from a vanishing ratio to the minimax bound")
def from_ratio(run: ClaimRun) -> Evidence:
    """If ‖f_G - f_G*‖ / L_{1,r}(G, G*) has no positive lower bound near G*, then inf sup E[L_{1,r}]
    >= c n^-1/2.

    Setting: the lemma as an implication, for any pair with ‖f - f'‖ <= C ε and L = 2ε
    Tested: Le Cam's bound at ε = n^-1/2 for C = 0.1, over n: √n times it, against 2ε/8 e^(-C²/2ν).
    Overturned by: a bound below a multiple of n^-1/2
    """
    ratio = 0.1
    values = [math.sqrt(n) * le_cam(2 / math.sqrt(n), ratio / math.sqrt(n), n) for n in SIZES]
    expected = 0.25 * math.exp(-(ratio**2) / (2 * NOISE))
    return Evidence.of(
        at_least("√n times the bound, least over n", min(values), 1e-3),
        corrected(near("the same by the formula", max(values) / expected, 1, 1e-9)),
        paper="c n^-1/2",
        measured=min(values),
    )


@claim("p2-eq6", "from parameters to experts", number="after (6)", expected=Verdict.FAILS)
def inferred_experts(run: ClaimRun) -> Evidence:
    """Since |h(x, η̂) - h(x, η)| <= C ‖η̂ - η‖, experts are estimated no faster than the bound on
    the loss says, as slowly as 1/log^τ n.

    Setting: the inference from Thm 2; vanilla cosine, tanh
    Tested: The two measures behind the bound: distance of their experts, of their rows, and of the
        directions of their rows.
    Overturned by: two measures of one function whose experts differ, in the exact setting
    """
    _model, truth, other = measures_of_one_function(run, 2, 0)
    experts = (other.experts - truth.experts).norm(dim=1).max().item()
    rows = (other.router - truth.router).norm(dim=1).max().item()
    units = [p.router / p.router.norm(dim=1, keepdim=True) for p in (truth, other)]
    turned = (units[0] - units[1]).norm(dim=1).max().item()
    return Evidence.of(
        at_least("distance of the experts behind the bound", experts, 1e-3),
        corrected(
            at_least("distance of the rows", rows, 0.1),
            at_most("distance of their directions", turned, 1e-12),
        ),
        paper="experts are slow",
        corrected="an upper bound by ‖η̂ - η‖ does not carry a lower bound; the loss is large in "
        "the length of a row alone",
        measured=experts,
    )


@claim("p2-eq18", "the covering step of Theorem 1", number="(18)")
def covering_step(run: ClaimRun) -> Evidence:
    """∫ Σ |softmax_i(β) - softmax_i(β̄)|² <= C Σ ‖β_i - β̄_i‖² ‖x‖² + |β_0i - β̄_0i|² <= C' τ for
    parameters within τ of one another.

    Setting: vanilla cosine, any parameters of a bounded set, as printed
    Tested: Rows of length τ/2 and their opposites, τ = 0.1 to 0.001: the left side over the middle;
        the same for rows of length 1; order in τ there.
    Overturned by: rows bounded away from zero among the hypotheses
    Condition: router rows bounded away from zero: β/‖β‖ is not continuous at 0; then the left side
        is of order τ², as the proof needs for ‖·‖ <= C τ, and not of order τ
    """
    taus = [0.1, 0.01, 0.001]
    short = [covering_ratio(run, tau, length=tau / 2) for tau in taus]
    long = [covering_ratio(run, tau, length=1.0) for tau in taus]
    return Evidence.of(
        at_most("rows of length τ/2: largest ratio", max(short), 10),
        qualified(at_most("rows of length 1: largest ratio", max(long), 10)),
        corrected(at_least("short rows: growth of the ratio", short[-1] / short[0], 1e3)),
        paper="C",
        corrected="C / min ‖β‖²",
        measured=f"{max(long):.2g} at length 1, {short[-1]:.2g} at τ/2 with τ = 0.001",
    )


def covering_ratio(run: ClaimRun, tau: float, length: float) -> float:
    """Mean square change of the weights over Σ ‖Δβ‖², for rows of a length, moved by τ."""
    rows = run.normal(4, 3, stream=51)
    rows = length * rows / rows.norm(dim=1, keepdim=True)
    if length < tau:
        moved = -rows
    else:
        step = run.normal(4, 3, stream=52)
        moved = rows + tau * step / step.norm(dim=1, keepdim=True)
    x = run.uniform(2000, 3)
    unit = x / x.norm(dim=1, keepdim=True)
    weights = [(unit @ (r / r.norm(dim=1, keepdim=True)).T).softmax(dim=1) for r in (rows, moved)]
    change = (weights[0] - weights[1]).square().sum(dim=1).mean().item()
    return change / (rows - moved).square().sum().item()


@claim(
    "p4-lem1",
    "concentration of the least-squares fit",
    statement="P(‖f̂ - f*‖ > δ) <= c e^(-nδ²/c²) for all δ >= δ_n.",
    setting="as Lemma 1 of paper 2, from which it is taken",
    number="Lemma 1",
)
@claim("p2-lem1", "concentration of the least-squares fit")
def least_squares_concentration(run: ClaimRun) -> Evidence:
    """P(‖f̂ - f*‖ > δ) <= c e^(-nδ²/c²) for all δ >= δ_n, for classes of entropy log(1/ε).

    Setting: the simplest class with that entropy, three-dimensional linear regression; one c for
        all n and δ
    Tested: Tails of ‖f̂ - f*‖ over 4,000 fits at n = 50, 200, 800, at δ√n = 0.15 to 0.4; the c that
        the tail at one n asks for, at the others.
    Overturned by: tails that need a larger c as n grows
    """
    levels, constants = np.array([0.15, 0.2, 0.25, 0.3]), []
    for n in (50, 200, 800):
        errors = linear_errors(run, n, run.size(2_000, 20_000)) * math.sqrt(n)
        tails = np.array([(errors > level).mean() for level in levels]) + 1e-4
        pairs = zip(levels, tails, strict=True)
        constants.append(max(needed_constant(level, tail) for level, tail in pairs))
    return Evidence.of(
        at_most("c at n = 800 over c at n = 50", constants[-1] / constants[0], 1.15),
        at_most("largest c", max(constants), 1.0),
        paper="one c",
        measured=", ".join(f"{c:.3f}" for c in constants),
    )


def needed_constant(level: float, tail: float) -> float:
    """Solve c e^(-level²/c²) = tail for c."""
    return cast("float", brentq(lambda c: c * math.exp(-((level / c) ** 2)) - tail, 0.01, 10))


def linear_errors(run: ClaimRun, n: int, fits: int) -> np.ndarray:
    """Errors ‖f̂ - f*‖ of least squares on three standard normal inputs, noise variance 0.01."""
    generator = np.random.default_rng([run.seed, 53, n])
    errors = np.empty(fits)
    for start in range(0, fits, 500):
        stop = min(start + 500, fits)
        x = generator.standard_normal((stop - start, n, 3))
        noise = 0.1 * generator.standard_normal((stop - start, n, 1))
        gram = x.transpose(0, 2, 1) @ x
        errors[start:stop] = np.linalg.norm(
            np.linalg.solve(gram, x.transpose(0, 2, 1) @ noise)[..., 0], axis=1
        )
    return errors


@claim(
    "p4-secB.1-bracket",
    "brackets of the entropy bound",
    number="sec. B.1, Step 1",
    expected=Verdict.FAILS,
)
def entropy_brackets(run: ClaimRun) -> Evidence:
    """[max(ζ - τ, 0), max(ζ + τ, M)] are brackets of width at most min(2τ, M) that cover the class
    |f| <= M.

    Setting: as printed; functions of both signs, |f| <= M
    Tested: Widths and containment on drawn values of ζ and f within τ of it, as printed and with
        max(ζ - τ, -M), min(ζ + τ, M).
    Overturned by: min in place of the second max, and -M in place of 0
    """
    M, tau = 1.0, 0.1
    zeta = M * run.uniform(2000, stream=54)
    f = (zeta + tau * run.uniform(2000, stream=55)).clamp(-M, M)
    printed = bracket_pair(zeta, tau, M, printed=True)
    mended = bracket_pair(zeta, tau, M, printed=False)
    widths = [(high - low).max().item() for low, high in (printed, mended)]
    outside = [int(((f < low) | (f > high)).sum()) for low, high in (printed, mended)]
    return Evidence.of(
        at_most("largest width as printed", widths[0], min(2 * tau, M)),
        near("functions outside their bracket as printed", outside[0], 0, 0),
        corrected(
            at_most("largest width with min and -M", widths[1], 2 * tau + 1e-12),
            near("functions outside with min and -M", outside[1], 0, 0),
        ),
        paper=2 * tau,
        corrected=widths[1],
        measured=f"{widths[0]:.2f} wide, {outside[0]} of 2,000 outside",
    )


def bracket_pair(
    zeta: torch.Tensor, tau: float, bound: float, *, printed: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Lower and upper function of a bracket, as printed or corrected."""
    if printed:
        return (zeta - tau).clamp_min(0), (zeta + tau).clamp_min(bound)
    return (zeta - tau).clamp_min(-bound), (zeta + tau).clamp_max(bound)
