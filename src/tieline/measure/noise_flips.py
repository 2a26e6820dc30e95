"""Flips caused by noise of the logits: how often the chosen experts change.

    flip_probability         P(S changes) of each token under independent normal noise   Def. 6.2
    flip_limits              limits of it if only the first ranks are known              Def. 6.2
    noisy_gap                gap in units of its own noise                               Def. 6.3
    population_flips         f_gap(0) σ / √π to first order; √2 times it for two runs    Def. 6.3
    group_flip_probability   probability that two groups of experts change places        Def. 6.4
    logit_view               scores in the units where noise of the logits is simplest   Def. 6.1
    noise_flips              all of these for a layer of a trace

`flip_probability` is exact for the given tokens, `population_flips` estimates the rate of the
population they were drawn from.

A router ranks u_i = s(l_i) + b_i: l the logit, s the score function, b a correction bias. Without
a bias, u and l have the same ranks because s is increasing, so flips are computed on the logits.
With a bias, noise of the logits reaches the scores with the slope s′(l_i) (`logit_view`):

    units           without bias             with bias
    logits          l, slope 1               u, slope 1
    sigmoid         logit(u), slope 1        u, slope s (1 - s)
    sqrtsoftplus    log(e^(u²) - 1), slope 1 u, slope (1 - e^(-s²)) / 2s
    softmax         log u, slope 1           u, slope p

Softmax probabilities determine the logits up to a shift common to all experts of a token, which
changes no choice. Their slope is p and not p (1 - p), because the rest of the derivative moves all
experts near the threshold together.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tieline.core.errors import ShapeError, require
from tieline.core.numerics import one_thread
from tieline.core.statistics import Band, Estimate, mean_estimate
from tieline.measure.boundary import gap_density
from tieline.trace.record import LayerTrace

Ranks = Float[Tensor, "tokens ranks"]
PerToken = Float[Tensor, " tokens"]

ALMOST_ONE = 1 - 2.0**-24
"""Largest float32 below 1: a saturated sigmoid has a logit of at least about 16.6."""


@dataclass(frozen=True)
class LogitView:
    """Scores of the kept ranks in the units where noise of the logits is simplest.

    Attributes:
        scores: the ranked values, descending, in float64.
        slope: derivative of each value with respect to its logit.
        logits: the logits; None for softmax scores, which determine them up to a shift only.
        threshold_slope: derivative of the selection score at rank k with respect to its logit.
    """

    scores: Ranks
    slope: Ranks
    logits: Ranks | None
    threshold_slope: Float[Tensor, " tokens"]


def logit_view(layer: LayerTrace) -> LogitView:
    """Return the layer's kept ranks in units where noise of the logits is simplest (Def. 6.1)."""
    selection = layer.known_scores().double()
    unbiased = selection - _bias_of_ranks(layer)
    units, k = layer.facts.units, layer.facts.k
    if units == "logits":
        ones = torch.ones_like(selection)
        return LogitView(selection, ones, unbiased, ones[:, k - 1])
    logits, slope = _INVERSES[units](unbiased)
    exact = None if units == "softmax" else logits
    if layer.bias is None:
        return LogitView(logits, torch.ones_like(slope), exact, slope[:, k - 1])
    return LogitView(selection, slope, exact, slope[:, k - 1])


def scores_of_logits(logits: Ranks, layer: LayerTrace) -> Ranks:
    """Return the selection scores of (perturbed) logits of the layer's kept ranks.

    Without a bias returns the logits, which have the same order and do not saturate.
    """
    if layer.bias is None:
        return logits
    if layer.facts.units == "sigmoid":
        logits = logits.sigmoid()
    if layer.facts.units == "sqrtsoftplus":
        logits = torch.nn.functional.softplus(logits).sqrt()
    return logits + _bias_of_ranks(layer)


