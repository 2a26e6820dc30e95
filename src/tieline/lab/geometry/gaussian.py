"""Near-ties of independent standard normal scores, the reference for every measured router.

With t = z_[k], whose density is E!/((k-1)!(E-k)!) φ Φ̄^(k-1) Φ^(E-k), the E - k scores below t are
independent, and so are the k - 1 above it: every law of near-ties is one integral over t.

    gaussian_pair_density    f_pair(0) = E (E-1) / (2√π), density at 0 of min |z_i - z_j|
    gaussian_gap_mass        P(Δ <= w) = 1 - E[(Φ(t-w)/Φ(t))^(E-k)]
    gaussian_near_ties       E[K(ε)] - k = (E-k) E[1 - Φ(t-ε)/Φ(t)]
    gaussian_budget_epsilon  the ε at which that is `extra`
    gaussian_order_shares    P(order = 0), P(order = 1), ... at tolerance ε             Def. 4.2

All by the trapezoidal rule in the log domain, whose error falls faster than any power of the step
for an analytic integrand that vanishes at both ends: 12 digits or more.
`measure.boundary.gaussian_gap_density` is the density of the gap at zero.
"""

import math

import torch
from jaxtyping import Float
from scipy import optimize
from torch import Tensor
from torch.special import log_ndtr

from tieline.core.errors import require
from tieline.measure.boundary import Real

__all__ = [
    "gaussian_budget_epsilon",
    "gaussian_gap_mass",
    "gaussian_near_ties",
    "gaussian_order_shares",
    "gaussian_pair_density",
]

STEP = 1 / 128
"""Step of the grid in t: an eighth of what twelve digits need for E = 64."""


def gaussian_pair_density(n_experts: int) -> float:
    """Density at zero of the smallest |z_i - z_j|: one pair has 1/√π, and there are E (E-1) / 2.

    Divided by `gaussian_gap_density` with k = 1 it is 38 at E = 16 and 6514 at E = 256: BM_pair is
    a poor proxy of BM_top for many experts (Paper 0, sec. 3).
    """
    require(n_experts >= 2, f"a pair needs 2 experts, got E={n_experts}")
    return n_experts * (n_experts - 1) / (2 * math.sqrt(math.pi))


def gaussian_gap_mass(n_experts: int, k: int, width: Real) -> float:
    """BM_top(w) = P(z_[k] - z_[k+1] <= w), exactly."""
    _check_gaussian_ties(n_experts, k, width)
    t, weight = _threshold_law(n_experts, k)
    none_near = (n_experts - k) * (log_ndtr(t - width) - log_ndtr(t))
    return -(weight * torch.expm1(none_near)).sum().item()


def gaussian_near_ties(n_experts: int, k: int, epsilon: Real) -> float:
    """Mean number of experts beyond k above z_[k] - ε: E[K(ε)] - k (Def. 4.1)."""
    _check_gaussian_ties(n_experts, k, epsilon)
    t, weight = _threshold_law(n_experts, k)
    far = log_ndtr(t - epsilon) - log_ndtr(t)
    return -(n_experts - k) * (weight * torch.expm1(far)).sum().item()


def gaussian_budget_epsilon(n_experts: int, k: int, extra: Real = 0.5) -> float:
    """ε with E[K(ε)] = k + extra (Def. 4.3); E = 16, k = 2, extra = ½: .1515806538556.

    The mean count rises from 0 to E - k, so the root is bracketed and unique.
    """
    _check_gaussian_ties(n_experts, k)
    require(
        0 < extra < n_experts - k,
        f"need 0 < extra < E - k = {n_experts - k}, got {extra=}: no ε reaches it",
    )
    top = 1.0
    while gaussian_near_ties(n_experts, k, top) <= extra:
        top *= 2
    return optimize.root_scalar(
        lambda epsilon: gaussian_near_ties(n_experts, k, epsilon) - extra,
        bracket=(0.0, top),
        xtol=1e-15,
        rtol=1e-14,
    ).root


def gaussian_order_shares(
    n_experts: int, k: int, epsilon: Real, most: int | None = None
) -> Float[Tensor, " orders"]:
    """P(order = n) for n = 0, ..., most at tolerance ε (Def. 4.2); the last entry takes the rest.

    Given t the scores within ε below it are binomial (E-k, 1 - Φ(t-ε)/Φ(t)) and those within ε
    above it binomial (k-1, 1 - Φ̄(t+ε)/Φ̄(t)), independently; the order is their sum unless the
    first is zero. `most` is E - 1 by default.
    """
    _check_gaussian_ties(n_experts, k, epsilon)
    most = n_experts - 1 if most is None else most
    require(1 <= most < n_experts, f"need 1 <= most < E, got {most=}, E={n_experts}")
    t, weight = _threshold_law(n_experts, k)
    below = _binomial_law(n_experts - k, log_ndtr(t - epsilon) - log_ndtr(t))
    above = _binomial_law(k - 1, log_ndtr(-t - epsilon) - log_ndtr(-t))
    shares = torch.zeros(n_experts, dtype=torch.float64)
    for low in range(1, n_experts - k + 1):
        joint = (weight[:, None] * below[:, low : low + 1] * above).sum(dim=0)
        shares[low : low + k] += joint
    shares[0] = (weight * below[:, 0]).sum()
    return torch.cat([shares[:most], shares[most:].sum()[None]])


def _threshold_law(n_experts: int, k: int) -> tuple[Tensor, Tensor]:
    """Grid of t and the probability of z_[k] at each point, summing to one up to rounding."""
    t = torch.arange(-14 / STEP, 14 / STEP + 1, dtype=torch.float64) * STEP
    log_ways = math.lgamma(n_experts + 1) - math.lgamma(k) - math.lgamma(n_experts - k + 1)
    log_density = (
        log_ways
        - t.square() / 2
        - math.log(2 * math.pi) / 2
        + (k - 1) * log_ndtr(-t)
        + (n_experts - k) * log_ndtr(t)
    )
    weight = log_density.exp() * STEP
    return t, weight / weight.sum()  # lgamma is good to 1e-13 only at thousands of experts


def _binomial_law(n: int, log_far: Float[Tensor, " t"]) -> Float[Tensor, "t counts"]:
    """P(m of n scores are near) where one is far with probability exp(log_far)."""
    count = torch.arange(n + 1, dtype=torch.float64)
    log_binomial = math.lgamma(n + 1) - torch.lgamma(count + 1) - torch.lgamma(n - count + 1)
    log_near = torch.log(-torch.expm1(log_far))[:, None]
    near = torch.where(count == 0, 0.0, count * log_near)  # 0 · log 0 at ε = 0
    return (log_binomial + near + (n - count) * log_far[:, None]).exp()


def _check_gaussian_ties(n_experts: int, k: int, width: Real = 0.0) -> None:
    """Raise unless 1 <= k < E and the width is finite and not negative."""
    require(1 <= k < n_experts, f"need 1 <= k < E, got {k=}, E={n_experts}")
    require(width >= 0 and math.isfinite(width), f"a width is finite and >= 0, got {width}")
