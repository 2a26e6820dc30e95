"""How many tokens of a text calibration needs until every expert has seen enough of them.

An expert that no calibration token reaches gets scales from nothing (NaN in some libraries). With p
the share of tokens that choose an expert, N tokens give it about Poisson(N p) of them, so that it
has n or more with probability 1 - δ once

    N = λ / p,    P(Poisson(λ) >= n) = 1 - δ,    λ = the (1 - δ)-quantile of Gamma(n).

The expert of the smallest share decides; δ = (1 - confidence) / E covers all experts of a layer.
The interval is that of the smallest share, from exact limits of a Poisson count. The expert with
the fewest tokens was chosen because it had few, so the upper limit of its share, and with it the
lower end of N, holds for all E experts at once. An expert that the measured text never reached
gives a lower end alone. Tokens of one document are taken for independent, which makes N too small
where documents differ much.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import gammaincinv

from tieline.core.errors import require

COVERAGE = 0.95
"""Confidence of the interval of the smallest share."""


@dataclass(frozen=True)
class CalibrationNeed:
    """Tokens that one layer needs.

    Attributes:
        name: the layer.
        expert: the expert of the smallest load.
        load: tokens that it had.
        tokens: tokens that were measured.
        least: tokens that each expert shall have.
        needed: tokens until every expert has them; None if one had none.
        low: lower end of the 95 % interval of `needed`.
        high: its upper end; None if there is none.
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
        tokens: tokens of that text.
        least: tokens that each expert shall have.
        confidence: probability that all experts have them.
    """
    counts = np.asarray(load)
    require(least >= 1, f"an expert shall have at least one token, got {least}")
    require(0 < confidence < 1, f"confidence lies between 0 and 1, got {confidence}")
    require(tokens >= 1 and len(counts) > 0, f"{name}: no tokens were measured")
    expert = int(counts.argmin())
    count = int(counts[expert])
    rate = float(gammaincinv(least, 1 - (1 - confidence) / len(counts)))
    tail = (1 - COVERAGE) / 2
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
    """Return the need of every layer of a trace, the most demanding first.

    Args:
        routing: a `RoutingTrace`, or a summary with `layers` of `load` and `tokens`.
        least: tokens that each expert shall have.
        confidence: probability that all experts of a layer have them.
    """
    return neediest_first(_layer_need(layer, least, confidence) for layer in routing.layers)


def _layer_need(layer: Any, least: int, confidence: float) -> CalibrationNeed:
    """The need of a layer of a trace or of a summary."""
    if hasattr(layer, "experts"):
        ids = layer.experts[:, : layer.facts.k].numpy().ravel()
        load, tokens = np.bincount(ids, minlength=layer.facts.n_experts), len(layer.experts)
    else:
        load, tokens = layer.load.numpy(), layer.tokens
    return tokens_needed(layer.name, load, tokens, least, confidence)


def neediest_first(needs: Iterable[CalibrationNeed]) -> tuple[CalibrationNeed, ...]:
    """The needs of layers, the most demanding first."""
    infinite = math.inf
    return tuple(
        sorted(needs, key=lambda x: (-(infinite if x.needed is None else x.needed), -x.low))
    )
