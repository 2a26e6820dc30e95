"""How the tokens spread over the experts.

expert_load    tokens per expert, their entropy, dead and cold experts     Def. 8.1, 8.2
coalitions     distinct chosen sets                                        Def. 8.3
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Int
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
    words = _packed_members(members, n_experts)
    sets = words[:, 0]
    for word in words.T[1:]:  # numbers of distinct sets instead of rows, which sort more slowly
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
