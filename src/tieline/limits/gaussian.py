"""Risks of two affine experts under a Gaussian input by quadrature, to twelve digits.

    gaussian_risk            L_τ (τ > 0) and L_0 (τ = 0)
    gaussian_decomposition   its parts inside and outside {|S| <= κ_ε τ}       Lemma 5.5
    gaussian_profile         min over the experts: Ψ_τ, Ψ_0, θ̂, α_fr            Assumption 5.14
    gaussian_boundary_mass   P(|S| <= r), its first order and the next term    Example 3.8

Risks are those of the noiseless target, L̃ of section 5.1; noise adds its variance to each.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tieline.errors import require
from tieline.limits.cells import TwoCells, check_covariance
from tieline.limits.slices import Slices, normal_cdf, slices

__all__ = [
    "BoundaryMass",
    "GaussianProfile",
    "GaussianSplit",
    "ambiguity_width",
    "first_weight",
    "gaussian_boundary_mass",
    "gaussian_decomposition",
    "gaussian_profile",
    "gaussian_risk",
]

Covariance = Float[Tensor, "width width"] | None


def first_weight(score: Float[Tensor, " n"], tau: float) -> Float[Tensor, " n"]:
    """p_1 = σ(S/τ), or 1{S > 0} at τ = 0."""
    return torch.sigmoid(score / tau) if tau > 0 else (score > 0).double()


def slice_risk(cut: Slices, student: TwoCells, tau: float) -> Float[Tensor, " n"]:
    """E[(μ - h_τ)² | s] = C - 2 f·B + fᵀAf with f = p_1 θ_1 + p_2 θ_2."""
    p = first_weight(cut.score, tau)[:, None]
    f = p * student.experts[0] + (1 - p) * student.experts[1]
    quadratic = torch.einsum("ni,nij,nj->n", f, cut.second, f)
    return cut.square - 2 * (f * cut.cross).sum(dim=1) + quadratic


def gaussian_risk(
    student: TwoCells, teacher: TwoCells, covariance: Covariance = None, tau: float = 0.0
) -> Float[Tensor, ""]:
    """L̃_τ = E[(μ(X) - h_τ(X))²], X ~ N(0, Σ); τ = 0 is the hard risk.

    Differentiable in all parameters of the student, for τ = 0 wherever the two walls differ. Where
    they are parallel in more than one dimension, derivatives by the direction of the normal are
    not those of the risk: `tieline.limits.transfer` refuses that case.
    """
    cut = slices(student, teacher, covariance, tau)
    return (cut.weight * slice_risk(cut, student, tau)).sum()


@dataclass(frozen=True)
class GaussianSplit:
    """L̃_τ = interior + boundary, the latter over {|S| <= κ_ε τ} of probability `mass`."""

    interior: float
    boundary: float
    mass: float


def ambiguity_width(eps: float, n_experts: int = 2) -> float:
    """κ_{ε,E} = log((E - 1)(1 - ε)/ε), which is κ_ε for two experts (Remark 5.4)."""
    require(0 < eps < 0.5, f"need 0 < eps < 1/2, got {eps=}")
    require(n_experts > 1, f"need 2 experts or more, got {n_experts=}")
    return math.log(n_experts - 1) + math.log1p(-eps) - math.log(eps)


def gaussian_decomposition(
    student: TwoCells, teacher: TwoCells, tau: float, eps: float, covariance: Covariance = None
) -> GaussianSplit:
    """Interior and boundary parts of L̃_τ, eq. 5.3 and Lemma 5.5; exact for two experts."""
    require(tau > 0, f"need a temperature tau > 0, got {tau=}")
    width = ambiguity_width(eps) * tau
    cut = slices(student, teacher, covariance, tau, levels=(-width, width))
    risk, near = cut.weight * slice_risk(cut, student, tau), cut.score.abs() <= width
    return GaussianSplit(
        risk[~near].sum().item(), risk[near].sum().item(), cut.weight[near].sum().item()
    )


@dataclass(frozen=True, eq=False)
class GaussianProfile:
    """The best experts for a given wall.

    Attributes:
        value: Ψ_τ = min over θ of L̃_τ(θ, φ).
        experts: (2, D + 1) θ̂(φ).
        curvature: α_fr, the least eigenvalue of the Hessian in θ.
    """

    value: Float[Tensor, ""]
    experts: Float[Tensor, "2 columns"]
    curvature: float


def gaussian_profile(
    wall: TwoCells, teacher: TwoCells, covariance: Covariance = None, tau: float = 0.0
) -> GaussianProfile:
    """Ψ_τ(φ), θ̂(φ) and α_fr for the wall of a student (its experts are not used).

    The risk is quadratic in θ: with G = E[p pᵀ ⊗ x̃x̃ᵀ] and c = E[p ⊗ x̃ μ], θ̂ = G⁻¹c,
    Ψ = E[μ²] - c·θ̂ and the Hessian is 2G.
    """
    cut = slices(wall, teacher, covariance, tau)
    p = first_weight(cut.score, tau)
    pair = torch.stack([p, 1 - p], dim=1)
    columns = cut.cross.shape[1]
    both = (pair[:, :, None] * pair[:, None, :]).flatten(1) * cut.weight[:, None]
    gram = (both.T @ cut.second.flatten(1)).reshape(2, 2, columns, columns)
    gram = gram.transpose(1, 2).reshape(2 * columns, 2 * columns)
    cross = ((pair * cut.weight[:, None]).T @ cut.cross).flatten()
    experts = torch.linalg.solve(gram, cross)
    value = (cut.weight * cut.square).sum() - cross @ experts
    least = 2 * torch.linalg.eigvalsh(gram.detach())[0].item()
    return GaussianProfile(value, experts.reshape(2, -1), least)


@dataclass(frozen=True)
class BoundaryMass:
    """P(|S| <= r) of a linear router under a Gaussian (Example 3.8).

    Attributes:
        exact: by the normal distribution function, eq. 3.11.
        first_order: 2r φ(b/σ)/σ, eq. 3.12.
        next_order: the same with its next relative term r²(b²/σ⁴ - 1/σ²)/6.
        density: φ(b/σ)/σ, the surface integral of eq. 3.14.
        spread: σ = sqrt(vᵀΣv), the standard deviation of S.
    """

    exact: float
    first_order: float
    next_order: float
    density: float
    spread: float


def gaussian_boundary_mass(
    student: TwoCells, radius: float, covariance: Covariance = None
) -> BoundaryMass:
    """P(|S(X)| <= r) with its expansion; r = κ_ε τ gives eq. 3.13."""
    require(radius >= 0, f"need a width radius >= 0, got {radius=}")
    sigma = check_covariance(covariance, student.width)
    s, b = (student.normal @ sigma @ student.normal).sqrt().item(), abs(student.offset.item())
    # both tails on the side of the offset: no digits are lost far from the wall
    ends = torch.tensor([radius - b, -radius - b], dtype=torch.float64) / s
    exact = -normal_cdf(ends).diff()
    density = math.exp(-(b**2) / (2 * s**2)) / (s * math.sqrt(2 * math.pi))
    first = 2 * radius * density
    relative = radius**2 * (b**2 / s**4 - 1 / s**2) / 6
    return BoundaryMass(exact.item(), first, first * (1 + relative), density, s)
