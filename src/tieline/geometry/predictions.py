"""The sections that predict what perturbations do to the choice: noise, rounding, products.

Each returns its record together with the probability or event of each token, so that the model's
record can join layers. Group-limited routers add the chance that two groups change places.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from tieline.geometry.density import gap_density
from tieline.geometry.flips import (
    first_order,
    flip_limits,
    flip_probability,
    group_flip_probability,
    noisy_gap,
    population_flips,
)
from tieline.geometry.product import product_effect, product_flips
from tieline.geometry.records import Answer, NoiseFlips, PrecisionFlips, ProductFlips
from tieline.geometry.rounding import (
    PRECISIONS,
    IntegerGrid,
    emulated_choice,
    grid_step,
    round_to,
    shared_cell,
    shared_cell_flips,
)
from tieline.geometry.sections import reachable
from tieline.geometry.units import LogitView, from_logits
from tieline.numerics import Estimate, mean_estimate
from tieline.trace.record import LayerTrace

__all__ = ["noise_densities", "noise_flips", "precision_flips", "product_section"]

PerToken = Float[Tensor, " tokens"]
SCORES_PER_GROUP = {"max": 1, "top2sum": 2}
TINY = 1e-300


def noise_densities(layer: LayerTrace, view: LogitView) -> Estimate:
    """f_gap(0) in units of the noise that unit noise of the logits makes (Def. 6.3, 6.4).

    For group-limited routers the density of the gap between groups comes on top.
    """
    inner = gap_density(noisy_gap(view.scores, view.slope, layer.facts.k))
    if layer.group_gap is None:
        return inner
    return inner.plus(_group_density(layer, view.threshold_slope))


def noise_flips(
    layer: LayerTrace, view: LogitView, sigma: float, density: Estimate
) -> tuple[NoiseFlips, PerToken]:
    """Flips under N(0, σ²) noise of the logits, and the probability of each token (Def. 6.2 - 6.4).

    Args:
        layer: a layer with scores.
        view: its `logit_view`.
        sigma: σ.
        density: its `noise_densities`.
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

    Args:
        layer: a layer with scores.
        view: its `logit_view`, which must know the logits.
        precision: a name in `PRECISIONS`.
    """
    assert view.logits is not None
    k = layer.facts.k
    step = grid_step(view.logits, precision)
    tie, flip, tie_rate, flip_rate = _expected(layer, view, step)
    rounded = from_logits(round_to(view.logits, precision), layer)
    choice = emulated_choice(rounded, layer.experts, k)
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

    Args:
        layer: a layer with scores and inputs.
        view: its `logit_view`.
        weight: (E, D) weight that maps the inputs to the logits.
        precision: a floating-point format.
    """
    if layer.inputs is None or weight is None:
        lacking = "router inputs were not kept" if layer.inputs is None else "no weight was given"
        return Answer(None, f"not answerable: {lacking}")
    k, ids = layer.facts.k, layer.experts.long()
    effect = product_effect(layer.inputs, weight, precision)
    noise, error = effect.noise.gather(1, ids), effect.error.gather(1, ids)
    logits = view.logits
    if logits is None:  # softmax scores tell the logits up to a shift; the product tells all
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


def _emulated(layer: LayerTrace, logits: Float[Tensor, "tokens ranks"]) -> Estimate:
    """Share of tokens that other logits of the kept ranks route otherwise."""
    if layer.facts.units == "softmax" and layer.bias is not None:
        return Estimate(None, None, "not answerable: a bias beside a softmax over all experts")
    choice = emulated_choice(from_logits(logits, layer), layer.experts, layer.facts.k)
    return mean_estimate(choice.flipped.double())


def _expected(
    layer: LayerTrace, view: LogitView, step: Float[Tensor, "tokens ranks"]
) -> tuple[PerToken, PerToken, Estimate, Estimate]:
    """Chances of a tie and of a flip per token, and their first-order rates."""
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
        density = gap_density(noisy_gap(view.scores, noise.clamp(min=TINY), k))
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
    """What an emulation on the kept ranks cannot see."""
    ranks, experts = view.scores.shape[1], layer.facts.n_experts
    notes = []
    if isinstance(PRECISIONS[precision], IntegerGrid) and ranks < experts:
        notes.append(f"scale from the {ranks} largest of {experts} logits")
    if layer.group_gap is not None:
        notes.append("emulated within the chosen groups only")
    return "; ".join(notes) or "ok"
