"""Small populations with known truth, on which paper 0 is tested.

GraphRouter      S(x) = x_1 + c x_1³ + sin(x_2) x_3 under N(0, I_3): a curved wall whose level
                 sets are graphs, so that surface integrals are ordinary ones
affine_scores    scores of a drawn affine router under N(0, I)
pair_mass        P(|z_i - z_j| <= w) of an affine router, exactly
mixture          a drawn mixture of bounded experts, affine router, as a sample

Small routers on which paper 1 is tested.

router         weight and bias of an affine router, drawn
orthonormal    a router whose rows are the first E axes of D: scores are coordinates
in_ball        uniform points of the ball of radius R
slope          exponent of a power law

Small layers on which paper 3 is tested.

layer       router and neurons of a fully specified instance, drawn by NumPy from one seed
dense       neurons of one dense layer, with a router that has nothing to choose
drawn       a generator of its own for each stream of a run
router      weights and biases of a router alone
crofton     expected pieces along a curve, which several claims compare with
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.special import ndtr

from tieline.core.ranking import stable_topk
from tieline.limits.risk import MoESample, evaluate
from tieline.papers.claim import Run
from tieline.tropical import count_regions, expected_kinks, expected_switches

__all__ = [
    "BIAS",
    "GraphRouter",
    "Layer",
    "Pupil",
    "affine_scores",
    "crofton",
    "dense",
    "dense_regions",
    "density",
    "drawn",
    "drawn_router",
    "extrapolated",
    "in_ball",
    "layer",
    "mixture",
    "orthonormal",
    "pair_mass",
    "problems_router",
    "pupil",
    "router",
]

NODES = 64
"""Gauss-Hermite nodes per axis; fifteen digits for the curved wall."""


def density(x: Tensor) -> Tensor:
    """Normal density φ."""
    return torch.exp(-x.square() / 2) / math.sqrt(2 * math.pi)


class GraphRouter:
    """S = x_1 + c x_1³ + sin(x_2) x_3, strictly increasing in x_1: ∂S/∂x_1 = 1 + 3c x_1² >= 1.

    On the level set S = t the surface integral of p/‖∇S‖ is the integral over y = (x_2, x_3) of
    p/|∂S/∂x_1|, for dH = ‖∇S‖/|∂S/∂x_1| dy.
    """

    def __init__(self, curvature: float = 0.3) -> None:
        self.curvature = curvature

    def __call__(self, x: Tensor) -> Tensor:
        """S at inputs (n, 3)."""
        first = x[:, 0]
        return first + self.curvature * first**3 + torch.sin(x[:, 1]) * x[:, 2]

    def gradient(self, x: Tensor) -> Tensor:
        """∇S at inputs (n, 3)."""
        first = 1 + 3 * self.curvature * x[:, 0].square()
        return torch.stack([first, torch.cos(x[:, 1]) * x[:, 2], torch.sin(x[:, 1])], dim=1)

    def height(self, y: Tensor, level: float) -> Tensor:
        """x_1 of the point of the level set above y, by the cubic's closed root."""
        c, q = self.curvature, level - torch.sin(y[:, 0]) * y[:, 1]
        return 2 / math.sqrt(3 * c) * torch.sinh(torch.asinh(1.5 * q * math.sqrt(3 * c)) / 3)

    def on_surface(self, y: Tensor, level: float) -> Tensor:
        """φ(x_1)/|∂S/∂x_1| above each y: its mean over y ~ N(0, I_2) is F(t) of eq. 3.8."""
        x = self.height(y, level)
        return density(x) / (1 + 3 * self.curvature * x.square())

    def profile(self, level: float) -> float:
        """F(t), by quadrature."""
        y, weight = normal_grid()
        return (weight * self.on_surface(y, level)).sum().item()

    def mass(self, width: float) -> float:
        """P(|S| <= w), by quadrature."""
        y, weight = normal_grid()
        inside = ndtr(self.height(y, width)) - ndtr(self.height(y, -width))
        return (weight * inside).sum().item()


