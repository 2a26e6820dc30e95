"""The reduced model of symmetry breaking (paper 0, section 6): the operator M and its rates.

    M = E[g(v·X)(d·X) XXᵀ],  X ~ N(0, Σ), ‖v‖ = 1                                  eq. 6.5
      = E[gZ³](d·α)ααᵀ + E[gZ]((d·α)Σ_⊥ + α(Σ_⊥d)ᵀ + (Σ_⊥d)αᵀ),
        α = Σv/s²,  s² = vᵀΣv,  Σ_⊥ = Σ - s²ααᵀ,  Z ~ N(0, s²)
    κ_g = E[g(G)G³]/s³,  vᵀMv = κ_g (d·Σv) s                                       Lemma 6.1
    κ_sign = 2√(2/π)                                                               Lemma 6.2
    ρ(τ) = (1 + ηλ_2/τ)/(1 + ηλ_1/τ),  t_align = τ/(η(λ_1 - λ_2))                  eq. 6.10, 6.11

**Not without loss of generality.** The paper flips v so that d·Σv > 0 (eq. 6.7). Flipping v swaps
the two sides, hence the two experts, hence the sign of d: d·Σv and M itself do not change. For
d·Σv < 0 the reduced model has vᵀMv < 0. `tieline.limits.dynamics` shows what the true flow does.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from tieline.errors import ShapeError, require
from tieline.limits.cells import check_covariance, gaussian_inputs
from tieline.limits.slices import normal_rule
from tieline.numerics import Estimate, mean_estimate

__all__ = [
    "AlignmentRate",
    "Operator",
    "Response",
    "alignment_rate",
    "alignment_step",
    "operator",
    "relabelled",
    "response_constant",
    "sampled_rayleigh",
]

Vector = Float[Tensor, " width"]
SIGN_CONSTANT = 2 * math.sqrt(2 / math.pi)


@dataclass(frozen=True)
class Response:
    """The response g: "sign" gives sign(z), "tanh" gives tanh(gain·z)."""

    kind: Literal["sign", "tanh"] = "sign"
    gain: float = 1.0

    def __post_init__(self) -> None:
        require(self.gain > 0, f"need a gain > 0, got {self.gain}")

    def __call__(self, z: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """g(z)."""
        return torch.sign(z) if self.kind == "sign" else torch.tanh(self.gain * z)

    def moment(self, power: int, spread: float) -> float:
        """E[g(G) G^power], G ~ N(0, spread²), by a rule that resolves the turn of g at zero."""
        scale = 0.0 if self.kind == "sign" else 1 / (self.gain * spread)
        z, weight = normal_rule([(torch.zeros((), dtype=torch.float64), scale)])
        return (weight * self(spread * z) * (spread * z).pow(power)).sum().item()


def response_constant(response: Response, spread: float = 1.0) -> float:
    """κ_g = E[g(G)G³]/s³ with G ~ N(0, s²); 2√(2/π) for the sign, whatever s (Lemma 6.1, 6.2)."""
    require(spread > 0, f"need a spread s > 0, got {spread=}")
    return response.moment(3, spread) / spread**3


@dataclass(frozen=True, eq=False)
class Operator:
    """M with its spectrum.

    Attributes:
        matrix: (D, D) M.
        eigenvalues: (D,) in descending order.
        eigenvectors: (D, D), columns in the same order.
        rayleigh: vᵀMv by Lemma 6.1.
        kappa: κ_g.
        overlap: (D,) |⟨w_i, v⟩| of each eigenvector.
    """

    matrix: Float[Tensor, "width width"]
    eigenvalues: Float[Tensor, " width"]
    eigenvectors: Float[Tensor, "width width"]
    rayleigh: float
    kappa: float
    overlap: Float[Tensor, " width"]

    @property
    def unstable(self) -> bool:
        """Whether some direction grows in the reduced model."""
        return bool(self.eigenvalues[0] > 0)


def operator(
    v: Vector,
    d: Vector,
    covariance: Float[Tensor, "width width"] | None = None,
    response: Response | None = None,
) -> Operator:
    """M in closed form from two one-dimensional moments of g.

    Args:
        v: teacher separator, of length 1.
        d: teacher contrast d*.
        covariance: Σ of the inputs; the identity for None.
        response: g; the sign for None.
    """
    v, d, sigma = _checked(v, d, covariance)
    g = Response() if response is None else response
    forward = sigma @ v
    s = (v @ forward).sqrt().item()
    alpha = forward / s**2
    across = sigma - s**2 * alpha[:, None] * alpha
    along, side = (d @ alpha), across @ d
    mixed = alpha[:, None] * side
    matrix = g.moment(3, s) * along * alpha[:, None] * alpha
    matrix = matrix + g.moment(1, s) * (along * across + mixed + mixed.T)
    values, vectors = torch.linalg.eigh(matrix)
    values, vectors = values.flip(0), vectors.flip(1)
    kappa = response_constant(g, s)
    rayleigh = kappa * (d @ forward).item() * s
    return Operator(matrix, values, vectors, rayleigh, kappa, (v @ vectors).abs())


def sampled_rayleigh(
    v: Vector,
    d: Vector,
    covariance: Float[Tensor, "width width"] | None = None,
    response: Response | None = None,
    n: int = 100_000,
    seed: int = 0,
) -> Estimate:
    """E[g(v·X)(d·X)(v·X)²] = vᵀMv from its definition, by sampling."""
    v, d, sigma = _checked(v, d, covariance)
    x = gaussian_inputs(n, len(v), seed, sigma)
    side = x @ v
    return mean_estimate((response or Response())(side) * (x @ d) * side.square())


def relabelled(v: Vector, d: Vector) -> tuple[Vector, Vector]:
    """The same teacher with its two sides exchanged: (-v, -d), so that d·Σv keeps its sign."""
    return -v, -d


@dataclass(frozen=True)
class AlignmentRate:
    """How fast the reduced update turns u towards the first eigenvector.

    Attributes:
        amplification: 1 + ηλ_1/τ, growth of the leading component per step (Prop. 6.3).
        ratio: ρ(τ), eq. 6.10.
        ratio_first_order: 1 - (η/τ)(λ_1 - λ_2), eq. 6.11, for η/τ small.
        steps: t_align = τ/(η(λ_1 - λ_2)), the paper's scale.
        steps_exact: -1/log ρ, steps for a factor e.
        limit_ratio: λ_2/λ_1, where ρ saturates as τ → 0 with λ_1, λ_2 > 0.
        sign_stable: whether 1 + ηλ_D/τ > 0, which eq. 6.9 asks.
    """

    amplification: float
    ratio: float
    ratio_first_order: float
    steps: float
    steps_exact: float
    limit_ratio: float
    sign_stable: bool


def alignment_rate(
    eigenvalues: Float[Tensor, " width"], step_size: float, tau: float
) -> AlignmentRate:
    """Rates (6.8)–(6.11) from the eigenvalues of M in descending order."""
    require(step_size > 0 and tau > 0, f"need step_size > 0 and tau > 0, got {step_size=}, {tau=}")
    require(len(eigenvalues) > 1, "an alignment rate needs two eigenvalues or more", ShapeError)
    first, second, last = (eigenvalues[i].item() for i in (0, 1, -1))
    require(first > max(second, 0.0), f"need λ_1 > λ_2 and λ_1 > 0, got {first=}, {second=}")
    push = step_size / tau
    ratio = (1 + push * second) / (1 + push * first)
    return AlignmentRate(
        1 + push * first,
        ratio,
        1 - push * (first - second),
        1 / (push * (first - second)),
        -1 / math.log(ratio) if 0 < ratio < 1 else math.nan,
        second / first,
        1 + push * last > 0,
    )


def alignment_step(u: Vector, matrix: Float[Tensor, "width width"], push: float) -> Vector:
    """One reduced update (I + (η/τ) M) u, eq. 6.6."""
    return u + push * matrix @ u


def _checked(v: Tensor, d: Tensor, covariance: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    v, d = v.double(), d.double()
    require(
        v.shape == d.shape, f"v and d must have one width, got {len(v)} and {len(d)}", ShapeError
    )
    length = v.norm().item()
    # 1e-6 lets a unit vector of float32 pass
    require(abs(length - 1) < 1e-6, f"the separator v must have length 1, got {length:.9g}")
    return v / length, d, check_covariance(covariance, len(v))
