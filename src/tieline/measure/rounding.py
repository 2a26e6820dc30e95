"""What low precision does to the choice: rounding the logits, and computing them in low precision.

    shared_cell        P(tie) = (1 - Δ/q)+                                            Def. 7.2
    shared_cell_flips  P(flip) by ties on one grid, half of the former for fine grids Def. 7.3
    emulated_choice    ties and flips of the given scores                             Def. 7.4
    product_effect     noise and error of a low-precision matrix product              Def. 7.5
    product_flips      P(flip) per token: noise, then rounding of the result          Def. 7.5
    precision_flips    all of these for a layer of a trace
    product_section    flips of a layer by a low-precision product

The formats are those of `core.numerics`. Rounding to one grid never reverses two scores, it can
only make them equal; a tie then goes to the lower index, the wrong one in half of the cases. Where
a bias or a nonlinearity follows the logits, the scores round on different grids: ties are rare, and
rounding acts as noise of variance q²/12 (Def. 7.3).

A matrix unit rounds inputs and weights, sums products in float32 and rounds the sum. The error of
a logit is e_i = Σ_d (w_id δx_d + x_d δw_id) + ρ_i, with known sizes |δx_d|, |δw_id|, signs taken as
random, and ρ_i the rounding of the sum. An error common to all experts changes no choice, so w_id
counts as its distance from the mean over experts.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tieline.core.errors import ShapeError, require
from tieline.core.numerics import PRECISIONS, IntegerGrid, grid_step, one_thread, round_to
from tieline.core.ranking import gap, sets_differ, topk_mask
from tieline.core.statistics import Estimate, mean_estimate
from tieline.measure.boundary import gap_density
from tieline.measure.flips import (
    TINY,
    either_chance,
    first_order,
    flip_probability,
    group_density,
    group_flips,
    noisy_gap,
)
from tieline.measure.logit_view import LogitView, from_logits
from tieline.measure.measure_settings import Measurement
from tieline.trace.record import LayerTrace

Scores = Float[Tensor, "tokens experts"]

PerToken = Float[Tensor, " tokens"]

OFFSETS = 32
"""Positions of a cell's edge over which the flips of a coarse grid are averaged."""

CHUNK = 1 << 15
"""Entries of a temporary, so that it stays in the processor's cache."""

INPUT_CHUNK = 1 << 20
"""Entries of router inputs that are rounded at once."""


@dataclass(frozen=True)
class PrecisionFlips:
    """Ties and flips when the logits are rounded to a format.

    Attributes:
        precision: name of the format.
        step: mean step of the grid at the threshold, in units of the logits.
        tie: expected share of tied tokens for a random offset of the grid (Def. 7.2).
        flip: expected share of flipped tokens (Def. 7.2, 7.3).
        tie_population: f_gap(0) q / 2.
        flip_population: f_gap(0) q / 4, or its equivalent on two grids.
        tie_emulated: share of these tokens that tie when rounded (Def. 7.4).
        flip_emulated: share of these tokens that flip when rounded, within the chosen groups.
        status: "ok", or what the numbers leave out.
    """

    precision: str
    step: float
    tie: Estimate
    flip: Estimate
    tie_population: Estimate
    flip_population: Estimate
    tie_emulated: Estimate
    flip_emulated: Estimate
    status: str = "ok"


@dataclass(frozen=True)
class ProductFlips:
    """Flips when the logits are computed by a low-precision matrix product (Def. 7.5).

    Attributes:
        precision: name of the format.
        noise: mean standard deviation of the product's error at the threshold.
        flip: expected share of flipped tokens.
        flip_emulated: share of these tokens that flip.
    """

    precision: str
    noise: float
    flip: Estimate
    flip_emulated: Estimate


def shared_cell(gaps: PerToken, step: PerToken) -> PerToken:
    """(1 - Δ/q)+: probability that two scores Δ apart round to the same number (Def. 7.2).

    For a uniform offset of the grid. Its mean over tokens is the tie rate, f_gap(0) q / 2 to first
    order.
    """
    same = torch.where(gaps == 0, 1.0, 1 - gaps.double() / step)
    return same.clamp(min=0).nan_to_num(neginf=0.0)


