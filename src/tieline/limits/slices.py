"""Gaussian expectations over a two-cell mixture as integrals over the student's score.

Given S = s the input is Gaussian with a mean linear in s, and the teacher's cell is a half-space of
that Gaussian, whose moments up to the second are closed. With x̃ = (x, 1) every squared risk is

    L = ∫ [C(s) - 2 Σ_i p_i θ_i·B(s) + Σ_ij p_i p_j θ_iᵀ A(s) θ_j] dP(s),
    A(s) = E[x̃x̃ᵀ | s],  B(s) = E[x̃ μ | s],  C(s) = E[μ² | s],

for weights p that depend on s alone: soft (σ(s/τ)) or hard (1{s > 0}).

    graded_rule      nodes and weights on panels that shrink towards given points
    normal_rule      the same with the standard normal density in the weights
    slices           A, B, C at the nodes of such a rule
    slice_at         A, B, C on one level set

The rule has Gauss-Legendre panels between all points where the integrand jumps, and panels of the
size of a layer around it, so that twelve digits come out at every temperature. Panels that end on a
jump move with it: automatic differentiation of a hard risk is exact too.
"""

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from tieline.errors import ShapeError, require
from tieline.limits.cells import TwoCells, check_covariance

__all__ = [
    "Slices",
    "graded_rule",
    "normal_cdf",
    "normal_density",
    "normal_rule",
    "slice_at",
    "slices",
]

LIMIT = 9.5  # the normal law beyond has mass 2e-21
ORDER = 20

Rule = tuple[Float[Tensor, " nodes"], Float[Tensor, " nodes"]]
Layer = tuple[Tensor, Tensor | float]


@dataclass(frozen=True, eq=False)
class Slices:
    """Conditional moments given the student's score.

    Attributes:
        score: (n,) values s of S.
        weight: (n,) probability weights of the rule.
        second: (n, D + 1, D + 1) A(s).
        cross: (n, D + 1) B(s).
        square: (n,) C(s).
    """

    score: Float[Tensor, " n"]
    weight: Float[Tensor, " n"]
    second: Float[Tensor, "n columns columns"]
    cross: Float[Tensor, "n columns"]
    square: Float[Tensor, " n"]


@cache
def _legendre(order: int) -> tuple[Tensor, Tensor]:
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
    nodes, weights = _legendre(order)
    middle, half = (ends[1:] + ends[:-1]) / 2, ends.diff() / 2
    points = (middle[:, None] + half[:, None] * nodes).flatten()
    return points, (half[:, None] * weights).flatten()


def normal_density(z: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """φ(z)."""
    return torch.exp(-z.square() / 2) / math.sqrt(2 * math.pi)


def normal_cdf(z: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Φ(z), to full relative precision in the lower tail, where `torch.special.ndtr` is 0."""
    return torch.special.erfc(-z / math.sqrt(2)) / 2


def normal_rule(layers: list[Layer]) -> Rule:
    """Nodes and probability weights of N(0, 1) on a graded rule."""
    z, weight = graded_rule(layers)
    return z, weight * normal_density(z)


def slices(
    student: TwoCells,
    teacher: TwoCells,
    covariance: Float[Tensor, "width width"] | None = None,
    tau: float = 0.0,
    levels: tuple[float, ...] = (),
) -> Slices:
    """A, B, C of the teacher given the student's score, at the nodes of a graded rule.

    Args:
        student: whose normal and offset define S; its experts are not used.
        teacher: the target μ.
        covariance: Σ of the inputs; the identity for None.
        tau: width of the layer around S = 0 that the rule resolves; 0 for a jump.
        levels: further values of S at which the integrand will jump.
    """
    require(tau >= 0, f"need a temperature tau >= 0, got {tau=}")
    law = _conditional(student, teacher, covariance)
    layers: list[Layer] = [((x - student.offset) / law.spread, 0.0) for x in (0.0, *levels)]
    if tau > 0:
        layers[0] = _fixed(layers[0][0], tau / law.spread)
    if law.tilt.abs().item() > 0:
        centre = -law.level / law.tilt
        smooth = _fixed(centre, law.rest / law.tilt.abs())
        layers.append(smooth if law.crosses else (centre, 0.0))
    z, weight = normal_rule(layers)
    return law.moments(z, weight)


def _fixed(centre: Tensor, scale: Tensor) -> Layer:
    """A layer without a jump, whose panels need not move with the parameters.

    They must not where they meet a jump: of two ends at one place only the jump's may move.
    """
    return centre.detach(), scale.detach()


def slice_at(
    student: TwoCells,
    teacher: TwoCells,
    covariance: Float[Tensor, "width width"] | None = None,
    score: float = 0.0,
) -> Slices:
    """A, B, C on the level set S = score, the density of S there as its one weight.

    Where the teacher's wall is the same level set, μ is the trace from the side T >= 0.
    """
    law = _conditional(student, teacher, covariance)
    z = ((score - student.offset) / law.spread)[None]
    return law.moments(z, normal_density(z) / law.spread)


@dataclass(frozen=True, eq=False)
class _Conditional:
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
        """A, B, C at S = offset + spread·z."""
        one = torch.ones_like(z)[:, None]
        mean = torch.cat([z[:, None] * self.drift, one], dim=1)
        pad = torch.nn.functional.pad
        second = mean[:, :, None] * mean[:, None, :] + pad(self.across, (0, 1, 0, 1))
        first = self._upper(z, mean, second)
        parts = torch.stack([first, second - first], dim=1)
        cross = torch.einsum("nkij,kj->nki", parts, self.teacher.experts)
        square = torch.einsum("nki,ki->n", cross, self.teacher.experts)
        score = self.student.offset + self.spread * z
        return Slices(score, weight, second, cross.sum(dim=1), square)

    def _upper(self, z: Tensor, mean: Tensor, second: Tensor) -> Tensor:
        """E[x̃x̃ᵀ 1{T >= 0} | z], from the moments of a normal truncated at -h."""
        reach = self.level + self.tilt * z
        if not self.crosses:
            return second * (reach >= 0).double()[:, None, None]
        h = (reach / self.rest)[:, None, None]
        g = torch.nn.functional.pad(self.gain, (0, 1))
        mixed = mean[:, :, None] * g + g[:, None] * mean[:, None, :]
        bulk = normal_cdf(h) * second
        return bulk + normal_density(h) * (mixed - h * g[:, None] * g)


def _conditional(student: TwoCells, teacher: TwoCells, covariance: Tensor | None) -> "_Conditional":
    require(
        student.width == teacher.width,
        f"student and teacher must have one width, got {student.width} and {teacher.width}",
        ShapeError,
    )
    sigma = check_covariance(covariance, student.width)
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
    return _Conditional(student, teacher, *fields)
