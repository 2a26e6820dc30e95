"""Flips that the clean scores predict for a router that is perturbed on clean inputs.

score noise    the quadrature of Def. 6.2 with σ
state noise    the same with σ_i = ρ rms(x) ‖w_i - w̄‖, w̄ the mean over experts
rounding       the same with the noise of a product of rounded numbers, then rounding of the
               result (Def. 7.5): σ_i² = Σ_d (w_id - w̄_d)² δx_d² + x_d² δw_id²

Where groups of experts limit the choice, the chance that two of them change places comes on top
(Def. 6.4): an upper limit, so that the prediction is an interval. So it is where not all ranks were
kept.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tieline.audit.precision.perturbations import Perturbation
from tieline.geometry.flips import flip_limits, group_flip_probability
from tieline.geometry.product import product_flips
from tieline.geometry.rounding import grid_step
from tieline.geometry.sections import reachable
from tieline.geometry.units import LogitView, logit_view
from tieline.hf.formats import Format, format_named
from tieline.hf.router_scope import logits_matrix
from tieline.trace.record import LayerTrace

__all__ = ["Chance", "chance_by_noise", "predicted_flips"]

PerToken = Float[Tensor, " tokens"]
SCORES_PER_GROUP = {"max": 1, "top2sum": 2}


class Chance(NamedTuple):
    """Limits of the probability that each token's experts change."""

    low: PerToken
    high: PerToken


def predicted_flips(
    layer: LayerTrace,
    router: nn.Module,
    inputs: Float[Tensor, "tokens width"],
    perturbation: Perturbation,
) -> Chance | None:
    """The chance of each token to flip; None where the router is not one product with its input.

    Args:
        layer: the clean routing of these tokens.
        router: the layer's router, with its own weights.
        inputs: what the router was given.
        perturbation: of a router.
    """
    view, k = logit_view(layer), layer.facts.k
    if view.scores.shape[1] <= k:
        never = torch.zeros(len(view.scores), dtype=torch.float64)
        return Chance(never, never)
    if perturbation.kind == "score noise":
        return chance_by_noise(
            layer, view, float(perturbation.level) * torch.ones_like(view.scores)
        )
    matrix = logits_matrix(router)
    if matrix is None or matrix.shape[1] != inputs.shape[1]:
        return None
    w, x = matrix.detach().double().cpu(), inputs.detach().double().cpu()
    w, ids = w[: layer.facts.n_experts], layer.experts.long()
    if perturbation.kind == "state noise":
        size = float(perturbation.level) * x.square().mean(dim=1).sqrt()
        spread = (w - w.mean(dim=0)).norm(dim=1)
        return chance_by_noise(layer, view, size[:, None] * spread[ids])
    return _by_rounding(layer, view, (x, w), format_named(str(perturbation.level)))


def chance_by_noise(
    layer: LayerTrace, view: LogitView, noise: Float[Tensor, "tokens ranks"]
) -> Chance:
    """Limits under independent normal noise of the logits of the kept ranks."""
    k = layer.facts.k
    beyond = max(0, reachable(layer) - view.scores.shape[1])
    low, high = flip_limits(view.scores, k, view.slope * noise, beyond)
    return Chance(low, _with_groups(high, layer, view.threshold_slope * noise[:, k - 1]))


def _by_rounding(
    layer: LayerTrace, view: LogitView, factors: tuple[Tensor, Tensor], chosen: Format
) -> Chance:
    (x, w), k, ids = factors, layer.facts.k, layer.experts.long()
    dx = torch.zeros_like(x) if chosen.activations is None else chosen.activations(x.float()) - x
    dw = chosen.weights(w.float()) - w
    spread = (w - w.mean(dim=0)).square()
    noise = (dx.square() @ spread.T + x.square() @ dw.square().T).sqrt().gather(1, ids)
    step = torch.zeros(len(x), dtype=torch.float64)
    if chosen.plain:
        logits = (x @ w.T).gather(1, ids) if view.logits is None else view.logits
        step = grid_step(logits, chosen.name)[:, k - 1]
    grid = step * view.slope[:, k - 1]
    inner = product_flips(view.scores, k, noise * view.slope, grid, same_grid=layer.bias is None)
    inner = inner.clamp(0, 1)
    of_groups = (noise[:, k - 1].square() + step.square() / 12).sqrt() * view.threshold_slope
    return Chance(inner, _with_groups(inner, layer, of_groups))


def _with_groups(inner: PerToken, layer: LayerTrace, noise: PerToken) -> PerToken:
    if layer.group_gap is None:
        return inner
    per_group = SCORES_PER_GROUP[layer.facts.group_score]
    groups = group_flip_probability(layer.group_gap, noise, per_group)
    return inner + groups - inner * groups
