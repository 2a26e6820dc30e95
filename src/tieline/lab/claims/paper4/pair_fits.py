"""Least squares with one expert too many on the line: two gated experts where the truth has one.

    f(x) = Σ_{i=1,2} λ_i σ(a_i x² + b_i x + c_i) φ(α_i x + β_i),        |x| <= 1

A fit moves some of (a, b, c, α, β, λ) of both atoms inside a box and holds the others at the truth:
a parameter set of paper 4 is any compact set, and one with few free directions has fits that
converge. Sample sizes n are emulated by the noise level, as in `estimation.rate_plan`. A bound in
probability is one of every quantile, so that losses are kept for each repetition.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tieline.core.numerics import one_thread
from tieline.lab.claims.claim import ClaimRun
from tieline.lab.claims.evidence import Fits
from tieline.lab.estimation.model import ridge_function
from tieline.lab.estimation.solvers import LeastSquares, levenberg_marquardt
from tieline.lab.power_law import PowerLaw, fit_rate

COORDINATES = "abcαβλ"
"""Parameters of an atom, in the order of its row."""
SAMPLES, NOISE, BOX = 64, 0.1, 4.0
"""Inputs of a fit, standard deviation of one sample's noise, bound on every free parameter."""
SIZES = (10**8, 3 * 10**9, 10**11, 3 * 10**12, 10**14)
"""Emulated sample sizes."""


