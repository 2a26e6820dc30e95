"""Scores of a trace in the units where noise of the logits is simplest.

A router ranks u_i = s(l_i) + b_i: l the logit, s the score function, b a correction bias. Without
a bias ranking u is ranking l, since s is increasing, so flips are studied on the logits themselves.
With one, noise of the logits is passed on with the slope s′(l_i):

    units           without bias             with bias
    logits          l, slope 1               u, slope 1
    sigmoid         logit(u), slope 1        u, slope s (1 - s)
    sqrtsoftplus    log(e^(u²) - 1), slope 1 u, slope (1 - e^(-s²)) / 2s
    softmax         log u, slope 1           u, slope p

Softmax probabilities fix the logits up to a shift common to all experts of a token, which changes
no choice. Their slope is p and not p (1 - p): the rest of the derivative moves all experts near the
threshold together.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tieline.core.errors import TraceError, require
from tieline.core.text import layer_label
from tieline.trace.record import LayerTrace

Ranks = Float[Tensor, "tokens ranks"]


ALMOST_ONE = 1 - 2.0**-24
"""Largest float32 below 1: a saturated sigmoid has a logit of at least about 16.6."""


@dataclass(frozen=True)
class LogitView:
    """Scores of the kept ranks in the units where noise of the logits is simplest.

    Attributes:
        scores: what is ranked, descending, in float64.
        slope: derivative of each of them by its logit.
        logits: the logits themselves; None for softmax scores, which fix them up to a shift only.
        threshold_slope: derivative of the selection score at rank k by its logit.
    """

    scores: Ranks
    slope: Ranks
    logits: Ranks | None
    threshold_slope: Float[Tensor, " tokens"]


def logit_view(layer: LayerTrace) -> LogitView:
    """Return the layer's kept ranks in units where noise of the logits is simplest (Def. 6.1)."""
    require(
        layer.scores is not None, f"{layer_label(layer.name)} has ids only: no scores", TraceError
    )
    assert layer.scores is not None
    selection = layer.scores.double()
    plain = selection - _bias_of_ranks(layer)
    units, k = layer.facts.units, layer.facts.k
    if units == "logits":
        ones = torch.ones_like(selection)
        return LogitView(selection, ones, plain, ones[:, k - 1])
    logits, slope = _INVERSES[units](plain)
    exact = None if units == "softmax" else logits
    if layer.bias is None:
        return LogitView(logits, torch.ones_like(slope), exact, slope[:, k - 1])
    return LogitView(selection, slope, exact, slope[:, k - 1])


def from_logits(logits: Ranks, layer: LayerTrace) -> Ranks:
    """Selection scores of (perturbed) logits of the layer's kept ranks.

    Without a bias returns the logits: the order is the same and nothing saturates.
    """
    if layer.bias is None:
        return logits
    if layer.facts.units == "sigmoid":
        logits = logits.sigmoid()
    if layer.facts.units == "sqrtsoftplus":
        logits = torch.nn.functional.softplus(logits).sqrt()
    return logits + _bias_of_ranks(layer)


def _logits_of_sigmoid(score: Tensor) -> tuple[Tensor, Tensor]:
    """Logits of sigmoid scores, and the slope s (1 - s)."""
    inside = score.clamp(torch.finfo(torch.float32).tiny, ALMOST_ONE)
    logits = torch.where(score.isneginf(), score, inside.logit())
    return logits, inside * (1 - inside)


def _logits_of_sqrtsoftplus(score: Tensor) -> tuple[Tensor, Tensor]:
    """Logits of sqrtsoftplus scores, and the slope (1 - e^(-s²)) / 2s."""
    inside = score.clamp(min=torch.finfo(torch.float32).tiny)
    slope = -torch.expm1(-(inside**2))  # the sigmoid of the logit
    logits = torch.where(score.isneginf(), score, inside**2 + slope.log())
    return logits, slope / (2 * inside)


def _logits_of_softmax(score: Tensor) -> tuple[Tensor, Tensor]:
    """Logarithms of softmax scores, and the slope p."""
    inside = score.clamp(torch.finfo(torch.float32).tiny, 1.0)
    return torch.where(score.isneginf(), score, inside.log()), inside


_INVERSES = {
    "sigmoid": _logits_of_sigmoid,
    "sqrtsoftplus": _logits_of_sqrtsoftplus,
    "softmax": _logits_of_softmax,
}


def _bias_of_ranks(layer: LayerTrace) -> Tensor | float:
    """The correction bias of each rank's expert, or 0."""
    return 0.0 if layer.bias is None else layer.bias.double()[layer.experts.long()]
