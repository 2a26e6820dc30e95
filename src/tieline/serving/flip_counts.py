"""Count tokens and flips by layer and gap: the logged metrics of a rollout and a live model.

A token *flips* in a layer if its live experts differ from the recorded ones. With
Δ = z_[k] - z_[k+1] of the live scores, a flip is a *near-tie* if Δ is below the layer's 25 %
quantile of gaps, and *unexplained* if Δ is above the median, which noise that flips few tokens does
not reach.

Only histograms of gaps on a fixed grid are kept, so memory does not grow with steps, and sums over
ranks equal those of one process exactly. Needs torch only.
"""

import torch
import torch.distributed as dist
from torch import Tensor

PREFIX = "rollout/"
BINS_PER_OCTAVE, LOWEST, HIGHEST = 8, -40, 24
"""The grid of gaps: 2^-40 to 2^24, eight bins to a factor of two; exact zeros in the first."""

N_BINS = (HIGHEST - LOWEST) * BINS_PER_OCTAVE
NEAR_QUANTILE, WIDE_QUANTILE = 0.25, 0.5
MOST_LAYERS = 128
"""Number of layers with metrics of their own; deeper ones count in mean and maximum only."""


class FlipCounts:
    """Histograms of the gaps of all compared tokens, and of tokens that flip, by layer.

    Attributes:
        gaps: counts (2, layers, bins) of all tokens and of flips.
    """

    def __init__(self, layers: int) -> None:
        self.gaps = torch.zeros(2, layers, N_BINS + 1, dtype=torch.int64, device="cpu")

    def add(self, layer: int, gaps: Tensor, flips: Tensor) -> None:
        """Add tokens of a layer, given their gaps (T,) and a mask of flips (T,)."""
        bins = _gap_bins(gaps)
        for row, counted in enumerate((bins, bins[flips])):
            self.gaps[row, layer] += torch.bincount(counted, minlength=N_BINS + 1).cpu()


def _gap_bins(gaps: Tensor) -> Tensor:
    """Return the bin of each gap on the fixed grid; infinite gaps are in the last bin."""
    exponents = gaps.double().clamp(min=2.0**LOWEST, max=2.0**HIGHEST).log2() - LOWEST
    return (exponents * BINS_PER_OCTAVE).floor().long().clamp(0, N_BINS)


def _quantile_bin(counts: Tensor, share: float) -> int:
    """Return the bin of the quantile of the gaps at this share."""
    total = int(counts.sum())
    return int((counts.cumsum(0) < share * total).sum()) if total else 0


def flip_scalars(gaps: Tensor, per_layer: bool = True) -> dict[str, float]:
    """Return the flip rates of `FlipCounts.gaps` by metric name, without the prefix."""
    tokens = gaps[0].sum(dim=1).clamp(min=1).double()
    flips = gaps[1].sum(dim=1).double()
    near, wide = torch.zeros_like(flips), torch.zeros_like(flips)
    for index in range(len(flips)):
        near_bin = _quantile_bin(gaps[0, index], NEAR_QUANTILE)
        wide_bin = _quantile_bin(gaps[0, index], WIDE_QUANTILE)
        near[index] = gaps[1, index, : near_bin + 1].sum()
        wide[index] = gaps[1, index, wide_bin + 1 :].sum()
    rates, unexplained = flips / tokens, wide / tokens
    scalars = {
        "flip_rate": float(rates.mean()),
        "flip_rate_max": float(rates.max()),
        "near_ties": float(near.sum() / flips.sum()) if float(flips.sum()) else 1.0,
        "unexplained": float(unexplained.mean()),
        "unexplained_max": float(unexplained.max()),
        "worst_layer": float(unexplained.argmax()),
    }
    layers = enumerate(rates[:MOST_LAYERS] if per_layer else ())
    return scalars | {f"flip_rate/layer_{index}": float(rate) for index, rate in layers}


def summed_over_ranks(counts: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return the counts summed over the ranks of a group; a copy without torch.distributed."""
    if not dist.is_available() or not dist.is_initialized():
        return counts.clone()
    nccl = dist.get_backend(group) == "nccl"
    total = counts.to("cuda" if nccl else "cpu", copy=True)
    dist.all_reduce(total, group=group)
    return total.cpu()
