"""Symmetry breaking: the reduced model of paper 0, section 6, beside actual gradient descent.

    M = E[g(v·X)(d·X) XXᵀ],  X ~ N(0, Σ), ‖v‖ = 1                                  eq. 6.5
      = E[gZ³](d·α)ααᵀ + E[gZ]((d·α)Σ_⊥ + α(Σ_⊥d)ᵀ + (Σ_⊥d)αᵀ),
        α = Σv/s²,  s² = vᵀΣv,  Σ_⊥ = Σ - s²ααᵀ,  Z ~ N(0, s²)
    κ_g = E[g(G)G³]/s³,  vᵀMv = κ_g (d·Σv) s                                       Lemma 6.1
    κ_sign = 2√(2/π)                                                               Lemma 6.2
    ρ(τ) = (1 + ηλ_2/τ)/(1 + ηλ_1/τ),  t_align = τ/(η(λ_1 - λ_2))                  eq. 6.10, 6.11

**Not without loss of generality.** The paper flips v so that d·Σv > 0 (eq. 6.7). Flipping v swaps
the two sides, hence the two experts, hence the sign of d: d·Σv and M itself do not change. For
d·Σv < 0 the reduced model has vᵀMv < 0.

Teacher ±½ d·x on the sides of v·x; student experts f_1, f_2, nearly equal, scores ±u·x. Section 6
assumes a response (6.3) that makes the update of u linear in u, u ← (I + (η/τ)M)u. In the actual
model the residual does not depend on u to first order, and at u = 0 the gradient is a *drift*
caused by the contrast δ of the two experts. Under gradient flow

    u̇ = M_e δ/2τ,  δ̇ = M_e u/τ,  M_e = E[(sign(v·X) d·X - 2e) XXᵀ],

e the mean intercept of the experts. Router and contrast drive each other: modes ±|λ|/(√2 τ) for
each eigenvalue λ of M_e, one of them growing whatever the sign of λ. The paper's M is e = 0; the
experts' own optimum is e = ½ (d·α) E|Z|, where M_e is smaller.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from tieline.core.errors import ShapeError, require
from tieline.core.numerics import one_thread
from tieline.core.statistics import Estimate, mean_estimate
from tieline.lab.limits.risk import check_temperature
from tieline.lab.limits.saddle import WeightedInputs, gaussian_grid, population_gradient
from tieline.lab.limits.two_cells import (
    Covariance,
    TwoCells,
    check_covariance,
    gaussian_inputs,
    normal_rule,
)

__all__ = [
    "AlignmentRate",
    "CoupledModes",
    "Operator",
    "Response",
    "SymmetryBreaking",
    "alignment_rate",
    "alignment_step",
    "coupled_modes",
    "operator",
    "relabelled",
    "response_constant",
    "sampled_rayleigh",
    "symmetry_breaking",
    "symmetry_teacher",
]

Vector = Float[Tensor, " dim"]


@dataclass(frozen=True)
class Response:
    """The response g: "sign" gives sign(z), "tanh" gives tanh(gain·z)."""

    kind: Literal["sign", "tanh"] = "sign"
    gain: float = 1.0

    def __post_init__(self) -> None:
        require(self.gain > 0, f"need a gain > 0, got {self.gain}")

    def __call__(self, z: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Evaluate g(z)."""
        return torch.sign(z) if self.kind == "sign" else torch.tanh(self.gain * z)

    def moment(self, power: int, spread: float) -> float:
        """Moment E[g(G) G^power], G ~ N(0, spread²), by a rule that resolves g around zero."""
        scale = 0.0 if self.kind == "sign" else 1 / (self.gain * spread)
        z, weight = normal_rule([(torch.zeros((), dtype=torch.float64), scale)])
        return (weight * self(spread * z) * (spread * z).pow(power)).sum().item()


@dataclass(frozen=True, eq=False)
class Operator:
    """The operator M with its spectrum."""

    matrix: Float[Tensor, "dim dim"]  # (D, D) M
    eigenvalues: Float[Tensor, " dim"]  # (D,) in descending order
    eigenvectors: Float[Tensor, "dim dim"]  # (D, D), columns in the same order
    rayleigh: float  # vᵀMv by Lemma 6.1
    kappa: float  # κ_g
    overlap: Float[Tensor, " dim"]  # (D,) |⟨w_i, v⟩| of each eigenvector

    @property
    def unstable(self) -> bool:
        """Whether some direction grows in the reduced model."""
        return bool(self.eigenvalues[0] > 0)


@dataclass(frozen=True)
class AlignmentRate:
    """Rate at which the reduced update turns u towards the first eigenvector."""

    amplification: float  # 1 + ηλ_1/τ, growth of the leading component per step (Prop. 6.3)
    ratio: float  # ρ(τ), eq. 6.10
    ratio_first_order: float  # 1 - (η/τ)(λ_1 - λ_2), eq. 6.11, for η/τ small
    steps: float  # t_align = τ/(η(λ_1 - λ_2)), the paper's scale
    steps_exact: float  # -1/log ρ, steps for a factor e
    limit_ratio: float  # λ_2/λ_1, where ρ saturates as τ → 0 with λ_1, λ_2 > 0
    sign_stable: bool  # whether 1 + ηλ_D/τ > 0, which eq. 6.9 requires


