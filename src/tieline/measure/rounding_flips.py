"""Flips by low precision: logits rounded to a format, or computed by a low-precision product.

    shared_cell_probability        P(tie) = (1 - Δ/q)+                                 Def. 7.2
    shared_cell_flip_probability   P(flip) by ties on one grid; P(tie) / 2 if fine     Def. 7.3
    emulated_choice                ties and flips of rounded scores                    Def. 7.4
    product_effect                 noise and error of a low-precision matrix product   Def. 7.5
    product_flip_probability       P(flip) by noise, then rounding of the result       Def. 7.5
    precision_flips                flips of a layer of a trace by rounding its logits
    measure_product_flips          flips of a layer of a trace by a low-precision product
    certified_choices              tokens whose choice no order of summation can change

The formats are those of `core.numerics`. Rounding to one grid never reverses two scores, it can
only make them equal; the tie then goes to the lower index, which is wrong in half of the cases. If
a bias or a nonlinearity follows the logits, the scores round on different grids: ties are rare, and
rounding acts as noise of variance q²/12 (Def. 7.3).

A matrix unit rounds inputs and weights, sums products in float32 and rounds the sum. The error of
a logit is e_i = Σ_d (w_id δx_d + x_d δw_id) + ρ_i, with known sizes |δx_d|, |δw_id|, signs assumed
random, and ρ_i the rounding of the sum. An error common to all experts changes no choice, so w_id
is replaced by its distance from the mean over experts.

A forward error bound certifies choices. With bitwise equal router input x and stored weights w_e,
exact scores z_e = Σ_i x_i w_ei and

    B_e = γ_d(u) Σ_i |x_i w_ei| + u_out (|z_e| + γ_d(u) Σ_i |x_i w_ei|),   γ_d(u) = d u / (1 - d u),

every evaluation whose operations satisfy fl(a ∘ b) = (a ∘ b)(1 + δ), |δ| <= u, in any order, and
whose result is rounded once with |δ| <= u_out, is within B_e of z_e. So if z_i - z_j > B_i + B_j
for every chosen i and every other j, all these evaluations choose the same experts (Higham,
Accuracy and Stability of Numerical Algorithms, sec. 3.1). The share of uncertified tokens is an
upper bound on the share that another kernel of the router's product alone can change. Not covered:
TF32, fp8 and truncating tensor-core adds (other constants), selection on computed softmax or
sigmoid values, selection biases and groups (they add roundings of their own), and differences
before the router.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tieline.core.errors import ShapeError, require
from tieline.core.numerics import PRECISIONS, IntegerGrid, grid_step, one_thread, round_to
from tieline.core.ranking import gap, topk_mask
from tieline.core.statistics import Estimate, mean_estimate
from tieline.measure.boundary import gap_density
from tieline.measure.measure_settings import Measurement
from tieline.measure.noise_flips import (
    TINY,
    LogitView,
    either_probability,
    flip_probability,
    group_gap_density,
    layer_group_flip_probability,
    noisy_gap,
    note_first_order,
    scores_of_logits,
)
from tieline.trace.record import LayerTrace

Scores = Float[Tensor, "tokens experts"]

PerToken = Float[Tensor, " tokens"]

CELL_OFFSETS = 32
"""Number of positions of a cell's edge over which the flips of a coarse grid are averaged."""

CHUNK = 1 << 15
"""Number of entries of a temporary tensor, so that it stays in the processor's cache."""

LAST_ID = (1 << 31) - 1
"""An integer above every expert's index."""

INPUT_CHUNK = 1 << 18
"""Number of entries of router inputs that are rounded at once."""


