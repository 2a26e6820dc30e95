"""Sections of the measures of one layer: where its tokens are, and what perturbations do to them.

    scored, check_finite                           whether the layer has the scores that are needed
    gap_section, near_section, distance_section    gaps, near experts, distances to ties
    noise_flips, precision_flips, product_section  flips by noise, rounding, low-precision products
    angular_section                                where the router's inputs point

Flip predictions come with the probability or event of each token, from which the measures of the
model are made. Group-limited routers add the probability that two groups change places.
`docs/definitions.md` gives the formulas.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from tieline.core.errors import TraceError, require
from tieline.core.statistics import Estimate, mean_estimate, quantile_bands
from tieline.geometry.boundary import boundary_mass
from tieline.geometry.density import gap_density, margin_tail
from tieline.geometry.distance import AngularSpread, angular_spread
from tieline.geometry.flips import (
    LogitView,
    first_order,
    flip_limits,
    flip_probability,
    from_logits,
    group_flip_probability,
    noisy_gap,
    population_flips,
)
from tieline.geometry.measure_records import (
    Answer,
    DistanceMeasures,
    GapMeasures,
    MeasureSettings,
    NearMeasures,
    NoiseFlips,
    PrecisionFlips,
    ProductFlips,
    Quantiles,
)
from tieline.geometry.order import (
    censored_share,
    epsilon_for_extra,
    near_counts,
    order_from_counts,
    order_shares,
)
from tieline.geometry.rounding import (
    PRECISIONS,
    IntegerGrid,
    emulated_choice,
    grid_step,
    product_effect,
    product_flips,
    round_to,
    shared_cell,
    shared_cell_flips,
)
from tieline.trace.record import LayerTrace

__all__ = [
    "angular_section",
    "check_finite",
    "distance_section",
    "gap_section",
    "interpolated_epsilon",
    "near_section",
    "noise_densities",
    "noise_flips",
    "precision_flips",
    "product_section",
    "quantiles",
    "reachable",
    "scored",
]

PerToken = Float[Tensor, " tokens"]

SCORES_PER_GROUP = {"max": 1, "top2sum": 2}
TINY = 1e-300


def scored(layer: LayerTrace) -> str:
    """Return "ok" if scores on both sides of the threshold are available, else the reason."""
    k, experts = layer.facts.k, layer.facts.n_experts
    if layer.scores is None:
        return "not answerable: the trace has expert ids only, no scores"
    if k == experts:
        return f"not answerable: all {experts} experts are chosen, so no tie is possible"
    if layer.scores.shape[1] == k:
        return f"not answerable: only the {k} chosen scores were kept, not the next one"
    return "ok"


def check_finite(layer: LayerTrace) -> None:
    """Raise if scores are NaN or infinite, naming the layer, their number and the first token."""
    if layer.scores is None:
        return
    bad = layer.scores.isnan() | layer.scores.isposinf()
    bad[:, : layer.facts.k] |= layer.scores[:, : layer.facts.k].isneginf()
    rows = bad.any(dim=1).nonzero()
    require(
        len(rows) == 0,
        f"layer {layer.name!r}: scores of {len(rows)} of {len(bad)} tokens are NaN or infinite, "
        f"first at token {int(rows[0]) if len(rows) else -1}",
        TraceError,
    )


def reachable(layer: LayerTrace) -> int:
    """Number of experts that a token can choose from, those of its chosen groups."""
    facts = layer.facts
    return facts.k_groups * (facts.n_experts // facts.n_groups)


def quantiles(values: PerToken, settings: MeasureSettings) -> Quantiles:
    """Quantiles at the levels of the settings (Def. 2.4)."""
    bands = quantile_bands(values, settings.probabilities, settings.confidence)
    return Quantiles(settings.probabilities, *(tuple(column.tolist()) for column in bands))


def gap_section(gaps: PerToken, settings: MeasureSettings) -> GapMeasures:
    """Quantiles, boundary mass, density and tail of gaps (Def. 2.1, 2.4, 3.2, 3.3)."""
    widths = torch.tensor(settings.widths, dtype=torch.float64)
    return GapMeasures(
        quantiles=quantiles(gaps, settings),
        profile=boundary_mass(gaps, widths, settings.confidence),
        density=gap_density(gaps),
        tail=margin_tail(gaps, confidence=settings.confidence),
        ties=int((gaps == 0).sum()),
        tokens=gaps.numel(),
    )


def near_section(
    layer: LayerTrace, settings: MeasureSettings, epsilons: tuple[float, ...] = ()
) -> NearMeasures:
    """K(ε), tie orders and the ε of k + 1/2 experts (Def. 4.1 - 4.3).

    `epsilons` is the grid of the counts in `layer.near`, which include all experts.
    """
    ranked, k = _scores(layer), layer.facts.k
    exact = layer.near is not None and len(epsilons) > 0
    grid = epsilons if exact else settings.epsilons
    counts = layer.near if exact else near_counts(ranked, k, grid)
    assert counts is not None
    complete = exact or ranked.shape[1] >= reachable(layer)
    shares = [
        order_shares(order_from_counts(ranked, k, epsilon, count), settings.most_orders)
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


def distance_section(layer: LayerTrace, settings: MeasureSettings) -> Answer[DistanceMeasures]:
    """Distances to the nearest tie that were computed while capturing (Def. 5.2)."""
    if layer.distance is None:
        why = "no distances were kept" if layer.facts.affine else "the scores are not affine"
        return Answer(None, f"not answerable: {why}")
    values = layer.distance.double()
    return Answer(DistanceMeasures(quantiles(values, settings), gap_density(values)))


def angular_section(layer: LayerTrace) -> Answer[AngularSpread]:
    """Directions of the router's inputs (Def. 9.1 - 9.3)."""
    if layer.inputs is None:
        return Answer(None, "not answerable: router inputs were not kept")
    if layer.inputs.shape[-1] < 2:
        return Answer(None, "not answerable: inputs of one dimension have no direction")
    return Answer(angular_spread(layer.inputs, layer.facts.n_experts, layer.facts.k))


