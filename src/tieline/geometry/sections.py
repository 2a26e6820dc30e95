"""The sections that describe where the tokens are: gaps, near experts, distances.

`scored` says whether a layer can answer them at all; `docs/definitions.md` gives the formulas.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from tieline.errors import TraceError, require
from tieline.geometry.boundary import boundary_mass
from tieline.geometry.density import gap_density, margin_tail
from tieline.geometry.order import (
    censored_share,
    epsilon_for_extra,
    near_counts,
    order_from_counts,
    order_shares,
)
from tieline.geometry.records import (
    Answer,
    DistanceMeasures,
    GapMeasures,
    NearMeasures,
    Quantiles,
)
from tieline.geometry.settings import MeasureSettings
from tieline.numerics import Estimate, mean_estimate, quantile_bands
from tieline.trace.record import LayerTrace

__all__ = [
    "check_finite",
    "distance_section",
    "gap_section",
    "interpolated_epsilon",
    "near_section",
    "quantiles",
    "reachable",
    "scored",
]

PerToken = Float[Tensor, " tokens"]


def scored(layer: LayerTrace) -> str:
    """Whether ("ok") the layer can tell the scores beside its threshold, or why not."""
    k, experts = layer.facts.k, layer.facts.n_experts
    if layer.scores is None:
        return "not answerable: the trace has expert ids only, no scores"
    if k == experts:
        return f"not answerable: all {experts} experts are chosen, so no tie is possible"
    if layer.scores.shape[1] == k:
        return f"not answerable: only the {k} chosen scores were kept, not the next one"
    return "ok"


def check_finite(layer: LayerTrace) -> None:
    """Refuse scores that are no numbers, naming the layer, their count and the first token."""
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
    """Number of experts that a token can choose from: those of the chosen groups, or all."""
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

    Args:
        layer: a layer that `scored` accepts.
        settings: grids.
        epsilons: the grid of the counts in `layer.near`, which run over all experts.
    """
    ranked, k = _scores(layer), layer.facts.k
    exact = layer.near is not None and len(epsilons) > 0
    grid = epsilons if exact else settings.epsilons
    counts = layer.near if exact else near_counts(ranked, k, grid)
    assert counts is not None
    complete = exact or ranked.shape[1] >= reachable(layer)
    shares = [
        order_shares(order_from_counts(ranked, k, eps, count), settings.most_orders)
        for eps, count in zip(grid, counts.T, strict=True)
    ]
    experts = tuple(mean_estimate(count.double()) for count in counts.T)
    return NearMeasures(
        epsilons=tuple(grid),
        experts=experts,
        orders=tuple(tuple(share.tolist()) for share in shares),
        censored=tuple(0.0 if complete else censored_share(ranked, k, eps) for eps in grid),
        epsilon_half=_epsilon_half(layer, tuple(grid), experts, exact),
    )


def distance_section(layer: LayerTrace, settings: MeasureSettings) -> Answer[DistanceMeasures]:
    """Distances to the nearest tie that were computed while capturing (Def. 5.2)."""
    if layer.distance is None:
        why = "no distances were kept" if layer.facts.affine else "the scores are not affine"
        return Answer(None, f"not answerable: {why}")
    values = layer.distance.double()
    return Answer(DistanceMeasures(quantiles(values, settings), gap_density(values)))


def _epsilon_half(
    layer: LayerTrace, grid: tuple[float, ...], experts: tuple[Estimate, ...], exact: bool
) -> Estimate:
    """From the ranks where they suffice, else between the points of the exact counts."""
    ranked, k = _scores(layer), layer.facts.k
    estimate = epsilon_for_extra(ranked, k)
    missing = ranked.shape[1] < reachable(layer)
    hidden = censored_share(ranked, k, estimate.value) if missing and estimate.value else 0.0
    if not missing or (estimate.value is not None and hidden == 0):
        return estimate
    if exact:
        return interpolated_epsilon(k + 0.5, grid, experts, k)
    note = f"upper limit: for {hidden:.1%} of tokens all {ranked.shape[1]} kept ranks are within ε"
    return (
        estimate
        if estimate.value is None
        else Estimate(estimate.value, estimate.standard_error, note)
    )


def interpolated_epsilon(
    goal: float, grid: tuple[float, ...], experts: tuple[Estimate, ...], k: int
) -> Estimate:
    """ε at which the mean count, linear between the points of the grid, reaches the goal."""
    below, before = 0.0, float(k)
    for epsilon, count in zip(grid, experts, strict=True):
        assert count.value is not None
        if count.value >= goal:
            slope = (count.value - before) / (epsilon - below)
            error = (count.standard_error or 0.0) / slope
            return Estimate(below + (goal - before) / slope, error)
        below, before = epsilon, count.value
    return Estimate(None, None, f"not answerable: K(ε) stays below {goal:g} up to ε = {grid[-1]:g}")


def _scores(layer: LayerTrace) -> Float[Tensor, "tokens ranks"]:
    require(layer.scores is not None, f"layer {layer.name!r} has ids only: no scores", TraceError)
    assert layer.scores is not None
    return layer.scores.double()
