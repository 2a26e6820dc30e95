"""The statistics of one batch in one layer: the increment of a streaming summary.

This runs inside a forward pass, so it is written in NumPy, which costs less per call than torch and
wakes no threads that the model's own matrix products would have to wait for.
"""

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from tieline.errors import TraceError, require
from tieline.trace.distinct import DistinctSketch
from tieline.trace.grid import LogHistogram
from tieline.trace.hashing import SPAN, coalition_hash
from tieline.trace.layer_summary import LayerSummary, SharedBias, TokenKey
from tieline.trace.moments import ExactMoments
from tieline.trace.ops import take_tokens
from tieline.trace.record import LayerTrace

__all__ = ["summarise_chunk"]


def summarise_chunk(
    chunk: LayerTrace,
    documents: Int[Tensor, " tokens"],
    positions: Int[Tensor, " tokens"],
    epsilons: tuple[float, ...],
    ceiling: int = SPAN,
) -> LayerSummary:
    """Summary of one batch.

    Args:
        chunk: what the router did, on the CPU.
        documents: document of each token.
        positions: position of each token in its document.
        epsilons: the ε of the columns of `chunk.near`.
        ceiling: coalitions of this hash or above are left out, since a full sketch of earlier
            batches would drop them.
    """
    chosen = _chosen(chunk)
    nonfinite = _nonfinite(chunk)
    experts = chunk.facts.n_experts
    hashes = coalition_hash(chosen)
    return LayerSummary(
        name=chunk.name,
        facts=chunk.facts,
        tokens=len(chunk.experts),
        load=torch.from_numpy(np.bincount(chosen.ravel(), minlength=experts)),
        coalitions=DistinctSketch.empty().with_hashes(hashes[hashes < ceiling]),
        bias=SharedBias(None if chunk.bias is None else chunk.bias.detach().clone()),
        nonfinite=len(nonfinite),
        first_nonfinite=_first(nonfinite, documents, positions),
        **_of_scores(_without(chunk, nonfinite), epsilons),  # pyright: ignore[reportArgumentType]
    )


def _chosen(chunk: LayerTrace) -> np.ndarray:
    """Chosen experts (k, T) as int64, all of them between 0 and E - 1."""
    chosen = np.ascontiguousarray(chunk.experts.numpy()[:, : chunk.facts.k].T, dtype=np.int64)
    low, high = int(chosen.min(initial=0)), int(chosen.max(initial=0))
    require(
        low >= 0 and high < chunk.facts.n_experts,
        f"layer {chunk.name!r}: experts must lie in 0 ... {chunk.facts.n_experts - 1}, "
        f"got {low if low < 0 else high}",
        TraceError,
    )
    return chosen


def _nonfinite(chunk: LayerTrace) -> np.ndarray:
    """Tokens with a score that is not finite among the first k.

    The first and the k-th tell: scores descend, and one that is not a number ranks above all.
    """
    if chunk.scores is None:
        return np.zeros(0, dtype=np.int64)
    scores = _numbers(chunk.scores)
    first, last = scores[:, 0], scores[:, chunk.facts.k - 1]
    return np.flatnonzero(~(np.isfinite(first) & np.isfinite(last)))


def _first(tokens: np.ndarray, documents: Tensor, positions: Tensor) -> TokenKey | None:
    keys = ((int(documents[token]), int(positions[token])) for token in tokens)
    first = min(keys, default=None)
    return None if first is None else TokenKey(*first)


def _without(chunk: LayerTrace, tokens: np.ndarray) -> LayerTrace:
    if len(tokens) == 0:
        return chunk
    keep = np.setdiff1d(np.arange(len(chunk.experts)), tokens)
    return take_tokens(chunk, torch.from_numpy(keep))


def _of_scores(chunk: LayerTrace, epsilons: tuple[float, ...]) -> dict[str, object]:
    """The fields of a summary that count scores; all of them must be finite."""
    gaps = _histogram(chunk, "gap") if chunk.has_gaps else None
    group_decides = 0
    if gaps is not None and chunk.group_gap is not None:
        group_decides = int((chunk.group_gap.double() < chunk.inner_gap).sum())
    return {
        "gaps": gaps,
        "group_gaps": _histogram(chunk, "group_gap"),
        "group_decides": group_decides,
        "distances": _histogram(chunk, "distance"),
        "near": _near(chunk),
        "orders": _orders(chunk, epsilons) if gaps is not None else None,
        "moments": None if chunk.scores is None else ExactMoments.of(chunk.scores.detach()),
    }


def _histogram(chunk: LayerTrace, name: str) -> LogHistogram | None:
    values = getattr(chunk, name)
    try:
        return None if values is None else LogHistogram.of(values.detach())
    except TraceError as error:
        raise TraceError(f"layer {chunk.name!r}: {name}: {error}") from error


def _near(chunk: LayerTrace) -> Tensor | None:
    """Counts of K(ε), one row per ε."""
    if chunk.near is None:
        return None
    columns = np.ascontiguousarray(chunk.near.numpy().T, dtype=np.int64)
    return _counted(columns, chunk.facts.n_experts + 1, f"layer {chunk.name!r}: near")


def _orders(chunk: LayerTrace, epsilons: tuple[float, ...]) -> Tensor | None:
    """Counts of the order of tie, one row per ε.

    #{i : |z_i - z_[k]| < ε} = K(ε) - #{i < k : z_[i] - z_[k] >= ε}: K(ε) was counted over all
    experts, and the others are ranks that were kept, so that the order is exact.
    """
    if chunk.near is None or chunk.scores is None:
        return None
    k, experts = chunk.facts.k, chunk.facts.n_experts
    gap = chunk.inner_gap.detach().numpy()
    ranked = _numbers(chunk.scores)[:, :k].T.astype(np.float64, order="C")
    rise = ranked - ranked[-1]
    near = np.ascontiguousarray(chunk.near.numpy().T)
    small = np.uint8 if k < 256 else np.uint32  # bytes are added 32 at a time
    orders = np.zeros((len(epsilons), len(gap)), dtype=np.int64)
    for row, epsilon in enumerate(epsilons):
        above = np.add.reduce((rise >= epsilon).view(np.uint8), axis=0, dtype=small)
        np.multiply(near[row] - above.astype(np.int64) - 1, gap < epsilon, out=orders[row])
    return _counted(orders, experts, f"layer {chunk.name!r}: orders of ties")


def _numbers(scores: Tensor) -> np.ndarray:
    """The same scores for NumPy, which knows no bfloat16."""
    return (scores.float() if scores.dtype == torch.bfloat16 else scores).detach().numpy()


def _counted(rows: np.ndarray, size: int, name: str) -> Tensor:
    """How often 0, ..., size - 1 occur in each row."""
    low, high = int(rows.min(initial=0)), int(rows.max(initial=0))
    require(
        low >= 0 and high < size,
        f"{name} must lie in 0 ... {size - 1}, got {low if low < 0 else high}",
        TraceError,
    )
    counts = [np.bincount(row, minlength=size) for row in rows]
    return torch.from_numpy(np.array(counts, dtype=np.int64).reshape(len(rows), size))
