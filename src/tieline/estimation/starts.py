"""Where a fit begins.

near_truth      θ* + r ξ, ξ standard normal: the papers' start, whose r they do not state
random_start    coordinates N(0, scale²)
kmeans_start    centres of clusters as router rows, a linear fit in each cluster as expert
lift            a truth of N* atoms as one of N > N* atoms, some split or switched off
radius_at       r, or r √(1000/n) for a start that shrinks as fast as the estimate itself

A start that shrinks like n^-1/2 makes every loss fall like n^-1/2, fitted or not.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from tieline.errors import require
from tieline.estimation.model import MoEModel
from tieline.estimation.parameters import MoEParameters

__all__ = ["kmeans_start", "lift", "near_truth", "radius_at", "random_start"]

REFERENCE = 1000
"""Sample size at which a shrinking start has its radius."""
OFF = -6.0
"""Bias under which a sigmoid gate is off, σ = .0025, and can still be moved."""


def radius_at(radius: float, n: int, *, shrink: bool = False) -> float:
    """R of the start at sample size n."""
    require(radius >= 0, f"a start radius is not negative, got {radius}")
    return radius * math.sqrt(REFERENCE / n) if shrink else radius


def near_truth(
    truth: MoEParameters, radius: float, seeds: list[int], starts: int = 1
) -> MoEParameters:
    """θ* + r ξ for each seed, (seeds, starts, ...).

    Args:
        truth: θ*, without leading axes.
        radius: r, the standard deviation of every coordinate.
        seeds: one for each data set.
        starts: S starts for each.
    """
    centre = truth.flatten()
    draws = [_normal((starts, len(centre)), seed) for seed in seeds]
    return truth.like(centre + radius * torch.stack(draws))


def random_start(
    model: MoEModel, seeds: list[int], starts: int = 1, scale: float = 1.0
) -> MoEParameters:
    """Every coordinate N(0, scale²), (seeds, starts, ...)."""
    draws = [_normal((starts, model.n_parameters), seed) for seed in seeds]
    return model.unflatten(scale * torch.stack(draws))


def kmeans_start(
    model: MoEModel,
    x: Float[Tensor, "n d"],
    y: Float[Tensor, " n"],
    seed: int = 0,
    starts: int = 1,
) -> MoEParameters:
    """One start for each draw of the first centres, (starts, ...).

    With κ = 1/(2 mean squared distance to the centre per coordinate), a linear router with rows
    2κc and bias -κ‖c‖² gives the posterior of spherical clusters; cosine rows are the centres;
    a matrix A begins at zero.
    """
    require(len(x) >= model.n_experts, f"{model.n_experts} experts need as many samples: {len(x)}")
    begun = [
        _from_clusters(model, x, y, _clusters(x, model.n_experts, seed + s)) for s in range(starts)
    ]
    parts = zip(*((one.router, one.bias, one.experts) for one in begun), strict=True)
    return MoEParameters(*(torch.stack(part) for part in parts))


def lift(model: MoEModel, truth: MoEParameters) -> MoEParameters:
    """The truth as a measure with the model's number of atoms, the last ones repeated.

    Under softmax, masses exp β_0 are shared equally and f does not change. Under the sigmoid that
    is so for σ(c) of an atom without gate, which papers put last; one with a gate cannot be split,
    and its copies are switched off (c = -6).
    """
    have, want = truth.n_experts, model.n_experts
    require(have <= want, f"{have} atoms do not fit into {want}")
    index = torch.cat([torch.arange(have), have - 1 - torch.arange(want - have) % have])
    shares = torch.bincount(index, minlength=have)[index].to(truth.bias)
    lifted = truth.take(index)
    if model.link == "softmax":
        return MoEParameters(lifted.router, lifted.bias - shares.log(), lifted.experts)
    gated, copy = (lifted.router != 0).any(-1), torch.arange(want) >= have
    split = torch.where(shares > 1, torch.logit(lifted.bias.sigmoid() / shares), lifted.bias)
    kept = torch.where(copy, OFF, lifted.bias)
    return MoEParameters(lifted.router, torch.where(gated, kept, split), lifted.experts)


def _normal(shape: tuple[int, ...], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def _clusters(x: Tensor, k: int, seed: int, rounds: int = 25) -> tuple[Tensor, Tensor]:
    """Centres and labels by Lloyd's rule from k samples drawn far apart (k-means++)."""
    generator = torch.Generator().manual_seed(seed)
    centres = x[torch.randint(len(x), (1,), generator=generator)]
    while len(centres) < k:
        far = torch.cdist(x, centres).amin(-1).square() + 1e-12
        centres = torch.cat([centres, x[torch.multinomial(far, 1, generator=generator)]])
    label = torch.cdist(x, centres).argmin(-1)
    for _ in range(rounds):
        sums = torch.zeros_like(centres).index_add_(0, label, x)
        count = torch.bincount(label, minlength=k).clamp_min(1)
        centres = torch.where((sums != 0).any(-1, keepdim=True), sums / count[:, None], centres)
        label = torch.cdist(x, centres).argmin(-1)
    return centres, label


def _from_clusters(
    model: MoEModel, x: Tensor, y: Tensor, found: tuple[Tensor, Tensor]
) -> MoEParameters:
    centres, label = found
    sharp = 1 / (2 * (x - centres[label]).square().mean().clamp_min(1e-12))
    rows, bias = (
        torch.zeros(len(centres), model.router_width).to(x),
        torch.zeros(len(centres)).to(x),
    )
    if model.gate in ("cosine", "perturbed"):
        rows[:] = centres
    elif model.gate != "partial":
        rows[:, -model.d :] = 2 * sharp * centres
        bias = -sharp * centres.square().sum(-1)
    experts = torch.stack([_line(x[label == i], y[label == i]) for i in range(len(centres))])
    if model.expert == "two_layer":
        experts = torch.cat([experts, torch.ones(len(centres), 1).to(x)], dim=-1)
    return MoEParameters(rows, bias - bias.mean(), experts)


def _line(x: Tensor, y: Tensor, ridge: float = 1e-3) -> Tensor:
    """(a, b) of y ≈ a·x + b by ridge regression, zeros without data."""
    design = torch.cat([x, torch.ones(len(x), 1).to(x)], dim=-1)
    gram = design.T @ design + ridge * (1 + len(x)) * torch.eye(design.shape[1]).to(x)
    return torch.linalg.solve(gram, design.T @ y)