def _logits_of_sigmoid(score: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits of sigmoid scores and the slope s (1 - s)."""
    inside = score.clamp(torch.finfo(torch.float32).tiny, ALMOST_ONE)
    logits = torch.where(score.isneginf(), score, inside.logit())
    return logits, inside * (1 - inside)


def _logits_of_sqrtsoftplus(score: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits of sqrtsoftplus scores and the slope (1 - e^(-s²)) / 2s."""
    inside = score.clamp(min=torch.finfo(torch.float32).tiny)
    slope = -torch.expm1(-(inside**2))  # the sigmoid of the logit
    logits = torch.where(score.isneginf(), score, inside**2 + slope.log())
    return logits, slope / (2 * inside)


def _logits_of_softmax(score: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logarithms of softmax scores and the slope p."""
    inside = score.clamp(torch.finfo(torch.float32).tiny, 1.0)
    return torch.where(score.isneginf(), score, inside.log()), inside


_INVERSES = {
    "sigmoid": _logits_of_sigmoid,
    "sqrtsoftplus": _logits_of_sqrtsoftplus,
    "softmax": _logits_of_softmax,
}


def _bias_of_ranks(layer: LayerTrace) -> Tensor | float:
    """Return the correction bias of the expert at each rank, or 0."""
    return 0.0 if layer.bias is None else layer.bias.double()[layer.experts.long()]


LARGEST_RATIO = 8.5
"""Pairs further apart than this many deviations of their noise (probability 1e-17) never swap."""

IGNORED_SQUARE = 36.0
"""Pairs with r² > r_0² + 36 are ignored: they swap e^(-36/2) times as often as the nearest pair."""

LOG2_E = math.log2(math.e)


STEPS, PER_HIDDEN, MOST_STEPS = 2.0, 0.2, 4096
"""Quadrature steps per deviation of the least noisy relevant expert; additional steps per unit of
log(1 + number of unkept experts), which all at one score make the integrand steep; largest number
of steps."""

SINGLE_STEPS = 64
"""Largest number of steps for float32: its arguments are then small enough for seven digits."""

CHUNK = 1 << 15
"""Number of entries of a temporary tensor, so that it stays in the processor's cache."""

TOKENS_AT_ONCE = 1 << 13
"""Number of tokens that are processed together, with all sizes of the noise."""

FIRST_ORDER_LIMIT = 0.2
"""Largest rate at which a first-order prediction is trusted."""


@dataclass(frozen=True)
class NoiseFlips:
    """Flips under independent N(0, σ²) noise of the logits.

    Attributes:
        sigma: σ, in units of the logits.
        flip: mean over these tokens of the exact probability; its standard error is that of a
            sample of tokens (Def. 6.2).
        upper: upper limit for these tokens, as if all unkept experts had the last kept score.
        population: first-order rate of the population (Def. 6.3).
        two_runs: first-order rate between two noisy runs.
    """

    sigma: float
    flip: Estimate
    upper: float
    population: Estimate
    two_runs: Estimate


SCORES_PER_GROUP = {"max": 1, "top2sum": 2}

TINY = 1e-300


def flip_probability(ranked: Ranks, k: int, noise: Ranks | float) -> Float[Tensor, " tokens"]:
    """Return P(S changes) when rank r gets independent N(0, σ_r²) noise (Def. 6.2).

    1 - ∫ Π_{j ∉ S} Φ((t - z_j)/σ_j) dF(t), F the law of the smallest noisy score of S, with
    1 - F(t) = Π_{i ∈ S} Φ((z_i - t)/σ_i). Let r = (z_i - z_j) / √(σ_i² + σ_j²) for pairs i ∈ S,
    j ∉ S, and r_0 the smallest of these ratios. Pairs with r² > r_0² + 36 are 1e-8 times as likely
    to change places and are ignored. There are three cases:

        r_0 > 8.5                                         0
        only the pair of ranks k and k + 1 remains        Φ(-r_0)
        else    the integral of the complement, the probability that an expert outside S exceeds t,
                which keeps the digits of small probabilities

    The trapezoidal rule, on the interval outside which the integrand vanishes, has an error like
    exp(-2π²σ²/h²), h <= σ/2. Differences are taken in float64, the integrand in float32 if few
    steps are needed: relative errors are below 1e-6 for probabilities above 1e-4 and below 1e-5 for
    smaller ones. Noise thousands of times smaller than that of other ranks is raised to 1/2048 of
    the interval.

    Args:
        ranked: scores of the first C ranks, descending; -inf for a rank without expert. Experts
            past rank C are ignored: `flip_limits` bounds their effect.
        k: number of experts chosen, at least 1.
        noise: standard deviation σ of the noise, one number or one per token and rank.
    """
    return flip_limits(ranked, k, noise, 0).low


def flip_limits(ranked: Ranks, k: int, noise: Ranks | float, beyond: int) -> Band:
    """Return limits of P(S changes) if only the first C ranks are known (Def. 6.2).

    The lower limit ignores the `beyond` = E - C other experts, the upper limit puts them all at the
    score of rank C, the largest possible. Arguments as for `flip_probability`.
    """
    low, high = flip_limits_by_size(ranked, k, noise, (1.0,), beyond)
    return Band(low[0], high[0])


def flip_limits_by_size(
    ranked: Ranks, k: int, noise: Ranks | float, sizes: Sequence[float], beyond: int
) -> Band:
    """Return `flip_limits` under noise c σ for each c of `sizes`, one row each, in one quadrature.

    The probability depends on the ratio of scores and noise only, so scores divided by c under
    noise σ give the same result.
    """
    ranks = ranked.shape[1]
    require(1 <= k <= ranks, f"need 1 <= k <= kept ranks, got {k=}, {ranks=}", ShapeError)
    z = ranked.detach().double()
    sigma = torch.as_tensor(noise, dtype=torch.float64, device=z.device)
    require(
        bool((sigma >= 0).all()) and min(sizes, default=0) >= 0, "noise must be >= 0 and not NaN"
    )
    near = slice(max(0, k - 2), k + 2) if sigma.ndim == 0 else slice(None)
    # rescaled so that float32 does not overflow for noise near its largest number
    unit = sigma.amax().clamp(min=1.0) if sigma.numel() else 1.0
    z, sigma = z / unit, (sigma / unit).expand_as(z)
    limits = torch.zeros(2, len(sizes), len(z), dtype=torch.float64, device=z.device)
    if k < ranks:
        sigma = torch.maximum(sigma, sigma.amax(dim=1, keepdim=True) / MOST_STEPS)
        with one_thread():
            for start in range(0, len(z), TOKENS_AT_ONCE):
                rows = slice(start, start + TOKENS_AT_ONCE)
                ratios = _pair_ratios(z[rows, near], sigma[rows, near], k - (near.start or 0))
                filled = limits[:, :, rows]
                _fill_limits(filled, z[rows], sigma[rows], k, ratios, sizes, beyond)
    limits.clamp_(0, 1)
    return Band(limits[0], limits[1])


def _pair_ratios(z: Ranks, sigma: Ranks, k: int) -> tuple[PerToken, PerToken]:
    """Return (z_i - z_j) / √(σ_i² + σ_j²) of ranks k and k + 1, and the minimum of other pairs."""
    square = sigma.square()
    spread = (square[:, :k, None] + square[:, None, k:]).sqrt_()
    ratios = (z[:, :k, None] - z[:, None, k:]).div_(spread).masked_fill_(spread == 0, torch.inf)
    pair = ratios[:, -1, 0].clone()
    ratios[:, -1, 0] = torch.inf
    return pair, ratios.flatten(1).amin(dim=1)


def _fill_limits(
    limits: Float[Tensor, "2 sizes tokens"],
    z: Ranks,
    sigma: Ranks,
    k: int,
    ratios: tuple[PerToken, PerToken],
    sizes: Sequence[float],
    beyond: int,
) -> None:
    """Write both limits into `limits`: in closed form for single pairs, else by quadrature."""
    pair, others = ratios
    may_tie = beyond > 0 and z.shape[1] == k + 1  # unkept experts with the score of rank k + 1
    nearest = torch.minimum(pair, others)
    excess = nearest.new_zeros(()) if may_tie else others.square() - nearest.square()
    integrands = []
    for size, size_limits in zip(sizes, limits.unbind(dim=1), strict=True):
        if size == 0:
            continue
        near = nearest <= LARGEST_RATIO * size
        rows = (near & (excess <= IGNORED_SQUARE * size**2)).nonzero().squeeze(1)
        size_limits[:] = torch.where(near, _upper_tail(pair / size), 0.0)
        integrands.append((size_limits, rows, z[rows] / size, nearest[rows] / size))
    if not integrands:
        return
    counts = [len(rows) for _, rows, *_ in integrands]
    noise = sigma[torch.cat([rows for _, rows, *_ in integrands])]
    scores, least = (torch.cat(column) for column in list(zip(*integrands, strict=True))[2:])
    integrals = _flip_integrals(scores, noise, k, least, beyond).split(counts, dim=1)
    for (size_limits, rows, *_), values in zip(integrands, integrals, strict=True):
        size_limits[:, rows] = values


def _flip_integrals(
    z: Ranks, sigma: Ranks, k: int, nearest: PerToken, beyond: int
) -> Float[Tensor, "2 tokens"]:
    """Compute both limits by quadrature, in chunks of tokens with similar intervals and ranks.

    `nearest` is the ratio r_0 of `flip_probability`.
    """
    limits = torch.zeros(2, len(z), dtype=torch.float64, device=z.device)
    # relative to the middle of ranks k and k + 1, where the integrand is largest: keeps digits
    exact = z - (z[:, k - 1 : k] + z[:, k : k + 1]) / 2, sigma
    offsets, spread = (column.float() for column in exact)
    reach = (nearest.square() + IGNORED_SQUARE).sqrt_().float()[:, None]
    low, high = _flip_interval(offsets, spread, k, reach)
    span = reach * spread
    relevant = (offsets + span > low[:, None]) & (offsets - span < high[:, None])
    least = torch.where(relevant, spread, torch.inf).amin(dim=1)
    density = torch.where(relevant[:, -1], STEPS + PER_HIDDEN * math.log1p(beyond), STEPS)
    steps = _rounded_steps(density * (high - low) / least)
    inner, outer = relevant[:, :k].sum(dim=1), relevant[:, k:].sum(dim=1)
    order = (steps * (k + 1) + inner).mul_(z.shape[1] + 1).add_(outer).argsort()
    tokens = order[(high > low)[order]]
    counts = steps[tokens].unique_consecutive(return_counts=True)
    for count, size in zip(*(column.tolist() for column in counts), strict=True):
        group, tokens = tokens[:size], tokens[size:]
        scores = (offsets, spread) if count <= SINGLE_STEPS else exact
        for rows in group.split(max(1, CHUNK // count)):
            columns = relevant[rows].any(dim=0).nonzero().squeeze(1)
            ranks = slice(min(int(columns[0]), k - 1), max(int(columns[-1]), k) + 1)
            hidden = beyond if ranks.stop == z.shape[1] else 0
            near, noise = scores[0][rows, ranks], scores[1][rows, ranks]
            ends = low[rows], high[rows]
            limits[:, rows] = _flip_integral(near, noise, k - ranks.start, ends, count, hidden)
    return limits


def _rounded_steps(steps: Float[Tensor, " tokens"]) -> Int[Tensor, " tokens"]:
    """Round numbers of steps up to the next multiple of an eighth of their power of two."""
    steps = steps.clamp(16, MOST_STEPS)
    unit = steps.log2().floor().sub_(3).exp2()
    return (steps / unit).ceil().mul_(unit).clamp_(max=MOST_STEPS).long()


def _flip_interval(z: Ranks, sigma: Ranks, k: int, reach: Tensor) -> tuple[Tensor, Tensor]:
    """Return the range of the smallest noisy score of S in which an outsider can exceed it.

    The range ends `reach` deviations from the scores, or where both sides are reach/√2 deviations
    away, because the product of the densities vanishes there.
    """
    inside, outside, spread = z[:, :k], z[:, k:], reach * sigma
    inside_reach, outside_reach = spread[:, :k], spread[:, k:]
    half = math.sqrt(0.5)
    middle = (inside + half * inside_reach).amin(dim=1)
    middle = torch.maximum(middle, (outside + half * outside_reach).amax(dim=1))
    high = torch.minimum((inside + inside_reach).amin(dim=1), (outside + outside_reach).amax(dim=1))
    return (inside - inside_reach).amin(dim=1), torch.minimum(high, middle)


def _flip_integral(
    z: Ranks, sigma: Ranks, k: int, ends: tuple[Tensor, Tensor], steps: int, beyond: int
) -> Float[Tensor, "2 tokens"]:
    """Return ∫ P(an outsider exceeds t) dF(t) over `ends`, without and with experts past rank C.

    The integrand vanishes at both ends, so the trapezoidal rule is a plain sum.
    """
    low, width = ends[0].to(z.dtype), (ends[1] - ends[0]).to(z.dtype)
    sigma = torch.maximum(sigma, width[:, None] * (2 / MOST_STEPS)).T.contiguous()
    step, unit = width / steps, math.sqrt(2) * sigma
    grid = low / step + torch.arange(1, steps, device=z.device)[:, None]
    rate, start = (step / unit)[:, None], (-z.T.contiguous() / unit).clamp_(max=1e4)[:, None]
    # x / √2 of each rank; the integrand vanishes past eleven deviations, and no tail may underflow
    x = torch.addcmul(start, rate, grid).clamp_(-8.0, 8.0)
    tail = torch.special.erfc(x)  # twice the upper tail
    hazard = x[:k].square_().mul_(-LOG2_E).exp2_().div_(tail[:k]).mul_(rate[:k]).sum(dim=0)
    weight = tail[:k].prod(dim=0).mul_(hazard)
    exceed = tail[k] / 2
    for other in tail[k + 1 :]:
        exceed.addcmul_(other, 1 - exceed, value=0.5)
    lower = upper = (weight * exceed).sum(dim=0).double()
    if beyond:
        hidden_exceed = torch.expm1(tail[-1].div_(-2).log1p_().mul_(beyond)).neg_()
        exceed.addcmul_(hidden_exceed, 1 - exceed)
        upper = (weight * exceed).sum(dim=0).double()
    return torch.stack([lower, upper]) * (2.0 ** (1 - k) / math.sqrt(math.pi))


def _upper_tail(x: Tensor) -> Tensor:
    """Return 1 - Φ(x), accurate for large x."""
    return torch.special.erfc(x * math.sqrt(0.5)).mul_(0.5)


def group_flip_probability(
    group_gap: Float[Tensor, " tokens"], noise: Float[Tensor, " tokens"], scores_per_group: int
) -> Float[Tensor, " tokens"]:
    """Return Φ(-Δ_group / √(2 n) σ), the probability that the last chosen and next group swap.

    A group's score is a sum of n scores (1, or 2 for the sum of the two largest), each with noise
    σ. This is an upper limit of the flips it causes, because groups may swap without an expert of
    either being chosen (Def. 6.4).
    """
    spread = math.sqrt(2 * scores_per_group) * noise
    ratio = torch.where(spread > 0, group_gap.double() / spread, torch.inf)
    return torch.special.ndtr(-ratio)


def noisy_gap(ranked: Ranks, k: int, slope: Ranks) -> Float[Tensor, " tokens"]:
    """Return Δ / √((s_k² + s_{k+1}²) / 2), the gap in units of the noise by unit logit noise.

    `population_flips` takes its density at zero (Def. 6.3).
    """
    require(k < ranked.shape[1], f"a gap needs k < kept ranks, got {k=}, {ranked.shape[1]}")
    rise = ranked[:, k - 1].double() - ranked[:, k].double()
    return rise / ((slope[:, k - 1].square() + slope[:, k].square()) / 2).sqrt()


def population_flips(density: Estimate, sigma: float, runs: int = 1) -> Estimate:
    """Return the flip rate to first order, f_gap(0) σ / √π, times √2 for two runs (Def. 6.3).

    Args:
        density: density of the gap at zero (`boundary.gap_density`), in units where the noise of
            every score has standard deviation σ.
        sigma: standard deviation of the noise.
        runs: 1 for a noisy run against the exact run, 2 for two noisy runs against each other.
    """
    require(runs in (1, 2), f"flips are between one or two noisy runs, got {runs=}")
    return note_first_order(density.times(sigma * math.sqrt(runs / math.pi)))


def note_first_order(rate: Estimate) -> Estimate:
    """Add a note to a rate that is too large for a first-order prediction."""
    if rate.value is None or rate.value <= FIRST_ORDER_LIMIT:
        return rate
    note = f"first order only: beyond {FIRST_ORDER_LIMIT:g} it overstates"
    return Estimate(rate.value, rate.standard_error, note)


def noisy_gap_density(layer: LayerTrace, view: LogitView) -> Estimate:
    """Return f_gap(0) in units of the noise caused by unit noise of the logits (Def. 6.3, 6.4).

    For group-limited routers the density of the gap between groups is added.
    """
    inner = gap_density(noisy_gap(view.scores, layer.facts.k, view.slope))
    if layer.group_gap is None:
        return inner
    return inner.plus(group_gap_density(layer, view.threshold_slope))


def noise_flips(
    layer: LayerTrace, view: LogitView, sigmas: Sequence[float], density: Estimate
) -> list[tuple[NoiseFlips, PerToken]]:
    """Return flips under N(0, σ²) noise of the logits for each σ, with each token's probability.

    `view` is the `logit_view` of the layer, `density` its `noisy_gap_density` (Def. 6.2 - 6.4).
    """
    beyond = max(0, layer.facts.reachable - view.scores.shape[1])
    equal_noise = layer.bias is None or layer.facts.units == "logits"
    noise = 1.0 if equal_noise else view.slope
    limits = flip_limits_by_size(view.scores, layer.facts.k, noise, sigmas, beyond)
    rows = []
    for sigma, low, high in zip(sigmas, *limits, strict=True):
        groups = layer_group_flip_probability(layer, view.threshold_slope * sigma)
        chance = either_probability(low, groups)
        record = NoiseFlips(
            sigma=sigma,
            flip=mean_estimate(chance),
            upper=either_probability(high, groups).mean().item(),
            population=population_flips(density, sigma),
            two_runs=population_flips(density, sigma, runs=2),
        )
        rows.append((record, chance))
    return rows


def group_gap_density(layer: LayerTrace, noise: PerToken) -> Estimate:
    """Return the density at zero of the gap between groups, in units of their noise."""
    assert layer.group_gap is not None
    unit = math.sqrt(SCORES_PER_GROUP[layer.facts.group_score]) * noise
    return gap_density(layer.group_gap.double() / unit.clamp(min=TINY))


def layer_group_flip_probability(layer: LayerTrace, noise: PerToken) -> PerToken:
    """Return the probability that two groups of a layer swap; zero without groups (Def. 6.4)."""
    if layer.group_gap is None:
        return torch.zeros_like(noise)
    per_group = SCORES_PER_GROUP[layer.facts.group_score]
    return group_flip_probability(layer.group_gap, noise, per_group)


def either_probability(first: PerToken, second: PerToken) -> PerToken:
    """Return the probability of at least one of two independent events."""
    return first + second - first * second
