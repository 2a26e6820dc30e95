"""Small problems with known truth for the claims of papers 0, 1 and 3 (in NumPy)."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.special import ndtr

from tieline.core.ranking import stable_topk
from tieline.lab.claims.claim import ClaimRun
from tieline.lab.geometry.exit_time import TopKCell, top_k_cell
from tieline.lab.limits.risk import MoESample, evaluate
from tieline.lab.limits.two_cells import normal_density
from tieline.lab.tropical import count_regions

NODES = 64
"""Gauss-Hermite nodes per axis; fifteen digits for the curved wall."""


class GraphRouter:
    """S = x_1 + c x_1³ + sin(x_2) x_3, strictly increasing in x_1: ∂S/∂x_1 = 1 + 3c x_1² >= 1.

    On the level set S = t the surface integral of p/‖∇S‖ is the integral over y = (x_2, x_3) of
    p/|∂S/∂x_1|, for dH = ‖∇S‖/|∂S/∂x_1| dy.
    """

    def __init__(self, curvature: float = 0.3) -> None:
        self.curvature = curvature

    def __call__(self, x: Tensor) -> Tensor:
        """Scores S of inputs (n, 3)."""
        first = x[:, 0]
        return first + self.curvature * first**3 + torch.sin(x[:, 1]) * x[:, 2]

    def gradient(self, x: Tensor) -> Tensor:
        """Gradients ∇S at inputs (n, 3)."""
        first = 1 + 3 * self.curvature * x[:, 0].square()
        return torch.stack([first, torch.cos(x[:, 1]) * x[:, 2], torch.sin(x[:, 1])], dim=1)

    def height(self, y: Tensor, level: float) -> Tensor:
        """Coordinate x_1 of the level set above y, by the closed root of the cubic."""
        c, q = self.curvature, level - torch.sin(y[:, 0]) * y[:, 1]
        return 2 / math.sqrt(3 * c) * torch.sinh(torch.asinh(1.5 * q * math.sqrt(3 * c)) / 3)

    def on_surface(self, y: Tensor, level: float) -> Tensor:
        """Integrand φ(x_1)/|∂S/∂x_1| above y, whose mean over y ~ N(0, I_2) is F(t) of eq. 3.8."""
        x = self.height(y, level)
        return normal_density(x) / (1 + 3 * self.curvature * x.square())

    def profile(self, level: float) -> float:
        """Surface integral F(t), by quadrature."""
        y, weight = normal_grid()
        return (weight * self.on_surface(y, level)).sum().item()

    def mass(self, width: float) -> float:
        """Boundary mass P(|S| <= w), by quadrature."""
        y, weight = normal_grid()
        inside = ndtr(self.height(y, width)) - ndtr(self.height(y, -width))
        return (weight * inside).sum().item()


def normal_grid() -> tuple[Tensor, Tensor]:
    """Quadrature nodes (n, 2) and weights of N(0, I_2)."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(NODES)
    x, w = torch.from_numpy(nodes), torch.from_numpy(weights / weights.sum())
    return torch.cartesian_prod(x, x), torch.outer(w, w).flatten()


def drawn_router(run: ClaimRun, n_experts: int, dim: int) -> tuple[Tensor, Tensor]:
    """Draw weight and bias of an affine router."""
    weight = run.normal(n_experts, dim, stream=1)
    return weight, 0.5 * run.normal(n_experts, stream=2)


def gaussian_affine_scores(run: ClaimRun, n: int, weight: Tensor, bias: Tensor) -> Tensor:
    """Return the scores of inputs drawn from N(0, I)."""
    return run.normal(n, weight.shape[1], stream=3) @ weight.T + bias


