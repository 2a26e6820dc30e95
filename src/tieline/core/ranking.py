"""The one place where experts are ranked, and with it the one tie rule: stable, lower index first.

z_[1] >= z_[2] >= ... are the scores of a token in order; equal scores keep the order of their
indices. `torch.topk` and `torch.max` promise no order among equals and pick differently from each
other and from call to call with another k, so no other module of the package ranks scores.

    stable_topk      the k largest scores and their experts, in order
    topk_mask        the set of those experts as booleans
    kth_largest      z_[k]
    top_values       z_[1], ..., z_[n]
    gap              z_[k] - z_[k+1] in float64, zero on a tie
    ranked_scores    z_[1], ..., z_[n] in float64
    ranked_choice    the first n ranks where another program has already chosen
    confirmed_ranks  the same from that choice, without a search, where scores explain it
    group_scores     scores of groups of experts: the largest, or the sum of the two largest
    sets_differ      whether two sets of experts differ, sets as booleans
    n_changed        how many experts of one choice another one lacks, choices as indices

A score that is not a number ranks above all others, so that it is chosen and shows in the output
instead of vanishing from it.
"""

from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tieline.core.errors import ShapeError


class Ranked(NamedTuple):
    """The first k ranks of each row: scores in descending order and the experts that hold them."""

    values: Float[Tensor, "*batch k"]
    indices: Int[Tensor, "*batch k"]


def stable_topk(scores: Float[Tensor, "*batch experts"], k: int) -> Ranked:
    """The k largest scores of each row in order; of equal scores the lower index comes first."""
    _require_k_in_range(scores, k)
    values, indices = scores.sort(dim=-1, descending=True, stable=True)
    return Ranked(values[..., :k], indices[..., :k])


def topk_mask(scores: Float[Tensor, "*batch experts"], k: int) -> Bool[Tensor, "*batch experts"]:
    """The set S of the k experts that `stable_topk` returns, as a mask.

    All scores above z_[k] belong to S; of those equal to z_[k] the first by index do, until k are
    chosen. This needs values only, which are the same for every sorting routine, and costs half of
    a stable sort at 64 experts. Where reading a number back is free, rows without a tie across the
    threshold, nearly always all of them, are done after one comparison.
    """
    _require_k_in_range(scores, k)
    scores = scores.detach()
    if scores.device.type == "cpu" and not torch.compiler.is_compiling():
        threshold = scores.topk(k, dim=-1, sorted=True).values[..., -1:]
        reached = (scores < threshold).logical_not_()  # what is not a number is not below any
        if bool((reached.sum(dim=-1) == k).all()):
            return reached
    return _mask_at_ties(scores, k)


def _mask_at_ties(scores: Tensor, k: int) -> Tensor:
    """The top-k mask where scores may tie across the threshold."""
    comparable = scores.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
    threshold = comparable.topk(k, dim=-1, sorted=True).values[..., -1:]
    above, level = comparable > threshold, comparable == threshold
    vacant = k - above.sum(dim=-1, keepdim=True)
    return above | (level & (level.cumsum(dim=-1) <= vacant))


def kth_largest(scores: Float[Tensor, "*batch experts"], k: int) -> Float[Tensor, "*batch 1"]:
    """z_[k] of each row, differentiable in the score that holds it."""
    return top_values(scores, k)[..., -1:]


def top_values(scores: Float[Tensor, "*batch experts"], n: int) -> Float[Tensor, "*batch n"]:
    """z_[1], ..., z_[n] of each row in the dtype of the scores, which no tie rule can change."""
    _require_k_in_range(scores, n)
    return scores.topk(n, dim=-1, sorted=True).values


def ranked_scores(scores: Float[Tensor, "*batch experts"], n: int) -> Float[Tensor, "*batch n"]:
    """z_[1], ..., z_[n] of each row in float64, so that differences are exact."""
    _require_k_in_range(scores, n)
    return scores.double().topk(n, dim=-1, sorted=True).values


def gap(scores: Float[Tensor, "*batch experts"], k: int) -> Float[Tensor, "*batch"]:
    """z_[k] - z_[k+1] in float64: how far each token is from changing its top-k set.

    Zero on a tie across the threshold; infinite for k = E, where no expert is left to enter.
    """
    _require_k_in_range(scores, k)
    if k == scores.shape[-1]:
        return scores.new_full(scores.shape[:-1], torch.inf, dtype=torch.float64)
    top = ranked_scores(scores, k + 1)
    return top[..., k - 1] - top[..., k]


def ranked_choice(
    scores: Float[Tensor, "tokens experts"], chosen: Int[Tensor, "tokens c"], k: int, n: int
) -> Ranked:
    """The first n >= k ranks, the experts `chosen` by another program among the first k of them.

    Values are z_[1], ..., z_[n]. Experts follow the tie rule, except that those chosen come before
    all others: another program may break a tie otherwise, or take two scores for equal that differ
    by its rounding. Rows without such a case need a plain top-k only; the others, few unless scores
    are coarse, are sorted.

    Args:
        scores: (T, E) without NaN.
        chosen: (T, c) experts, repeated ones allowed, that hold c or fewer of the first k ranks.
        k: number of ranks that are chosen.
        n: number of ranks to return.
    """
    ranked = confirmed_ranks(scores, chosen, k, n)
    return searched_ranks(scores, chosen, k, n) if ranked is None else ranked


