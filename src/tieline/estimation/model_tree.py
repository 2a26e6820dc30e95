"""A tree whose leaves hold linear models: where a mixture of experts may begin.

The tree is grown greedily. Of all leaves, features and thresholds that split is made which lowers

    S(leaf) = min_B Σ_{t ∈ leaf} w_t ‖y_t - B (x_t, 1)‖² + λ ‖B‖²

most. Thresholds are weighted quantiles of the feature in the leaf, and S of all of them comes from
the moments of the bins between them. Nothing is drawn, and the tree depends on the rows through
their weighted distribution only: a row of weight 2 counts as two rows, in any order.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

__all__ = ["linear_tree", "weighted_quantiles"]

Rows = Float[Tensor, "rows width"]
Targets = Float[Tensor, "rows outputs"]
Weights = Float[Tensor, " rows"]


class _Split(NamedTuple):
    """The best split of a leaf; `feature` is -1 where none helps."""

    gain: float = 0.0
    feature: int = -1
    threshold: float = 0.0


def linear_tree(
    x: Rows, y: Targets, weight: Weights, leaves: int, *, cuts: int = 15, ridge: float = 1e-3
) -> Int[Tensor, " rows"]:
    """Leaf of each row, 0, 1, ...; fewer leaves than asked for where no split helps.

    Args:
        x: inputs (n, D).
        y: targets (n, C).
        weight: weights (n) > 0 of the rows.
        leaves: how many leaves are wanted.
        cuts: thresholds tried per feature.
        ridge: λ over the mean square of the design, so that small leaves have models too.
    """
    rows = torch.cat([x, torch.ones_like(x[:, :1]), y], dim=1)
    least = (x.shape[1] + 1) * weight.sum() / len(weight)
    leaf = torch.zeros(len(x), dtype=torch.long)
    found = [_best_split(rows, weight, y.shape[1], least, cuts, ridge)]
    while len(found) < leaves:
        widest = max(range(len(found)), key=lambda place: found[place].gain)
        split = found[widest]
        if split.feature < 0:
            break
        leaf[(leaf == widest) & (x[:, split.feature] > split.threshold)] = len(found)
        found.append(_Split())
        for place in (widest, len(found) - 1):
            inside = leaf == place
            found[place] = _best_split(rows[inside], weight[inside], y.shape[1], least, cuts, ridge)
    return leaf


def weighted_quantiles(
    values: Float[Tensor, " rows"], weight: Weights, levels: Float[Tensor, " levels"]
) -> Float[Tensor, " levels"]:
    """Smallest value whose cumulated weight reaches each level; repeats count as weight does."""
    ordered, order = values.sort(stable=True)
    mass = weight[order].cumsum(dim=0)
    goal = levels * mass[-1] * (1 - 1e-12)  # lest the rounding of the sum move on by one row
    return ordered[torch.searchsorted(mass, goal).clamp(max=len(values) - 1)]


def _best_split(
    rows: Tensor, weight: Tensor, outputs: int, least: Tensor, cuts: int, ridge: float
) -> _Split:
    """The split of these rows (x, 1, y) that lowers S most, with `least` weight on either side."""
    if weight.sum() < 2 * least:
        return _Split()
    total = (rows * weight[:, None]).mT @ rows
    penalty = ridge * total.diagonal()[:-outputs].mean()
    before, best = _residual(total, outputs, penalty), _Split()
    levels = torch.arange(1, cuts + 1, dtype=rows.dtype) / (cuts + 1)
    for feature in range(rows.shape[1] - outputs - 1):
        column = rows[:, feature].contiguous()
        thresholds = weighted_quantiles(column, weight, levels).unique()
        left, mass = _moments_below(rows, weight, column, thresholds)
        after = _residual(left, outputs, penalty) + _residual(total - left, outputs, penalty)
        allowed = (mass >= least) & (weight.sum() - mass >= least)
        gain = (before - after).where(allowed, 0.0)
        top = int(gain.argmax())
        if gain[top] > best.gain * (1 + 1e-9):
            best = _Split(gain[top].item(), feature, thresholds[top].item())
    return best


def _moments_below(
    rows: Tensor, weight: Tensor, column: Tensor, thresholds: Tensor
) -> tuple[Tensor, Tensor]:
    """Σ w z zᵀ and Σ w over the rows up to each threshold."""
    bins, order = torch.bucketize(column, thresholds).sort(stable=True)
    ends = torch.searchsorted(bins, torch.arange(len(thresholds)), right=True)
    sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
    last = int(ends[-1])
    parts = zip(rows[order][:last].split(sizes), weight[order][:last].split(sizes), strict=True)
    moments, masses = zip(*(((z * w[:, None]).mT @ z, w.sum()) for z, w in parts), strict=True)
    return torch.stack(moments).cumsum(dim=0), torch.stack(masses).cumsum(dim=0)


def _residual(moments: Tensor, outputs: int, penalty: Tensor) -> Tensor:
    """S from the moments (..., p + C, p + C) of (x, 1, y)."""
    gram, cross = moments[..., :-outputs, :-outputs], moments[..., :-outputs, -outputs:]
    eye = torch.eye(gram.shape[-1], dtype=gram.dtype)
    solved = torch.linalg.solve(gram + penalty * eye, cross)
    squares = moments[..., -outputs:, -outputs:].diagonal(dim1=-2, dim2=-1).sum(dim=-1)
    return squares - (solved * cross).sum(dim=(-2, -1))
