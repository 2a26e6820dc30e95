"""Scores that carry their truth: without a tie, or with ties where they were planted.

    tie_free_scores    every two scores of a token at least `gap` apart, in the format asked for
    tie_heavy_scores   a share of the tokens has a tie of a given order across the threshold

Both are exact in their dtype: what is planted is not lost by rounding.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tieline.errors import require
from tieline.ranking import gap as gap_of

__all__ = ["PlantedScores", "tie_free_scores", "tie_heavy_scores"]


class PlantedScores(NamedTuple):
    """Scores and what is true of them.

    Attributes:
        scores: (T, E), experts in random order.
        tied: tokens whose scores of ranks k and k + 1 are equal.
        gap: z_[k] - z_[k+1] in float64.
    """

    scores: Float[Tensor, "tokens experts"]
    tied: Bool[Tensor, " tokens"]
    gap: Float[Tensor, " tokens"]


def tie_free_scores(
    tokens: int,
    experts: int,
    k: int,
    *,
    gap: float = 0.125,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> PlantedScores:
    """Scores of which every two are at least `gap` apart, so that no rounding below gap/2 matters.

    Multiples of `gap` around zero, with random holes between them.

    Args:
        tokens: T.
        experts: E.
        k: number of experts chosen, for the truth.
        gap: smallest distance, a power of two so that multiples are exact.
        seed: of the random numbers.
        dtype: of the scores; refused where it cannot hold them apart.
    """
    _check(tokens, experts, k)
    draw = torch.Generator().manual_seed(seed)
    levels = _levels(tokens, experts, draw)
    return _planted(levels, gap, k, draw, dtype)


def tie_heavy_scores(
    tokens: int,
    experts: int,
    k: int,
    *,
    share: float = 0.5,
    order: int = 1,
    gap: float = 0.125,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> PlantedScores:
    """Scores of which a share of the tokens has order + 1 equal ones across the threshold.

    The others, and all other pairs, are at least `gap` apart. How many of the equal scores are
    above the threshold is random.

    Args:
        tokens: T.
        experts: E.
        k: number of experts chosen, less than E.
        share: part of the tokens that tie, rounded to a number of tokens.
        order: n of a tie of order n: n + 1 equal scores (Def. 4.2).
        gap: smallest distance of other pairs, a power of two.
        seed: of the random numbers.
        dtype: of the scores.
    """
    _check(tokens, experts, k)
    require(k < experts, f"a tie across the threshold needs k < experts, got {k=} of {experts}")
    require(0 <= share <= 1, f"need 0 <= share <= 1, got {share}")
    require(1 <= order < experts, f"need 1 <= order < experts, got {order=} of {experts}")
    draw = torch.Generator().manual_seed(seed)
    levels = _levels(tokens, experts, draw)
    wanted = torch.randperm(tokens, generator=draw)[: round(share * tokens)]
    low, high = max(0, k - order), min(k, experts - order) - 1  # first equal rank, from 0
    starts = torch.randint(low, high + 1, (len(wanted),), generator=draw)
    ranks = starts[:, None] + torch.arange(order + 1)
    levels[wanted[:, None], ranks] = levels[wanted, starts][:, None]
    return _planted(levels, gap, k, draw, dtype)


def _levels(tokens: int, experts: int, draw: torch.Generator) -> Float[Tensor, "tokens experts"]:
    """Descending integers around zero, with holes of up to three between neighbours."""
    steps = torch.randint(1, 5, (tokens, experts), generator=draw).double()
    levels = -steps.cumsum(dim=1)
    return levels - levels.mean(dim=1, keepdim=True).round()


def _planted(
    levels: Float[Tensor, "tokens experts"],
    gap: float,
    k: int,
    draw: torch.Generator,
    dtype: torch.dtype,
) -> PlantedScores:
    """Levels times the gap, experts shuffled, if the type holds these numbers exactly."""
    exact = levels * gap
    scores = exact.to(dtype)
    require(
        gap > 0 and bool((scores.double() == exact).all()),
        f"{dtype} does not hold multiples of {gap=} up to {exact.abs().max().item():g} exactly: "
        "take a power of two, or fewer experts",
    )
    order = torch.rand(levels.shape, generator=draw).argsort(dim=1)
    gaps = gap_of(exact, k)
    return PlantedScores(scores.gather(1, order), gaps == 0, gaps)


def _check(tokens: int, experts: int, k: int) -> None:
    require(
        tokens >= 1 and 1 <= k <= experts,
        f"need a token and 1 <= k <= experts, got {tokens=}, {experts=}, {k=}",
    )
