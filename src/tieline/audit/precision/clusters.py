"""Means over tokens whose standard errors know that tokens of a sequence belong together.

    m = Σ_s y_s / Σ_s n_s,    se² = S/(S-1) · Σ_s (y_s - m n_s)² / (Σ_s n_s)²

for sequences s = 1, ..., S with sums y_s over n_s tokens: the ratio estimator whose clusters are
the sequences. A single sequence tells no spread.
"""

import math
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from tieline.errors import ShapeError, require
from tieline.numerics import Estimate

__all__ = ["SequenceSums", "clustered_mean"]

NOT_MEASURED = Estimate(None, None, "not measured")


def clustered_mean(
    sums: Float[Tensor, " sequences"], counts: Float[Tensor, " sequences"]
) -> Estimate:
    """Mean per token with the standard error clustered by sequence.

    Args:
        sums: sum of the quantity over the tokens of each sequence.
        counts: number of these tokens, positive in all.
    """
    require(len(sums) == len(counts) > 0, f"{len(sums)} sums, {len(counts)} counts", ShapeError)
    y, n = sums.double(), counts.double()
    mean = (y.sum() / n.sum()).item()
    groups = len(y)
    if groups == 1:
        return Estimate(mean, None)
    spread = (y - mean * n).square().sum().item() * groups / (groups - 1)
    return Estimate(mean, math.sqrt(spread) / n.sum().item())


@dataclass
class SequenceSums:
    """Sums per sequence of one quantity, batch after batch."""

    sums: list[Tensor] = field(default_factory=list)
    counts: list[Tensor] = field(default_factory=list)

    def add(self, values: Float[Tensor, "rows length"]) -> None:
        """Take the values of the tokens of some more sequences."""
        self.sums.append(values.double().sum(dim=1).cpu())
        self.counts.append(torch.full((len(values),), float(values.shape[1])))

    def mean(self) -> Estimate:
        """Mean per token so far."""
        if not self.sums:
            return NOT_MEASURED
        return clustered_mean(torch.cat(self.sums), torch.cat(self.counts))

    def joined(self, *others: "SequenceSums") -> "SequenceSums":
        """The same sequences with all quantities as further tokens: the mean over layers."""
        every = [whole for whole in (self, *others) if whole.sums]
        parts = [torch.cat(whole.sums) for whole in every]
        counts = [torch.cat(whole.counts) for whole in every]
        if not parts:
            return SequenceSums()
        return SequenceSums([torch.stack(parts).sum(dim=0)], [torch.stack(counts).sum(dim=0)])