def interpolated_epsilon(
    goal: float, grid: tuple[float, ...], experts: tuple[Estimate, ...], k: int
) -> Estimate:
    """ε at which the mean count, interpolated linearly between grid points, reaches the goal."""
    below, before = 0.0, float(k)
    for epsilon, count in zip(grid, experts, strict=True):
        assert count.value is not None
        if count.value >= goal:
            slope = (count.value - before) / (epsilon - below)
            error = (count.standard_error or 0.0) / slope
            return Estimate(below + (goal - before) / slope, error)
        below, before = epsilon, count.value
    return Estimate(None, None, f"not answerable: K(ε) stays below {goal:g} up to ε = {grid[-1]:g}")


def noise_densities(layer: LayerTrace, view: LogitView) -> Estimate:
    """f_gap(0) in units of the noise caused by unit noise of the logits (Def. 6.3, 6.4).

    Group-limited routers add the density of the gap between groups.
    """
    inner = gap_density(noisy_gap(view.scores, layer.facts.k, view.slope))
    if layer.group_gap is None:
        return inner
    return inner.plus(_group_density(layer, view.threshold_slope))


def noise_flips(
    layer: LayerTrace, view: LogitView, sigma: float, density: Estimate
) -> tuple[NoiseFlips, PerToken]:
    """Flips under N(0, σ²) noise of the logits, and the probability of each token (Def. 6.2 - 6.4).

    `view` is the `logit_view` of the layer, `density` its `noise_densities`.
    """
    beyond = max(0, reachable(layer) - view.scores.shape[1])
    low, high = flip_limits(view.scores, layer.facts.k, view.slope * sigma, beyond)
    groups = _group_flips(layer, view.threshold_slope * sigma)
    chance = _either(low, groups)
    record = NoiseFlips(
        sigma=sigma,
        flip=mean_estimate(chance),
        upper=_either(high, groups).mean().item(),
        population=population_flips(density, sigma),
        two_runs=population_flips(density, sigma, runs=2),
    )
    return record, chance


def precision_flips(
    layer: LayerTrace, view: LogitView, precision: str
) -> tuple[PrecisionFlips, PerToken]:
    """Ties and flips by rounding the logits, and which tokens flip (Def. 7.2 - 7.4).

    `view` is the `logit_view` of the layer, with logits; `precision` a name in `PRECISIONS`.
    """
    assert view.logits is not None
    k = layer.facts.k
    step = grid_step(view.logits, precision)
    tie, flip, tie_rate, flip_rate = _expected(layer, view, step)
    rounded = from_logits(round_to(view.logits, precision), layer)
    choice = emulated_choice(rounded, k, layer.experts)
    record = PrecisionFlips(
        precision=precision,
        step=step[:, k - 1].mean().item(),
        tie=mean_estimate(tie),
        flip=mean_estimate(flip),
        tie_population=first_order(tie_rate),
        flip_population=first_order(flip_rate),
        tie_emulated=mean_estimate(choice.tied.double()),
        flip_emulated=mean_estimate(choice.flipped.double()),
        status=_limits_of(layer, view, precision),
    )
    return record, choice.flipped.double()