@dataclass(frozen=True, eq=False)
class CoupledModes:
    """The true linear dynamics of (u, δ) at the symmetric point."""

    intercept: float  # e, the experts' own optimum ½ (d·α) E|Z|
    matrix: Float[Tensor, "dim dim"]  # (D, D) M_e
    eigenvalues: Float[Tensor, " dim"]  # (D,) of M_e, descending
    # (D,) |λ|/(√2 τ), growth per unit of time of gradient flow, descending
    rates: Float[Tensor, " dim"]
    direction: Vector  # (D,) eigenvector of the fastest mode, the direction of u in it
    paper_rate: float  # λ_1(M)/τ, the growth that the reduced model predicts


@dataclass(frozen=True, eq=False)
class SymmetryBreaking:
    """Reduced model and true gradient descent from one start."""

    reduced_norms: Float[Tensor, " times"]  # (steps + 1,) ‖u‖ of the reduced update (6.6)
    reduced_alignments: Float[Tensor, " times"]  # |cos(u, v)| of it
    norms: Float[Tensor, " times"]  # ‖u‖ of the true descent
    alignments: Float[Tensor, " times"]  # |cos(u, v)| of it
    risks: Float[Tensor, " times"]  # L̃_τ along the true descent
    drift: Vector  # -∇_u L at u = 0 with the start's contrast, computed
    predicted_drift: Vector  # (1/2τ) M_e δ
    growth: float  # fitted factor per step of ‖u‖ in the linear regime of the true descent
    predicted_growth: float  # 1 + η|λ|/(√2 τ) of the fastest coupled mode
    paper_growth: float  # 1 + ηλ_1/τ of the reduced model
    modes: CoupledModes  # the coupled modes


def response_constant(response: Response, spread: float = 1.0) -> float:
    """Constant κ_g = E[g(G)G³]/s³, G ~ N(0, s²); 2√(2/π) for the sign, any s (Lemma 6.1, 6.2)."""
    require(spread > 0, f"need a spread s > 0, got {spread=}")
    return response.moment(3, spread) / spread**3


def operator(
    v: Vector, d: Vector, covariance: Covariance = None, response: Response | None = None
) -> Operator:
    """Closed form of M from two one-dimensional moments of g.

    v is the teacher's separator, of length 1, and d its contrast d*; g is the sign for None.
    """
    v, d, sigma = _validated_teacher(v, d, covariance)
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
    covariance: Covariance = None,
    response: Response | None = None,
    n: int = 100_000,
    seed: int = 0,
) -> Estimate:
    """Monte-Carlo estimate of vᵀMv = E[g(v·X)(d·X)(v·X)²]."""
    v, d, sigma = _validated_teacher(v, d, covariance)
    x = gaussian_inputs(n, len(v), seed, sigma)
    side = x @ v
    return mean_estimate((response or Response())(side) * (x @ d) * side.square())


def relabelled(v: Vector, d: Vector) -> tuple[Vector, Vector]:
    """The same teacher with its two sides exchanged: (-v, -d), so that d·Σv keeps its sign."""
    return -v, -d


