"""Load of the experts: how many tokens each expert of a layer gets, and in which sets.

expert_load        tokens per expert, their entropy, dead and cold experts     Def. 8.1, 8.2
coalitions         distinct chosen sets                                        Def. 8.3
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
    """Load of the experts by T tokens with k choices each.

    Attributes:
        counts: number of tokens that chose each expert.
        share: counts / (T k); 1 / E each if the load is even.
        entropy: -Σ share log share, in nats.
        evenness: entropy / log E, 1 for an even load and 0 for a single expert.
        busiest: largest share times E, 1 for an even load.
        dead: experts that no token chose.
        cold: experts with a load above zero, but below `cold_below` times an even load.
        cold_below: fraction of an even load below which an expert is cold.
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
        seen: number of distinct sets, possibly estimated.
        once: number of sets that exactly one token chose; None if not counted. once / T estimates
            the probability that the next token has a new set (Good and Turing).
        log10_possible: log10 of C(E, k), the number of possible sets.
        tokens: number of tokens T.
    """

    seen: int
    once: int | None
    log10_possible: float
    tokens: int


def expert_load(chosen: Chosen, n_experts: int, cold_below: float = 0.1) -> ExpertLoad:
    """Compute the load of each expert, its entropy, dead and cold experts (Def. 8.1, 8.2).

    Args:
        chosen: (T, k) experts of the first k ranks.
        n_experts: number of experts E.
        cold_below: fraction of an even load T k / E below which an expert is cold.
    """
    ids = _validated_ids(chosen, n_experts).flatten()
    return load_from_counts(torch.bincount(ids, minlength=n_experts), cold_below)


def load_from_counts(counts: Int[Tensor, " experts"], cold_below: float = 0.1) -> ExpertLoad:
    """Compute `expert_load` from the number of tokens per expert, as streaming summaries count."""
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
    """Count the distinct chosen sets (Def. 8.3), regardless of the order of the ranks."""
    tokens, k = chosen.shape
    members = _validated_ids(chosen, n_experts).sort(dim=1).values
    packed = _pack_members(members, n_experts)
    sets = packed[:, 0]
    for word in packed.T[1:]:  # one integer per distinct set sorts faster than rows of words
        set_numbers, word_numbers = (x.unique(return_inverse=True)[1] for x in (sets, word))
        sets = set_numbers * tokens + word_numbers
    counts = sets.sort().values.unique_consecutive(return_counts=True)[1]
    return Coalitions(len(counts), int((counts == 1).sum()), log10_possible(n_experts, k), tokens)


def log10_possible(n_experts: int, k: int) -> float:
    """Return log10 of C(E, k), the number of possible chosen sets."""
    log_binomial = math.lgamma(n_experts + 1) - math.lgamma(k + 1) - math.lgamma(n_experts - k + 1)
    return log_binomial / math.log(10)


def _pack_members(members: Chosen, n_experts: int) -> Int[Tensor, "tokens words"]:
    """Pack the experts of each set into few 62-bit words, because fewer columns sort faster."""
    bits = max(1, (n_experts - 1).bit_length())
    packed = []
    for group in members.split(62 // bits, dim=1):
        word = torch.zeros_like(group[:, 0])
        for column in group.unbind(dim=1):
            word = (word << bits) | column
        packed.append(word)
    return torch.stack(packed, dim=1)


def _validated_ids(chosen: Chosen, n_experts: int) -> Chosen:
    """Return expert ids as int64; raises if there are none or one is out of range."""
    require(chosen.numel() > 0, "a load needs at least one token, got none", ShapeError)
    ids = chosen.long()
    low, high = int(ids.min()), int(ids.max())
    require(
        low >= 0 and high < n_experts,
        f"expert ids must be in 0..{n_experts - 1}, got {low}..{high}",
        TraceError,
    )
    return ids
