"""Oracles and inputs for tests of routing kernels: is a mismatch a bug or a tie?

    regret                 r(S) = max_{i ∉ S} z_i - min_{j ∈ S} z_j
    compare_choices        tokens with different choices, and whether ties explain them
    assert_routing_close   the same as an assertion with an explanation
    tie_band               a few roundings of a format at each token's threshold
    tie_free_scores        any two scores of a token at least `gap` apart
    tie_heavy_scores       a share of the tokens with a tie of a given order across the threshold

A set S of k experts is a top-k choice if r(S) <= 0, and a top-k choice up to a band t if r(S) <= t:
no expert left out exceeds a chosen one by more than t. Generated scores are exact in their dtype,
so rounding preserves the planted ties and gaps.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tieline.core.errors import ShapeError, require
from tieline.core.numerics import PRECISIONS, float_step, grid_step
from tieline.core.ranking import gap as gap_of
from tieline.core.ranking import kth_largest, sets_differ


class PlantedScores(NamedTuple):
    """Scores with known ties.

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
    """Scores at least `gap` apart in each token, so that rounding below gap/2 changes no choice.

    They are multiples of `gap` around zero, with random distances.

    Args:
        tokens: T.
        experts: E.
        k: number of chosen experts, for the returned gaps.
        gap: smallest distance, a power of two so that multiples are exact.
        seed: seed of the random numbers.
        dtype: dtype of the scores; raises if it cannot represent them exactly.
    """
    _check_planted_sizes(tokens, experts, k)
    draw = torch.Generator().manual_seed(seed)
    levels = _descending_levels(tokens, experts, draw)
    return _planted_scores(levels, gap, k, draw, dtype)


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
    """Scores with order + 1 equal ones across the threshold in a share of the tokens.

    All other pairs of scores differ by at least `gap`. The number of equal scores above the
    threshold is random.

    Args:
        tokens: T.
        experts: E.
        k: number of chosen experts, less than E.
        share: share of the tokens with a tie, rounded to a number of tokens.
        order: order n of a tie, n + 1 equal scores (Def. 4.2).
        gap: smallest distance of other pairs, a power of two.
        seed: seed of the random numbers.
        dtype: dtype of the scores.
    """
    _check_planted_sizes(tokens, experts, k)
    require(k < experts, f"a tie across the threshold needs k < experts, got {k=} of {experts}")
    require(0 <= share <= 1, f"need 0 <= share <= 1, got {share}")
    require(1 <= order < experts, f"need 1 <= order < experts, got {order=} of {experts}")
    draw = torch.Generator().manual_seed(seed)
    levels = _descending_levels(tokens, experts, draw)
    tied = torch.randperm(tokens, generator=draw, device=draw.device)[: round(share * tokens)]
    low, high = max(0, k - order), min(k, experts - order) - 1  # first equal rank, from 0
    starts = torch.randint(low, high + 1, (len(tied),), generator=draw, device=draw.device)
    ranks = starts[:, None] + torch.arange(order + 1, device="cpu")
    levels[tied[:, None], ranks] = levels[tied, starts][:, None]
    return _planted_scores(levels, gap, k, draw, dtype)


def _descending_levels(
    tokens: int, experts: int, draw: torch.Generator
) -> Float[Tensor, "tokens experts"]:
    """Descending integers around zero, neighbours one to four apart."""
    steps = torch.randint(1, 5, (tokens, experts), generator=draw, device=draw.device).double()
    levels = -steps.cumsum(dim=1)
    return levels - levels.mean(dim=1, keepdim=True).round()


def _planted_scores(
    levels: Float[Tensor, "tokens experts"],
    gap: float,
    k: int,
    draw: torch.Generator,
    dtype: torch.dtype,
) -> PlantedScores:
    """Levels times the gap with shuffled experts; raises if the dtype is not exact for them."""
    exact = levels * gap
    scores = exact.to(dtype)
    require(
        gap > 0 and bool((scores.double() == exact).all()),
        f"{dtype} does not hold multiples of {gap=} up to {exact.abs().max().item():g} exactly: "
        "take a power of two, or fewer experts",
    )
    order = torch.rand(levels.shape, generator=draw, device=draw.device).argsort(dim=1)
    gaps = gap_of(exact, k)
    return PlantedScores(scores.gather(1, order), gaps == 0, gaps)


