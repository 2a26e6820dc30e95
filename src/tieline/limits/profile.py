"""The hard problem with its experts optimised out, along motions of the wall (Assumption 5.14).

    Ψ_τ(φ) = min_θ L̃_τ(θ, φ)                        `gaussian_profile`, with θ̂(φ) and α_fr
    profile_variation    dΨ/dt and d²Ψ/dt² along (normal, offset) + t·direction, and λ_nd
    velocity_gram        Gram matrix of the normal velocities that a linear router realises

A linear router moves its wall by affine functions on the wall (Assumption 5.12): D + 1 parameters,
D independent velocities, since scaling the router moves nothing.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tieline.errors import ShapeError, require
from tieline.limits.cells import TwoCells
from tieline.limits.gaussian import gaussian_profile
from tieline.limits.shape import moved
from tieline.limits.slices import slice_at

__all__ = ["ProfileVariation", "VelocityGram", "profile_variation", "velocity_gram"]

Covariance = Float[Tensor, "width width"] | None


@dataclass(frozen=True, eq=False)
class VelocityGram:
    """Inner products of realised velocities.

    Attributes:
        gram: (D + 1, D + 1) ∫_{S=0} (x̃/‖∇S‖)(x̃/‖∇S‖)ᵀ p dH over changes of (normal, offset).
        rank: dimension of the space of velocities.
    """

    gram: Float[Tensor, "columns columns"]
    rank: int


def velocity_gram(wall: TwoCells, covariance: Covariance = None) -> VelocityGram:
    """Gram matrix of the velocities δS/‖∇S‖ in L²(p dH) on the wall, for X ~ N(0, Σ)."""
    facet = slice_at(wall, wall, covariance)
    gram = facet.weight[0] * facet.second[0] / wall.normal.norm()
    return VelocityGram(gram, int(torch.linalg.matrix_rank(gram, rtol=1e-10)))


@dataclass(frozen=True)
class ProfileVariation:
    """Ψ_τ along a motion of the wall.

    Attributes:
        value: Ψ_τ(φ).
        first: dΨ/dt at t = 0.
        second: d²Ψ/dt².
        speed: squared norm of the velocity in L²(p dH).
        descent: λ_nd = -second/speed where `first` vanishes; negative if Ψ curves upwards.
        curvature: α_fr, the least eigenvalue of the Hessian in the experts.
    """

    value: float
    first: float
    second: float
    speed: float
    descent: float
    curvature: float


def profile_variation(
    wall: TwoCells,
    teacher: TwoCells,
    direction: Float[Tensor, " columns"],
    covariance: Covariance = None,
    tau: float = 0.0,
) -> ProfileVariation:
    """First and second variation of Ψ_τ, exact where the walls cross.

    Args:
        wall: where to start; its experts are not used.
        teacher: the target.
        direction: (D + 1,) change of (normal, offset) per unit of t; one that moves the wall.
        covariance: Σ of the inputs; the identity for None.
        tau: temperature; 0 for the hard problem.
    """
    require(
        wall.width == teacher.width, f"widths differ: {wall.width}, {teacher.width}", ShapeError
    )
    move = direction.double()
    t = torch.zeros((), dtype=torch.float64, requires_grad=True)
    profile = gaussian_profile(moved(wall, move, t), teacher, covariance, tau)
    speed = (move @ velocity_gram(wall, covariance).gram @ move).item()
    require(speed > 0, f"the direction {direction.tolist()} does not move the wall")
    (first,) = torch.autograd.grad(profile.value, t, create_graph=True)
    second = torch.autograd.grad(first, t)[0].item()
    value = profile.value.item()
    return ProfileVariation(value, first.item(), second, speed, -second / speed, profile.curvature)
