"""The smallest mixture with a wall: two affine experts on the two sides of a hyperplane.

    S(x) = normal·x + offset        score difference a_1 - a_2
    f_i(x) = experts_i·(x, 1)       expert 1 rules where S > 0, expert 2 where S < 0

Student and teacher of paper 0 are both of this form in the Gaussian case, X ~ N(0, Σ). Given S = s
the input is Gaussian with a mean linear in s, and the teacher's cell is a half-space of that
Gaussian, whose moments up to the second are closed. With x̃ = (x, 1) every squared risk is

    L = ∫ [C(s) - 2 Σ_i p_i θ_i·B(s) + Σ_ij p_i p_j θ_iᵀ A(s) θ_j] dP(s),
    A(s) = E[x̃x̃ᵀ | s],  B(s) = E[x̃ μ | s],  C(s) = E[μ² | s],

for weights p that depend on s alone: soft (σ(s/τ)) or hard (1{s > 0}).

    graded_rule, normal_rule nodes and weights on panels that shrink towards given points

The rule has Gauss-Legendre panels between all points where the integrand jumps and panels of the
size of a layer around it, which gives twelve digits at every temperature. Panels that end on a jump
move with it, so automatic differentiation of a hard risk is exact too. Risks are those of the
noiseless target, L̃ of section 5.1; noise adds its variance.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from tieline.core.errors import ShapeError, require
from tieline.core.numerics import normal_cdf
from tieline.lab.geometry.tubes import SlabMass, gaussian_slab
from tieline.lab.limits.risk import check_temperature

__all__ = [
    "BoundaryMass",
    "GaussianProfile",
    "GaussianSplit",
    "Slices",
    "TwoCells",
    "ambiguity_width",
    "check_covariance",
    "first_weight",
    "gaussian_boundary_mass",
    "gaussian_decomposition",
    "gaussian_inputs",
    "gaussian_profile",
    "gaussian_risk",
    "graded_rule",
    "normal_cdf",
    "normal_density",
    "normal_rule",
    "same_wall",
    "slice_at",
    "slices",
    "two_cells",
]

LIMIT = 9.5
"""End of the quadrature in standard deviations; the normal law beyond has mass 2e-21."""

ORDER = 20
"""Nodes of a panel."""

Numbers = Sequence[float] | Float[Tensor, " dim"]
Covariance = Float[Tensor, "dim dim"] | None
Rule = tuple[Float[Tensor, " nodes"], Float[Tensor, " nodes"]]
Layer = tuple[Tensor, Tensor | float]


@dataclass(frozen=True, eq=False)
class TwoCells:
    """A wall and the affine function on each of its sides, in float64."""

    # (D,) gradient of the score difference S; its length is the router's scale
    normal: Float[Tensor, " dim"]
    offset: Float[Tensor, ""]  # S at the origin
    # (2, D + 1) slopes and intercept of the function where S > 0, then where S < 0
    experts: Float[Tensor, "2 columns"]

    @property
    def dim(self) -> int:
        """Dimension D of an input."""
        return self.normal.shape[0]

    def flat(self) -> Float[Tensor, " parameters"]:
        """All parameters in a row: normal, offset, expert 1, expert 2."""
        return torch.cat([self.normal, self.offset[None], self.experts.flatten()])

    def with_flat(self, parameters: Float[Tensor, " parameters"]) -> "TwoCells":
        """The mixture of the same dimension with the parameters of `flat`."""
        d = self.dim
        return TwoCells(parameters[:d], parameters[d], parameters[d + 1 :].reshape(2, d + 1))

    def with_experts(self, experts: Float[Tensor, "2 columns"]) -> "TwoCells":
        """The same wall with other experts."""
        return TwoCells(self.normal, self.offset, experts)

    def swapped(self) -> "TwoCells":
        """The same function with the labels of the two experts exchanged."""
        return TwoCells(-self.normal, -self.offset, self.experts.flip(0))

    def scores(self, x: Float[Tensor, "n dim"]) -> Float[Tensor, "n 2"]:
        """(S/2, -S/2), so that softmax at temperature τ gives expert 1 the weight σ(S/τ)."""
        s = x @ self.normal + self.offset
        return torch.stack([s / 2, -s / 2], dim=1)

    def outputs(self, x: Float[Tensor, "n dim"]) -> Float[Tensor, "n 2"]:
        """Values of both experts."""
        return x @ self.experts[:, :-1].T + self.experts[:, -1]

    def cell(self, x: Float[Tensor, "n dim"]) -> Int[Tensor, " n"]:
        """0 where S >= 0 and 1 elsewhere: the tie rule of the package, lower index first."""
        return (x @ self.normal + self.offset < 0).long()

    def value(self, x: Float[Tensor, "n dim"]) -> Float[Tensor, " n"]:
        """The piecewise function itself: the expert of the cell."""
        return self.outputs(x).gather(1, self.cell(x)[:, None]).squeeze(1)


@dataclass(frozen=True, eq=False)
class Slices:
    """Moments of input and target, conditioned on the student's score."""

    score: Float[Tensor, " n"]  # (n,) values s of S
    weight: Float[Tensor, " n"]  # (n,) probability weights of the rule
    second: Float[Tensor, "n columns columns"]  # (n, D + 1, D + 1) A(s)
    cross: Float[Tensor, "n columns"]  # (n, D + 1) B(s)
    square: Float[Tensor, " n"]  # (n,) C(s)


