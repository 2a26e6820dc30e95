"""Structured perturbations of a router's input: with a mean, any covariance, or an adversary.

Paper 1 has m = 0 and an invertible σ, Σ = σσᵀ, and leaves structured perturbations open. Results
depend on W Σ Wᵀ and W m only: power in directions that W maps to zero has no effect, and Σ may be
singular. Statements and proofs are in docs/boundary-geometry.md.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tieline.core.errors import ShapeError, require
from tieline.core.ranking import stable_topk, topk_mask
from tieline.core.statistics import Estimate, mean_estimate
from tieline.lab.geometry.exit_time import ExitBounds
from tieline.lab.geometry.ties import Scores, Weight, check_router
from tieline.measure.boundary import Real

__all__ = [
    "PerturbationLaw",
    "WorstStep",
    "drifting_exit",
    "flip_rate",
    "pair_noise",
    "perturbation_law",
    "step_bounds",
    "structured_bounds",
    "whitened_router",
    "worst_step",
]

LEAST_VARIANCE_SHARE = 1e-12
"""Directions with less than this share of the largest eigenvalue of Σ count as unperturbed."""


@dataclass(frozen=True, eq=False)
class PerturbationLaw:
    """Mean and covariance of the perturbations of a hidden state."""

    mean: Float[Tensor, " dim"]  # m, (D,)
    covariance: Float[Tensor, "dim dim"]  # Σ, symmetric and positive semidefinite, (D, D)

    def root(self) -> Float[Tensor, "dim rank"]:
        """Square root R of Σ, R Rᵀ = Σ, with a column for each perturbed direction."""
        values, vectors = torch.linalg.eigh(self.covariance)
        require(
            bool(values[0] >= -1e-9 * values[-1].abs()), "a covariance is positive semidefinite"
        )
        perturbed = values > LEAST_VARIANCE_SHARE * values[-1]
        return vectors[:, perturbed] * values[perturbed].sqrt()

    def isotropic(self) -> "PerturbationLaw":
        """Return the isotropic law of mean zero with the same power E‖δ‖²."""
        power = self.covariance.trace() + self.mean.square().sum()
        dim = len(self.mean)
        return PerturbationLaw(torch.zeros_like(self.mean), power / dim * torch.eye(dim).double())


class WorstStep(NamedTuple):
    """The nearest ties of some tokens in the metric of Σ."""

    length: Float[Tensor, " tokens"]  # ‖Σ^{-½} δ‖; infinite where no tie can be reached
    step: Float[Tensor, "tokens dim"]  # δ, (T, D); not a number where no tie can be reached
    pair: Int[Tensor, "tokens 2"]  # the experts that tie, one chosen and one not, (T, 2)


class _SwapPairs(NamedTuple):
    """Gap, deviation and drift of each pair of a chosen expert and one that is not."""

    gap: Float[Tensor, "tokens pairs"]
    deviation: Float[Tensor, "tokens pairs"]
    drift: Float[Tensor, "tokens pairs"]
    experts: Int[Tensor, "tokens pairs 2"]


def perturbation_law(steps: Float[Tensor, "samples dim"]) -> PerturbationLaw:
    """Mean and covariance of measured perturbations δ = x' - x, in float64."""
    require(
        steps.ndim == 2 and len(steps) >= 2,
        f"need two samples, got {tuple(steps.shape)}",
        ShapeError,
    )
    samples = steps.detach().double()
    mean = samples.mean(dim=0)
    return PerturbationLaw(mean, (samples - mean).T @ (samples - mean) / (len(samples) - 1))


def whitened_router(W: Weight, law: PerturbationLaw) -> Float[Tensor, "experts rank"]:
    """W Σ^½, the weights as seen by a standard normal perturbation."""
    require(W.shape[1] == len(law.mean), f"{W.shape[1]} and {len(law.mean)} dimensions", ShapeError)
    return W.detach().double() @ law.root()


def pair_noise(
    W: Weight, law: PerturbationLaw
) -> tuple[Float[Tensor, "experts experts"], Float[Tensor, "experts experts"]]:
    """Deviations s_ij = √((w_i - w_j)ᵀ Σ (w_i - w_j)) and drifts μ_ij = (w_i - w_j)·m."""
    rows, drifts = whitened_router(W, law), W.detach().double() @ law.mean
    # differences first: s² by products would cancel for experts that are nearly the same
    deviations = torch.stack([(rows - row).norm(dim=1) for row in rows])
    return deviations, drifts[:, None] - drifts


