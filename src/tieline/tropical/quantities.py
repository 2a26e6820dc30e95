"""What the advisor's numbers mean and where each of them holds."""

from dataclasses import dataclass

__all__ = ["QUANTITIES", "Quantity"]


@dataclass(frozen=True)
class Quantity:
    """A column of the advisor.

    Attributes:
        heading: short, for a table.
        meaning: the number in words, with its formula.
        valid: where it holds, and where not.
        kind: "exact", "bound", "Gaussian" (expectation or law of Gaussian weights) or "paper".
    """

    heading: str
    meaning: str
    valid: str
    kind: str


QUANTITIES: dict[str, Quantity] = {
    "parameters": Quantity(
        "parameters",
        "weights of all experts, shared ones and the router",
        "exact; biases and norms are not counted",
        "exact",
    ),
    "active": Quantity(
        "active",
        "weights that one token uses: k experts, shared ones, the router",
        "exact; biases and norms are not counted; the router grows with the split",
        "exact",
    ),
    "flops": Quantity(
        "FLOPs/token",
        "2 per active weight, forward pass",
        "matrix products only",
        "exact",
    ),
    "coalitions": Quantity(
        "coalitions",
        "C(N, k) sets of experts that could be chosen, fewer under group limits",
        "a count of names: all have a cell only if d >= N - 1, and data on R^d_eff meet far fewer",
        "exact",
    ),
    "paper_bound": Quantity(
        "paper's bound",
        "C(N, k) Φ(kH, d_eff), Thm. 4.17 of paper 3",
        "an upper bound on any flat of dimension d_eff; out of reach for d_eff < N - 1",
        "paper",
    ),
    "sharp_bound": Quantity(
        "B*",
        "Σ_j Σ_a n(j, a) min(C(N-a, k-a), U(N, k, d_eff-j))",
        "a rigorous upper bound for every router and every ReLU experts in general position",
        "bound",
    ),
    "expected_cells": Quantity(
        "E[cells]",
        "C(N, k) P(M <= d_eff+1): coalitions that a d_eff-flat of inputs meets",
        "Gaussian router; a whole flat, so data in a part of it meet fewer",
        "Gaussian",
    ),
    "expected_regions": Quantity(
        "E[pieces]",
        "C(N, k) Σ_j C(kH, j) P(M <= d_eff-j+1): pieces that a d_eff-flat meets",
        "Gaussian router and ReLU experts; a whole flat, so data in a part of it meet fewer",
        "Gaussian",
    ),
    "over_dense": Quantity(
        "E/dense",
        "E[pieces] / Φ(kH, d_eff): times the pieces of a dense layer with as many active neurons",
        "Gaussian weights on a whole d_eff-flat; near 1 where kH is much larger than N",
        "Gaussian",
    ),
    "switches": Quantity(
        "switches/rad",
        "ρ/π: changes of coalition per radian of input direction, Crofton",
        "Gaussian router, any curve; on the trained model in the box 0.88 to 1.04 times this",
        "Gaussian",
    ),
    "kinks": Quantity(
        "kinks/rad",
        "kH/π: zeros of active neurons per radian",
        "Gaussian ReLU experts, any curve",
        "Gaussian",
    ),
    "gap_density": Quantity(
        "f_gap(0)",
        "density of the gap z_[k] - z_[k+1] at zero, per standard deviation of a score",
        "independent normal scores of equal spread; measure a trained router with tieline inspect",
        "Gaussian",
    ),
    "bf16_flips": Quantity(
        "flips bf16",
        "share of tokens whose choice changes when the logits are rounded once to bf16",
        "independent normal logits; first order, below 10 %; errors of the product come on top",
        "Gaussian",
    ),
    "paper_gain": Quantity(
        "law G(m)",
        "(Ne/k)^{(m-1)k} m^{-d_eff-1/2}, Thm. 5.1 of paper 3",
        "as printed: N → ∞ at fixed k, H/m >= d_eff; at fixed k Stirling is off by a constant",
        "paper",
    ),
    "binomial_gain": Quantity(
        "exact G(m)",
        "C(mN, mk) / C(N, k) · m^{-d_eff}, what the law approximates",
        "exact for the paper's principal term C(N, k) H^d_eff",
        "paper",
    ),
    "bound_gain": Quantity(
        "bound ratio",
        "C(mN, mk) / C(N, k): ratio of the paper's bounds themselves",
        "kH does not change under a split, so neither does Φ(kH, d_eff): no width penalty",
        "paper",
    ),
    "expected_gain": Quantity(
        "E ratio",
        "E[pieces] after the split / before",
        "Gaussian router and ReLU experts on a d_eff-flat",
        "Gaussian",
    ),
    "m_max": Quantity(
        "m_max",
        "⌊H/d_eff⌋ of the layer before any split, Cor. 5.3 of paper 3",
        "the paper's limit; the count of pieces needs only kH >= d_eff, which a split keeps",
        "paper",
    ),
}
"""By name, in the order of the table."""
