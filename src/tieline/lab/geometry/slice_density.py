"""Slice densities: which share of a flat of equal scores is a tie across the threshold.

On S_J the other experts lie above or below the tied ones; a point is an order-r tie where
max(0, k-r) <= p <= k-1 of them are above. α_{J,r} is the share of such directions in S_J.

    slice_density           orthonormal rows, exact by quadrature
    sampled_slice_density   any router, by sampling directions
    slice_bounds            the paper's bounds                                   Paper 1, Lemma A.16
    tube_ratio              U_n / U_m for Euclidean tubes                        Paper 1, Thm 4.4
    band_ratio              U_n / U_m for ℓ∞ bands, with the missing factor      Paper 1, Thm 4.7

The paper's upper bound α <= ½ holds for one choice of experts above, not for their union: with
E = 4, k = 2, r = 2 every point of S_J is a tie and α = 1.
"""

import itertools
import math
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from scipy import optimize, special
from torch import Tensor
from torch.special import log_ndtr

from tieline.core.errors import require
from tieline.core.statistics import Estimate, share_estimate
from tieline.lab.geometry.ties import check_router, tie_flat
from tieline.lab.geometry.tubes import tube_leading_term
from tieline.measure.boundary import Real

__all__ = [
    "OrderRatio",
    "SliceBounds",
    "band_ratio",
    "sampled_slice_density",
    "slice_bounds",
    "slice_density",
    "tube_ratio",
]

MOST_CHOICES = 4096
"""Largest number of choices of experts above that `slice_bounds` tries."""


@dataclass(frozen=True)
class SliceBounds:
    """Limits of α_{J,r} (Paper 1, Lemma A.16 and Thm A.18).

    Attributes:
        lower: max over choices of ½ I_{4s²(1-s²)}((d-1)/2, ½), d = D - r.
        paper_upper: ½, as in the paper's Thm 4.4.
        upper: 1, the bound that holds (the paper's own Thm A.18).
        choices: number of choices of experts above that are admissible.
    """

    lower: float
    paper_upper: float
    upper: float
    choices: int


@dataclass(frozen=True)
class OrderRatio:
    """Volume near order-n ties over volume near order-m ties, to first order in ε/R.

    Attributes:
        paper: by the paper's formula.
        value: corrected; the same for Euclidean tubes, (n+1)/(m+1) times as much for ℓ∞ bands.
    """

    paper: Real
    value: float


def slice_density(n_experts: int, k: int, order: int) -> float:
    """α = Σ_j C(m,j) E[Φ̄(t)^j Φ(t)^(m-j)], m = E-r-1, t ~ N(0, 1/(r+1)), max(0,k-r) <= j <= k-1.

    For orthonormal rows of W: the scores of a normal direction are independent, and conditioned on
    r + 1 of them being equal their level t has variance 1/(r+1). Trapezoidal rule; 12 digits.
    """
    require(1 <= k < n_experts, f"need 1 <= k < E, got {k=}, E={n_experts}")
    require(1 <= order < n_experts, f"need 1 <= order < E, got {order=}, E={n_experts}")
    others = n_experts - order - 1
    step = 1 / (64 * math.sqrt(order + 1))
    t = torch.arange(-64 * 12, 64 * 12 + 1, dtype=torch.float64) * step
    log_weight = -(order + 1) * t.square() / 2 + math.log(
        step * math.sqrt((order + 1) / 2 / math.pi)
    )
    total = torch.zeros_like(t)
    for above in _admissible(others, k, order):
        log_choices = (
            math.lgamma(others + 1) - math.lgamma(above + 1) - math.lgamma(others - above + 1)
        )
        law = log_choices + above * log_ndtr(-t) + (others - above) * log_ndtr(t)
        total += (log_weight + law).exp()
    return total.sum().item()


def sampled_slice_density(
    W: Float[Tensor, "experts dim"],
    k: int,
    experts: tuple[int, ...],
    samples: int,
    seed: int = 0,
) -> Estimate:
    """α_{J,r} of any router by `samples` directions of S_J, with its standard error.

    A bias moves S_J and the walls on it but not the share of directions.
    """
    weight, _ = check_router(W, None, k)
    flat = tie_flat(weight, None, experts)
    require(samples >= 1, f"need a sample or more, got {samples=}")
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, weight.shape[1], generator=generator, dtype=torch.float64)
    x -= (x @ flat.basis) @ flat.basis.T
    rest = torch.tensor([e for e in range(len(weight)) if e not in flat.experts], dtype=torch.long)
    rise = x @ (weight[rest] - weight[flat.experts[0]]).T
    above, order = (rise > 0).sum(dim=1), len(flat.experts) - 1
    hits = (above >= k - order) & (above <= k - 1)
    return share_estimate(hits)