def shared_cell_flips(ranked: Scores, k: int, step: PerToken) -> PerToken:
    """P(flip) by ties on one grid: mean of 1 - 1/C(a + b, a) over grid offsets (Def. 7.3).

    A cell across the threshold contains a chosen experts and b others; the a lowest indices are
    kept. Fine grids have a = b = 1: half of the ties flip and the rate is f_gap(0) q / 4.

    Args:
        ranked: scores of the first C ranks, descending.
        k: number of experts chosen.
        step: q at the threshold, in units of score.
    """
    z, q = ranked.double(), step[:, None].double()
    tie = shared_cell(z[:, k - 1] - z[:, k], step)
    rows = (tie > 0).nonzero().squeeze(1)
    flips = torch.zeros_like(tie)
    binomials = _binomials(z.shape[1])
    with one_thread():
        for chunk in rows.split(max(1, CHUNK // z.shape[1])):
            flips[chunk] = tie[chunk] * _mean_over_offsets(z[chunk], k, q[chunk], binomials)
    return flips


def _mean_over_offsets(
    z: Scores, k: int, q: Float[Tensor, "tokens 1"], binomials: Tensor
) -> PerToken:
    """Mean of 1 - 1/C(a + b, a) over equally spaced cells across the threshold."""
    floor, top = z[:, k - 1 : k] - q, z[:, k : k + 1]
    total = torch.zeros_like(z[:, 0])
    for offset in range(OFFSETS):
        edge = floor + (top - floor) * ((offset + 0.5) / OFFSETS)
        held = (z >= edge) & (z < edge + q)
        total += 1 - 1 / binomials[held.sum(dim=1), held[:, :k].sum(dim=1)]
    return total / OFFSETS


def _binomials(most: int) -> Float[Tensor, "n n"]:
    """Binomial coefficients C(n, a) for n, a <= most; 1 for a > n, which does not occur."""
    n = torch.arange(most + 1, dtype=torch.float64)
    logs = torch.lgamma(n + 1)
    inside = (logs[:, None] - logs - torch.lgamma((n[:, None] - n).clamp(min=0) + 1)).exp()
    return torch.where(n[:, None] >= n, inside, 1.0)


class EmulatedChoice(NamedTuple):
    """For each token, whether its threshold is tied and whether its chosen set changed."""

    tied: Bool[Tensor, " tokens"]
    flipped: Bool[Tensor, " tokens"]


def emulated_choice(
    rounded: Float[Tensor, "tokens ranks"], k: int, experts: Int[Tensor, "tokens ranks"]
) -> EmulatedChoice:
    """Ties at the threshold and changes of the chosen set for the given scores (Def. 7.4).

    Considers the kept ranks only: where all of them past k tie, further experts might enter.

    Args:
        rounded: perturbed scores of the kept ranks, in the order of the ranks before rounding.
        k: number of experts chosen.
        experts: the expert of each rank, which decides ties; the first k are the choice before.
    """
    by_index = experts.long().argsort(dim=1)
    chosen = topk_mask(rounded.gather(1, by_index), k)
    return EmulatedChoice(gap(rounded, k) == 0, sets_differ(chosen, by_index < k))


class ProductEffect(NamedTuple):
    """Effect of a low-precision product on each logit, before the result is rounded.

    Attributes:
        noise: σ_i = √(Σ_d (w_id - w̄_d)² δx_d² + x_d² δw_id²), the error with random signs.
        error: Σ_d x̃_d w̃_id - x_d w_id of the rounded x̃ and w̃, the error of the given numbers.
    """

    noise: Float[Tensor, "tokens experts"]
    error: Float[Tensor, "tokens experts"]


def product_effect(
    inputs: Float[Tensor, "tokens dim"],
    weight: Float[Tensor, "experts dim"],
    precision: str = "bf16",
) -> ProductEffect:
    """Noise and error of logits computed by a low-precision matrix product (Def. 7.5).

    δ is the actual rounding error of each number: a checkpoint stored in the format adds nothing.
    Sums are taken in float64; the float32 sums of matrix units err far less than 16-bit inputs.

    Args:
        inputs: the router's inputs in the precision of the exact run.
        weight: the exact weight of the router.
        precision: a floating-point format of `PRECISIONS`.
    """
    require(inputs.shape[1] == weight.shape[1], "inputs and weight differ in dimension", ShapeError)
    w = weight.detach().double()
    w_rounded = round_to(w, precision)
    spread, dw = (w - w.mean(dim=0)).square(), (w_rounded - w).square()
    effects = []
    for rows in inputs.split(max(1, INPUT_CHUNK // inputs.shape[1])):
        x = rows.double()
        x_rounded = round_to(x, precision)
        noise = ((x_rounded - x).square() @ spread.T + x.square() @ dw.T).sqrt()
        effects.append(ProductEffect(noise, x_rounded @ w_rounded.T - x @ w.T))
    return ProductEffect(*(torch.cat(column) for column in zip(*effects, strict=True)))


def product_flips(
    ranked: Float[Tensor, "tokens ranks"],
    k: int,
    noise: Float[Tensor, "tokens ranks"],
    step: Float[Tensor, " tokens"],
    same_grid: bool = True,
) -> Float[Tensor, " tokens"]:
    """P(flip) of each token: noise of the sum, then rounding of the result (Def. 7.5).

    The quadrature of Def. 6.2 for the noise, plus the effect of rounding on the pair at the
    threshold: with u ~ N(Δ, σ_k² + σ_{k+1}²) the noisy gap, a pair at |u| < q falls into one cell
    with probability 1 - |u|/q and then flips (u > 0) or unflips (u < 0) in half of the cases.

    Args:
        ranked: exact scores of the first ranks, descending.
        k: number of experts chosen.
        noise: `product_effect` of these ranks, times the slope of the scores.
        step: q, grid of the result at the threshold, in units of score; 0 for none.
        same_grid: whether the pair rounds on one grid; otherwise the rounding is more noise.
    """
    if not same_grid:
        return flip_probability(ranked, k, (noise.square() + step[:, None].square() / 12).sqrt())
    rise = ranked[:, k - 1].double() - ranked[:, k].double()
    spread = (noise[:, k - 1].square() + noise[:, k].square()).sqrt()
    return flip_probability(ranked, k, noise) + _tie_flips(rise, spread, step)


def _tie_flips(rise: Tensor, spread: Tensor, step: Tensor) -> Tensor:
    """½ E[(1 - |u|/q)+ sign u], u ~ N(rise, spread²)."""
    tiny = torch.finfo(torch.float64).tiny
    s, q, rise = spread.clamp(min=tiny), step.clamp(min=tiny), rise.clamp(max=1e30)
    marks = torch.stack([-q, torch.zeros_like(q), q])
    x = (marks - rise) / s
    below = torch.special.ndtr(x)
    density = (-x.square() / 2).exp() / math.sqrt(2 * math.pi)
    inside = (below[2] - below[1]) - (below[1] - below[0])
    mean = rise * (below[2] - below[0]) - s * (density[2] - density[0])
    return torch.where(step > 0, (inside - mean / q) / 2, 0.0).clamp(-0.5, 0.5)


def precision_flips(
    layer: LayerTrace, view: LogitView, precision: str
) -> tuple[PrecisionFlips, PerToken]:
    """Ties and flips by rounding the logits, and which tokens flip (Def. 7.2 - 7.4).

    `view` is the `logit_view` of the layer, with logits; `precision` a name in `PRECISIONS`.
    """
    assert view.logits is not None
    k = layer.facts.k
    step = grid_step(view.logits, precision)
    tie, flip, tie_rate, flip_rate = _expected_rates(layer, view, step)
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
        status=_emulation_notes(layer, view, precision),
    )
    return record, choice.flipped.double()


def product_section(
    layer: LayerTrace, view: LogitView, weight: Tensor | None, precision: str
) -> Measurement[ProductFlips]:
    """Flips by a low-precision matrix product (Def. 7.5).

    `weight` (E, D) maps the inputs of the layer to its logits; `precision` is a floating format.
    """
    if layer.inputs is None or weight is None:
        lacking = "router inputs were not kept" if layer.inputs is None else "no weight was given"
        return Measurement(None, f"not answerable: {lacking}")
    k, ids = layer.facts.k, layer.experts.long()
    effect = product_effect(layer.inputs, weight, precision)
    noise, error = effect.noise.gather(1, ids), effect.error.gather(1, ids)
    logits = view.logits
    if logits is None:  # softmax scores fix them up to a shift only
        logits = (layer.inputs.double() @ weight.detach().double().T).gather(1, ids)
    step = grid_step(logits, precision)[:, k - 1] * view.slope[:, k - 1]
    chance = product_flips(view.scores, k, noise * view.slope, step, same_grid=layer.bias is None)
    return Measurement(
        ProductFlips(
            precision=precision,
            noise=noise[:, k - 1].mean().item(),
            flip=mean_estimate(chance.clamp(0, 1)),
            flip_emulated=_emulated_flips(layer, round_to(logits + error, precision)),
        )
    )


def _emulated_flips(layer: LayerTrace, logits: Float[Tensor, "tokens ranks"]) -> Estimate:
    """Share of tokens that are routed differently by other logits of the kept ranks."""
    if layer.facts.units == "softmax" and layer.bias is not None:
        return Estimate(None, None, "not answerable: a bias beside a softmax over all experts")
    choice = emulated_choice(from_logits(logits, layer), layer.facts.k, layer.experts)
    return mean_estimate(choice.flipped.double())


def _expected_rates(
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
    groups = group_density(layer, group_noise).times(1 / math.sqrt(math.pi))
    return (
        tie,
        either_chance(flip, group_flips(layer, group_noise)),
        tie_rate,
        flip_rate.plus(groups),
    )


def _emulation_notes(layer: LayerTrace, view: LogitView, precision: str) -> str:
    """Note what an emulation on the kept ranks leaves out."""
    ranks, experts = view.scores.shape[1], layer.facts.n_experts
    notes = []
    if isinstance(PRECISIONS[precision], IntegerGrid) and ranks < experts:
        notes.append(f"scale from the {ranks} largest of {experts} logits")
    if layer.group_gap is not None:
        notes.append("emulated within the chosen groups only")
    return "; ".join(notes) or "ok"
