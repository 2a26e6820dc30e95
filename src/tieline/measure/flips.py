"""How often noise of the logits changes the chosen experts.

    flip_probability         P(S changes) of each token under independent normal noise   Def. 6.2
    flip_limits              the same where only the first ranks are known               Def. 6.2
    noisy_gap                gap in units of its own noise                               Def. 6.3
    population_flips         f_gap(0) σ / √π to first order; √2 times it for two runs    Def. 6.3
    group_flip_probability   probability that two groups of experts change places        Def. 6.4
    noise_flips              all of these for a layer of a trace
    flip_reduction           how many times cheaper flips are after smoothing

`flip_probability` is exact for the given tokens, `population_flips` estimates the rate of the
population they were drawn from.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from scipy.integrate import quad
from torch import Tensor

from tieline.core.errors import ShapeError, require
from tieline.core.numerics import one_thread
from tieline.core.statistics import Band, Estimate, mean_estimate
from tieline.measure.boundary import gap_density
from tieline.measure.logit_view import LogitView
from tieline.trace.record import LayerTrace

Ranks = Float[Tensor, "tokens ranks"]
PerToken = Float[Tensor, " tokens"]


REACH = 8.5
"""Noise beyond this many standard deviations (probability 1e-16) is ignored."""

RAMP_REACH = 8.0
"""Standard deviations at which integrals over the noise of a ramp end."""

MEAN_ABSOLUTE = math.sqrt(2 / math.pi)
"""E|n| of standard normal noise."""

FEWEST_STEPS, MOST_STEPS = 32, 4096
"""Limits of the quadrature steps, two per deviation of the least noisy expert that matters."""

CHUNK = 1 << 15
"""Entries of a temporary, so that it stays in the processor's cache."""

FIRST_ORDER_LIMIT = 0.2
"""Largest rate that a first-order prediction is trusted for."""


@dataclass(frozen=True)
class NoiseFlips:
    """Flips under independent N(0, σ²) noise of the logits.

    Attributes:
        sigma: σ, in units of the logits.
        flip: mean over these tokens of the exact probability; its standard error is that of a
            sample of tokens (Def. 6.2).
        upper: upper limit for these tokens, with all experts past the last kept rank at that rank.
        population: first-order rate of the population (Def. 6.3).
        two_runs: the same between two noisy runs.
    """

    sigma: float
    flip: Estimate
    upper: float
    population: Estimate
    two_runs: Estimate


SCORES_PER_GROUP = {"max": 1, "top2sum": 2}

TINY = 1e-300


def flip_probability(ranked: Ranks, k: int, noise: Ranks | float) -> Float[Tensor, " tokens"]:
    """P(S changes) when rank r gets independent N(0, σ_r²) noise (Def. 6.2).

    1 - ∫ Π_{j ∉ S} Φ((t - z_j)/σ_j) dF(t), F the law of the smallest noisy score of S, with
    1 - F(t) = Π_{i ∈ S} Φ((z_i - t)/σ_i). Integrates the complement, the probability that an expert
    outside S exceeds t, to keep the digits of small probabilities. The trapezoidal rule on the
    interval outside which the integrand vanishes has an error like exp(-2π²σ²/h²); h <= σ/2 leaves
    a relative error of 1e-5 down to probabilities of 1e-13. Noise thousands of times smaller than
    that of other ranks is raised to 1/2048 of the interval.

    Args:
        ranked: scores of the first C ranks, descending; -inf for a rank without expert. Experts
            past rank C are ignored: `flip_limits` bounds their effect.
        k: number of experts chosen, at least 1.
        noise: standard deviation σ of the noise, one number or one per token and rank.
    """
    return flip_limits(ranked, k, noise, 0).low


def flip_limits(ranked: Ranks, k: int, noise: Ranks | float, beyond: int) -> Band:
    """Limits of P(S changes) where only the first C ranks are known (Def. 6.2).

    The lower limit ignores the `beyond` = E - C other experts, the upper one puts them all at the
    score of rank C, the largest possible. Arguments as for `flip_probability`.
    """
    ranks = ranked.shape[1]
    require(1 <= k <= ranks, f"need 1 <= k <= kept ranks, got {k=}, {ranks=}", ShapeError)
    z = ranked.detach().double()
    sigma = torch.as_tensor(noise, dtype=torch.float64, device=z.device).expand_as(z)
    require(bool((sigma >= 0).all()), "noise must be >= 0 and not NaN")
    sigma = torch.maximum(sigma, sigma.amax(dim=1, keepdim=True) / MOST_STEPS)
    limits = torch.zeros(2, len(z), dtype=torch.float64, device=z.device)
    if k < ranks:
        low, high = _flip_interval(z, sigma, k)
        with one_thread():
            for rows, steps in _quadrature_batches(z, sigma, low, high):
                ends = (low[rows], high[rows])
                limits[:, rows] = _flip_integral(z[rows], sigma[rows], k, ends, steps, beyond)
    limits.clamp_(0, 1)
    return Band(limits[0], limits[1])