def normal_grid() -> tuple[Tensor, Tensor]:
    """Nodes (n, 2) and weights of N(0, I_2)."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(NODES)
    x, w = torch.from_numpy(nodes), torch.from_numpy(weights / weights.sum())
    return torch.cartesian_prod(x, x), torch.outer(w, w).flatten()


def drawn_router(run: Run, experts: int, width: int) -> tuple[Tensor, Tensor]:
    """Weight and bias of an affine router."""
    weight = run.normal(experts, width, stream=1)
    return weight, 0.5 * run.normal(experts, stream=2)


def affine_scores(run: Run, n: int, weight: Tensor, bias: Tensor) -> Tensor:
    """Scores of inputs drawn from N(0, I)."""
    return run.normal(n, weight.shape[1], stream=3) @ weight.T + bias


def pair_mass(weight: Tensor, bias: Tensor, width: float) -> tuple[Tensor, Tensor]:
    """P(|z_i - z_j| <= w) and the density of z_i - z_j at 0, for all pairs i < j."""
    i, j = torch.triu_indices(len(weight), len(weight), 1)
    spread = (weight[i] - weight[j]).norm(dim=1)
    shift = bias[i] - bias[j]
    inside = ndtr((width - shift) / spread) - ndtr((-width - shift) / spread)
    return inside, density(shift / spread) / spread


def mixture(run: Run, n: int, experts: int = 4, width: int = 3) -> MoESample:
    """Bounded experts 0.9 tanh(u·x) and a bounded target that jumps at x_1 = 0, |Y| <= 1."""
    weight, bias = drawn_router(run, experts, width)
    slopes = run.normal(experts, width, stream=4)
    inputs = run.normal(n, width, stream=5)
    return evaluate(
        lambda x: x @ weight.T + bias,
        lambda x: 0.9 * torch.tanh(x @ slopes.T),
        lambda x: torch.where(x[:, 0] > 0, 0.8, -0.4) * torch.cos(x[:, 1]),
        inputs,
    )


@dataclass(frozen=True, eq=False)
class Pupil:
    """A student of a teacher with bounded experts, seen on one sample.

    Attributes:
        sample: scores and outputs of the student, the teacher's signal μ as target.
        labels: teacher cell of each input.
        teacher_scores: scores of the teacher's router.
        experts: (n, E) values of the teacher's experts f*_k.
    """

    sample: MoESample
    labels: Tensor
    teacher_scores: Tensor
    experts: Tensor


def pupil(run: Run, n: int, distance: float, experts: int = 3, width: int = 3) -> Pupil:
    """A student at a distance from its teacher in all parameters; experts 0.9 tanh(u·x + c)."""
    inputs = run.normal(n, width, stream=11)
    columns = torch.cat([inputs, torch.ones(n, 1, dtype=torch.float64)], dim=1)
    walls, rules = (run.normal(experts, width + 1, stream=s) for s in (12, 13))
    rules = 0.15 * rules  # experts that are nearly constant and well apart
    rules[:, -1] += torch.linspace(-1.5, 1.5, experts, dtype=torch.float64)
    shift = [distance * run.normal(experts, width + 1, stream=s) for s in (14, 15)]
    theirs, scores = 0.9 * torch.tanh(columns @ rules.T), columns @ walls.T
    labels = stable_topk(scores, 1).indices.squeeze(1)
    target = theirs.gather(1, labels[:, None]).squeeze(1)
    ours = 0.9 * torch.tanh(columns @ (rules + shift[1]).T)
    sample = MoESample(columns @ (walls + shift[0]).T, ours, target)
    return Pupil(sample, labels, scores, theirs)


BIAS = 0.07
"""What the extrapolation to ε = 0 leaves of terms of order ε², in the ratios of order 2 below."""


def router(run: Run, experts: int, width: int, stream: int = 1) -> tuple[Tensor, Tensor]:
    """Weight (E, D) and bias (E,)."""
    weight = run.normal(experts, width, stream=1000 + stream)
    return weight, 0.5 * run.normal(experts, stream=2000 + stream)


def orthonormal(experts: int, width: int) -> Tensor:
    """The first E rows of the identity of size D."""
    return torch.eye(experts, width, dtype=torch.float64)


def in_ball(run: Run, n: int, width: int, radius: float = 1.0, stream: int = 7) -> Tensor:
    """Independent uniform points of the ball."""
    x = run.normal(n, width, stream=stream)
    u = torch.rand(n, 1, dtype=torch.float64, generator=run.generator(stream + 1))
    return radius * u ** (1 / width) * x / x.norm(dim=1, keepdim=True)


def extrapolated(shares: dict[float, tuple[Tensor, Tensor]]) -> tuple[float, float]:
    """U_2/U_1 over ε, extrapolated to ε = 0 from two widths ε and 2ε, with its standard error."""
    (small, near_), (large, far) = sorted(shares.items())
    values, variance = [], 0.0
    for epsilon, (one, two), factor in ((small, near_, 2.0), (large, far, -1.0)):
        ratio = two.mean() / one.mean() / epsilon
        values.append(factor * ratio.item())
        relative = (1 / two.sum() + 1 / one.sum()).item()
        variance += (factor * ratio.item()) ** 2 * relative
    return sum(values), variance**0.5


class Layer(NamedTuple):
    """Router W x + b and neurons V[e, h] · x + c[e, h]."""

    W: Float[np.ndarray, "experts dim"]
    b: Float[np.ndarray, " experts"]
    V: Float[np.ndarray, "experts width dim"]
    c: Float[np.ndarray, "experts width"]


def drawn(run: Run, stream: int) -> np.random.Generator:
    """A generator of its own for each stream."""
    return np.random.default_rng([run.seed, stream])


def layer(seed: int | np.random.Generator, experts: int, width: int, dim: int) -> Layer:
    """W, b, V, c in this order from `numpy.random.default_rng(seed)`."""
    r = np.random.default_rng(seed)
    return Layer(
        r.standard_normal((experts, dim)),
        r.standard_normal(experts),
        r.standard_normal((experts, width, dim)),
        r.standard_normal((experts, width)),
    )


def dense(V: np.ndarray, c: np.ndarray) -> Layer:
    """One expert with neurons V (H, d), c (H,), always chosen."""
    return Layer(np.zeros((1, V.shape[1])), np.zeros(1), V[None], c[None])


def dense_regions(V: np.ndarray, c: np.ndarray) -> int:
    """Regions of the arrangement of hyperplanes V x + c = 0."""
    return int(count_regions(*dense(V, c), 1))


def crofton(n_experts: int, k: int, width: int, length: float) -> float:
    """1 + (L/π)(kH + ρ): expected pieces of a Gaussian layer along a curve of length L."""
    switches = 0.0 if k == n_experts else expected_switches(n_experts, k, length)
    return 1 + switches + expected_kinks(k, width, length)


def problems_router(run: Run, stream: int, experts: int, dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Weights and biases, drawn."""
    r = drawn(run, stream)
    return r.standard_normal((experts, dim)), r.standard_normal(experts)
