"""Number of calibration tokens that a layer needs until each of its experts has enough.

An expert that no calibration token reaches has no data for its scales (NaN in some libraries). With
p the share of tokens that choose an expert, about Poisson(N p) of N tokens choose it. It gets n or
more with probability 1 - δ once

    N = λ / p,    P(Poisson(λ) >= n) = 1 - δ,    λ = the (1 - δ)-quantile of Gamma(n).

The expert with the smallest share decides; δ = (1 - confidence) / E covers all experts of a layer.
The interval follows from exact Poisson limits of that share. Because the expert was selected as the
one with the fewest tokens, the upper limit of its share, and so the lower end of N, is corrected to
hold for all E experts at once. If no measured token reached the expert, there is a lower end only.
Tokens of one document are treated as independent, which makes N too small if documents differ much.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import gammaincinv

from tieline.core.errors import require

INTERVAL_CONFIDENCE = 0.95
"""Confidence level of the interval of the smallest share."""


@dataclass(frozen=True)
class CalibrationNeed:
    """Number of calibration tokens that one layer needs.

    Attributes:
        name: name of the layer.
        expert: the expert with the smallest load.
        load: measured tokens of that expert.
        tokens: number of measured tokens.
        least: required tokens per expert.
        needed: tokens after which every expert has `least`; None if an expert had no tokens.
        low: lower end of the 95 % interval of `needed`.
        high: upper end of the interval; None if an expert had no tokens.
    """

    name: str
    expert: int
    load: int
    tokens: int
    least: int
    needed: float | None
    low: float
    high: float | None


def tokens_needed(
    name: str, load: Sequence[int] | np.ndarray, tokens: int, least: int, confidence: float = 0.95
) -> CalibrationNeed:
    """Return how many tokens a layer needs until each of its experts has `least` of them.

    Args:
        name: name of the layer.
        load: (E,) tokens of each expert in the measured text.
        tokens: number of tokens of that text.
        least: required tokens per expert.
        confidence: probability that all experts get them.
    """
    counts = np.asarray(load)
    require(least >= 1, f"an expert shall have at least one token, got {least}")
    require(0 < confidence < 1, f"confidence lies between 0 and 1, got {confidence}")
    require(tokens >= 1 and len(counts) > 0, f"{name}: no tokens were measured")
    expert = int(counts.argmin())
    count = int(counts[expert])
    rate = float(gammaincinv(least, 1 - (1 - confidence) / len(counts)))
    tail = (1 - INTERVAL_CONFIDENCE) / 2
    highest = float(gammaincinv(count + 1, 1 - tail / len(counts))) / tokens
    lowest = float(gammaincinv(count, tail)) / tokens if count else 0.0
    return CalibrationNeed(
        name=name,
        expert=expert,
        load=count,
        tokens=tokens,
        least=least,
        needed=rate * tokens / count if count else None,
        low=rate / highest,
        high=rate / lowest if lowest else None,
    )


def calibration_need(
    routing: Any, least: int, confidence: float = 0.95
) -> tuple[CalibrationNeed, ...]:
    """Return the calibration need of every layer of a trace, the most demanding first.

    Args:
        routing: a `RoutingTrace`, or a summary whose layers have `load` and `tokens`.
        least: required tokens per expert.
        confidence: probability that all experts of a layer get them.
    """
    return neediest_first(_layer_need(layer, least, confidence) for layer in routing.layers)


def _layer_need(layer: Any, least: int, confidence: float) -> CalibrationNeed:
    """Return the calibration need of a layer of a trace or of a summary."""
    if hasattr(layer, "experts"):
        ids = layer.experts[:, : layer.facts.k].numpy().ravel()
        load, tokens = np.bincount(ids, minlength=layer.facts.n_experts), len(layer.experts)
    else:
        load, tokens = layer.load.numpy(), layer.tokens
    return tokens_needed(layer.name, load, tokens, least, confidence)


def neediest_first(needs: Iterable[CalibrationNeed]) -> tuple[CalibrationNeed, ...]:
    """Sort the needs of layers, the most demanding first."""
    return tuple(
        sorted(needs, key=lambda x: (-(math.inf if x.needed is None else x.needed), -x.low))
    )
