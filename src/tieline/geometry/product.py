"""What computing the logits by a low-precision matrix product does to the choice.

Inputs and weights are rounded, products are summed in float32 and the sums are rounded once more,
as matrix units do. The error of a logit is then (Def. 7.5)

    e_i = Σ_d (w_id δx_d + x_d δw_id) + ρ_i

with known sizes |δx_d|, |δw_id| and signs that are taken to be random; ρ_i is the rounding of the
sum to the grid of the result. A part of the error that is common to all experts changes no choice,
so w_id counts as its distance from the mean over experts.

    product_effect    noise of the sums and the error of these very numbers, per token and expert
    product_flips     P(flip) per token: noise, then rounding of the result
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from tieline.errors import ShapeError, require
from tieline.geometry.flips import flip_probability
from tieline.geometry.rounding import round_to

__all__ = ["ProductEffect", "product_effect", "product_flips"]

Inputs = Float[Tensor, "tokens width"]
Weight = Float[Tensor, "experts width"]

CHUNK = 1 << 20
"""Entries of inputs that are rounded at once."""


class ProductEffect(NamedTuple):
    """What a low-precision product does to each logit, before the result is rounded.

    Attributes:
        noise: σ_i = √(Σ_d (w_id - w̄_d)² δx_d² + x_d² δw_id²), the error with signs at random.
        error: Σ_d x̃_d w̃_id - x_d w_id of the rounded x̃ and w̃, the error of these very numbers.
    """

    noise: Float[Tensor, "tokens experts"]
    error: Float[Tensor, "tokens experts"]


def product_effect(inputs: Inputs, weight: Weight, precision: str = "bf16") -> ProductEffect:
    """Noise and error of logits computed by a low-precision matrix product (Def. 7.5).

    δ is the rounding error that each number really has, so that a checkpoint stored in the format
    adds nothing. The sums are taken in float64: those of matrix units, in float32, err by far less
    than inputs of 16 bits do.

    Args:
        inputs: the router's inputs in the precision of the exact run.
        weight: the router's weight, as exact.
        precision: a floating-point format of `PRECISIONS`.
    """
    require(inputs.shape[1] == weight.shape[1], "inputs and weight differ in width", ShapeError)
    w = weight.detach().double()
    w_rounded = round_to(w, precision)
    spread, dw = (w - w.mean(dim=0)).square(), (w_rounded - w).square()
    parts = []
    for rows in inputs.split(max(1, CHUNK // inputs.shape[1])):
        x = rows.double()
        x_rounded = round_to(x, precision)
        noise = ((x_rounded - x).square() @ spread.T + x.square() @ dw.T).sqrt()
        parts.append(ProductEffect(noise, x_rounded @ w_rounded.T - x @ w.T))
    return ProductEffect(*(torch.cat(column) for column in zip(*parts, strict=True)))


def product_flips(
    ranked: Float[Tensor, "tokens ranks"],
    k: int,
    noise: Float[Tensor, "tokens ranks"],
    step: Float[Tensor, " tokens"],
    same_grid: bool = True,
) -> Float[Tensor, " tokens"]:
    """P(flip) of each token: noise of the sum, then rounding of the result (Def. 7.5).

    The quadrature of Def. 6.2 for the noise, plus what rounding adds to the pair at the threshold:
    with u ~ N(Δ, σ_k² + σ_{k+1}²) the noisy gap, a pair at |u| < q falls into one cell with chance
    1 - |u|/q and then flips (u > 0) or unflips (u < 0) in half of the cases.

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
