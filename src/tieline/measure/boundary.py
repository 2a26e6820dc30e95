"""Gaps between scores: probability mass near a routing tie, and experts near the threshold.

    boundary_mass           BM_top(w) = P(Δ <= w) of gaps, binomial bands        Def. 2.1
    gap_density             f_gap(0) from observed gaps, with standard error     Def. 3.2
    gaussian_gap_density    f_gap(0) of independent standard normal scores       Def. 3.1
    margin_tail             (C, α) of P(Δ <= t) ~ C t^α, by likelihood           Def. 3.3
    near_counts             K(ε) = #{i : z_i > z_[k] - ε}                        Def. 4.1
    tie_order               0 if Δ >= ε, else #{i : |z_i - z_[k]| < ε} - 1       Def. 4.2
    tie_order_from_counts   the tie order from the first k + 1 ranks and K(ε)    Def. 4.2
    order_shares            share of tokens of each order                        Def. 4.2
    epsilon_for_extra       ε at which a token has on average k + ½ experts      Def. 4.3
    measure_gaps, measure_near_experts   all of these for a layer of a trace

Each mass is an empirical probability over tokens; `docs/definitions.md` fixes the notation.
A density is per unit of score; standard errors assume independent tokens. Counts of near experts
need the scores of every expert. On the first C ranks they are lower limits, and exact for each
token whose last kept rank lies outside the band; `censored_share` is the share of other tokens.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.special import log_ndtr

from tieline.core.errors import ShapeError, require
from tieline.core.ranking import kth_largest, ranked_scores
from tieline.core.statistics import (
    Estimate,
    Quantiles,
    binomial_band,
    empirical_cdf,
    mean_estimate,
    normal_quantile,
    quantile_record,
)
from tieline.measure.measure_settings import MeasureSettings
from tieline.trace.record import LayerTrace

Real = float | int
"""A number; run-time type checks of `float` would refuse an int such as 1."""

Scores = Float[Tensor, "tokens experts"]

Gaps = Float[Tensor, " tokens"]

LARGEST_LOG = 600.0
"""Largest |log C| of a margin tail; C and its standard error overflow near 709."""


@dataclass(frozen=True)
class MassProfile:
    """A probability as a function of a width, with a Clopper-Pearson band at each width.

    The band is pointwise and assumes independent tokens.
    """

    widths: tuple[float, ...]
    mass: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    tokens: int
    confidence: float


@dataclass(frozen=True)
class MarginTail:
    """The fit P(Δ <= t) ~ C t^α for t <= cutoff (Paper 0, eq. 4.4).

    Attributes:
        constant: C, given the exponent in `exponent`.
        exponent: α; set to exactly 1 if the interval of `fitted` contains 1.
        fitted: fitted α with its standard error.
        cutoff: t0, the largest gap in the fit.
        below: number of gaps in the fit.
        ties: number of gaps of exactly zero; excluded, because C t^α has no mass at zero.
    """

    constant: Estimate
    exponent: Estimate
    fitted: Estimate
    cutoff: float
    below: int
    ties: int


@dataclass(frozen=True)
class GapMeasures:
    """Distribution of the gap, in units of the selection score.

    Attributes:
        quantiles: quantiles of the gap (Def. 2.4).
        profile: BM_top, the gap's distribution function, on a logarithmic grid (Def. 2.1).
        density: f_gap(0) (Def. 3.2).
        tail: (C, α) of the margin tail (Def. 3.3).
        ties: number of tokens whose gap is exactly zero.
        tokens: number of tokens.
    """

    quantiles: Quantiles
    profile: MassProfile
    density: Estimate
    tail: MarginTail
    ties: int
    tokens: int


@dataclass(frozen=True)
class NearMeasures:
    """Experts near the threshold as a function of ε, in units of the selection score.

    Attributes:
        epsilons: the grid of ε.
        experts: mean number K(ε) of experts at each ε, with standard error (Def. 4.1).
        orders: for each ε the share of tokens of tie order 0, 1, ...; the last entry includes all
            higher orders (Def. 4.2).
        censored: for each ε the share of tokens whose count may miss ranks that were not kept.
        epsilon_half: the ε that gives k + 1/2 experts on average (Def. 4.3).
    """

    epsilons: tuple[float, ...]
    experts: tuple[Estimate, ...]
    orders: tuple[tuple[float, ...], ...]
    censored: tuple[float, ...]
    epsilon_half: Estimate


def boundary_mass(
    gaps: Gaps, widths: Float[Tensor, " widths"], confidence: float = 0.95
) -> MassProfile:
    """BM_top(w) = P(Δ <= w) at each width (Def. 2.1; Paper 0, sec. 2).

    Args:
        gaps: z_[k] - z_[k+1] of each token, from `ranking.gap` or `LayerTrace.gap`; infinite where
            no expert can enter.
        widths: widths w; a gap equal to a width is counted.
        confidence: confidence level of the binomial band.
    """
    require(gaps.numel() > 0, "a boundary mass needs at least one token, got none", ShapeError)
    bad = int((~(gaps >= 0)).sum())
    require(bad == 0, f"a gap is >= 0, got {bad} of {gaps.numel()} that are not")
    count = (empirical_cdf(gaps, widths) * gaps.numel()).round().long()
    return mass_profile(count, gaps.numel(), widths, confidence)


def mass_profile(
    count: Int[Tensor, " widths"],
    tokens: int,
    widths: Float[Tensor, " widths"],
    confidence: float = 0.95,
) -> MassProfile:
    """Return the `MassProfile` of integer counts, such as those of a streaming summary."""
    low, high = binomial_band(count, tokens, confidence)
    mass = count.double() / tokens
    columns = (tuple(column.double().tolist()) for column in (widths, mass, low, high))
    return MassProfile(*columns, tokens=tokens, confidence=confidence)


def gap_density(gaps: Gaps, width: float | None = None, mass: float = 0.2) -> Estimate:
    """f_gap(0) ≈ (4 F(w) - F(2w)) / 2w with its standard error (Def. 3.2).

    One-sided. The slope of the density does not bias it, while F(w) / w is 6 to 12 % low. F counts
    half of the gaps equal to w, which removes the bias of gaps on a grid (low-precision scores).

    Args:
        gaps: gap of each token; infinite ones count as tokens far from any tie.
        width: w; by default half of the `mass`-quantile, so that F(2w) is `mass`.
        mass: F(2w) of the default width; the bias grows with its square.
    """
    w = _half_quantile(gaps, mass) if width is None else width
    if w <= 0 or not math.isfinite(w):
        why = "exactly zero" if w <= 0 else "infinite"
        return Estimate(None, None, f"not answerable: the {mass:g}-quantile of the gaps is {why}")
    at_w, at_2w = (((gaps < x).sum() + (gaps <= x).sum()).item() / 2 for x in (w, 2 * w))
    return density_from_masses(at_w / gaps.numel(), at_2w / gaps.numel(), w, gaps.numel())


def density_from_masses(f_w: float, f_2w: float, width: float, tokens: int) -> Estimate:
    """Return `gap_density` from the masses F(w) and F(2w), as streaming summaries count them.

    Value (4 F(w) - F(2w)) / 2w, standard error sqrt((8 F(w) + F(2w)) / n) / 2w.
    """
    require(width > 0 and tokens > 0, f"need width > 0 and tokens > 0, got {width=}, {tokens=}")
    error = math.sqrt((8 * f_w + f_2w) / tokens) / (2 * width)
    return Estimate((4 * f_w - f_2w) / (2 * width), error)


def gaussian_gap_density(n_experts: int, k: int) -> float:
    """Return f_gap(0), the density at zero of z_[k] - z_[k+1], for standard normal z (Def. 3.1).

    E!/((k-1)!(E-k-1)!) ∫ φ² Φ̄^(k-1) Φ^(E-k-1), by the trapezoidal rule in the log domain, which is
    accurate to 12 digits; 12.91488668807 for E = 64, k = 8. P(Δ <= w) = f_gap(0) w + O(w²). Equal
    for k and E - k.
    """
    require(1 <= k < n_experts, f"need 1 <= k < E, got {k=}, E={n_experts}")
    t, step = torch.linspace(-14, 14, 28 * 64 + 1, dtype=torch.float64, device="cpu"), 1 / 64
    log_phi = -t.square() / 2 - math.log(2 * math.pi) / 2
    log_integrand = 2 * log_phi + (k - 1) * log_ndtr(-t) + (n_experts - k - 1) * log_ndtr(t)
    log_ways = math.lgamma(n_experts + 1) - math.lgamma(k) - math.lgamma(n_experts - k)
    return (log_integrand + log_ways).exp().sum().item() * step


def margin_tail(gaps: Gaps, mass: float = 0.05, confidence: float = 0.95) -> MarginTail:
    """(C, α) of the margin tail: α = m / Σ log(t0 / Δ_i), C = (m / n) / t0^α (Def. 3.3).

    Fitted to the m gaps in (0, t0], t0 the `mass`-quantile; the standard error of α is α / sqrt(m).
    α is set to 1, the exponent of every continuous density, if its interval contains 1.
    """
    n, cutoff = gaps.numel(), 2 * _half_quantile(gaps, mass)
    small_gaps = gaps.double()[(gaps > 0) & (gaps <= cutoff)]
    m, ties = small_gaps.numel(), int((gaps == 0).sum())
    log_sum = (cutoff / small_gaps).log().sum().item() if math.isfinite(cutoff) else 0.0
    if log_sum <= 0:
        unknown = Estimate(None, None, f"not answerable: {m} gaps between 0 and {cutoff:g}")
        return MarginTail(unknown, unknown, unknown, cutoff, m, ties)
    alpha = m / log_sum
    fitted = Estimate(alpha, alpha / math.sqrt(m))
    is_one = abs(alpha - 1) <= normal_quantile(confidence) * alpha / math.sqrt(m)
    exponent = Estimate(1.0, 0.0, "ok") if is_one else fitted
    return MarginTail(_tail_constant(exponent, m, n, cutoff), exponent, fitted, cutoff, m, ties)


def _tail_constant(exponent: Estimate, m: int, n: int, cutoff: float) -> Estimate:
    """C = (m / n) / t0^α; log C has variance (1/m - 1/n) + (log t0)² Var α."""
    assert exponent.value is not None
    assert exponent.standard_error is not None
    log_value = math.log(m / n) - exponent.value * math.log(cutoff)
    if abs(log_value) > LARGEST_LOG:  # repeated tokens have equal gaps, which makes α this large
        return Estimate(None, None, f"not answerable: α = {exponent.value:.3g} is no power law")
    spread = (1 / m - 1 / n) + (math.log(cutoff) * exponent.standard_error) ** 2
    return Estimate(math.exp(log_value), math.exp(log_value) * math.sqrt(spread))


def _half_quantile(gaps: Gaps, mass: float) -> float:
    """Half of the `mass`-quantile of the gaps."""
    n = gaps.numel()
    require(n > 0, "a gap density needs at least one token, got none", ShapeError)
    require(0 < mass <= 1, f"need 0 < mass <= 1, got {mass}")
    return gaps.double().kthvalue(max(1, math.ceil(mass * n - 1e-9))).values.item() / 2


def near_counts(
    scores: Scores, k: int, epsilons: Sequence[float]
) -> Int[Tensor, "tokens epsilons"]:
    """Count K(ε), the experts above z_[k] - ε including the chosen ones (Def. 4.1).

    Args:
        scores: (T, E) scores, or their first C ranks.
        k: number of experts chosen.
        epsilons: positive tolerances in units of score.
    """
    depths = _depth_below_threshold(scores, k)
    counts = [(depths < epsilon).sum(dim=-1) for epsilon in epsilons]
    return torch.stack(counts, dim=-1) if counts else depths.new_zeros(len(depths), 0).long()


def tie_order(scores: Scores, k: int, epsilon: Real) -> Int[Tensor, " tokens"]:
    """Return the largest n with an order-n tie within ε of a token (Def. 4.2; Paper 1, Def. 3.2).

    0 if z_[k] - z_[k+1] >= ε, because near-ties inside the chosen set make no discontinuity.
    Otherwise the number of scores within ε of z_[k], minus one.
    """
    experts = scores.shape[1]
    require(1 <= k < experts, f"a tie needs 1 <= k < number of scores, got {k=}, {experts}")
    require(epsilon > 0, f"need epsilon > 0, got {epsilon}")
    within = _depth_below_threshold(scores, k).abs() < epsilon
    top = ranked_scores(scores, k + 1)
    crosses = top[:, k - 1] - top[:, k] < epsilon
    return (within.sum(dim=-1) - 1) * crosses


def tie_order_from_counts(
    ranked: Scores, k: int, epsilon: float, near: Int[Tensor, " tokens"]
) -> Int[Tensor, " tokens"]:
    """Return `tie_order` from what a trace keeps: the first k + 1 ranks and the count K(ε)."""
    top = ranked[:, : k + 1].double()
    above = (top[:, :k] - top[:, k - 1 : k] < epsilon).sum(dim=-1)
    crosses = top[:, k - 1] - top[:, k] < epsilon
    return (near.long() - k + above - 1) * crosses


def order_shares(orders: Int[Tensor, " tokens"], most: int) -> Float[Tensor, " orders"]:
    """Share of tokens of order 0, 1, ..., `most`; the last entry includes all higher orders."""
    require(most >= 1 and orders.numel() > 0, f"need most >= 1 and a token, got {most=}")
    return torch.bincount(orders.clamp(max=most), minlength=most + 1).double() / orders.numel()


def epsilon_for_extra(ranked: Scores, k: int, extra: float = 0.5) -> Estimate:
    """Return inf{ε : mean K(ε) >= k + extra} with its standard error (Def. 4.3).

    The value is the ⌈extra · T⌉-th smallest of all distances z_[k] - z_[j], j > k. The standard
    error is half the change of ε as `extra` goes from one standard error of the mean count below
    to one above.

    Args:
        ranked: scores of the first C ranks, descending.
        k: number of experts chosen.
        extra: target mean number of experts beyond k.
    """
    distances = ranked[:, k - 1 : k].double() - ranked[:, k:].double()
    all_distances = distances.flatten()
    epsilon = _order_statistic(all_distances, extra, len(ranked))
    if not math.isfinite(epsilon):
        reach = f"k + {extra:g} = {k + extra:g} of {ranked.shape[1]} kept ranks"
        return Estimate(None, None, f"not answerable: no ε reaches {reach}")
    counts = (distances <= epsilon).sum(dim=-1)
    error = counts.double().std().item() / math.sqrt(len(ranked)) if len(ranked) > 1 else 0.0
    low, high = (
        _order_statistic(all_distances, extra + sign * error, len(ranked)) for sign in (-1, 1)
    )
    return Estimate(epsilon, (high - low) / 2)


def censored_share(ranked: Scores, k: int, epsilon: float) -> float:
    """Share of tokens whose last kept rank is within ε, so that ranks not kept may be too."""
    return (ranked[:, k - 1].double() - ranked[:, -1].double() < epsilon).double().mean().item()


def _order_statistic(values: Float[Tensor, " n"], per_token: float, tokens: int) -> float:
    """The ⌈per_token · tokens⌉-th smallest value (from 1); infinite past the last one."""
    rank = max(1, math.ceil(per_token * tokens - 1e-9))
    return values.kthvalue(rank).values.item() if rank <= len(values) else math.inf


def _depth_below_threshold(scores: Scores, k: int) -> Float[Tensor, "tokens experts"]:
    """Return z_[k] - z_i in float64; negative for experts ranked above the k-th."""
    return kth_largest(scores, k).double() - scores.double()


def measure_gaps(gaps: Gaps, settings: MeasureSettings) -> GapMeasures:
    """Measure quantiles, boundary mass, density and tail of gaps (Def. 2.1, 2.4, 3.2, 3.3)."""
    widths = torch.tensor(settings.widths, dtype=torch.float64, device=gaps.device)
    gaps = gaps.double().sort().values  # sorted input makes the later sorts faster
    return GapMeasures(
        quantiles=quantile_record(gaps, settings.probabilities, settings.confidence),
        profile=boundary_mass(gaps, widths, settings.confidence),
        density=gap_density(gaps),
        tail=margin_tail(gaps, confidence=settings.confidence),
        ties=int((gaps == 0).sum()),
        tokens=gaps.numel(),
    )


def measure_near_experts(
    layer: LayerTrace, settings: MeasureSettings, epsilons: tuple[float, ...] = ()
) -> NearMeasures:
    """Measure K(ε), tie orders and the ε of k + 1/2 experts (Def. 4.1 - 4.3).

    `epsilons` is the grid of the counts in `layer.near`, which include all experts.
    """
    ranked, k = layer.known_scores().double(), layer.facts.k
    exact = layer.near is not None and len(epsilons) > 0
    grid = epsilons if exact else settings.epsilons
    counts = layer.near if exact else near_counts(ranked, k, grid)
    assert counts is not None
    complete = exact or ranked.shape[1] >= layer.facts.reachable
    shares = [
        order_shares(tie_order_from_counts(ranked, k, epsilon, count), settings.most_orders)
        for epsilon, count in zip(grid, counts.T, strict=True)
    ]
    experts = tuple(mean_estimate(count.double()) for count in counts.T)
    return NearMeasures(
        epsilons=tuple(grid),
        experts=experts,
        orders=tuple(tuple(share.tolist()) for share in shares),
        censored=tuple(0.0 if complete else censored_share(ranked, k, epsilon) for epsilon in grid),
        epsilon_half=_epsilon_half(layer, tuple(grid), experts, exact),
    )


def epsilon_reaching_count(
    goal: float, grid: tuple[float, ...], experts: tuple[Estimate, ...], k: int
) -> Estimate:
    """Return the ε at which the mean count, interpolated between grid points, reaches `goal`."""
    last_epsilon, last_count = 0.0, float(k)
    for epsilon, count in zip(grid, experts, strict=True):
        assert count.value is not None
        if count.value >= goal:
            slope = (count.value - last_count) / (epsilon - last_epsilon)
            error = (count.standard_error or 0.0) / slope
            return Estimate(last_epsilon + (goal - last_count) / slope, error)
        last_epsilon, last_count = epsilon, count.value
    return Estimate(None, None, f"not answerable: K(ε) stays below {goal:g} up to ε = {grid[-1]:g}")


def _epsilon_half(
    layer: LayerTrace, grid: tuple[float, ...], experts: tuple[Estimate, ...], exact: bool
) -> Estimate:
    """Return the ε of k + 1/2 experts from the kept ranks if they suffice, else from counts."""
    ranked, k = layer.known_scores().double(), layer.facts.k
    estimate = epsilon_for_extra(ranked, k)
    is_partial = ranked.shape[1] < layer.facts.reachable
    censored = censored_share(ranked, k, estimate.value) if is_partial and estimate.value else 0.0
    if not is_partial or (estimate.value is not None and censored == 0):
        return estimate
    if exact:
        return epsilon_reaching_count(k + 0.5, grid, experts, k)
    if estimate.value is None:
        return estimate
    kept = ranked.shape[1]
    note = f"upper limit: for {censored:.1%} of tokens all {kept} kept ranks are within ε"
    return Estimate(estimate.value, estimate.standard_error, note)
