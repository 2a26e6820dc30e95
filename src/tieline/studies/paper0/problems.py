"""Small populations with known truth, on which paper 0 is tested.

GraphRouter      S(x) = x_1 + c x_1³ + sin(x_2) x_3 under N(0, I_3): a curved wall whose level
                 sets are graphs, so that surface integrals are ordinary ones
affine_scores    scores of a drawn affine router under N(0, I)
pair_mass        P(|z_i - z_j| <= w) of an affine router, exactly
mixture          a drawn mixture of bounded experts, affine router, as a sample
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.special import ndtr

from tieline.limits.risk import MoESample, evaluate
from tieline.ranking import stable_topk
from tieline.studies.claim import Run

__all__ = [
    "GraphRouter",
    "Pupil",
    "affine_scores",
    "density",
    "drawn_router",
    "mixture",
    "pair_mass",
    "pupil",
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