@dataclass(frozen=True)
class GaussianSplit:
    """Split of L̃_τ into interior and boundary, {|S| <= κ_ε τ} of probability `mass`."""

    interior: float
    boundary: float
    mass: float


@dataclass(frozen=True, eq=False)
class GaussianProfile:
    """The best experts for a given wall."""

    value: Float[Tensor, ""]  # Ψ_τ = min over θ of L̃_τ(θ, φ)
    experts: Float[Tensor, "2 columns"]  # (2, D + 1) θ̂(φ)
    curvature: float  # α_fr, the least eigenvalue of the Hessian in θ


@dataclass(frozen=True)
class BoundaryMass(SlabMass):
    """P(|S| <= r) of a linear router under a Gaussian; `spread` is σ = √(vᵀΣv), that of S."""

    spread: float


def two_cells(
    *,
    normal: Numbers,
    offset: float = 0.0,
    slopes: Sequence[Sequence[float]] | Float[Tensor, "2 dim"],
    intercepts: Sequence[float] | Float[Tensor, "2"] = (0.0, 0.0),
) -> TwoCells:
    """Build `TwoCells` from plain numbers.

    Args:
        normal: (D,) gradient of S, not zero.
        offset: S at the origin.
        slopes: (2, D) of the functions where S > 0 and where S < 0.
        intercepts: of the same.
    """
    v = torch.as_tensor(normal, dtype=torch.float64)
    require(bool(torch.isfinite(v).all() and v.norm() > 0), f"need a normal that is not 0, got {v}")
    slope = torch.as_tensor(slopes, dtype=torch.float64)
    require(
        slope.shape == (2, len(v)), f"slopes must be (2, {len(v)}), got {slope.shape}", ShapeError
    )
    level = torch.as_tensor(intercepts, dtype=torch.float64)
    require(level.shape == (2,), f"need two intercepts, got {level.shape}", ShapeError)
    experts = torch.cat([slope, level[:, None]], dim=1)
    require(bool(torch.isfinite(experts).all()), f"experts must be finite, got {experts.tolist()}")
    return TwoCells(v, torch.as_tensor(offset, dtype=torch.float64), experts)


def same_wall(student: TwoCells, teacher: TwoCells) -> int:
    """1 or -1 where both walls are one hyperplane (with equal or opposite sides), else 0."""
    ours = torch.cat([student.normal, student.offset[None]]) / student.normal.norm()
    theirs = torch.cat([teacher.normal, teacher.offset[None]]) / teacher.normal.norm()
    for side in (1, -1):
        if torch.allclose(ours, side * theirs, rtol=0, atol=1e-13):
            return side
    return 0