def _check_planted_sizes(tokens: int, experts: int, k: int) -> None:
    """Raise unless there is a token and 1 <= k <= experts."""
    require(
        tokens >= 1 and 1 <= k <= experts,
        f"need a token and 1 <= k <= experts, got {tokens=}, {experts=}, {k=}",
    )


Ids = Int[Tensor, "tokens k"]
Scores = Float[Tensor, "tokens experts"]
PerToken = Float[Tensor, " tokens"]

MOST_SHOWN = 5
"""Most tokens that a message lists."""


@dataclass(frozen=True)
class ChoiceComparison:
    """Tokens for which two programs chose different experts.

    Attributes:
        tokens: number of tokens.
        ties: tokens whose choices differ within the tie band.
        wrong: tokens whose choices differ beyond it.
        reasons: one sentence for each wrong token.
    """

    tokens: int
    ties: tuple[int, ...]
    wrong: tuple[int, ...]
    reasons: tuple[str, ...]

    @property
    def explanation(self) -> str:
        """The numbers of differences, and the reasons of the first wrong tokens, as text."""
        count = len(self.ties) + len(self.wrong)
        lines = [f"{count} of {self.tokens} tokens chose other experts: {len(self.ties)} at ties"]
        lines[0] += f", {len(self.wrong)} not"
        lines += self.reasons[:MOST_SHOWN]
        if len(self.reasons) > MOST_SHOWN:
            lines.append(f"... and {len(self.reasons) - MOST_SHOWN} more")
        return "\n".join(lines)


def assert_routing_close(
    ids_a: Ids, ids_b: Ids, scores: Scores, tol: float | PerToken
) -> ChoiceComparison:
    """Raise an `AssertionError` with reasons if choices differ beyond the tie band.

    Args:
        ids_a: experts that one program chose, in any order.
        ids_b: experts that the other program chose.
        scores: selection scores of both, including the correction bias; minus infinity for experts
            that cannot be chosen.
        tol: width of the band, one number or one per token, for example `tie_band`.
    """
    comparison = compare_choices(ids_a, ids_b, scores, tol)
    if comparison.wrong:
        raise AssertionError(comparison.explanation)
    return comparison


def compare_choices(
    ids_a: Ids, ids_b: Ids, scores: Scores, tol: float | PerToken
) -> ChoiceComparison:
    """Compare two programs' choices; arguments as in `assert_routing_close`."""
    band = torch.as_tensor(tol, dtype=torch.float64, device=scores.device)
    require(bool((band >= 0).all()), f"a tie band is >= 0, got {tol}")
    band = band.expand(len(scores))
    shapes = tuple(ids_a.shape), tuple(ids_b.shape), tuple(scores.shape)
    fits = ids_a.shape == ids_b.shape and len(ids_a) == len(scores)
    require(fits and 1 <= ids_a.shape[1] <= scores.shape[1], f"shapes {shapes} differ", ShapeError)
    n_nan = int(scores.isnan().sum())
    require(n_nan == 0, f"{n_nan} of {scores.numel()} scores are NaN: no choice of them is right")
    broken_a, broken_b = _invalid_choices(ids_a, scores), _invalid_choices(ids_b, scores)
    set_a, set_b = _ids_as_mask(ids_a, scores), _ids_as_mask(ids_b, scores)
    differ = sets_differ(set_a, set_b) | broken_a | broken_b
    regrets = {"a": regret(set_a, scores), "b": regret(set_b, scores)}
    beyond_band = {name: ~(value <= band) for name, value in regrets.items()}
    wrong = differ & (beyond_band["a"] | beyond_band["b"] | broken_a | broken_b)
    broken = {"a": (broken_a, ids_a), "b": (broken_b, ids_b)}
    sets = {"a": set_a, "b": set_b}
    reasons = []
    for token in _true_indices(wrong):
        reasons_of_token = []
        for name in ("a", "b"):
            if broken[name][0][token]:
                ids, last = broken[name][1][token].tolist(), scores.shape[1] - 1
                reasons_of_token.append(
                    f"{name} chose {ids}, which are not {len(ids)} experts of 0..{last}"
                )
            elif beyond_band[name][token]:
                row = sets[name][token], scores[token]
                reasons_of_token.append(_regret_text(name, *row, regrets[name][token], band[token]))
        reasons.append(f"token {token}: " + "; ".join(reasons_of_token))
    return ChoiceComparison(
        len(scores),
        tuple(_true_indices(differ & ~wrong)),
        tuple(_true_indices(wrong)),
        tuple(reasons),
    )