def _flip_interval(z: Ranks, sigma: Ranks, k: int) -> tuple[Tensor, Tensor]:
    """Range of the smallest noisy score of S in which an outsider can exceed it."""
    chosen, spread = z[:, :k], REACH * sigma[:, :k]
    low = (chosen - spread).amin(dim=1)
    outside = (z[:, k:] + REACH * sigma[:, k:]).amax(dim=1)
    return low, torch.minimum(outside, (chosen + spread).amin(dim=1))


def _quadrature_batches(
    z: Ranks, sigma: Ranks, low: Tensor, high: Tensor
) -> Iterator[tuple[Tensor, int]]:
    """Yield the tokens that can flip, grouped by the number of steps their interval needs."""
    span = REACH * sigma
    matters = (z + span > low[:, None]) & (z - span < high[:, None])
    least = torch.where(matters, sigma, torch.inf).amin(dim=1)
    steps = (2 * (high - low) / least).clamp(FEWEST_STEPS, MOST_STEPS)
    exponent = steps.log2().ceil().int()
    alive = high > low
    for power in exponent[alive].unique().tolist():
        rows = (alive & (exponent == power)).nonzero().squeeze(1)
        for chunk in rows.split(max(1, CHUNK // ((1 << power) + 1))):
            yield chunk, 1 << power


def _flip_integral(
    z: Ranks, sigma: Ranks, k: int, ends: tuple[Tensor, Tensor], steps: int, beyond: int
) -> Float[Tensor, "2 tokens"]:
    """∫ P(an outsider exceeds t) dF(t) over [low, high], without and with experts past rank C.

    The integrand vanishes at both ends, so the trapezoidal rule is a plain sum.
    """
    low, width = ends[0], ends[1] - ends[0]
    t = torch.linspace(0, 1, steps + 1, dtype=torch.float64, device=z.device)
    t = low[:, None] + width[:, None] * t
    sigma = torch.maximum(sigma, width[:, None] * (2 / MOST_STEPS))
    weight = _smallest_density(t, z[:, :k], sigma[:, :k])
    exceed, tail = torch.zeros_like(t), torch.zeros_like(t)
    for rank in range(k, z.shape[1]):
        tail = _upper_tail((t - z[:, rank, None]) / sigma[:, rank, None])
        exceed += tail * (1 - exceed)
    lower = (weight * exceed).sum(dim=1)
    upper = lower
    if beyond:
        more = -torch.expm1(beyond * torch.log1p(-tail))
        upper = (weight * (exceed + more * (1 - exceed))).sum(dim=1)
    return torch.stack([lower, upper]) * width / steps


def _smallest_density(t: Tensor, z: Ranks, sigma: Ranks) -> Tensor:
    """Density at t of the smallest noisy score: Π_i Φ(-x_i) · Σ_i φ(x_i) / (σ_i Φ(-x_i))."""
    survival, hazard = torch.ones_like(t), torch.zeros_like(t)
    for score, deviation in zip(z.T[:, :, None], sigma.T[:, :, None], strict=True):
        # Φ underflows past 38 deviations, where the density is zero and its hazard is about x
        x = ((t - score) / deviation).clamp_(max=36.0)
        tail = _upper_tail(x)
        hazard += x.square_().mul_(-0.5).exp_().div_(tail).div_(deviation)
        survival *= tail
    return survival * hazard / math.sqrt(2 * math.pi)


def _upper_tail(x: Tensor) -> Tensor:
    """1 - Φ(x), accurate for large x."""
    return torch.special.erfc(x * math.sqrt(0.5)).mul_(0.5)


def group_flip_probability(
    group_gap: Float[Tensor, " tokens"], noise: Float[Tensor, " tokens"], scores_per_group: int
) -> Float[Tensor, " tokens"]:
    """Φ(-Δ_group / √(2 n) σ): probability that noise swaps the last chosen group and the next.

    A group's score is a sum of n scores (1, or 2 for the sum of the two largest), each with noise
    σ. An upper limit of the flips it causes: the groups may swap without an expert of either being
    chosen (Def. 6.4).
    """
    spread = math.sqrt(2 * scores_per_group) * noise
    ratio = torch.where(spread > 0, group_gap.double() / spread, torch.inf)
    return torch.special.ndtr(-ratio)


def noisy_gap(ranked: Ranks, k: int, slope: Ranks) -> Float[Tensor, " tokens"]:
    """Δ / √((s_k² + s_{k+1}²) / 2): the gap in units of the noise caused by unit logit noise.

    Its density at zero is what `population_flips` needs (Def. 6.3).
    """
    require(k < ranked.shape[1], f"a gap needs k < kept ranks, got {k=}, {ranked.shape[1]}")
    rise = ranked[:, k - 1].double() - ranked[:, k].double()
    return rise / ((slope[:, k - 1].square() + slope[:, k].square()) / 2).sqrt()


def population_flips(density: Estimate, sigma: float, runs: int = 1) -> Estimate:
    """f_gap(0) σ / √π, times √2 between two noisy runs: flip rate to first order (Def. 6.3).

    Args:
        density: density of the gap at zero (`density.gap_density`), in units where the noise of
            every score has standard deviation σ.
        sigma: standard deviation of the noise.
        runs: 1 for a noisy run against the exact one, 2 for two noisy runs against each other.
    """
    require(runs in (1, 2), f"flips are between one or two noisy runs, got {runs=}")
    return first_order(density.times(sigma * math.sqrt(runs / math.pi)))


def first_order(rate: Estimate) -> Estimate:
    """Mark a rate that is too large for a first-order prediction."""
    if rate.value is None or rate.value <= FIRST_ORDER_LIMIT:
        return rate
    note = f"first order only: beyond {FIRST_ORDER_LIMIT:g} it overstates"
    return Estimate(rate.value, rate.standard_error, note)


def noise_densities(layer: LayerTrace, view: LogitView) -> Estimate:
    """f_gap(0) in units of the noise caused by unit noise of the logits (Def. 6.3, 6.4).

    Group-limited routers add the density of the gap between groups.
    """
    inner = gap_density(noisy_gap(view.scores, layer.facts.k, view.slope))
    if layer.group_gap is None:
        return inner
    return inner.plus(group_density(layer, view.threshold_slope))


def noise_flips(
    layer: LayerTrace, view: LogitView, sigma: float, density: Estimate
) -> tuple[NoiseFlips, PerToken]:
    """Flips under N(0, σ²) noise of the logits, and the probability of each token (Def. 6.2 - 6.4).

    `view` is the `logit_view` of the layer, `density` its `noise_densities`.
    """
    beyond = max(0, layer.facts.reachable - view.scores.shape[1])
    low, high = flip_limits(view.scores, layer.facts.k, view.slope * sigma, beyond)
    groups = group_flips(layer, view.threshold_slope * sigma)
    chance = either_chance(low, groups)
    record = NoiseFlips(
        sigma=sigma,
        flip=mean_estimate(chance),
        upper=either_chance(high, groups).mean().item(),
        population=population_flips(density, sigma),
        two_runs=population_flips(density, sigma, runs=2),
    )
    return record, chance


def group_density(layer: LayerTrace, noise: PerToken) -> Estimate:
    """Density at zero of the gap between groups, in units of their noise."""
    assert layer.group_gap is not None
    unit = math.sqrt(SCORES_PER_GROUP[layer.facts.group_score]) * noise
    return gap_density(layer.group_gap.double() / unit.clamp(min=TINY))


def group_flips(layer: LayerTrace, noise: PerToken) -> PerToken:
    """Probability that two groups change places, zero without groups (Def. 6.4)."""
    if layer.group_gap is None:
        return torch.zeros_like(noise)
    per_group = SCORES_PER_GROUP[layer.facts.group_score]
    return group_flip_probability(layer.group_gap, noise, per_group)


def either_chance(first: PerToken, second: PerToken) -> PerToken:
    """Probability of at least one of two independent events."""
    return first + second - first * second


def straight_change(noise: float, width: float) -> float:
    """∫ (r(s + n) - r(s))² ds of the straight ramp r from 0 to 1 over |s| <= w/2, n > 0.

    n² (w - n/3) / w² for n <= w, n - w/3 beyond; s is the signed margin of two experts. A step has
    w = 0. `tieline.lab.limits.continuity` has the law for every ramp.
    """
    if noise <= width:
        return noise**2 * (width - noise / 3) / width**2 if width > 0 else 0.0
    return noise - width / 3


def flip_reduction(scale: float) -> float:
    """S_hard / S: how many times cheaper flips are by projected top-k with ε = c σ.

    Args:
        scale: c, the width of the band over the standard deviation of the margin's noise.
    """
    width = 2 * scale

    def weighted(x: float) -> float:
        return straight_change(x, width) * MEAN_ABSOLUTE * math.exp(-x * x / 2)

    knee = min(RAMP_REACH, width)
    halves = ((0, knee), (knee, RAMP_REACH))
    return MEAN_ABSOLUTE / sum(quad(weighted, *ends)[0] for ends in halves)