def check_covariance(covariance: Covariance, dim: int) -> Float[Tensor, "dim dim"]:
    """Return Σ in float64, the identity for None; raise unless it is positive definite."""
    if covariance is None:
        return torch.eye(dim, dtype=torch.float64)
    sigma = covariance.double()
    require(
        sigma.shape == (dim, dim),
        f"covariance must be ({dim}, {dim}), got {tuple(sigma.shape)}",
        ShapeError,
    )
    require(torch.allclose(sigma, sigma.T), "covariance must be symmetric")
    least = torch.linalg.eigvalsh(sigma)[0].item()
    require(least > 0, f"covariance must be positive definite, its least eigenvalue is {least:.3g}")
    return sigma


def gaussian_inputs(
    n: int, dim: int, seed: int, covariance: Covariance = None
) -> Float[Tensor, "n dim"]:
    """Independent draws of N(0, Σ) in float64, the same for the same seed."""
    require(n > 0 and dim > 0, f"need n > 0 and dim > 0, got {n=}, {dim=}")
    root = torch.linalg.cholesky(check_covariance(covariance, dim))
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, dim, generator=generator, dtype=torch.float64) @ root.T


@cache
def _legendre_rule(order: int) -> tuple[Tensor, Tensor]:
    """Nodes and weights of Gauss-Legendre quadrature on [-1, 1]."""
    nodes, weights = np.polynomial.legendre.leggauss(order)
    return torch.from_numpy(nodes), torch.from_numpy(weights)


def graded_rule(
    layers: list[Layer], low: float = -LIMIT, high: float = LIMIT, order: int = ORDER
) -> Rule:
    """Nodes and weights on [low, high] that resolve layers (centre, scale); scale 0 is a jump.

    Panels have at most unit length; around a centre their ends are centre ± scale·2^j.
    """
    edges = [torch.linspace(low, high, math.ceil(high - low) + 1, dtype=torch.float64)]
    for centre, scale in layers:
        size = torch.as_tensor(scale, dtype=torch.float64)
        steps = torch.zeros(1, dtype=torch.float64)
        if size.item() > 0:
            levels = max(0, math.ceil(math.log2((high - low) / size.item())))
            grow = size * torch.pow(2.0, torch.arange(levels, dtype=torch.float64))
            steps = torch.cat([-grow.flip(0), steps, grow])
        edges.append(centre + steps)
    ends = torch.cat(edges).clamp(low, high).sort().values
    nodes, weights = _legendre_rule(order)
    middle, half = (ends[1:] + ends[:-1]) / 2, ends.diff() / 2
    points = (middle[:, None] + half[:, None] * nodes).flatten()
    return points, (half[:, None] * weights).flatten()


