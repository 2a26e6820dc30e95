"""Flips of a router under a perturbation, as its clean scores predict them.

For a router that is perturbed on clean inputs:

score noise    the quadrature of Def. 6.2 with σ
state noise    the same with σ_i = ρ rms(x) ‖w_i - w̄‖, w̄ the mean_flip_rate over experts
rounding       the same with the noise of a product of rounded numbers, then rounding of the
               result (Def. 7.5): σ_i² = Σ_d (w_id - w̄_d)² δx_d² + x_d² δw_id²

Where groups of experts limit the choice, the chance that two groups change places is added (Def.
6.4), an upper limit, so the prediction is an interval; likewise where not all ranks were kept.

`sigma_for_flips` inverts the first: the σ that changes the experts of a given share of tokens. The
share grows with σ, at first as f_gap(0) σ / √π (Def. 6.3), so steps on a log-log line find it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tieline.analysis.audit_records import SigmaForFlips
from tieline.core.numerics import grid_step, one_thread
from tieline.measure.flips import either_chance, flip_limits_by_size, group_flips
from tieline.measure.logit_view import LogitView, logit_view
from tieline.measure.rounding import product_flips
from tieline.models.emulate import logits_matrix
from tieline.models.number_formats import Format, format_named
from tieline.run.condition import Perturbation
from tieline.trace.record import LayerTrace

PerToken = Float[Tensor, " tokens"]


class FlipChance(NamedTuple):
    """Limits of the probability that each token's experts change."""

    low: PerToken
    high: PerToken


def predicted_flips(
    layer: LayerTrace,
    router: nn.Module,
    inputs: Float[Tensor, "tokens dim"],
    perturbations: Sequence[Perturbation],
) -> dict[Perturbation, FlipChance | None]:
    """The chance of each token to flip, by perturbation; None where the logits are no one product.

    What does not depend on the perturbation is computed once, and noise of several sizes together.

    Args:
        layer: the clean routing of these tokens.
        router: the layer's router, with its own weights.
        inputs: what the router was given.
        perturbations: of a router.
    """
    view = logit_view(layer)
    if view.scores.shape[1] <= layer.facts.k:
        never = torch.zeros(len(view.scores), dtype=torch.float64)
        return dict.fromkeys(perturbations, FlipChance(never, never))
    product = _router_product(layer, router, inputs)
    chances: dict[Perturbation, FlipChance | None] = dict.fromkeys(perturbations)
    for kind in ("score noise", "state noise"):
        some = [perturbation for perturbation in perturbations if perturbation.kind == kind]
        if some and (kind == "score noise" or product is not None):
            noise = 1.0 if product is None or kind == "score noise" else product.state_noise
            sizes = [float(perturbation.level) for perturbation in some]
            chances.update(zip(some, chances_by_noise(layer, view, noise, sizes), strict=True))
    for perturbation in perturbations:
        if perturbation.kind == "rounding" and product is not None:
            number_format = format_named(str(perturbation.level))
            chances[perturbation] = _chance_by_rounding(layer, view, product, number_format)
    return chances


class RouterProduct(NamedTuple):
    """The product of a router's inputs and weights, in float32.

    Attributes:
        inputs: x (T, D).
        weights: w (E, D).
        spread: (w_id - w̄_d)², w̄ the mean_flip_rate over experts.
        experts: the expert of each kept rank.
    """

    inputs: Float[Tensor, "tokens dim"]
    weights: Float[Tensor, "experts dim"]
    spread: Float[Tensor, "experts dim"]
    experts: Int[Tensor, "tokens ranks"]

    @property
    def state_noise(self) -> Float[Tensor, "tokens ranks"]:
        """σ_i = rms(x) ‖w_i - w̄‖ of each rank: noise of the inputs as large as they are."""
        size = self.inputs.double().square().mean(dim=1).sqrt()
        return size[:, None] * self.spread.double().sum(dim=1).sqrt()[self.experts]


def _router_product(
    layer: LayerTrace, router: nn.Module, inputs: Float[Tensor, "tokens dim"]
) -> RouterProduct | None:
    """The product that makes a router's logits; None if they are not one product."""
    matrix = logits_matrix(router)
    if matrix is None or matrix.shape[1] != inputs.shape[1]:
        return None
    w = matrix.detach().cpu()[: layer.facts.n_experts]
    spread = (w.double() - w.double().mean(dim=0)).square().float()
    return RouterProduct(inputs.detach().float().cpu(), w.float(), spread, layer.experts.long())


