"""How fast the mass near a tie grows: the density of the gap at zero and its tail law.

    gap_density          f_gap(0) from observed gaps, with standard error          Def. 3.2
    margin_tail          (C, α) of P(Δ <= t) ~ C t^α, by the tail's likelihood     Def. 3.3

A density is per unit of score. Standard errors assume independent tokens.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tieline.core.errors import ShapeError, require
from tieline.core.statistics import Estimate, empirical_cdf, normal_quantile

__all__ = ["MarginTail", "density_from_masses", "gap_density", "margin_tail"]

Gaps = Float[Tensor, " tokens"]


def gap_density(gaps: Gaps, width: float | None = None, mass: float = 0.2) -> Estimate:
    """f_gap(0) ≈ (4 F(w) - F(2w)) / 2w with its standard error (Def. 3.2).

    One-sided and unbiased by the slope of the density, where F(w) / w is 6 to 12 % low. F counts
    half of the gaps equal to w, which removes the bias of gaps on a grid (low-precision scores).

    Args:
        gaps: gap of each token; infinite ones count as tokens far from any tie.
        width: w; by default half of the `mass`-quantile, so that F(2w) is `mass`.
        mass: F(2w) of the default width; the bias grows with its square.
    """
    w = _default_width(gaps, mass) if width is None else width
    if w <= 0 or not math.isfinite(w):
        why = "exactly zero" if w <= 0 else "infinite"
        return Estimate(None, None, f"not answerable: the {mass:g}-quantile of the gaps is {why}")
    f_w, f_2w = empirical_cdf(gaps, torch.tensor([w, 2 * w], dtype=torch.float64), "middle")
    return density_from_masses(f_w.item(), f_2w.item(), w, gaps.numel())


def density_from_masses(f_w: float, f_2w: float, width: float, tokens: int) -> Estimate:
    """Density (4 F(w) - F(2w)) / 2w, s.e. sqrt((8 F(w) + F(2w)) / n) / 2w, from two masses.

    For summaries that keep counts instead of gaps; see `gap_density`.
    """
    require(width > 0 and tokens > 0, f"need width > 0 and tokens > 0, got {width=}, {tokens=}")
    error = math.sqrt((8 * f_w + f_2w) / tokens) / (2 * width)
    return Estimate((4 * f_w - f_2w) / (2 * width), error)


@dataclass(frozen=True)
class MarginTail:
    """The fit P(Δ <= t) ~ C t^α for t <= cutoff (Paper 0, eq. 4.4).

    Attributes:
        constant: C, for the exponent in `exponent`.
        exponent: α; exactly 1 where the interval of `fitted` contains 1.
        fitted: α as fitted, with its standard error.
        cutoff: t0, the largest gap of the fit.
        below: number of gaps in the fit.
        ties: gaps of exactly zero, which no C t^α allows; left out of the fit.
    """

    constant: Estimate
    exponent: Estimate
    fitted: Estimate
    cutoff: float
    below: int
    ties: int


def margin_tail(gaps: Gaps, mass: float = 0.05, confidence: float = 0.95) -> MarginTail:
    """(C, α) of the margin tail: α = m / Σ log(t0 / Δ_i), C = (m / n) / t0^α (Def. 3.3).

    Over the m gaps in (0, t0], t0 the `mass`-quantile; s.e. of α is α / sqrt(m). α is fixed at 1,
    the exponent of every continuous density, where its interval of `confidence` contains 1.
    """
    n, cutoff = gaps.numel(), 2 * _default_width(gaps, mass)
    inside = gaps.double()[(gaps > 0) & (gaps <= cutoff)]
    m, ties = inside.numel(), int((gaps == 0).sum())
    logs = (cutoff / inside).log().sum().item() if math.isfinite(cutoff) else 0.0
    if logs <= 0:
        lost = Estimate(None, None, f"not answerable: {m} gaps between 0 and {cutoff:g}")
        return MarginTail(lost, lost, lost, cutoff, m, ties)
    alpha = m / logs
    fitted = Estimate(alpha, alpha / math.sqrt(m))
    fixed = abs(alpha - 1) <= normal_quantile(confidence) * alpha / math.sqrt(m)
    exponent = Estimate(1.0, 0.0, "ok") if fixed else fitted
    return MarginTail(_constant(exponent, m, n, cutoff), exponent, fitted, cutoff, m, ties)


def _constant(exponent: Estimate, m: int, n: int, cutoff: float) -> Estimate:
    """C = (m / n) / t0^α; log C has variance (1/m - 1/n) + (log t0)² Var α."""
    assert exponent.value is not None
    assert exponent.standard_error is not None
    value = (m / n) / cutoff**exponent.value
    spread = (1 / m - 1 / n) + (math.log(cutoff) * exponent.standard_error) ** 2
    return Estimate(value, value * math.sqrt(spread))


def _default_width(gaps: Gaps, mass: float) -> float:
    """Half of the `mass`-quantile of the gaps."""
    n = gaps.numel()
    require(n > 0, "a gap density needs at least one token, got none", ShapeError)
    require(0 < mass <= 1, f"need 0 < mass <= 1, got {mass}")
    return gaps.double().kthvalue(max(1, math.ceil(mass * n - 1e-9))).values.item() / 2