def pair_walls(weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Normals w_i - w_j and offsets b_i - b_j of the walls z_i = z_j, for all pairs i < j."""
    i, j = torch.triu_indices(len(weight), len(weight), 1)
    return weight[i] - weight[j], bias[i] - bias[j]


def pair_mass(weight: Tensor, bias: Tensor, width: float) -> tuple[Tensor, Tensor]:
    """P(|z_i - z_j| <= w) and the density of z_i - z_j at 0, for all pairs i < j."""
    normals, shift = pair_walls(weight, bias)
    spread = normals.norm(dim=1)
    inside = ndtr((width - shift) / spread) - ndtr((-width - shift) / spread)
    return inside, normal_density(shift / spread) / spread


def bounded_mixture(run: ClaimRun, n: int, n_experts: int = 4, dim: int = 3) -> MoESample:
    """Draw a mixture of experts 0.9 tanh(u·x) and a target, |Y| <= 1, that jumps at x_1 = 0."""
    weight, bias = drawn_router(run, n_experts, dim)
    slopes = run.normal(n_experts, dim, stream=4)
    inputs = run.normal(n, dim, stream=5)
    return evaluate(
        lambda x: x @ weight.T + bias,
        lambda x: 0.9 * torch.tanh(x @ slopes.T),
        lambda x: torch.where(x[:, 0] > 0, 0.8, -0.4) * torch.cos(x[:, 1]),
        inputs,
    )


@dataclass(frozen=True, eq=False)
class Pupil:
    """A student of a teacher with bounded experts, evaluated on one sample.

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


def drawn_pupil(run: ClaimRun, n: int, distance: float, n_experts: int = 3, dim: int = 3) -> Pupil:
    """Draw a student at a distance from its teacher in all parameters.

    Experts are 0.9 tanh(u·x + c).
    """
    inputs = run.normal(n, dim, stream=11)
    columns = torch.cat([inputs, torch.ones(n, 1, dtype=torch.float64)], dim=1)
    walls, rules = (run.normal(n_experts, dim + 1, stream=s) for s in (12, 13))
    rules = 0.15 * rules  # experts that are nearly constant and well apart
    rules[:, -1] += torch.linspace(-1.5, 1.5, n_experts, dtype=torch.float64)
    shift = [distance * run.normal(n_experts, dim + 1, stream=s) for s in (14, 15)]
    theirs, scores = 0.9 * torch.tanh(columns @ rules.T), columns @ walls.T
    labels = stable_topk(scores, 1).indices.squeeze(1)
    target = theirs.gather(1, labels[:, None]).squeeze(1)
    ours = 0.9 * torch.tanh(columns @ (rules + shift[1]).T)
    sample = MoESample(columns @ (walls + shift[0]).T, ours, target)
    return Pupil(sample, labels, scores, theirs)


def router_from_stream(
    run: ClaimRun, n_experts: int, dim: int, stream: int = 1
) -> tuple[Tensor, Tensor]:
    """Draw weight (E, D) and bias (E,) from the generators of a stream."""
    weight = run.normal(n_experts, dim, stream=1000 + stream)
    return weight, 0.5 * run.normal(n_experts, stream=2000 + stream)


def one_wall_cell() -> TopKCell:
    """The cell of two experts at distance 1 from their wall, in units of noise."""
    weight = torch.tensor([[1.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
    return top_k_cell(torch.tensor([1.0, 0.0], dtype=torch.float64), 1, weight)


def orthonormal_rows(n_experts: int, dim: int) -> Tensor:
    """The first E rows of the identity of size D."""
    return torch.eye(n_experts, dim, dtype=torch.float64)


class Layer(NamedTuple):
    """Router W x + b and neurons V[e, h] · x + c[e, h]."""

    W: Float[np.ndarray, "experts dim"]
    b: Float[np.ndarray, " experts"]
    V: Float[np.ndarray, "experts hidden dim"]
    c: Float[np.ndarray, "experts hidden"]


def numpy_generator(run: ClaimRun, stream: int) -> np.random.Generator:
    """Return the NumPy generator of a stream."""
    return np.random.default_rng([run.seed, stream])


def numpy_router(
    run: ClaimRun, stream: int, n_experts: int, dim: int
) -> tuple[np.ndarray, np.ndarray]:
    """Draw weights and biases of a router as NumPy arrays."""
    r = numpy_generator(run, stream)
    return r.standard_normal((n_experts, dim)), r.standard_normal(n_experts)


def drawn_layer(seed: int | np.random.Generator, n_experts: int, d_hidden: int, dim: int) -> Layer:
    """Draw W, b, V, c in this order from `numpy.random.default_rng(seed)`."""
    r = np.random.default_rng(seed)
    return Layer(
        r.standard_normal((n_experts, dim)),
        r.standard_normal(n_experts),
        r.standard_normal((n_experts, d_hidden, dim)),
        r.standard_normal((n_experts, d_hidden)),
    )


def dense_layer(V: np.ndarray, c: np.ndarray) -> Layer:
    """Layer of one expert, always chosen, with neurons V (H, d), c (H,)."""
    return Layer(np.zeros((1, V.shape[1])), np.zeros(1), V[None], c[None])


def dense_regions(V: np.ndarray, c: np.ndarray) -> int:
    """Count regions of the arrangement of hyperplanes V x + c = 0."""
    return int(count_regions(*dense_layer(V, c), 1))


def bisect_segments(
    on_low_side: Callable[[np.ndarray], np.ndarray],
    low: np.ndarray,
    high: np.ndarray,
    halvings: int = 60,
) -> np.ndarray:
    """Bisect all segments from `low` to `high` at once for the point where the side changes."""
    for _ in range(halvings):
        middle = (low + high) / 2
        same = on_low_side(middle)
        low, high = np.where(same, middle, low), np.where(same, high, middle)
    return low