@dataclass(frozen=True, eq=False)
class AtomPair:
    """The regression function of two atoms near one, a `Regression`.

    Attributes:
        activation: φ.
        truth: (6,) the true atom, in the order of `COORDINATES`.
        free: the coordinates of both atoms that are fitted.
    """

    activation: str
    truth: Tensor
    free: str

    @property
    def columns(self) -> list[int]:
        """Places of the free coordinates in a row."""
        return [COORDINATES.index(name) for name in self.free]

    @property
    def size(self) -> int:
        """Number of fitted parameters."""
        return 2 * len(self.free)

    def atoms(self, theta: Tensor) -> Tensor:
        """Both atoms (B, 2, 6) of flat parameters (B, p)."""
        rows = self.truth.repeat(*theta.shape[:-1], 2, 1)
        rows[..., self.columns] = theta.unflatten(-1, (2, -1))
        return rows

    def start(self, **halves: float) -> Tensor:
        """Both atoms at the truth, except for coordinates that are given."""
        row = self.truth.clone()
        for name, value in halves.items():
            row[COORDINATES.index(name)] = value
        return row[self.columns].repeat(2)

    def value(self, theta: Tensor, x: Tensor) -> Tensor:
        """F (B, n) at inputs (B, n, 1)."""
        return self.value_and_jacobian(theta, x)[0]

    def value_and_jacobian(self, theta: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """F and its derivatives in the free coordinates."""
        a, b, c, alpha, beta, scale = self.atoms(theta)[:, None].unbind(-1)
        phi = ridge_function(self.activation)
        gate, u = (a * x**2 + b * x + c).sigmoid(), alpha * x + beta
        expert, slope = phi.value(u), scale * gate * phi.slope(u)
        bend = scale * gate * (1 - gate) * expert
        derivatives = (bend * x**2, bend * x, bend, slope * x, slope, gate * expert)
        columns = torch.stack([derivatives[i] for i in self.columns], dim=-1)
        return (scale * gate * expert).sum(-1), columns.flatten(-2)

    def target(self, x: Tensor) -> Tensor:
        """F* (B, n) at inputs (B, n, 1)."""
        a, b, c, alpha, beta, scale = self.truth
        gate = (a * x**2 + b * x + c).sigmoid()
        return (scale * gate * ridge_function(self.activation).value(alpha * x + beta))[..., 0]


def dense_atom(*, full: bool) -> Tensor:
    """A gated expert of scale 1 whose gate depends on x."""
    row = [1.0, 0.5, 0.3, 1.2, 0.4, 1.0] if full else [2.0, 0.0, -1.0, 1.2, 0.4, 1.0]
    return torch.tensor(row, dtype=torch.float64)


def sparse_atom(mass: float = 0.31) -> Tensor:
    """An expert under a constant gate σ(c) of this mass."""
    return torch.tensor([0, 0, math.log(mass / (1 - mass)), 1.3, 0.4, 1.0], dtype=torch.float64)


class PairStudy(NamedTuple):
    """Losses (sizes, repetitions) of fits with one expert too many."""

    sizes: tuple[int, ...]
    losses: Tensor
    distances: Tensor  # ‖f̂ - f*‖
    fits: Fits
    seed: int

    def law(self, quantile: float) -> PowerLaw:
        """Power law of a quantile of the loss, with its 95 % interval."""
        return fit_rate(self.sizes, list(self.losses), self.seed, quantile)

    @property
    def function_law(self) -> PowerLaw:
        """Power law of the median of ‖f̂ - f*‖."""
        return fit_rate(self.sizes, list(self.distances), self.seed, "median")


def fit_pairs(
    run: ClaimRun,
    model: AtomPair,
    start: Tensor,
    loss: Callable[[Tensor], Tensor],
    *,
    radius: float = 0.2,
    repetitions: int = 24,
) -> PairStudy:
    """Fit pairs of atoms at emulated sample sizes.

    Args:
        run: mode and seed.
        model: the pair.
        start: (p,) from where fits begin, at a distance `radius` in every coordinate.
        loss: of atoms (B, 2, 6).
        radius: standard deviation of the starts.
        repetitions: fits for each size in the fast mode; twice as many in the full one.
    """
    repetitions, starts = run.size(repetitions, 2 * repetitions), 3
    count, generator = len(SIZES) * repetitions, run.generator(77)
    draw = {"dtype": torch.float64, "generator": generator}
    x = 2 * torch.rand(count, SAMPLES, 1, **draw) - 1
    n = torch.tensor(SIZES, dtype=torch.float64).repeat_interleave(repetitions)
    noise = NOISE * (SAMPLES / n).sqrt()[:, None] * torch.randn(count, SAMPLES, **draw)
    begin = start + radius * torch.randn(count * starts, model.size, **draw)
    problem = LeastSquares(model, x, model.target(x) + noise, starts=starts)
    with one_thread():
        ends = levenberg_marquardt(problem, begin, iterations=1500, box=BOX)
    best = ends.loss.unflatten(0, (-1, starts)).argmin(1) + starts * torch.arange(count)
    theta, answered = ends.theta[best], int(ends.answered[best].sum())
    grid = torch.linspace(-1, 1, 201, dtype=torch.float64)[None, :, None].expand(count, -1, -1)
    distance = (model.value(theta, grid) - model.target(grid)).square().mean(1).sqrt()
    shape = (len(SIZES), repetitions)
    losses = loss(model.atoms(theta)).reshape(shape)
    return PairStudy(SIZES, losses, distance.reshape(shape), Fits(answered, count), run.seed)


def atom_pair_loss(truth: Tensor) -> Callable[[Tensor], Tensor]:
    """L_1 or L_4 of two atoms in the cell of one: masses, and squares of all differences."""

    def loss(atoms: Tensor) -> Tensor:
        mass = atoms[..., 2].sigmoid().sum(-1) - truth[2].sigmoid()
        rest = (atoms - truth)[..., [0, 1, 3, 4, 5]].square().sum((-1, -2))
        return mass.abs() + rest

    return loss


def best_measure_loss(truth: Tensor) -> Callable[[Tensor], Tensor]:
    """L_3 or L_5 of two atoms to the nearest measure of f* with two atoms λφ.

    These are two atoms under the true gate whose scales add up to λ*, and the true atom beside one
    of scale 0 under any gate.
    """

    def loss(atoms: Tensor) -> Tensor:
        change = atoms - truth
        apart = change[..., :3].abs().sum(-1) + change[..., 3:5].norm(dim=-1)
        shared = apart.sum(-1) + (atoms[..., 5].sum(-1) - truth[5]).abs()
        alone = [
            apart[..., i] + change[..., i, 5].abs() + atoms[..., 1 - i, 5].abs() for i in (0, 1)
        ]
        return torch.stack((shared, *alone)).amin(0)

    return loss


def quantile_text(study: PairStudy, quantiles: Sequence[float]) -> str:
    """Slopes of the quantiles, with intervals."""
    slopes = ", ".join(f"{study.law(q)} at {q:g}" for q in quantiles)
    return f"{slopes}; f {study.function_law}"


def split_atoms(truth: Tensor, size: float, first: float = 0.6) -> Tensor:
    """Two atoms (2, 6) under gates s* + δ and s* - (λ₁/λ₂)δ x², with scales λ₁ + λ₂ = λ*."""
    pair = truth.repeat(2, 1)
    scale = float(truth[5])
    pair[0, 5], pair[1, 5] = first * scale, (1 - first) * scale
    pair[0, 0] += size
    pair[1, 0] -= first / (1 - first) * size
    return pair


def repaired_distance(activation: str, truth: Tensor, pair: Tensor) -> tuple[float, float]:
    """‖f - f*‖ of a pair of atoms, and what of it no first-order change of both atoms undoes."""
    model = AtomPair(activation, truth, COORDINATES)
    grid = torch.linspace(-1, 1, 401, dtype=torch.float64)[None, :, None]
    gap = (model.value(pair.flatten()[None], grid) - model.target(grid))[0].numpy()
    tangent = model.value_and_jacobian(truth.repeat(2)[None], grid)[1][0].numpy()
    tangent = tangent / np.linalg.norm(tangent, axis=0)
    left, values, _ = np.linalg.svd(tangent, full_matrices=False)
    basis = left[:, values > 1e-9]
    rest = gap - basis @ (basis.T @ gap)
    return tuple(float(np.sqrt(np.mean(v**2))) for v in (gap, rest))  # type: ignore[return-value]