def regret(chosen: Bool[Tensor, "tokens experts"], scores: Scores) -> PerToken:
    """r(S) = max_{i ∉ S} z_i - min_{j ∈ S} z_j in float64; at most 0 for a top-k choice."""
    z = scores.double()
    best_left_out = z.masked_fill(chosen, -torch.inf).amax(dim=1)
    worst_chosen = z.masked_fill(~chosen, torch.inf).amin(dim=1)
    # both are minus infinity: no better expert was left out
    return (best_left_out - worst_chosen).nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf)


def tie_band(scores: Scores, k: int, dtype: str = "bf16", roundings: float = 2.0) -> PerToken:
    """`roundings` spacings of a format at z_[k], in float64: distances that rounding can reverse.

    Two scores rounded once each change places only within one spacing; a matrix product summed in
    the format needs more.

    Args:
        scores: selection scores.
        k: number of chosen experts.
        dtype: "fp32" or one of `PRECISIONS`.
        roundings: number of spacings.
    """
    formats = ("fp32", *PRECISIONS)
    require(dtype in formats, f"unknown dtype {dtype!r}: one of {', '.join(formats)}")
    threshold = kth_largest(scores.double(), k)
    if dtype == "fp32":
        return roundings * float_step(threshold, 23, -126)[:, 0]
    # together with all scores, because an integer format has the scale of the largest
    return roundings * grid_step(torch.cat([threshold, scores.double()], dim=1), dtype)[:, 0]


def _ids_as_mask(ids: Ids, scores: Scores) -> Bool[Tensor, "tokens experts"]:
    """Mask of the chosen experts; ids outside the range are clamped, see `_invalid_choices`."""
    inside = ids.long().clamp(0, scores.shape[1] - 1)
    return torch.zeros_like(scores, dtype=torch.bool).scatter(1, inside, True)


def _invalid_choices(ids: Ids, scores: Scores) -> Bool[Tensor, " tokens"]:
    """Mask of tokens with an id outside the range or a repeated expert."""
    outside = ((ids < 0) | (ids >= scores.shape[1])).any(dim=1)
    return outside | (_ids_as_mask(ids, scores).sum(dim=1) < ids.shape[1])


def _regret_text(
    name: str, chosen: Bool[Tensor, " e"], z: Float[Tensor, " e"], value: Tensor, band: Tensor
) -> str:
    """Sentence on the worst chosen expert and the best one left out."""
    inside, outside = _true_indices(chosen), _true_indices(~chosen)
    worst = min(inside, key=lambda e: z[e].item())
    best = max(outside, key=lambda e: z[e].item())
    return (
        f"{name} chose expert {worst} ({z[worst].item():.9g}) and left out {best} "
        f"({z[best].item():.9g}), which is better by {value.item():.3g} > band {band.item():.3g}"
    )


def _true_indices(mask: Bool[Tensor, " n"]) -> list[int]:
    """Indices of the true elements of a mask."""
    return mask.nonzero().squeeze(1).tolist()
