"""The exact first order of L_τ - L_0, which the paper only bounds.

    L_τ - L_0 = τ Σ_{k<l} ∫_facet (2 ln2 · d·[μ] - d²) p/‖∇S‖ + o(τ),

d = f_k - f_l and [μ] the jump of the target from the side of l to that of k. A target that is
continuous at the wall has [μ] = 0: soft routing is then *better* than hard, by first order in τ.

    gaussian_slope   two affine experts under a Gaussian input, closed form
    sampled_slope    any number of experts and any target, from a sample near the walls

The sampled form needs no trace of the target. With t and q the first and second expert of an input,
both sides of a wall contribute 2 ln2 (μ - f_q)(f_t - f_q) - (ln2 + ½)(f_t - f_q)²; the mean of that
over {Δ <= w}, divided by w, tends to the slope.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tieline.errors import require
from tieline.limits.cells import TwoCells
from tieline.limits.risk import MoESample
from tieline.limits.slices import slice_at
from tieline.numerics import Estimate, mean_estimate
from tieline.ranking import stable_topk

__all__ = ["Slope", "gaussian_slope", "sampled_slope"]


@dataclass(frozen=True)
class Slope:
    """d(L_τ)/dτ at 0⁺ and its two parts.

    Attributes:
        value: the slope, `jump` + `smooth`.
        jump: ∫ 2 ln2 · d·[μ] p/‖∇S‖; zero unless the target jumps at the wall.
        smooth: -∫ d² p/‖∇S‖, never positive.
    """

    value: float
    jump: float
    smooth: float


def gaussian_slope(
    student: TwoCells, teacher: TwoCells, covariance: Float[Tensor, "width width"] | None = None
) -> Slope:
    """Slope of `gaussian_risk` in τ at 0⁺.

    The target jumps at the student's wall only where the teacher's is the same hyperplane.
    """
    facet = slice_at(student, teacher, covariance)
    density, second = facet.weight[0].item(), facet.second[0]
    d = student.experts[0] - student.experts[1]
    smooth = -density * (d @ second @ d).item()
    jump = teacher.experts[0] - teacher.experts[1]
    side = same_wall(student, teacher)
    strength = 2 * math.log(2) * density * side * (d @ second @ jump).item()
    return Slope(strength + smooth, strength, smooth)


def same_wall(student: TwoCells, teacher: TwoCells) -> int:
    """1 or -1 where both walls are one hyperplane (with equal or opposite sides), else 0."""
    ours = torch.cat([student.normal, student.offset[None]]) / student.normal.norm()
    theirs = torch.cat([teacher.normal, teacher.offset[None]]) / teacher.normal.norm()
    for side in (1, -1):
        if torch.allclose(ours, side * theirs, rtol=0, atol=1e-13):
            return side
    return 0


def sampled_slope(sample: MoESample, width: float) -> Estimate:
    """Slope of L_τ at 0⁺ from inputs with margin below 2w, with its standard error.

    One-sided and free of the first-order bias in w: (4 F(w) - F(2w))/2w, F(w) the mean of the
    integrand over {Δ <= w}. What is left is of order w².
    """
    require(width > 0, f"need a width > 0, got {width=}")
    first, second = stable_topk(sample.scores, 2).indices.unbind(dim=1)
    pick = sample.outputs.double().gather
    best, other = (pick(1, index[:, None]).squeeze(1) for index in (first, second))
    d, residual = best - other, sample.target - other
    integrand = 2 * math.log(2) * residual * d - (math.log(2) + 0.5) * d.square()
    near = 4 * (sample.margin <= width).double() - (sample.margin <= 2 * width).double()
    return mean_estimate(integrand * near / (2 * width))
