"""Share of tokens near a tie, from the scores of all experts.

    top_gap             Δ = z_[k] - z_[k+1]                             Def. 1.2
    pair_gap            Δ_min = min_{i != j} |z_i - z_j|                Def. 1.3
    linf_distance       inf over y ∈ Γ^(n) of max_i |z_i(x) - z_i(y)|   Paper 1, Def. 4.6
    boundary_mass_top   BM_top(w) of scores, with standard error        Def. 2.1
    boundary_mass_pair  BM_pair(w) = P(Δ_min <= w)                      Def. 2.2
    ambiguity_mass      BM(τ; ε) = P(max softmax(z / τ) <= 1 - ε)       Def. 2.3

BM_pair bounds BM_top from above but loosely for many experts: their ratio is about 38 at E = 16
and 6514 at E = 256 for independent normal scores.

Two scores become equal when each moves by half of their difference, so the distance of Def. 4.6 at
order 1 is *half* of the gap. Tieline calls a token near a tie where the gap itself is below ε.

The reference for every measured router has independent standard normal scores.
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
from dataclasses import dataclass

import torch
from jaxtyping import Float
from scipy import optimize
from torch import Tensor
from torch.special import log_ndtr

from tieline.core.errors import ShapeError, require
from tieline.core.ranking import gap, ranked_scores
from tieline.core.statistics import empirical_cdf
from tieline.measure.boundary import Gaps, Real, Scores

__all__ = [
    "Mass",
    "ambiguity_mass",
    "boundary_mass_pair",
    "boundary_mass_top",
    "gaussian_budget_epsilon",
    "gaussian_gap_mass",
    "gaussian_near_ties",
    "gaussian_order_shares",
    "gaussian_pair_density",
    "linf_distance",
    "pair_gap",
    "top_gap",
]


@dataclass(frozen=True, eq=False)
class Mass:
    """A share of tokens with the standard error √(p (1-p) / T) of independent ones.

    Has the shape of the requested widths; `float(mass)` is the value for a single width.
    """

    value: Float[Tensor, "*grid"]  # share of tokens, in float64
    # its standard error; 0 at shares 0 and 1, where `MassProfile` has a proper band
    stderr: Float[Tensor, "*grid"]

    def __float__(self) -> float:
        return self.value.item()


def top_gap(scores: Scores, k: int = 1) -> Gaps:
    """Gap Δ = z_[k] - z_[k+1] of each token, in float64 (Def. 1.2).

    Zero on a tie. Requires 1 <= k < E.
    """
    experts = _finite_pairwise_scores(scores).shape[1]
    require(1 <= k < experts, f"a gap needs 1 <= k < E, got {k=}, E={experts}")
    return gap(scores, k)


def pair_gap(scores: Scores) -> Gaps:
    """Smallest |z_i - z_j| over all pairs of experts, Δ_min of each token (Def. 1.3)."""
    return (
        -ranked_scores(_finite_pairwise_scores(scores), scores.shape[1]).diff(dim=-1).amax(dim=-1)
    )


def linf_distance(scores: Scores, k: int, order: int = 1) -> Float[Tensor, " tokens"]:
    """ℓ∞ distance of the scores from an order-n tie: ½ min_a (z_[a] - z_[a+n]) (Paper 1, Def. 4.6).

    Over windows of ranks a..a+n that contain k and k + 1, whose n + 1 scores meet in the middle.
    Exact for W of full row rank (E <= D), where every vector of scores can be reached; a lower
    bound otherwise.

    Args:
        scores: (T, E).
        k: number of experts chosen, 1 <= k < E.
        order: n, 1 <= n < E.
    """
    experts = scores.shape[1]
    require(1 <= k < experts, f"a tie needs 1 <= k < E, got {k=}, E={experts}")
    require(1 <= order < experts, f"need 1 <= order < E, got {order=}, E={experts}")
    ranked = ranked_scores(scores, experts)
    first, last = max(0, k - order), min(k - 1, experts - 1 - order)
    window = ranked[:, first : last + 1] - ranked[:, first + order : last + order + 1]
    return window.amin(dim=1) / 2


def boundary_mass_top(scores: Scores, k: int, width: Real | Float[Tensor, "*grid"]) -> Mass:
    """BM_top(w) = P(Δ <= w) with its standard error (Def. 2.1; Paper 0, sec. 2).

    Args:
        scores: (T, E) scores of all experts.
        k: number of experts chosen.
        width: w >= 0, one or many; a gap equal to a width is counted.
    """
    return _mass_of_gaps(top_gap(scores, k), width)


def boundary_mass_pair(scores: Scores, width: Real | Float[Tensor, "*grid"]) -> Mass:
    """BM_pair(w) = P(Δ_min <= w), at least BM_top(w) for every k (Def. 2.2).

    Args:
        scores: the scores of all experts; a truncated list has other neighbours.
        width: w >= 0, one or many.
    """
    return _mass_of_gaps(pair_gap(scores), width)


def ambiguity_mass(scores: Scores, epsilon: Real, tau: Real = 1.0) -> Mass:
    """Share BM(τ; ε) of tokens whose largest softmax weight is at most 1 - ε (Def. 2.3).

    Compared as log-odds, log Σ_{i > 1} exp((z_[i] - z_[1]) / τ) >= logit ε, since 1 - ε rounds to 1
    when ε is small. The sandwich of Paper 0, Remark 5.4, with Δ at k = 1,

        BM_top(τ κ) <= BM(τ; ε) <= BM_top(τ (κ + log(E - 1))),  κ = log((1 - ε) / ε),

    holds with equality at E = 2.
    """
    require(
        0 < epsilon < 1 and tau > 0, f"need 0 < epsilon < 1 and tau > 0, got {epsilon=}, {tau=}"
    )
    ranked = ranked_scores(_finite_pairwise_scores(scores), scores.shape[1])
    log_odds = ((ranked[:, 1:] - ranked[:, :1]) / tau).logsumexp(dim=-1)
    share = (log_odds >= math.log(epsilon) - math.log1p(-epsilon)).double().mean()
    return _binomial_mass(share, len(scores))


def _mass_of_gaps(gaps: Gaps, width: Real | Float[Tensor, "*grid"]) -> Mass:
    """Share of the gaps that are at most `width`, with its standard error."""
    widths = torch.as_tensor(width, dtype=torch.float64)
    require(bool((widths >= 0).all()), f"a width is >= 0, got {width}")
    return _binomial_mass(empirical_cdf(gaps, widths), gaps.numel())


def _binomial_mass(share: Float[Tensor, "*grid"], tokens: int) -> Mass:
    """Attach the standard error √(p (1 - p) / tokens) to a share."""
    return Mass(share, (share * (1 - share) / tokens).sqrt())


def _finite_pairwise_scores(scores: Scores) -> Scores:
    """Return the scores; raise unless they are finite, of at least one token and two experts."""
    tokens, experts = scores.shape
    require(
        tokens > 0 and experts > 1,
        f"need a token and 2 experts or more, got {tokens} tokens of {experts} experts",
        ShapeError,
    )
    require(
        bool(torch.isfinite(scores).all()),
        "scores must be finite: leave masked experts out before comparing all pairs",
    )
    return scores


STEP = 1 / 128
"""Step of the grid in t: an eighth of what twelve digits need for E = 64."""


def gaussian_pair_density(n_experts: int) -> float:
    """Density at zero of the smallest |z_i - z_j|: E (E-1) / 2 pairs of density 1/√π.

    Divided by `gaussian_gap_density` with k = 1 it is 38 at E = 16 and 6514 at E = 256: BM_pair is
    a poor proxy of BM_top for many experts (Paper 0, sec. 3).
    """
    require(n_experts >= 2, f"a pair needs 2 experts, got E={n_experts}")
    return n_experts * (n_experts - 1) / (2 * math.sqrt(math.pi))


def gaussian_gap_mass(n_experts: int, k: int, width: Real) -> float:
    """Exact P(z_[k] - z_[k+1] <= w) for independent standard normal scores."""
    _check_k_and_width(n_experts, k, width)
    t, weight = _threshold_distribution(n_experts, k)
    none_near = (n_experts - k) * (log_ndtr(t - width) - log_ndtr(t))
    return -(weight * torch.expm1(none_near)).sum().item()


def gaussian_near_ties(n_experts: int, k: int, epsilon: Real) -> float:
    """Mean number of unchosen experts within ε of the threshold: E[K(ε)] - k (Def. 4.1)."""
    _check_k_and_width(n_experts, k, epsilon)
    t, weight = _threshold_distribution(n_experts, k)
    far = log_ndtr(t - epsilon) - log_ndtr(t)
    return -(n_experts - k) * (weight * torch.expm1(far)).sum().item()


def gaussian_budget_epsilon(n_experts: int, k: int, extra: Real = 0.5) -> float:
    """Band width ε with E[K(ε)] = k + extra (Def. 4.3); E = 16, k = 2, ½: .1515806538556.

    The mean count rises from 0 to E - k, so the root is bracketed and unique.
    """
    _check_k_and_width(n_experts, k)
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
    """P(order = n) for n = 0, ..., most at tolerance ε (Def. 4.2); the last entry is P(>= most).

    Given t the scores within ε below it are binomial (E-k, 1 - Φ(t-ε)/Φ(t)) and those within ε
    above it binomial (k-1, 1 - Φ̄(t+ε)/Φ̄(t)), independently; the order is their sum unless the
    first is zero. `most` is E - 1 by default.
    """
    _check_k_and_width(n_experts, k, epsilon)
    most = n_experts - 1 if most is None else most
    require(1 <= most < n_experts, f"need 1 <= most < E, got {most=}, E={n_experts}")
    t, weight = _threshold_distribution(n_experts, k)
    below = _near_count_distribution(n_experts - k, log_ndtr(t - epsilon) - log_ndtr(t))
    above = _near_count_distribution(k - 1, log_ndtr(-t - epsilon) - log_ndtr(-t))
    shares = torch.zeros(n_experts, dtype=torch.float64)
    for low in range(1, n_experts - k + 1):
        joint = (weight[:, None] * below[:, low : low + 1] * above).sum(dim=0)
        shares[low : low + k] += joint
    shares[0] = (weight * below[:, 0]).sum()
    return torch.cat([shares[:most], shares[most:].sum()[None]])


def _threshold_distribution(n_experts: int, k: int) -> tuple[Tensor, Tensor]:
    """Grid of the threshold t = z_[k], and the probability of each grid point."""
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


def _near_count_distribution(n: int, log_far: Float[Tensor, " t"]) -> Float[Tensor, "t counts"]:
    """P(m of n independent scores are near) if each is far with probability exp(log_far)."""
    count = torch.arange(n + 1, dtype=torch.float64)
    log_binomial = math.lgamma(n + 1) - torch.lgamma(count + 1) - torch.lgamma(n - count + 1)
    log_near = torch.log(-torch.expm1(log_far))[:, None]
    near = torch.where(count == 0, 0.0, count * log_near)  # 0 · log 0 at ε = 0
    return (log_binomial + near + (n - count) * log_far[:, None]).exp()


def _check_k_and_width(n_experts: int, k: int, width: Real = 0.0) -> None:
    """Raise unless 1 <= k < E and the width is finite and not negative."""
    require(1 <= k < n_experts, f"need 1 <= k < E, got {k=}, E={n_experts}")
    require(width >= 0 and math.isfinite(width), f"a width is finite and >= 0, got {width}")