def normal_density(z: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Standard normal density φ(z)."""
    return torch.exp(-z.square() / 2) / math.sqrt(2 * math.pi)


def normal_rule(layers: list[Layer]) -> Rule:
    """Nodes and probability weights of N(0, 1) on a graded rule."""
    z, weight = graded_rule(layers)
    return z, weight * normal_density(z)


def slices(
    student: TwoCells,
    teacher: TwoCells,
    covariance: Covariance = None,
    tau: float = 0.0,
    levels: tuple[float, ...] = (),
) -> Slices:
    """Moments A, B, C given the student's score, at the nodes of a graded quadrature.

    Args:
        student: whose normal and offset define S; its experts are not used.
        teacher: the target μ.
        covariance: Σ of the inputs; the identity for None.
        tau: scale of the layer around S = 0 that the rule resolves; 0 for a jump.
        levels: further values of S at which the integrand will jump.
    """
    require(tau >= 0, f"need a temperature tau >= 0, got {tau=}")
    law = _conditional_law(student, teacher, covariance)
    layers: list[Layer] = [((x - student.offset) / law.spread, 0.0) for x in (0.0, *levels)]
    # layers without a jump are detached: of two panel ends at one place only a jump's may move
    if tau > 0:
        layers[0] = layers[0][0].detach(), (tau / law.spread).detach()
    if law.tilt.abs().item() > 0:
        centre, width = -law.level / law.tilt, law.rest / law.tilt.abs()
        layers.append((centre.detach(), width.detach()) if law.crosses else (centre, 0.0))
    z, weight = normal_rule(layers)
    return law.moments(z, weight)


def slice_at(student: TwoCells, teacher: TwoCells, covariance: Covariance = None) -> Slices:
    """Moments A, B, C on the wall S = 0; the one weight is the density of S there.

    Where the teacher's wall is the same, μ is the trace from the side T >= 0.
    """
    law = _conditional_law(student, teacher, covariance)
    z = (-student.offset / law.spread)[None]
    return law.moments(z, normal_density(z) / law.spread)


@dataclass(frozen=True, eq=False)
class _ConditionalLaw:
    """X given S = offset + spread·z is N(drift z, Σ_⊥); T = level + tilt z + rest·N(0, 1)."""

    student: TwoCells
    teacher: TwoCells
    spread: Tensor
    drift: Tensor
    across: Tensor
    level: Tensor
    tilt: Tensor
    rest: Tensor
    gain: Tensor
    crosses: bool

    def moments(self, z: Tensor, weight: Tensor) -> Slices:
        """Moments A, B, C at S = offset + spread·z."""
        ones = torch.ones_like(z)[:, None]
        mean = torch.cat([z[:, None] * self.drift, ones], dim=1)
        pad = torch.nn.functional.pad
        second = mean[:, :, None] * mean[:, None, :] + pad(self.across, (0, 1, 0, 1))
        first = self._moments_above_teacher_wall(z, mean, second)
        halves = torch.stack([first, second - first], dim=1)
        cross = torch.einsum("nkij,kj->nki", halves, self.teacher.experts)
        square = torch.einsum("nki,ki->n", cross, self.teacher.experts)
        score = self.student.offset + self.spread * z
        return Slices(score, weight, second, cross.sum(dim=1), square)

    def _moments_above_teacher_wall(self, z: Tensor, mean: Tensor, second: Tensor) -> Tensor:
        """E[x̃x̃ᵀ 1{T >= 0} | z], from the moments of a normal truncated at -h."""
        reach = self.level + self.tilt * z
        if not self.crosses:
            return second * (reach >= 0).double()[:, None, None]
        h = (reach / self.rest)[:, None, None]
        g = torch.nn.functional.pad(self.gain, (0, 1))
        mixed = mean[:, :, None] * g + g[:, None] * mean[:, None, :]
        bulk = normal_cdf(h) * second
        return bulk + normal_density(h) * (mixed - h * g[:, None] * g)


def _conditional_law(
    student: TwoCells, teacher: TwoCells, covariance: Tensor | None
) -> "_ConditionalLaw":
    """The law of the inputs given the student's score."""
    require(
        student.dim == teacher.dim,
        f"student and teacher must have one dimension, got {student.dim} and {teacher.dim}",
        ShapeError,
    )
    sigma = check_covariance(covariance, student.dim)
    forward = sigma @ student.normal
    spread = (student.normal @ forward).sqrt()
    require(bool(spread > 0), f"need a router normal that is not 0, got {student.normal.tolist()}")
    drift = forward / spread
    across = sigma - drift[:, None] * drift
    tilt = teacher.normal @ drift
    # projecting the normal first keeps a small angle between the walls to full precision
    apart = teacher.normal - student.normal * (tilt / spread)
    scale = (teacher.normal @ sigma @ teacher.normal).sqrt()
    crosses = bool((apart @ sigma @ apart).sqrt() > 1e-13 * scale)
    rest = (apart @ sigma @ apart).sqrt() if crosses else torch.zeros_like(spread)
    gain = sigma @ apart / rest if crosses else torch.zeros_like(drift)
    fields = (spread, drift, across, teacher.offset, tilt, rest, gain, crosses)
    return _ConditionalLaw(student, teacher, *fields)


def first_weight(score: Float[Tensor, " n"], tau: float) -> Float[Tensor, " n"]:
    """Weight p_1 of the first expert: σ(S/τ), or 1{S > 0} at τ = 0."""
    return torch.sigmoid(score / tau) if tau > 0 else (score > 0).double()


def slice_risk(cut: Slices, student: TwoCells, tau: float) -> Float[Tensor, " n"]:
    """Conditional risk E[(μ - h_τ)² | s] = C - 2 f·B + fᵀAf, f = p_1 θ_1 + p_2 θ_2."""
    p = first_weight(cut.score, tau)[:, None]
    f = p * student.experts[0] + (1 - p) * student.experts[1]
    quadratic = torch.einsum("ni,nij,nj->n", f, cut.second, f)
    return cut.square - 2 * (f * cut.cross).sum(dim=1) + quadratic


def gaussian_risk(
    student: TwoCells, teacher: TwoCells, covariance: Covariance = None, tau: float = 0.0
) -> Float[Tensor, ""]:
    """Risk L̃_τ = E[(μ(X) - h_τ(X))²], X ~ N(0, Σ); τ = 0 is the hard risk.

    Differentiable in all parameters of the student, for τ = 0 wherever the two walls differ. For
    parallel walls in two dimensions or more, derivatives by the direction of the normal are wrong:
    `risk_derivatives` raises in that case.
    """
    cut = slices(student, teacher, covariance, tau)
    return (cut.weight * slice_risk(cut, student, tau)).sum()


def ambiguity_width(epsilon: float, n_experts: int = 2) -> float:
    """Width κ_{ε,E} = log((E - 1)(1 - ε)/ε), κ_ε for two experts (Remark 5.4)."""
    require(0 < epsilon < 0.5, f"need 0 < epsilon < 1/2, got {epsilon=}")
    require(n_experts > 1, f"need 2 experts or more, got {n_experts=}")
    return math.log(n_experts - 1) + math.log1p(-epsilon) - math.log(epsilon)


def gaussian_decomposition(
    student: TwoCells, teacher: TwoCells, tau: float, epsilon: float, covariance: Covariance = None
) -> GaussianSplit:
    """Interior and boundary parts of L̃_τ, eq. 5.3 and Lemma 5.5; exact for two experts."""
    check_temperature(tau)
    width = ambiguity_width(epsilon) * tau
    cut = slices(student, teacher, covariance, tau, levels=(-width, width))
    risk, near = cut.weight * slice_risk(cut, student, tau), cut.score.abs() <= width
    return GaussianSplit(
        risk[~near].sum().item(), risk[near].sum().item(), cut.weight[near].sum().item()
    )


def gaussian_profile(
    wall: TwoCells, teacher: TwoCells, covariance: Covariance = None, tau: float = 0.0
) -> GaussianProfile:
    """Best experts θ̂(φ) of a wall, their risk Ψ_τ(φ), and α_fr (Assumption 5.14).

    The experts of `wall` are not used. The risk is quadratic in θ: with G = E[p pᵀ ⊗ x̃x̃ᵀ] and
    c = E[p ⊗ x̃ μ], θ̂ = G⁻¹c, Ψ = E[μ²] - c·θ̂ and the Hessian is 2G.
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


def gaussian_boundary_mass(
    student: TwoCells, radius: float, covariance: Covariance = None
) -> BoundaryMass:
    """P(|S(X)| <= r) with its expansion (Example 3.8); r = κ_ε τ gives eq. 3.13."""
    require(radius >= 0, f"need radius >= 0, got {radius=}")
    sigma = check_covariance(covariance, student.dim)
    spread = (student.normal @ sigma @ student.normal).sqrt().item()
    slab = gaussian_slab(student.offset.item(), spread, radius)
    return BoundaryMass(**vars(slab), spread=spread)