def chances_by_noise(
    layer: LayerTrace,
    view: LogitView,
    noise: Float[Tensor, "tokens ranks"] | float,
    sizes: Sequence[float],
) -> list[FlipChance]:
    """Limits under independent normal noise c σ of the kept logits, for each c of `sizes`."""
    k = layer.facts.k
    beyond = max(0, layer.facts.reachable - view.scores.shape[1])
    alike = layer.bias is None or layer.facts.units == "logits"
    limits = flip_limits_by_size(
        view.scores, k, noise if alike else view.slope * noise, sizes, beyond
    )
    at_threshold = noise[:, k - 1] if isinstance(noise, Tensor) else noise
    return [
        FlipChance(
            low, _chance_with_groups(high, layer, size * view.threshold_slope * at_threshold)
        )
        for low, high, size in zip(*limits, sizes, strict=True)
    ]


def _chance_by_rounding(
    layer: LayerTrace, view: LogitView, product: RouterProduct, number_format: Format
) -> FlipChance:
    """Limits under a product of rounded inputs and weights (Def. 7.5)."""
    (x, w, spread, ids), k = product, layer.facts.k
    variance = x.square() @ (number_format.weights(w) - w).square().T
    if number_format.activations is not None:
        variance += (number_format.activations(x) - x).square_() @ spread.T
    noise = variance.gather(1, ids).double().sqrt_()
    step = torch.zeros(len(x), dtype=torch.float64)
    if number_format.plain:
        logits = view.logits
        if logits is None:
            logits = (x.double() @ w.double().T).gather(1, ids)
        step = grid_step(logits, number_format.name)[:, k - 1]
    grid = step * view.slope[:, k - 1]
    inner = product_flips(view.scores, k, noise * view.slope, grid, same_grid=layer.bias is None)
    inner = inner.clamp(0, 1)
    of_groups = (noise[:, k - 1].square() + step.square() / 12).sqrt() * view.threshold_slope
    return FlipChance(inner, _chance_with_groups(inner, layer, of_groups))


def _chance_with_groups(inner: PerToken, layer: LayerTrace, noise: PerToken) -> PerToken:
    """The chance with that of two groups changing places, where there are groups."""
    if layer.group_gap is None:
        return inner
    return either_chance(inner, group_flips(layer, noise))


STEPS, CLOSE = 24, 1e-3
LARGEST = 1e6


def sigma_for_flips(
    layers: Mapping[str, Sequence[LayerTrace]], share: float = 0.01
) -> SigmaForFlips:
    """σ at which `share` of tokens flip, in each layer and in the mean over layers.

    Args:
        layers: routing of the same tokens by layer, in pieces.
        share: the share.
    """
    views = {
        name: [(piece, logit_view(piece)) for piece in pieces] for name, pieces in layers.items()
    }
    with one_thread():
        alone = {
            name: solve_increasing(lambda s, p=pieces: _flip_rate(p, s), share)
            for name, pieces in views.items()
        }
        sigmas = [sigma for sigma in alone.values() if sigma is not None]
        start = sum(sigmas) / len(sigmas) if sigmas else 0.01

        def mean_flip_rate(sigma: float) -> float:
            """Predicted flip rate at σ, averaged over layers."""
            return sum(_flip_rate(pieces, sigma) for pieces in views.values()) / len(views)

        return SigmaForFlips(share, solve_increasing(mean_flip_rate, share, start), alone)


def solve_increasing(
    rate: Callable[[float], float], target: float, start: float = 0.01
) -> float | None:
    """The x > 0 with rate(x) = target, for an increasing rate; None where none up to 10^6 has.

    Bracketed by factors of four, then by straight lines between logarithms, on which a rate that
    grows like a power of x is found at once; every third step halves the bracket instead.
    """
    low = high = (start, rate(start))
    while high[1] < target:
        low, high = high, (4 * high[0], rate(4 * high[0]))
        if high[0] > LARGEST:
            return None
    while low[1] >= target:
        low, high = (low[0] / 4, rate(low[0] / 4)), low
        if low[0] < 1 / LARGEST:
            return None
    middle = high
    for step in range(STEPS):
        share_of_way = (
            0.5 if step % 3 == 2 or low[1] <= 0 else _share_of_way(low[1], high[1], target)
        )
        x = low[0] * (high[0] / low[0]) ** share_of_way
        middle = (x, rate(x))
        low, high = (middle, high) if middle[1] < target else (low, middle)
        if abs(middle[1] / target - 1) < CLOSE or high[0] / low[0] < 1 + CLOSE:
            break
    return middle[0]


def _share_of_way(low: float, high: float, target: float) -> float:
    """Where a straight line between the logarithms meets the target, as a share of the way."""
    if high <= low:
        return 0.5
    return min(0.99, max(0.01, math.log(target / low) / math.log(high / low)))


def _flip_rate(pieces: Sequence[tuple[LayerTrace, LogitView]], sigma: float) -> float:
    """Predicted share of tokens that flip; its upper limit where it is an interval."""
    flips = tokens = 0.0
    for layer, view in pieces:
        ((_, high),) = chances_by_noise(layer, view, 1.0, (sigma,))
        flips, tokens = flips + high.sum().item(), tokens + len(high)
    return flips / tokens
