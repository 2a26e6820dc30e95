"""Steps and asides of paper 4: brackets of B.1, section 3 on two gates, section C.1.2."""

import math

import numpy as np
import torch

from tieline.lab.claims.claim import ClaimRun, Verdict, claim
from tieline.lab.claims.evidence import Evidence, at_least, at_most, corrected, near, qualified
from tieline.lab.claims.mixture_splits import (
    drawn_mixture,
    largest_gap,
    split_scale,
    uniform_inputs,
    without_row,
)
from tieline.lab.estimation import MoEModel, MoEParameters


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
    zeta = (2 * torch.rand(2000, dtype=torch.float64, generator=run.generator(54)) - 1) * M
    f = (
        zeta + tau * (2 * torch.rand(2000, dtype=torch.float64, generator=run.generator(55)) - 1)
    ).clamp(-M, M)
    printed = bracket_pair(zeta, tau, M, printed=True)
    mended = bracket_pair(zeta, tau, M, printed=False)
    wide = [(high - low).max().item() for low, high in (printed, mended)]
    outside = [int(((f < low) | (f > high)).sum()) for low, high in (printed, mended)]
    return Evidence.of(
        at_most("largest width as printed", wide[0], min(2 * tau, M)),
        near("functions outside their bracket as printed", outside[0], 0, 0),
        corrected(
            at_most("largest width with min and -M", wide[1], 2 * tau + 1e-12),
            near("functions outside with min and -M", outside[1], 0, 0),
        ),
        paper=2 * tau,
        corrected=wide[1],
        measured=f"{wide[0]:.2f} wide, {outside[0]} of 2,000 outside",
    )


def bracket_pair(
    zeta: torch.Tensor, tau: float, bound: float, *, printed: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Lower and upper function, as printed or mended."""
    if printed:
        return (zeta - tau).clamp_min(0), (zeta + tau).clamp_min(bound)
    return (zeta - tau).clamp_min(-bound), (zeta + tau).clamp_max(bound)


@claim("p4-sec3", "two gates that tend to one", number="sec. 3")
def two_gates(run: ClaimRun) -> Evidence:
    """If two atoms tend to one true atom, their gates add up to its gate only if its row is zero;
    so f̂ does not tend to f* in the dense regime.

    Setting: sigmoid gates, atoms of one row and one expert, as section 3; bounded constants
    Tested: Least sup |σ(s + c₁) + σ(s + c₂) - σ(s)| over constants in [-10, 10], s = a x² + b x
        with a row and without; c₂ → -∞ beside it; two proportional experts under one gate.
    Overturned by: constants without bound, or experts λ₁φ and λ₂φ
    Condition: bounded constants c and atoms whose experts are equal in the limit: with c₂ → -∞, or
        λ₁φ + λ₂φ = λφ under one gate, f̂ tends to f* in the dense regime too (`p4-cor1`)
    """
    x = np.linspace(-1, 1, 101)
    row, flat = 1.5 * x**2 + x, 0 * x
    least, constant = (least_two_gates(score, 10.0) for score in (row, flat))
    vanishing = least_two_gates(row, 40.0)
    model = MoEModel("quadratic", "sigmoid", "two_layer", 2, 2, activation="gelu")
    truth = drawn_mixture(run, model)
    pair = truth.take([0, 0, 1])
    experts = pair.experts.clone()
    experts[0, -1], experts[1, -1] = 0.7 * experts[0, -1], 0.3 * experts[1, -1]
    gap = largest_gap(
        model, MoEParameters(pair.router, pair.bias, experts), truth, uniform_inputs(run, 500, 2)
    )
    return Evidence.of(
        at_least("|f - f*| of λ₁φ, λ₂φ under one gate", gap, 1e-6),
        qualified(
            at_least("with a row: least difference of the gates", least, 1e-6),
            at_most("without a row", constant, 1e-6),
        ),
        corrected(at_most("with a row, c₂ down to -40", vanishing, 1e-12)),
        paper="only without a row",
        measured=f"{least:.1g} with a row and |c| <= 10, {constant:.1g} without; {gap:.1g} for "
        "λ₁φ and λ₂φ",
    )


def least_two_gates(score: np.ndarray, bound: float) -> float:
    """Least sup |σ(s + c₁) + σ(s + c₂) - σ(s)| over |c_i| <= bound, by a grid refined twice."""

    def sigmoid(values: np.ndarray) -> np.ndarray:
        return 1 / (1 + np.exp(-values))

    best, centre, width = math.inf, np.zeros(2), bound
    for _ in range(12):
        sides = [np.clip(np.linspace(c - width, c + width, 41), -bound, bound) for c in centre]
        first = sigmoid(score + sides[0][:, None])
        second = sigmoid(score + sides[1][:, None])
        gaps = np.abs(first[:, None] + second[None] - sigmoid(score)).max(axis=-1)
        i, j = np.unravel_index(gaps.argmin(), gaps.shape)
        best, centre, width = float(gaps[i, j]), np.array([sides[0][i], sides[1][j]]), width / 4
    return best


@claim(
    "p4-secC.1.2",
    "linear experts under the partial score",
    number="sec. C.1.2",
    expected=Verdict.FAILS,
)
def partial_linear(run: ClaimRun) -> Evidence:
    """Linear experts with β ≠ 0 are partial-strongly identifiable, so that ε^-4 samples suffice.

    Setting: over-specified, sparse, partial score, linear experts with β ≠ 0, as section C.1.2
    Tested: One linear expert under a zero row as two, α and β times 1 ± 0.3: distance of the
        functions and of the experts.
    Overturned by: a score that tells the two apart
    """
    model = MoEModel("partial", "sigmoid", "linear", 2, 3)
    truth = without_row(drawn_mixture(run, model))
    split = split_scale(model, truth, 0.3)
    gap = largest_gap(model, split, truth, uniform_inputs(run, 2000, 2))
    apart = (split.experts[0] - truth.experts[0]).norm().item()
    return Evidence.of(
        at_least("|f - f*| of the split over the distance of the experts", gap / apart, 1e-6),
        corrected(
            at_least("distance of the experts", apart, 0.05),
            at_least("|β| of the expert", truth.experts[0, -1].abs().item(), 1e-3),
        ),
        paper="ε^-4",
        corrected="not determined",
        measured=f"|f - f*| {gap:.1g} at a distance {apart:.2f}",
    )