@dataclass(frozen=True)
class PrecisionFlips:
    """Ties and flips by rounding the logits to a format.

    Attributes:
        precision: name of the format.
        step: mean step of the grid at the threshold, in units of the logits.
        tie: expected share of tied tokens for a random offset of the grid (Def. 7.2).
        flip: expected share of flipped tokens (Def. 7.2, 7.3).
        tie_population: f_gap(0) q / 2.
        flip_population: f_gap(0) q / 4, or its equivalent on two grids.
        tie_emulated: share of these tokens that tie when rounded (Def. 7.4).
        flip_emulated: share of these tokens that flip when rounded, within the chosen groups.
        status: "ok", or a note on what the numbers do not include.
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
    """Flips by computing the logits with a low-precision matrix product (Def. 7.5).

    Attributes:
        precision: name of the format.
        noise: mean standard deviation of the product's error at the threshold.
        flip: expected share of flipped tokens.
        flip_emulated: share of these tokens that flip.
        uncertified: share of tokens whose choice another order of summation in float32 may change,
            an upper bound for flips by the router's product alone (`certified_choices`).
    """

    precision: str
    noise: float
    flip: Estimate
    flip_emulated: Estimate
    uncertified: Estimate


def shared_cell_probability(gaps: PerToken, step: PerToken) -> PerToken:
    """Return (1 - Δ/q)+, the probability that two scores Δ apart round alike (Def. 7.2).

    The offset of the grid is uniform. The mean over tokens is the tie rate, f_gap(0) q / 2 to first
    order.
    """
    same = torch.where(gaps == 0, 1.0, 1 - gaps.double() / step)
    return same.clamp(min=0).nan_to_num(neginf=0.0)


def shared_cell_flip_probability(ranked: Scores, k: int, step: PerToken) -> PerToken:
    """Return P(flip) by ties on one grid, the mean of 1 - 1/C(a + b, a) over offsets (Def. 7.3).

    A cell across the threshold contains a chosen experts and b others; the a lowest indices are
    kept. Fine grids have a = b = 1: half of the ties flip and the rate is f_gap(0) q / 4.

    Args:
        ranked: scores of the first C ranks, descending.
        k: number of experts chosen.
        step: q at the threshold, in units of score.
    """
    z, q = ranked.double(), step.double()
    tie = shared_cell_probability(z[:, k - 1] - z[:, k], step)
    flips = tie / 2
    binomials = _binomial_coefficients(z.shape[1]).to(z.device)
    with one_thread():
        # cells that ranks k and k + 1 share can contain a third one
        crowded = torch.zeros(len(z), dtype=torch.bool, device=z.device)
        if k > 1:
            crowded |= z[:, k - 2] - z[:, k] < q
        if z.shape[1] > k + 1:
            crowded |= z[:, k - 1] - z[:, k + 1] < q
        rows = (crowded & (tie > 0)).nonzero().squeeze(1)
        crowd = z[rows]
        crowd = (crowd > crowd[:, k - 1 : k] - q[rows, None]).sum(dim=1)
        for chunk in rows[crowd.argsort()].split(max(1, CHUNK // CELL_OFFSETS)):
            flips[chunk] = tie[chunk] * _mean_over_offsets(z[chunk], k, q[chunk], binomials)
    return flips


def _mean_over_offsets(z: Scores, k: int, q: PerToken, binomials: Tensor) -> PerToken:
    """Return the mean of 1 - 1/C(a + b, a) over equally spaced cells across the threshold."""
    offsets = (
        torch.arange(CELL_OFFSETS, dtype=torch.float64, device=z.device) + 0.5
    ) / CELL_OFFSETS
    floor, top = z[:, k - 1] - q, z[:, k]
    edge = floor + (top - floor) * offsets[:, None]
    ceiling = edge + q
    members, chosen = torch.zeros(2, *edge.shape, dtype=torch.int16, device=z.device)
    possible = ((z > floor[:, None]) & (z < (top + q)[:, None])).any(dim=0).tolist()
    for rank, score in enumerate(z.T):
        if possible[rank]:
            inside = (score >= edge) & (score < ceiling)
            members += inside
            if rank < k:
                chosen += inside
    cell = members.long() * len(binomials) + chosen
    return (1 - 1 / binomials.flatten()[cell]).mean(dim=0)


def _binomial_coefficients(most: int) -> Float[Tensor, "n n"]:
    """Return binomial coefficients C(n, a) for n, a <= most; 1 for a > n, which does not occur."""
    n = torch.arange(most + 1, dtype=torch.float64, device="cpu")
    logs = torch.lgamma(n + 1)
    inside = (logs[:, None] - logs - torch.lgamma((n[:, None] - n).clamp(min=0) + 1)).exp()
    return torch.where(n[:, None] >= n, inside, 1.0)


class EmulatedChoice(NamedTuple):
    """Masks of tokens whose threshold is tied, and of those whose chosen set changed."""

    tied: Bool[Tensor, " tokens"]
    flipped: Bool[Tensor, " tokens"]


def emulated_choice(
    rounded: Float[Tensor, "tokens ranks"], k: int, experts: Int[Tensor, "tokens ranks"]
) -> EmulatedChoice:
    """Return ties at the threshold and changes of the chosen set for rounded scores (Def. 7.4).

    Considers the kept ranks only: if all kept ranks past k tie, further experts might enter.

    Args:
        rounded: perturbed scores of the kept ranks, in the order of the ranks before rounding.
        k: number of experts chosen.
        experts: expert of each rank, which decides ties; the first k are chosen before rounding.
    """
    inside, outside = rounded[:, :k], rounded[:, k:]
    if outside.shape[1] == 0:
        never = torch.zeros(len(rounded), dtype=torch.bool, device=rounded.device)
        return EmulatedChoice(never, never)
    lowest, highest = inside.amin(dim=1), outside.amax(dim=1)
    ids = experts.to(torch.int32)
    last = ids[:, :k].masked_fill(inside != lowest[:, None], -1).amax(dim=1)
    first = ids[:, k:].masked_fill(outside != highest[:, None], LAST_ID).amin(dim=1)
    tied, flipped = highest == lowest, highest > lowest
    rows = flipped.nonzero().squeeze(1)
    if len(rows):  # another expert may be at the threshold now
        tied[rows] = gap(rounded[rows], k) == 0
    return EmulatedChoice(tied, flipped | ((highest == lowest) & (first < last)))


class ProductEffect(NamedTuple):
    """Effect of a low-precision product on each logit, before the result is rounded.

    Attributes:
        noise: σ_i = √(Σ_d (w_id - w̄_d)² δx_d² + x_d² δw_id²), for rounding errors of random sign.
        error: Σ_d x̃_d w̃_id - x_d w_id with x̃ and w̃ rounded, the error of the given numbers.
    """

    noise: Float[Tensor, "tokens experts"]
    error: Float[Tensor, "tokens experts"]


def product_effect(
    inputs: Float[Tensor, "tokens dim"],
    weight: Float[Tensor, "experts dim"],
    precision: str = "bf16",
) -> ProductEffect:
    """Return noise and error of logits computed by a low-precision matrix product (Def. 7.5).

    δ is the actual rounding error of each number: weights stored in the format have none. The error
    is summed as Σ_d δx_d w̃_id + x_d δw_id, whose terms are small, so that float32 keeps its digits.

    Args:
        inputs: the router's inputs in the precision of the exact run.
        weight: exact weight of the router.
        precision: a floating-point format of `PRECISIONS`.
    """
    require(inputs.shape[1] == weight.shape[1], "inputs and weight differ in dimension", ShapeError)
    dtype = torch.promote_types(torch.promote_types(inputs.dtype, weight.dtype), torch.float32)
    w = weight.detach().to(dtype)
    w_rounded = _rounded_to(w, precision)
    dw, spread = (w_rounded - w).T, (w - w.mean(dim=0, dtype=torch.float64)).square().to(dtype).T
    effects = []
    for rows in inputs.split(max(1, INPUT_CHUNK // inputs.shape[1])):
        x = rows.to(dtype)
        dx = _rounded_to(x, precision) - x
        error, noise = dx @ w_rounded.T, dx.square() @ spread
        if bool(dw.any()):  # false for a checkpoint stored in the format
            error, noise = error + x @ dw, noise + x.square() @ dw.square()
        effects.append(ProductEffect(noise.sqrt().double(), error.double()))
    return ProductEffect(*(torch.cat(column) for column in zip(*effects, strict=True)))


def _rounded_to(values: Float[Tensor, "rows dim"], precision: str) -> Float[Tensor, "rows dim"]:
    """Round numbers to a format and return them in their own dtype."""
    if precision == "bf16" and values.dtype == torch.float32:
        return values.bfloat16().float()
    return round_to(values.double(), precision).to(values.dtype)


def product_flip_probability(
    ranked: Float[Tensor, "tokens ranks"],
    k: int,
    noise: Float[Tensor, "tokens ranks"],
    step: Float[Tensor, " tokens"],
    same_grid: bool = True,
) -> Float[Tensor, " tokens"]:
    """Return P(flip) of each token by noise of the sum, then rounding of the result (Def. 7.5).

    The quadrature of Def. 6.2 for the noise, plus the effect of rounding on the pair at the
    threshold: with u ~ N(Δ, σ_k² + σ_{k+1}²) the noisy gap, a pair at |u| < q falls into one cell
    with probability 1 - |u|/q and then flips (u > 0) or unflips (u < 0) in half of the cases.

    Args:
        ranked: exact scores of the first ranks, descending.
        k: number of experts chosen.
        noise: `product_effect` of these ranks, times the slope of the scores.
        step: q, grid step of the result at the threshold, in units of score; 0 for no rounding.
        same_grid: whether the pair rounds on one grid; if not, rounding is added to the noise.
    """
    if not same_grid:
        return flip_probability(ranked, k, (noise.square() + step[:, None].square() / 12).sqrt())
    rise = ranked[:, k - 1].double() - ranked[:, k].double()
    spread = (noise[:, k - 1].square() + noise[:, k].square()).sqrt()
    return flip_probability(ranked, k, noise) + _flips_added_by_rounding(rise, spread, step)


def _flips_added_by_rounding(rise: Tensor, spread: Tensor, step: Tensor) -> Tensor:
    """Return ½ E[(1 - |u|/q)+ sign u] with u ~ N(rise, spread²)."""
    tiny = torch.finfo(torch.float64).tiny
    s, q, rise = spread.clamp(min=tiny), step.clamp(min=tiny), rise.clamp(max=1e30)
    edges = torch.stack([-q, torch.zeros_like(q), q])
    x = (edges - rise) / s
    below = torch.special.ndtr(x)
    density = (-x.square() / 2).exp() / math.sqrt(2 * math.pi)
    inside = (below[2] - below[1]) - (below[1] - below[0])
    mean = rise * (below[2] - below[0]) - s * (density[2] - density[0])
    return torch.where(step > 0, (inside - mean / q) / 2, 0.0).clamp(-0.5, 0.5)


def precision_flips(
    layer: LayerTrace, view: LogitView, precision: str
) -> tuple[PrecisionFlips, PerToken]:
    """Return ties and flips by rounding the logits, and which tokens flip (Def. 7.2 - 7.4).

    `view` is the `logit_view` of the layer, with logits; `precision` a name in `PRECISIONS`.
    """
    assert view.logits is not None
    k = layer.facts.k
    step = _threshold_steps(layer, view.logits, precision)
    tie, flip, tie_rate, flip_rate = _expected_rates(layer, view, step)
    choice = _rounded_choice(layer, view.logits, step, precision)
    record = PrecisionFlips(
        precision=precision,
        step=_step_at_threshold(step, k).mean().item(),
        tie=mean_estimate(tie),
        flip=mean_estimate(flip),
        tie_population=note_first_order(tie_rate),
        flip_population=note_first_order(flip_rate),
        tie_emulated=mean_estimate(choice.tied.double()),
        flip_emulated=mean_estimate(choice.flipped.double()),
        status=_emulation_notes(layer, view, precision),
    )
    return record, choice.flipped.double()


def _threshold_steps(
    layer: LayerTrace, logits: Float[Tensor, "tokens ranks"], precision: str
) -> Float[Tensor, "tokens steps"]:
    """Return grid steps at ranks k and k + 1, or at all ranks if a bias can reorder them."""
    k = layer.facts.k
    if layer.bias is None and not isinstance(PRECISIONS[precision], IntegerGrid):
        return grid_step(logits[:, k - 1 : k + 1], precision)
    step = grid_step(logits, precision)
    return step if layer.bias is not None else step[:, k - 1 : k + 1]


def _step_at_threshold(step: Float[Tensor, "tokens steps"], k: int) -> PerToken:
    """Return the step at rank k from steps at ranks k and k + 1 or at all ranks."""
    return step[:, 0] if step.shape[1] == 2 else step[:, k - 1]


def _rounded_choice(
    layer: LayerTrace,
    logits: Float[Tensor, "tokens ranks"],
    step: Float[Tensor, "tokens steps"],
    precision: str,
) -> EmulatedChoice:
    """Return ties and flips of the logits rounded to a format.

    Without a bias rounding keeps the order, so only tokens whose ranks k and k + 1 are at most one
    step apart, or past the largest number of the format, can tie.
    """
    k, experts = layer.facts.k, layer.experts
    if layer.bias is not None:
        return emulated_choice(scores_of_logits(round_to(logits, precision), layer), k, experts)
    grid = PRECISIONS[precision]
    pair = logits[:, k - 1 : k + 1]
    near = pair[:, 0] - pair[:, 1] <= step.amax(dim=1)
    if not isinstance(grid, IntegerGrid):
        near |= (pair.abs() >= grid.largest).any(dim=1)
    rows = near.nonzero().squeeze(1)
    columns = torch.zeros(2, len(logits), dtype=torch.bool, device=logits.device)
    if len(rows):
        choice = emulated_choice(round_to(logits[rows], precision), k, experts[rows])
        columns[:, rows] = torch.stack(choice)
    return EmulatedChoice(*columns)


def measure_product_flips(
    layer: LayerTrace,
    view: LogitView,
    weight: Tensor | None,
    precision: str,
    bias: Tensor | None = None,
) -> Measurement[ProductFlips]:
    """Measure flips by a low-precision matrix product (Def. 7.5).

    `weight` (E, D) and `bias` (E,) map the inputs of the layer to its logits; `precision` is a
    floating-point format.
    """
    if layer.inputs is None or weight is None:
        reason = "router inputs were not kept" if layer.inputs is None else "no weight was given"
        return Measurement(None, f"not answerable: {reason}")
    k, ids = layer.facts.k, layer.experts.long()
    effect = product_effect(layer.inputs, weight, precision)
    noise, error = effect.noise.gather(1, ids), effect.error.gather(1, ids)
    logits = view.logits
    if logits is None:  # softmax scores determine logits up to a shift only
        logits = (layer.inputs.double() @ weight.detach().double().T).gather(1, ids)
    step = grid_step(logits, precision)[:, k - 1] * view.slope[:, k - 1]
    chance = product_flip_probability(
        view.scores, k, noise * view.slope, step, same_grid=layer.bias is None
    )
    return Measurement(
        ProductFlips(
            precision=precision,
            noise=noise[:, k - 1].mean().item(),
            flip=mean_estimate(chance.clamp(0, 1)),
            flip_emulated=_emulated_flip_share(layer, round_to(logits + error, precision)),
            uncertified=_uncertified_share(layer, weight, bias),
        )
    )


def _uncertified_share(layer: LayerTrace, weight: Tensor, bias: Tensor | None) -> Estimate:
    """Return the share of tokens whose choice another order of summation may change."""
    status = certificate_status(layer)
    if status != "ok":
        return Estimate(None, None, status)
    assert layer.inputs is not None
    certified = certified_by_router(layer.inputs, weight, bias, layer.facts.k)
    return mean_estimate((~certified).double())


def certificate_status(layer: LayerTrace) -> str:
    """Return "ok" if a layer chooses the top k of its logits, else why no choice is certified."""
    if layer.smoothed:
        return "not answerable: a smoothed router has no top k"
    if layer.bias is not None or layer.group_gap is not None:
        return "not answerable: the roundings of a selection bias or of groups add"
    return "ok"


def certified_by_router(
    inputs: Float[Tensor, "tokens dim"],
    weight: Float[Tensor, "experts dim"],
    bias: Float[Tensor, " experts"] | None,
    k: int,
) -> Bool[Tensor, " tokens"]:
    """Return `certified_choices` of a linear router in float32, some tokens at a time.

    A bias counts as the weight of a further input that is 1, so that it may be added anywhere in
    the sum.
    """
    weight = weight.detach()
    if bias is not None:
        exact = torch.promote_types(weight.dtype, bias.dtype)  # of two stored types
        weight = torch.cat([weight.to(exact), bias.detach()[:, None].to(exact)], dim=1)
    certified = []
    for x in inputs.split(max(1, INPUT_CHUNK // inputs.shape[1])):
        rows = x if bias is None else torch.cat([x, torch.ones_like(x[:, :1])], dim=1)
        certified.append(certified_choices(rows, weight, k))
    return torch.cat(certified)


def _emulated_flip_share(layer: LayerTrace, logits: Float[Tensor, "tokens ranks"]) -> Estimate:
    """Return the share of tokens that perturbed logits of the kept ranks route differently."""
    if layer.facts.units == "softmax" and layer.bias is not None:
        return Estimate(None, None, "not answerable: a bias beside a softmax over all experts")
    choice = emulated_choice(scores_of_logits(logits, layer), layer.facts.k, layer.experts)
    return mean_estimate(choice.flipped.double())


def _expected_rates(
    layer: LayerTrace, view: LogitView, step: Float[Tensor, "tokens steps"]
) -> tuple[PerToken, PerToken, Estimate, Estimate]:
    """Return the probabilities of a tie and of a flip per token, and their first-order rates."""
    k = layer.facts.k
    at_threshold = _step_at_threshold(step, k)
    if layer.bias is None:
        gaps, q = view.scores[:, k - 1] - view.scores[:, k], at_threshold.clamp(min=TINY)
        tie, flip = (
            shared_cell_probability(gaps, q),
            shared_cell_flip_probability(view.scores, k, q),
        )
        density = gap_density(gaps / q)
        tie_rate, flip_rate = density.times(0.5), density.times(0.25)
    else:
        noise = step * view.slope / math.sqrt(12)
        flip = flip_probability(view.scores, k, noise)
        tie, tie_rate = torch.zeros_like(flip), Estimate(0.0, 0.0)
        density = gap_density(noisy_gap(view.scores, k, noise.clamp(min=TINY)))
        flip_rate = density.times(1 / math.sqrt(math.pi))
    if layer.group_gap is None:
        return tie, flip, tie_rate, flip_rate
    group_noise = at_threshold * view.threshold_slope / math.sqrt(12)
    groups = group_gap_density(layer, group_noise).times(1 / math.sqrt(math.pi))
    return (
        tie,
        either_probability(flip, layer_group_flip_probability(layer, group_noise)),
        tie_rate,
        flip_rate.plus(groups),
    )


def _emulation_notes(layer: LayerTrace, view: LogitView, precision: str) -> str:
    """Return notes on what an emulation on the kept ranks leaves out, or "ok"."""
    ranks, experts = view.scores.shape[1], layer.facts.n_experts
    notes = []
    if isinstance(PRECISIONS[precision], IntegerGrid) and ranks < experts:
        notes.append(f"scale from the {ranks} largest of {experts} logits")
    if layer.group_gap is not None:
        notes.append("emulated within the chosen groups only")
    return "; ".join(notes) or "ok"


UNIT_ROUNDOFF = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
"""Unit roundoff u of formats that round to nearest."""


def score_error_bound(
    inputs: Float[Tensor, "tokens dim"],
    weight: Float[Tensor, "experts dim"],
    *,
    unit: float = UNIT_ROUNDOFF["float32"],
    output_unit: float = 0.0,
    exact_products: bool = False,
) -> tuple[Float[Tensor, "tokens experts"], Float[Tensor, "tokens experts"]]:
    """Return scores in float64 and the bound B_e on the error of any evaluation of them.

    B is infinite if d u >= 1.

    Args:
        inputs: router inputs as stored.
        weight: router rows as stored.
        unit: u of the products and sums.
        output_unit: u of the format in which scores are stored; 0 for the format of the sums.
        exact_products: whether products have no rounding error, such as products of two bf16
            numbers in float32; d - 1 roundings are then counted instead of d.
    """
    x, w = inputs.double(), weight.double()
    require(0 < unit < 1 and 0 <= output_unit < 1, f"need 0 < u < 1, got {unit=}, {output_unit=}")
    steps = x.shape[-1] - int(exact_products)
    exact, total = x @ w.T, x.abs() @ w.abs().T
    if steps * unit >= 1:
        return exact, torch.full_like(exact, torch.inf)
    # bound on the error of the float64 scores computed here
    float64_error = x.shape[-1] * 2.0**-53 * total
    inner = steps * unit / (1 - steps * unit) * total
    return exact, float64_error + inner + output_unit * (exact.abs() + inner + float64_error)


def certified_choices(
    inputs: Float[Tensor, "tokens dim"],
    weight: Float[Tensor, "experts dim"],
    k: int,
    *,
    unit: float = UNIT_ROUNDOFF["float32"],
    output_unit: float = 0.0,
    exact_products: bool = False,
) -> Bool[Tensor, " tokens"]:
    """Return whether every evaluation within the error bound chooses the same k experts.

    The condition is that the minimum of z - B over chosen experts exceeds the maximum of z + B over
    the others; arguments as for `score_error_bound`. Tokens that a cheaper bound in float32
    certifies are not computed again in float64.
    """
    certified = _certified_by_norm_bound(inputs, weight, k, unit, output_unit)
    rows = (~certified).nonzero().squeeze(1)
    scores, bound = score_error_bound(
        inputs[rows], weight, unit=unit, output_unit=output_unit, exact_products=exact_products
    )
    chosen = topk_mask(scores, k)
    low = (scores - bound).masked_fill(~chosen, torch.inf).amin(dim=-1)
    high = (scores + bound).masked_fill(chosen, -torch.inf).amax(dim=-1)
    certified[rows] = low > high
    return certified


def _certified_by_norm_bound(
    inputs: Float[Tensor, "tokens dim"],
    weight: Float[Tensor, "experts dim"],
    k: int,
    unit: float,
    output_unit: float,
) -> Bool[Tensor, " tokens"]:
    """Return the tokens that a bound by norms certifies in float32; none if it does not apply.

    Σ_i |x_i w_ei| <= ‖x‖ ‖w_e‖, so B_e <= (γ_d(u) + u_out (1 + γ_d(u))) ‖x‖ max_e ‖w_e‖, and the
    error of scores in float32 is at most γ_d(2⁻²⁴) ‖x‖ ‖w_e‖. A gap of ranks k and k + 1 above
    twice the sum of both suffices; one percent is added for the rounding of this comparison.
    """
    dim, single = inputs.shape[1], UNIT_ROUNDOFF["float32"]
    dtypes = {inputs.dtype, weight.dtype}
    fits_float32 = dtypes <= {torch.float32, torch.bfloat16, torch.float16}
    is_reduced = torch.get_float32_matmul_precision() != "highest"
    if not fits_float32 or is_reduced or k >= len(weight) or dim * max(unit, 1e3 * single) >= 1:
        return torch.zeros(len(inputs), dtype=torch.bool, device=inputs.device)
    x, w = inputs.float(), weight.float()
    gamma, single_gamma = (dim * u / (1 - dim * u) for u in (unit, single))
    factor = 2.02 * (gamma + output_unit * (1 + gamma) + single_gamma) * w.norm(dim=1).amax()
    return gap(x @ w.T, k) > (x.norm(dim=1) * factor).double()