def slice_bounds(W: Float[Tensor, "experts dim"], k: int, experts: tuple[int, ...]) -> SliceBounds:
    """The paper's lower bound of α_{J,r}, its upper bound ½, and the upper bound that holds.

    For a choice of experts above, ρ = max over unit û of the smallest signed product with the
    projected normals, L the longest normal, s = min(1/√2, ρ/4L). The best û is the direction of the
    shortest point of the convex hull of the normals, found by non-negative least squares.
    """
    weight, _ = check_router(W, None, k)
    flat = tie_flat(weight, None, experts)
    order, dim = len(flat.experts) - 1, weight.shape[1]
    rest = [e for e in range(len(weight)) if e not in flat.experts]
    if not rest:
        return SliceBounds(1.0, 0.5, 1.0, 1)
    raw = weight[rest] - weight[flat.experts[0]]
    normals = (raw - (raw @ flat.basis) @ flat.basis.T).numpy()
    longest = raw.norm(dim=1).max().item()
    counts = list(_admissible(len(rest), k, order))
    choices = sum(math.comb(len(rest), above) for above in counts)
    require(choices <= MOST_CHOICES, f"{choices} choices of experts above, {MOST_CHOICES} at most")
    best = 0.0
    for above in counts:
        for chosen in itertools.combinations(range(len(rest)), above):
            sign = np.where(np.isin(np.arange(len(rest)), chosen), 1.0, -1.0)
            best = max(best, _cap_bound(sign[:, None] * normals, longest, dim - order))
    return SliceBounds(best, 0.5, 1.0, choices)


def tube_ratio(
    n_experts: int, k: int, *, dim: int, orders: tuple[int, int], epsilon: Real, radius: Real
) -> OrderRatio:
    """U_n / U_m = Σα_n / Σα_m · ω_{D-n} ω_n / (ω_{D-m} ω_m) · (ε/R)^(n-m) (Thm 4.4).

    For orthonormal rows, `orders` = (n, m), to first order in ε/R.
    """
    volumes = [
        math.comb(n_experts, order + 1)
        * slice_density(n_experts, k, order)
        * tube_leading_term(dim=dim, codim=order, epsilon=epsilon, radius=radius)
        for order in orders
    ]
    require(volumes[1] > 0, f"need epsilon > 0, got {epsilon=}")
    return OrderRatio(volumes[0] / volumes[1], volumes[0] / volumes[1])


def band_ratio(
    n_experts: int, k: int, *, dim: int, orders: tuple[int, int], epsilon: Real, radius: Real
) -> OrderRatio:
    """U_n / U_m = Σκα_n / Σκα_m · ω_{D-n} / ω_{D-m} · (2ε/R)^(n-m) for bands of Def. 4.6 (Thm 4.7).

    Orthonormal rows, for which det(A_J A_Jᵀ) = r + 1. The paper takes {v : max|v_j| <= ε} of the r
    differences for the fibre, with volume (2ε)^r; moving all r + 1 scores by at most ε reaches
    {range of (0, v) <= 2ε}, with volume (r+1)(2ε)^r. So the true ratio has a factor (n+1)/(m+1).
    """
    require(
        epsilon > 0 and radius > 0, f"need epsilon > 0 and radius > 0, got {epsilon=}, {radius=}"
    )
    paper = []
    for order in orders:
        require(1 <= order <= dim, f"need 1 <= order <= dim, got {order=}, {dim=}")
        log_ball = (dim - order) / 2 * math.log(math.pi) - math.lgamma((dim - order) / 2 + 1)
        fibre = order * math.log(2 * epsilon / radius) - math.log(order + 1) / 2
        sets = math.comb(n_experts, order + 1) * slice_density(n_experts, k, order)
        paper.append(math.log(sets) + log_ball + fibre)
    ratio = math.exp(paper[0] - paper[1])
    return OrderRatio(ratio, ratio * (orders[0] + 1) / (orders[1] + 1))


def _admissible(others: int, k: int, order: int) -> range:
    """Numbers of experts above the tied ones with which the tie crosses the threshold."""
    return range(max(0, k - order), min(k - 1, others) + 1)


def _cap_bound(normals: np.ndarray, longest: Real, dim: int) -> float:
    """½ I_{4s²(1-s²)}((d-1)/2, ½) of one choice; 0 if no direction satisfies all its signs."""
    system = np.vstack([normals.T, np.ones(len(normals))])
    target = np.zeros(len(system))
    target[-1] = 1.0
    weights, _ = optimize.nnls(system, target)
    shortest = normals.T @ weights / weights.sum()
    rho = float(np.linalg.norm(shortest))
    s = min(1 / math.sqrt(2), rho / (4 * longest))
    if dim < 2:
        return 0.5 if rho > 0 else 0.0
    return 0.5 * float(special.betainc((dim - 1) / 2, 0.5, min(1.0, 4 * s * s * (1 - s * s))))