def drifting_exit(
    gap: Float[Tensor, "*#shape"],
    deviation: Float[Tensor, "*#shape"],
    drift: Float[Tensor, "*#shape"],
    t: Real | Float[Tensor, "*#shape"] = 1.0,
) -> Float[Tensor, "*all"]:
    """P(g + μ s + σ B_s <= 0 for some s <= t), the inverse Gaussian law; any σ >= 0.

        Φ(-(g + μt)/(σ√t)) + e^{-2μg/σ²} Φ(-(g - μt)/(σ√t))

    Without noise the wall is met if and only if g + μt <= 0.
    """
    g, s, mu, time = torch.broadcast_tensors(
        gap.double(), deviation.double(), drift.double(), torch.as_tensor(t, dtype=torch.float64)
    )
    require(bool((g > 0).all()), "a gap is > 0: the start must be in the cell")
    require(bool((s >= 0).all() and (time >= 0).all()), "deviations and times are >= 0")
    spread = s * time.sqrt()
    noisy = spread > 0
    positive_spread = torch.where(noisy, spread, 1.0)
    direct = torch.special.ndtr(-(g + mu * time) / positive_spread)
    # in logarithms: the exponential overflows where the normal tail underflows
    lifted = -2 * mu * g / torch.where(noisy, s, 1.0).square()
    reflected = (lifted + torch.special.log_ndtr(-(g - mu * time) / positive_spread)).exp()
    return torch.where(noisy, (direct + reflected).clamp(max=1), (g + mu * time <= 0).double())


def structured_bounds(
    scores: Scores, k: int, W: Weight, law: PerturbationLaw, times: Float[Tensor, " times"]
) -> ExitBounds:
    """Limits of P(the set of x + m t + Σ^½ B_t has changed by t), (T, times).

    The scores z = W x + b of the start have no ties; the law is per unit of time.
    """
    pairs = _swap_pairs(scores, k, W, law)
    hit = torch.stack([drifting_exit(*pairs[:3], t=t) for t in times.double().tolist()], dim=1)
    return ExitBounds(hit.amax(dim=-1), hit.sum(dim=-1).clamp(max=1))


def step_bounds(scores: Scores, k: int, W: Weight, law: PerturbationLaw) -> ExitBounds:
    """Limits of P(the set changes) for one step δ ~ N(m, Σ), (T,): likeliest pair, and all pairs.

    For m = 0 half of `structured_bounds` at t = 1, since a path that met a wall ends beyond it with
    probability ½.
    """
    gap, deviation, drift, _ = _swap_pairs(scores, k, W, law)
    noisy = deviation > 0
    change = torch.special.ndtr(-(gap + drift) / torch.where(noisy, deviation, 1.0))
    change = torch.where(noisy, change, (gap + drift < 0).double())
    return ExitBounds(change.amax(dim=-1), change.sum(dim=-1).clamp(max=1))


def flip_rate(
    scores: Scores, k: int, W: Weight, law: PerturbationLaw, draws: int = 16, seed: int = 0
) -> Estimate:
    """Mean P(the set changes) over tokens under one step N(m, Σ), with its standard error."""
    require(draws >= 1, f"need a draw, got {draws=}")
    clean = scores.detach().double()
    pull, push = whitened_router(W, law), W.detach().double() @ law.mean
    before, generator = topk_mask(clean, k), torch.Generator().manual_seed(seed)
    changed = torch.zeros(len(clean), dtype=torch.float64)
    for _ in range(draws):
        noise = torch.randn(len(clean), pull.shape[1], generator=generator, dtype=torch.float64)
        changed += (topk_mask(clean + noise @ pull.T + push, k) != before).any(dim=1)
    return mean_estimate(changed / draws)


def worst_step(scores: Scores, k: int, W: Weight, law: PerturbationLaw) -> WorstStep:
    """Smallest perturbation in the metric of Σ that makes a tie: ‖Σ^{-½}δ‖ = min (z_i - z_j)/s_ij.

    δ = -(z_i - z_j)/s_ij² Σ (w_i - w_j). No step of smaller length changes the chosen set; the mean
    of the law plays no part.
    """
    pairs = _swap_pairs(scores, k, W, law)
    reach = torch.where(pairs.deviation > 0, pairs.gap / pairs.deviation, torch.inf)
    length, index = reach.min(dim=1)
    pair = pairs.experts[torch.arange(len(index)), index]
    weight = W.detach().double()
    normal = (weight[pair[:, 0]] - weight[pair[:, 1]]) @ law.covariance.double()
    deviation = pairs.deviation.gather(1, index[:, None])
    step = -(length[:, None] / deviation) * normal
    return WorstStep(length, torch.where(length[:, None] < torch.inf, step, torch.nan), pair)


def _swap_pairs(scores: Tensor, k: int, W: Tensor, law: PerturbationLaw) -> _SwapPairs:
    """Return every pair of a chosen expert and one that is not."""
    check_router(W, None, k)
    require(scores.shape[1] == len(W), f"{scores.shape[1]} scores, {len(W)} experts", ShapeError)
    deviations, push = pair_noise(W, law)
    ranked = stable_topk(scores.detach().double(), len(W))
    first, second = ranked.indices[:, :k, None], ranked.indices[:, None, k:]
    gap = ranked.values[:, :k, None] - ranked.values[:, None, k:]
    experts = torch.stack(torch.broadcast_tensors(first, second), dim=-1)
    fields = (gap, deviations[first, second], push[first, second], experts)
    return _SwapPairs(*(values.flatten(1, 2) for values in fields))
