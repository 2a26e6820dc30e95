"""The counts of one layer of a summary, as tensors and single numbers of a file."""

from collections.abc import Mapping

import torch
from torch import Tensor

from tieline.errors import TraceError, require
from tieline.trace.distinct import CAPACITY, DistinctSketch
from tieline.trace.folder_reader import Folder
from tieline.trace.grid import N_BINS, LogHistogram
from tieline.trace.layer_summary import MOST_TOKENS, LayerSummary, SharedBias, TokenKey
from tieline.trace.layerfile import LayerHead
from tieline.trace.moments import EXPONENTS, LOW_BITS, ExactMoments
from tieline.trace.record import LayerTrace

__all__ = ["counts_of", "numbers_of", "read_counts"]

_HISTOGRAMS = ("gaps", "group_gaps", "distances")
_TABLES = ("near", "orders")
_MOMENTS = ("count", "first", "high", "low")


def numbers_of(layer: LayerSummary) -> dict[str, object]:
    """The single numbers of a layer as JSON values."""
    first = layer.first_nonfinite
    return {
        "tokens": layer.tokens,
        "nonfinite": layer.nonfinite,
        "first_nonfinite": None if first is None else list(first),
        "group_decides": layer.group_decides,
        "bias_changed": layer.bias.changed,
    }


def counts_of(layer: LayerSummary) -> dict[str, Tensor]:
    """The tensors of a layer; its bias goes with the sample."""
    tensors = {"load": layer.load, "coalitions": layer.coalitions.hashes}
    for name in _HISTOGRAMS:
        histogram = getattr(layer, name)
        tensors |= {} if histogram is None else {name: histogram.counts}
    for name in _TABLES:
        table = getattr(layer, name)
        tensors |= {} if table is None else {name: table}
    if layer.moments is not None:
        tensors |= {f"moments.{name}": getattr(layer.moments, name) for name in _MOMENTS}
    return tensors


def read_counts(folder: Folder, file: str, head: LayerHead, sample: LayerTrace) -> LayerSummary:
    """A layer of a summary; refuses counts that cannot be those of its tokens.

    Args:
        folder: the folder.
        file: name of the layer's file of counts.
        head: name, facts and single numbers of the layer.
        sample: its part of the sample, which says how many ranks and ε there are.
    """
    where = f"{folder.path}: layer {head.name!r}"
    numbers = head.entry
    tokens = _integer(numbers, "tokens", MOST_TOKENS, where)
    nonfinite = _integer(numbers, "nonfinite", tokens, where)
    measured = tokens - nonfinite
    tensors = _checked_tensors(folder, file, head, sample, where)
    _check_sums(tensors, tokens * head.facts.k, measured, where)
    changed = numbers.get("bias_changed")
    require(type(changed) is bool, f"{where}: bias_changed must be true or false", TraceError)
    histograms = {
        name: LogHistogram(tensors[name]) if name in tensors else None for name in _HISTOGRAMS
    }
    return LayerSummary(
        name=head.name,
        facts=head.facts,
        tokens=tokens,
        load=tensors["load"],
        coalitions=_sketch(tensors["coalitions"], tokens, where),
        bias=SharedBias(sample.bias, changed=bool(changed)),
        nonfinite=nonfinite,
        first_nonfinite=_first(numbers.get("first_nonfinite"), nonfinite, where),
        group_decides=_integer(numbers, "group_decides", measured, where),
        near=tensors.get("near"),
        orders=tensors.get("orders"),
        moments=_moments(tensors, measured, where),
        **histograms,
    )


def _checked_tensors(
    folder: Folder, file: str, head: LayerHead, sample: LayerTrace, where: str
) -> dict[str, Tensor]:
    """The tensors of a file, all of them int64 and of the shapes that a layer has."""
    experts, ranks = head.facts.n_experts, sample.experts.shape[1]
    epsilons = 0 if sample.near is None else sample.near.shape[1]
    shapes: dict[str, tuple[int, ...]] = {
        "load": (experts,),
        **dict.fromkeys(_HISTOGRAMS, (N_BINS,)),
        "near": (epsilons, experts + 1),
        "orders": (epsilons, experts),
        **dict.fromkeys((f"moments.{name}" for name in _MOMENTS), (ranks, EXPONENTS)),
        "moments.count": (ranks,),
    }
    header = folder.header(file)
    for name, (dtype, shape) in header.items():
        known = shape == shapes.get(name) or (name == "coalitions" and len(shape) == 1)
        require(
            known and dtype == torch.int64,
            f"{where}: no count is called {name!r:.80}, or it has not int64 and {shape}",
            TraceError,
        )
    needed = {"load", "coalitions"} - set(header)
    require(not needed, f"{where}: {sorted(needed)} missing", TraceError)
    return folder.tensors(file)


def _check_sums(tensors: Mapping[str, Tensor], chosen: int, measured: int, where: str) -> None:
    """Refuse counts that are negative or do not add up to the number of tokens."""
    totals = {"load": chosen, **dict.fromkeys((*_HISTOGRAMS, *_TABLES), measured)}
    for name, total in totals.items():
        if name in tensors:
            counts = tensors[name]
            inside = bool(((counts >= 0) & (counts <= total)).all())
            require(
                inside and bool((counts.sum(-1) == total).all()),
                f"{where}: {name} must be counts that add up to {total}",
                TraceError,
            )


def _sketch(hashes: Tensor, tokens: int, where: str) -> DistinctSketch:
    most = min(CAPACITY, tokens)
    ascending = bool((hashes[1:] > hashes[:-1]).all()) and bool((hashes >= 0).all())
    require(
        ascending and len(hashes) <= most,
        f"{where}: coalitions must be at most {most} ascending hashes",
        TraceError,
    )
    return DistinctSketch(hashes)


def _moments(tensors: Mapping[str, Tensor], measured: int, where: str) -> ExactMoments | None:
    parts = [tensors.get(f"moments.{name}") for name in _MOMENTS]
    if all(part is None for part in parts):
        return None
    most = measured << LOW_BITS
    limits = ((0, measured), (-most, most), (0, most), (0, (1 << LOW_BITS) - 1))
    for part, (low, high) in zip(parts, limits, strict=True):
        fits = part is not None and bool(((part >= low) & (part <= high)).all())
        require(fits, f"{where}: moments are incomplete or too large", TraceError)
    return ExactMoments(*(part for part in parts if part is not None))


def _first(value: object, nonfinite: int, where: str) -> TokenKey | None:
    if value is None and nonfinite == 0:
        return None
    fits = isinstance(value, list) and len(value) == 2 and all(type(x) is int for x in value)
    if not isinstance(value, list) or not fits or nonfinite == 0:
        raise TraceError(f"{where}: first_nonfinite must be a document and a position, or null")
    return TokenKey(*value)


def _integer(numbers: Mapping[str, object], name: str, most: int, where: str) -> int:
    value = numbers.get(name)
    if type(value) is not int or not 0 <= value <= most:
        raise TraceError(f"{where}: {name} must be an integer in 0 ... {most}, got {value!r:.40}")
    return value
