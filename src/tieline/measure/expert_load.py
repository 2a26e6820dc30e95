"""How the tokens spread over the experts, and how many tokens each expert needs.

expert_load        tokens per expert, their entropy, dead and cold experts     Def. 8.1, 8.2
coalitions         distinct chosen sets                                        Def. 8.3
calibration_need   tokens of a text until every expert has seen enough to be calibrated

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
import torch
from jaxtyping import Int
from scipy.special import gammaincinv
from torch import Tensor

from tieline.core.errors import ShapeError, TraceError, require

Chosen = Int[Tensor, "tokens k"]


@dataclass(frozen=True)
class ExpertLoad:
    """Use of the experts by T tokens of k choices each.

    Attributes:
        counts: number of tokens that chose each expert.
        share: counts / (T k); 1 / E each where the load is even.
        entropy: -Σ share log share, in nats.
        evenness: entropy / log E, 1 for an even load and 0 for a single expert.
        busiest: largest share times E, 1 for an even load.
        dead: experts that no token chose.
        cold: experts that were chosen, but less than `cold_below` times an even load.
        cold_below: that fraction.
    """

    counts: tuple[int, ...]
    share: tuple[float, ...]
    entropy: float
    evenness: float
    busiest: float
    dead: tuple[int, ...]
    cold: tuple[int, ...]
    cold_below: float


@dataclass(frozen=True)
class Coalitions:
    """Distinct chosen sets among T tokens.

    Attributes:
        seen: number of sets, possibly estimated.
        once: how many of them were seen once; None if not counted. once / T estimates the
            probability that the next token has a new one (Good and Turing).
        log10_possible: log10 of C(E, k), the number of sets there could be.
        tokens: T.
    """

    seen: int
    once: int | None
    log10_possible: float
    tokens: int


def expert_load(chosen: Chosen, n_experts: int, cold_below: float = 0.1) -> ExpertLoad:
    """Load of each expert, its entropy, dead and cold experts (Def. 8.1, 8.2).

    Args:
        chosen: experts of the first k ranks.
        n_experts: number of experts E.
        cold_below: fraction of an even load T k / E below which an expert is cold.
    """
    ids = _checked_ids(chosen, n_experts).flatten()
    return load_from_counts(torch.bincount(ids, minlength=n_experts), cold_below)


def load_from_counts(counts: Int[Tensor, " experts"], cold_below: float = 0.1) -> ExpertLoad:
    """The same from the number of tokens per expert, such as that of a streaming summary."""
    total, experts = int(counts.sum()), len(counts)
    require(total > 0, "a load needs at least one token, got none", ShapeError)
    share = counts.double() / total
    entropy = float(torch.special.entr(share).sum())
    cold = (counts > 0) & (share * experts < cold_below)
    return ExpertLoad(
        counts=tuple(counts.tolist()),
        share=tuple(share.tolist()),
        entropy=entropy,
        evenness=entropy / math.log(experts) if experts > 1 else 1.0,
        busiest=share.max().item() * experts,
        dead=tuple((counts == 0).nonzero().flatten().tolist()),
        cold=tuple(cold.nonzero().flatten().tolist()),
        cold_below=cold_below,
    )


def coalitions(chosen: Chosen, n_experts: int) -> Coalitions:
    """Number of distinct chosen sets (Def. 8.3); the order of the ranks does not matter."""
    tokens, k = chosen.shape
    members = _checked_ids(chosen, n_experts).sort(dim=1).values
    packed = _packed_members(members, n_experts)
    sets = packed[:, 0]
    for word in packed.T[1:]:  # numbers of distinct sets instead of rows, which sort more slowly
        before, here = (column.unique(return_inverse=True)[1] for column in (sets, word))
        sets = before * tokens + here
    counts = sets.sort().values.unique_consecutive(return_counts=True)[1]
    return Coalitions(len(counts), int((counts == 1).sum()), log10_possible(n_experts, k), tokens)


def log10_possible(n_experts: int, k: int) -> float:
    """Decimal logarithm of C(E, k), the number of sets that could be chosen."""
    log_binomial = math.lgamma(n_experts + 1) - math.lgamma(k + 1) - math.lgamma(n_experts - k + 1)
    return log_binomial / math.log(10)


def _packed_members(members: Chosen, n_experts: int) -> Int[Tensor, "tokens words"]:
    """Pack members into as few 62-bit words as possible: fewer columns sort faster."""
    bits = max(1, (n_experts - 1).bit_length())
    packed = []
    for group in members.split(62 // bits, dim=1):
        word = torch.zeros_like(group[:, 0])
        for column in group.unbind(dim=1):
            word = (word << bits) | column
        packed.append(word)
    return torch.stack(packed, dim=1)


def _checked_ids(chosen: Chosen, n_experts: int) -> Chosen:
    """Expert ids as int64; raises if there are none or one is out of range."""
    require(chosen.numel() > 0, "a load needs at least one token, got none", ShapeError)
    ids = chosen.long()
    low, high = int(ids.min()), int(ids.max())
    require(
        low >= 0 and high < n_experts,
        f"expert ids must be in 0..{n_experts - 1}, got {low}..{high}",
        TraceError,
    )
    return ids


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