def product_section(
    layer: LayerTrace, view: LogitView, weight: Tensor | None, precision: str
) -> Answer[ProductFlips]:
    """Flips by a low-precision matrix product (Def. 7.5).

    `weight` (E, D) maps the inputs of the layer to its logits; `precision` is a floating format.
    """
    if layer.inputs is None or weight is None:
        lacking = "router inputs were not kept" if layer.inputs is None else "no weight was given"
        return Answer(None, f"not answerable: {lacking}")
    k, ids = layer.facts.k, layer.experts.long()
    effect = product_effect(layer.inputs, weight, precision)
    noise, error = effect.noise.gather(1, ids), effect.error.gather(1, ids)
    logits = view.logits
    if logits is None:  # softmax scores fix them up to a shift only
        logits = (layer.inputs.double() @ weight.detach().double().T).gather(1, ids)
    step = grid_step(logits, precision)[:, k - 1] * view.slope[:, k - 1]
    chance = product_flips(view.scores, k, noise * view.slope, step, same_grid=layer.bias is None)
    return Answer(
        ProductFlips(
            precision=precision,
            noise=noise[:, k - 1].mean().item(),
            flip=mean_estimate(chance.clamp(0, 1)),
            flip_emulated=_emulated(layer, round_to(logits + error, precision)),
        )
    )


def _epsilon_half(
    layer: LayerTrace, grid: tuple[float, ...], experts: tuple[Estimate, ...], exact: bool
) -> Estimate:
    """ε of k + 1/2 experts from the ranks where they suffice, else from the exact counts."""
    ranked, k = _scores(layer), layer.facts.k
    estimate = epsilon_for_extra(ranked, k)
    missing = ranked.shape[1] < reachable(layer)
    hidden = censored_share(ranked, k, estimate.value) if missing and estimate.value else 0.0
    if not missing or (estimate.value is not None and hidden == 0):
        return estimate
    if exact:
        return interpolated_epsilon(k + 0.5, grid, experts, k)
    if estimate.value is None:
        return estimate
    note = f"upper limit: for {hidden:.1%} of tokens all {ranked.shape[1]} kept ranks are within ε"
    return Estimate(estimate.value, estimate.standard_error, note)


def _scores(layer: LayerTrace) -> Float[Tensor, "tokens ranks"]:
    require(layer.scores is not None, f"layer {layer.name!r} has ids only: no scores", TraceError)
    assert layer.scores is not None
    return layer.scores.double()


def _emulated(layer: LayerTrace, logits: Float[Tensor, "tokens ranks"]) -> Estimate:
    """Share of tokens that are routed differently by other logits of the kept ranks."""
    if layer.facts.units == "softmax" and layer.bias is not None:
        return Estimate(None, None, "not answerable: a bias beside a softmax over all experts")
    choice = emulated_choice(from_logits(logits, layer), layer.facts.k, layer.experts)
    return mean_estimate(choice.flipped.double())


def _expected(
    layer: LayerTrace, view: LogitView, step: Float[Tensor, "tokens ranks"]
) -> tuple[PerToken, PerToken, Estimate, Estimate]:
    """Probabilities of a tie and of a flip per token, and their first-order rates."""
    k = layer.facts.k
    noise = step * view.slope / math.sqrt(12)
    if layer.bias is None:
        gaps, q = view.scores[:, k - 1] - view.scores[:, k], step[:, k - 1].clamp(min=TINY)
        tie, flip = shared_cell(gaps, q), shared_cell_flips(view.scores, k, q)
        density = gap_density(gaps / q)
        tie_rate, flip_rate = density.times(0.5), density.times(0.25)
    else:
        flip = flip_probability(view.scores, k, noise)
        tie, tie_rate = torch.zeros_like(flip), Estimate(0.0, 0.0)
        density = gap_density(noisy_gap(view.scores, k, noise.clamp(min=TINY)))
        flip_rate = density.times(1 / math.sqrt(math.pi))
    if layer.group_gap is None:
        return tie, flip, tie_rate, flip_rate
    group_noise = step[:, k - 1] * view.threshold_slope / math.sqrt(12)
    groups = _group_density(layer, group_noise).times(1 / math.sqrt(math.pi))
    return tie, _either(flip, _group_flips(layer, group_noise)), tie_rate, flip_rate.plus(groups)


def _group_density(layer: LayerTrace, noise: PerToken) -> Estimate:
    """Density at zero of the gap between groups, in units of their noise."""
    assert layer.group_gap is not None
    unit = math.sqrt(SCORES_PER_GROUP[layer.facts.group_score]) * noise
    return gap_density(layer.group_gap.double() / unit.clamp(min=TINY))


def _group_flips(layer: LayerTrace, noise: PerToken) -> PerToken:
    if layer.group_gap is None:
        return torch.zeros_like(noise)
    per_group = SCORES_PER_GROUP[layer.facts.group_score]
    return group_flip_probability(layer.group_gap, noise, per_group)


def _either(first: PerToken, second: PerToken) -> PerToken:
    return first + second - first * second


def _limits_of(layer: LayerTrace, view: LogitView, precision: str) -> str:
    """Note what an emulation on the kept ranks leaves out."""
    ranks, experts = view.scores.shape[1], layer.facts.n_experts
    notes = []
    if isinstance(PRECISIONS[precision], IntegerGrid) and ranks < experts:
        notes.append(f"scale from the {ranks} largest of {experts} logits")
    if layer.group_gap is not None:
        notes.append("emulated within the chosen groups only")
    return "; ".join(notes) or "ok"