MOST_MAXIMA = 8
"""Ranks past k up to which one maximum each, of E / 8 at most, costs less than a search for all."""


def confirmed_ranks(
    scores: Float[Tensor, "tokens experts"], chosen: Int[Tensor, "tokens c"], k: int, n: int
) -> Ranked | None:
    """What `ranked_choice` returns where `chosen` are k different experts and none is above them.

    Most of a search is for the k that are known already: they are put in order, and one maximum
    after the other of the rest follows. None where the choice is another one, where a maximum is
    no longer cheaper, and on an accelerator, from which the answer would have to be read back.
    """
    experts = scores.shape[1]
    cheap = scores.device.type == "cpu" and n - k <= min(MOST_MAXIMA, experts // 8)
    if not cheap or scores.dtype.itemsize < 4 or chosen.shape[1] != k or not len(scores):
        return None
    first = _ordered_choice(scores, chosen)
    if first is None:
        return None
    columns, rest = [first], scores.scatter(1, first.indices, -torch.inf)
    for _ in range(k, n):
        columns.append(_first_maximum(rest))
        rest.scatter_(1, columns[-1].indices, -torch.inf)
    values, indices = (torch.cat(column, dim=1) for column in zip(*columns, strict=True))
    highest = values[:, k : k + 1] if n > k else rest.amax(dim=1, keepdim=True)
    explained = (highest <= values[:, k - 1 : k]) & (values[:, -1:] > -torch.inf)
    return Ranked(values, indices) if bool(explained.all()) else None


def _first_maximum(scores: Tensor) -> Ranked:
    """The first rank of each row; NumPy finds it in a quarter of the time."""
    array: Any = scores.detach().numpy()
    indices = torch.from_numpy(array.argmax(axis=1)[:, None])  # of equal scores the first
    return Ranked(scores.gather(1, indices), indices)


def _ordered_choice(scores: Tensor, chosen: Tensor) -> Ranked | None:
    """The experts of a choice by score, then by index; None where one is chosen twice."""
    values = scores.gather(1, chosen)
    if bool((values[:, 1:] < values[:, :-1]).all()):
        return Ranked(values, chosen)
    chosen = chosen.sort(dim=1).values
    if bool((chosen[:, 1:] == chosen[:, :-1]).any()):
        return None
    values, order = scores.gather(1, chosen).sort(dim=1, descending=True, stable=True)
    return Ranked(values, chosen.gather(1, order))


def searched_ranks(
    scores: Float[Tensor, "tokens experts"], chosen: Int[Tensor, "tokens c"], k: int, n: int
) -> Ranked:
    """What `ranked_choice` returns, by a search of all ranks."""
    _require_k_in_range(scores, n)
    values, indices = scores.topk(min(n + 1, scores.shape[-1]), dim=-1, sorted=True)
    tied = (values[:, 1:] >= values[:, :-1]).any(dim=-1)
    displaced = (scores.gather(1, chosen) < values[:, k - 1 : k]).any(dim=-1)
    if scores.device.type != "cpu":  # which rows they are is not read back
        sorted_rows = _chosen_first(scores, chosen)[:, :n]
        indices = torch.where((tied | displaced)[:, None], sorted_rows, indices[:, :n])
        return Ranked(values[:, :n], indices)
    rows = (tied | displaced).nonzero().squeeze(1)
    if len(rows):
        indices[rows, :n] = _chosen_first(scores[rows], chosen[rows])[:, :n]
    return Ranked(values[:, :n], indices[:, :n])


def _chosen_first(scores: Tensor, chosen: Tensor) -> Tensor:
    """Experts in order: chosen ones first, then by score, then by index."""
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    first = torch.zeros_like(scores, dtype=torch.uint8).scatter_(1, chosen, 1).gather(1, order)
    return order.gather(1, first.sort(dim=-1, descending=True, stable=True).indices)


def sets_differ(
    first: Bool[Tensor, "*batch experts"], second: Bool[Tensor, "*batch experts"]
) -> Bool[Tensor, "*batch"]:
    """Whether the two sets of experts of each token differ."""
    return (first != second).any(dim=-1)


def n_changed(
    before: Int[Tensor, "tokens k"], after: Int[Tensor, "tokens k"]
) -> Int[Tensor, " tokens"]:
    """Number of experts chosen before and not after; zero where the sets are equal."""
    kept = (before[:, :, None] == after[:, None, :]).any(dim=2).sum(dim=1)
    return before.shape[1] - kept


def group_scores(
    scores: Float[Tensor, "*batch experts"], groups: int, rule: Literal["max", "top2sum"]
) -> Float[Tensor, "*batch groups"]:
    """Score of each of `groups` equal runs of experts: its largest score, or its two largest added.

    In the dtype of the scores, since that is where a router rounds the sum.
    """
    runs = scores.unflatten(-1, (groups, -1))
    return runs.amax(dim=-1) if rule == "max" else runs.topk(2, dim=-1).values.sum(dim=-1)


def _require_k_in_range(scores: Tensor, k: int) -> None:
    """Refuse a k outside 1 ... E."""
    experts = scores.shape[-1] if scores.ndim else 0
    if not 1 <= k <= experts:  # a message made beforehand would fix the numbers of a compiled graph
        raise ShapeError(f"need 1 <= k <= number of experts, got {k=}, {experts=}")