def alignment_rate(
    eigenvalues: Float[Tensor, " dim"], step_size: float, tau: float
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


def alignment_step(u: Vector, matrix: Float[Tensor, "dim dim"], push: float) -> Vector:
    """One reduced update (I + (η/τ) M) u, eq. 6.6."""
    return u + push * matrix @ u


def symmetry_teacher(v: Vector, d: Vector) -> TwoCells:
    """Teacher of section 6 with baseline 0: ½ d·x where v·x >= 0, -½ d·x elsewhere."""
    require(v.shape == d.shape, f"v and d differ in dimension: {len(v)}, {len(d)}", ShapeError)
    slope = torch.nn.functional.pad(d.double() / 2, (0, 1))
    return TwoCells(v.double(), torch.zeros((), dtype=torch.float64), torch.stack([slope, -slope]))


def coupled_modes(
    v: Vector, d: Vector, tau: float, covariance: Covariance = None, intercept: float | None = None
) -> CoupledModes:
    """Growth rates of the coupled router and contrast; arguments as for `operator`.

    The intercept e is the experts' own optimum for None, 0 for the paper's M.
    """
    check_temperature(tau)
    sigma = check_covariance(covariance, len(v))
    paper = operator(v, d, sigma)
    forward = sigma @ v.double()
    s = (v.double() @ forward).sqrt().item()
    optimum = (d.double() @ forward).item() / s * Response().moment(1, 1.0) / 2
    e = optimum if intercept is None else intercept
    matrix = paper.matrix - 2 * e * sigma
    values, vectors = torch.linalg.eigh(matrix)
    fastest = int(values.abs().argmax())
    rates = values.abs().sort(descending=True).values / (math.sqrt(2) * tau)
    top = paper.eigenvalues[0].item() / tau
    return CoupledModes(e, matrix, values.flip(0), rates, vectors[:, fastest], top)


def symmetry_breaking(
    v: Vector,
    d: Vector,
    *,
    tau: float,
    step_size: float,
    steps: int,
    start: float = 1e-6,
    seed: int = 0,
    covariance: Float[Tensor, "2 2"] | None = None,
) -> SymmetryBreaking:
    """Gradient descent on router and experts, beside the reduced update of the router alone.

    Both start from one random u of length `start`; the experts from their common optimum and a
    random contrast of the same length, both directions by `seed`. In the plane, on a quadrature
    grid; v, d and the covariance as for `operator`, η the step size.
    """
    require(step_size > 0 and steps > 0, f"need step_size, steps > 0, got {step_size=}, {steps=}")
    require(0 < start < 1e-2, f"need a start in (0, 0.01), near symmetry, got {start=}")
    modes = coupled_modes(v, d, tau, covariance)
    generator = torch.Generator().manual_seed(seed)
    pair = torch.randn(2, 2, generator=generator, dtype=torch.float64)
    u, delta = start * pair / pair.norm(dim=1, keepdim=True)
    grid = gaussian_grid(symmetry_teacher(v, d), covariance)
    reduced, matrix = [u], operator(v, d, covariance).matrix
    for _ in range(steps):
        reduced.append(alignment_step(reduced[-1], matrix, step_size / tau))
    with one_thread():
        first = _parameters_near_symmetry(torch.zeros_like(u), delta, modes.intercept)
        drift = -2 * population_gradient(grid, first, tau)[1][:2]
        path, risks = _descend_gradient(
            grid, _parameters_near_symmetry(u, delta, modes.intercept), tau, step_size, steps
        )
    rate = step_size * modes.rates[0].item()
    return SymmetryBreaking(
        *_norms_and_alignments(torch.stack(reduced), v.double()),
        *_norms_and_alignments(path, v.double()),
        risks,
        drift,
        modes.matrix @ delta / (2 * tau),
        _fitted_growth(path.norm(dim=1), start),
        1 + rate,
        1 + step_size * modes.paper_rate,
        modes,
    )


def _validated_teacher(
    v: Tensor, d: Tensor, covariance: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Separator, contrast and covariance in float64, or an error."""
    v, d = v.double(), d.double()
    require(
        v.shape == d.shape,
        f"v and d must have one dimension, got {len(v)} and {len(d)}",
        ShapeError,
    )
    length = v.norm().item()
    # 1e-6 lets a unit vector of float32 pass
    require(abs(length - 1) < 1e-6, f"the separator v must have length 1, got {length:.9g}")
    return v / length, d, check_covariance(covariance, len(v))


def _parameters_near_symmetry(u: Tensor, delta: Tensor, intercept: float) -> Tensor:
    """Parameters (normal, offset, experts) of scores ±u·x, so S = 2u·x, and experts e ± ½ δ·x."""
    level = torch.tensor([intercept], dtype=torch.float64)
    zero = torch.zeros(1, dtype=torch.float64)
    return torch.cat([2 * u, zero, delta / 2, level, -delta / 2, level])


def _descend_gradient(
    grid: WeightedInputs, parameters: Tensor, tau: float, step_size: float, steps: int
) -> tuple[Tensor, Tensor]:
    """Gradient descent: path of u, and risks; the router has no offset, ∇_u = 2 ∇_normal."""
    # stepping u by η ∇_u moves the normal 2u by 4 η ∇_normal
    scale = torch.tensor([4.0, 4.0, 0.0, *[1.0] * 6], dtype=torch.float64)
    path, risks = [parameters[:2] / 2], []
    for _ in range(steps):
        value, gradient = population_gradient(grid, parameters, tau)
        parameters = parameters - step_size * scale * gradient
        path.append(parameters[:2] / 2)
        risks.append(value)
    risks.append(population_gradient(grid, parameters, tau)[0])
    return torch.stack(path), torch.tensor(risks, dtype=torch.float64)


def _norms_and_alignments(path: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Norm ‖u‖ and |cos(u, v)| along a path."""
    norms = path.norm(dim=1)
    return norms, (path @ v).abs() / norms


def _fitted_growth(norms: Tensor, start: float) -> float:
    """Growth factor per step, fitted to log ‖u‖ in [100·start, 0.01]; NaN with too few steps."""
    inside = ((norms > 100 * start) & (norms < 1e-2)).nonzero().squeeze(1)
    if len(inside) < 3:
        return math.nan
    return math.exp(np.polyfit(inside.double(), norms[inside].log(), 1)[0])
