"""Do the routes of a rollout fit the model that is trained on it? A few numbers per training step.

    mismatch = RolloutMismatch(model)
    for batch, routes in steps:                      # routes: what the engine returned
        with mismatch.watch(routes):
            loss = model(**batch).loss
        ...
        logger.log(mismatch.step())                  # dict[str, float], reduced over ranks

A token *flips* in a layer if its live experts are not those of the record. Rounding flips tokens
near a tie alone: with Δ = z_[k] - z_[k+1] of the live scores, a flip is a *near-tie* if Δ is below
the layer's 25 % quantile of gaps, and *unexplained* if it is above the median, where no noise
reaches that flips few tokens. Rows that were shifted or documents that were exchanged are found by
their experts: a document whose record agrees far better one row further, or with another document.

Counts and histograms of gaps on a fixed grid are all that is kept, so memory does not grow with
steps, and sums over ranks are those of one process, exactly.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor, nn

from tieline.core.errors import TraceError, require
from tieline.models.capture import capture
from tieline.models.documents import Batch
from tieline.models.families import find_routers
from tieline.models.replay import MatchedRows, OrderedRows
from tieline.trace.readers import import_trace
from tieline.trace.record import LayerTrace, RoutingTrace
from tieline.trace.store import save_trace

PREFIX = "rollout/"
BINS_PER_OCTAVE, LOWEST, HIGHEST = 8, -40, 24
"""The grid of gaps: 2^-40 to 2^24, eight bins to a factor of two; exact zeros in the first."""

N_BINS = (HIGHEST - LOWEST) * BINS_PER_OCTAVE
NEAR_QUANTILE, WIDE_QUANTILE = 0.25, 0.5
MOST_LAYERS = 128
"""Layers with keys of their own; the rates of deeper ones are in the mean and the maximum alone."""

SHORTEST = 8
"""Recorded tokens that a document needs for its agreement to mean anything."""

BETTER = 0.2
"""By how much more experts must agree one row further, or with another document."""

COUNTS = ("tokens", "unrecorded", "documents", "shifted", "exchanged")


class RolloutWarning(UserWarning):
    """The routes of a rollout do not fit the model that is trained."""


@dataclass(frozen=True)
class RolloutLimits:
    """When a step raises a warning.

    Attributes:
        unexplained: share of a layer's tokens with an unexplained flip.
        unrecorded: share of the tokens without a record.
        least: tokens with an unexplained flip, or documents, below which nothing is said.
    """

    unexplained: float = 0.01
    unrecorded: float = 0.05
    least: int = 4


class RolloutMismatch:
    """Compares the routes of rollouts with the live routers of a model, step by step.

    Args:
        model: a Mixture-of-Experts model of transformers; wrapped ones too.
        limits: when a warning is raised; None for never.
        per_layer: whether the flip rate of each layer has a key of its own.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        limits: RolloutLimits | None = RolloutLimits(),  # noqa: B008 - frozen
        per_layer: bool = True,
    ) -> None:
        self.model, self.limits, self.per_layer = model, limits, per_layer
        self._names = list(find_routers(model))
        self._warned: set[str] = set()
        self._last: tuple[RoutingTrace, RoutingTrace] | None = None
        self._clear()

    def _clear(self) -> None:
        """Forget the counts of a step."""
        self._counts = torch.zeros(len(COUNTS), dtype=torch.int64, device="cpu")
        self._gaps = torch.zeros(2, len(self._names), N_BINS + 1, dtype=torch.int64, device="cpu")

    @contextmanager
    def watch(self, routes: RoutingTrace | Any) -> Iterator[None]:
        """Compare the forward passes inside the block with recorded routes.

        Works around and inside of `tieline.replay`: what is compared is what the live router would
        choose.

        Args:
            routes: a trace, or anything that `tieline.trace.import_trace` reads. Documents are
                found by their tokens, in any order; in order where the record has no token ids.
        """
        record = routes if isinstance(routes, RoutingTrace) else import_trace(routes)
        with capture(self.model, ranks=1, epsilons=(), distances=False) as recorder:
            yield
        self.add(recorder.trace(), record)

    def add(self, live: RoutingTrace, record: RoutingTrace) -> None:
        """Count the live routes of a pass against the record of their documents."""
        rows = record_rows(live, record)
        layers = paired_layers(live, record)
        self._last = live, record
        recorded = rows >= 0
        for index, (ours, theirs) in enumerate(layers):
            flips = _set_overlap(ours, theirs, rows) < 1
            self._gaps[0, index] += _binned_gaps(ours.gap[recorded])
            self._gaps[1, index] += _binned_gaps(ours.gap[recorded & flips])
        documents = _document_faults(live, record, rows, layers)
        counts = (len(rows), int((~recorded).sum()), *documents)
        self._counts += torch.tensor(counts, device="cpu")

    def step(self) -> dict[str, float]:
        """Return the numbers of the passes since the last call, over all ranks; empty for none.

        Every rank must call it. Warnings are raised on the first rank alone.
        """
        counts, gaps = _summed_over_ranks(self._counts), _summed_over_ranks(self._gaps)
        self._clear()
        totals: dict[str, int] = dict(zip(COUNTS, counts.tolist(), strict=True))
        if not totals["tokens"]:
            return {}
        scalars = _rollout_scalars(totals, gaps, self.per_layer)
        if self.limits is not None and _is_first_rank():
            self._warn(scalars, totals, gaps)
        return scalars

    def save(self, folder: str | Path) -> None:
        """Write the traces of the last pass to `folder`/live and `folder`/rollout, for `diff`."""
        require(self._last is not None, "nothing was compared yet")
        assert self._last is not None
        for name, trace in zip(("live", "rollout"), self._last, strict=True):
            save_trace(trace, Path(folder) / name)

    def _warn(self, scalars: dict[str, float], totals: dict[str, int], gaps: Tensor) -> None:
        """Raise each kind of warning once."""
        assert self.limits is not None
        layer, share = int(scalars["rollout/worst_layer"]), scalars["rollout/unexplained_max"]
        tokens = int(gaps[0, layer].sum())
        kinds = {
            "unexplained": (share > self.limits.unexplained and share * tokens >= self.limits.least)
            * f"{share:.1%} of the tokens flip far from any tie in layer {self._names[layer]!r}: "
            "other weights, another selection bias or another rule than the rollout's",
            "shifted": bool(totals["shifted"])
            * f"{totals['shifted']} of {totals['documents']} documents have routes that fit one "
            "row further: rows were shifted",
            "exchanged": bool(totals["exchanged"])
            * f"{totals['exchanged']} of {totals['documents']} documents have the routes of "
            "another document",
            "unrecorded": (scalars["rollout/unrecorded"] > self.limits.unrecorded)
            * f"{scalars['rollout/unrecorded']:.1%} of the tokens have no recorded route",
        }
        for kind, sentence in kinds.items():
            if sentence and kind not in self._warned:
                self._warned.add(kind)
                warnings.warn(f"{sentence}. {NEXT}", RolloutWarning, stacklevel=3)


NEXT = (
    'To see which tokens, call mismatch.save("mismatch") and run '
    "`tieline diff mismatch/rollout mismatch/live`"
)


def record_rows(live: RoutingTrace, record: RoutingTrace) -> Int[Tensor, " tokens"]:
    """Return the row of the record that belongs to each live token; -1 without one."""
    batch = Batch(
        live.tokens.long(), live.documents.long(), live.positions.long(), None, len(live.tokens)
    )
    if bool((record.tokens >= 0).all()) and bool((live.tokens >= 0).all()):
        return MatchedRows(record, record.layers).of(batch)
    return OrderedRows(record).of(batch)


def paired_layers(live: RoutingTrace, record: RoutingTrace) -> list[tuple[LayerTrace, LayerTrace]]:
    """Return each live layer with its record: by name, or in order if there are as many."""
    by_name = {layer.name: layer for layer in record.layers}
    if all(layer.name in by_name for layer in live.layers):
        return [(layer, by_name[layer.name]) for layer in live.layers]
    require(
        len(live.layers) == len(record.layers),
        f"the record has {len(record.layers)} layers, the model {len(live.layers)} routers",
        TraceError,
    )
    return list(zip(live.layers, record.layers, strict=True))


def _set_overlap(ours: LayerTrace, theirs: LayerTrace, rows: Tensor) -> Float[Tensor, " tokens"]:
    """Share of a token's live experts that the record has too; rows of -1 give any number."""
    chosen = ours.experts[:, : ours.facts.k].long()
    recorded = theirs.experts[:, : theirs.facts.k].long()[rows.clamp(min=0)]
    return (chosen[:, :, None] == recorded[:, None, :]).any(dim=2).double().mean(dim=1)


def _binned_gaps(gaps: Float[Tensor, " tokens"]) -> Int[Tensor, " bins"]:
    """Numbers of gaps on the fixed grid; infinite ones in the last bin."""
    exponents = gaps.double().clamp(min=2.0**LOWEST, max=2.0**HIGHEST).log2() - LOWEST
    bins = (exponents * BINS_PER_OCTAVE).floor().long().clamp(0, N_BINS)
    return torch.bincount(bins, minlength=N_BINS + 1)


def _quantile_bin(counts: Int[Tensor, " bins"], share: float) -> int:
    """The bin in which the cumulated share of the gaps is reached."""
    total = int(counts.sum())
    return int((counts.cumsum(0) < share * total).sum()) if total else 0


def _document_faults(
    live: RoutingTrace,
    record: RoutingTrace,
    rows: Tensor,
    layers: list[tuple[LayerTrace, LayerTrace]],
) -> tuple[int, int, int]:
    """Numbers of documents with a record, of those shifted by a row, and of those exchanged."""
    neighbours = _RecordRows(record)
    documents = shifted = exchanged = 0
    for number in live.documents.unique().tolist():
        inside = (live.documents == number) & (rows >= 0)
        its_rows = rows[inside]
        documents += bool(len(its_rows))
        if len(its_rows) < SHORTEST:
            continue
        agreement = _mean_overlap(layers, inside, its_rows)
        if agreement > 1 - BETTER:
            continue
        if any(
            _is_better(
                layers,
                inside,
                its_rows,
                neighbours.moved(its_rows, rows=step),
                agreement,
            )
            for step in (-1, 1)
        ):
            shifted += 1
        elif any(
            _is_better(
                layers,
                inside,
                its_rows,
                neighbours.moved(its_rows, document=other),
                agreement,
            )
            for other in range(neighbours.count)
        ):
            exchanged += 1
    return documents, shifted, exchanged


class _RecordRows:
    """Finds rows of a record beside others: one further, or of another document."""

    def __init__(self, record: RoutingTrace) -> None:
        self.table = OrderedRows(record)
        numbers, order = np.unique(record.documents.numpy(), return_inverse=True)
        self.count, self.documents = len(numbers), torch.from_numpy(order).long()
        self.positions = record.positions.long()

    def moved(self, its_rows: Tensor, rows: int = 0, document: int | None = None) -> Tensor:
        """The rows so many further in their documents, or of the same positions in another."""
        documents = self.documents[its_rows]
        if document is not None:
            documents = torch.where(documents == document, -1, document)
        positions = self.positions[its_rows] + rows
        moved_rows = self.table.at(documents, positions.clamp(min=0))
        return moved_rows.masked_fill(positions < 0, -1)


def _is_better(
    layers: list[tuple[LayerTrace, LayerTrace]],
    inside: Tensor,
    its_rows: Tensor,
    other: Tensor,
    agreement: float,
) -> bool:
    """Whether other rows of the record agree far better with a document than its own."""
    there = other >= 0
    if int(there.sum()) < max(SHORTEST, len(its_rows) // 2):
        return False
    tokens = inside.nonzero().squeeze(1)[there]
    mask = torch.zeros_like(inside)
    mask[tokens] = True
    return _mean_overlap(layers, mask, other[there]) > agreement + BETTER


def _mean_overlap(
    layers: list[tuple[LayerTrace, LayerTrace]], inside: Tensor, rows: Tensor
) -> float:
    """Mean share of experts in common over the layers, of tokens with these rows of the record."""
    total = 0.0
    for ours, theirs in layers:
        chosen = ours.experts[inside][:, : ours.facts.k].long()
        recorded = theirs.experts[rows][:, : theirs.facts.k].long()
        total += float((chosen[:, :, None] == recorded[:, None, :]).any(2).double().mean())
    return total / len(layers)


def _rollout_scalars(totals: dict[str, int], gaps: Tensor, per_layer: bool) -> dict[str, float]:
    """The numbers of a step from its counts."""
    tokens = gaps[0].sum(dim=1).clamp(min=1).double()
    flips = gaps[1].sum(dim=1).double()
    near, wide = torch.zeros_like(flips), torch.zeros_like(flips)
    for index in range(len(flips)):
        near_bin = _quantile_bin(gaps[0, index], NEAR_QUANTILE)
        wide_bin = _quantile_bin(gaps[0, index], WIDE_QUANTILE)
        near[index] = gaps[1, index, : near_bin + 1].sum()
        wide[index] = gaps[1, index, wide_bin + 1 :].sum()
    rates, unexplained = flips / tokens, wide / tokens
    documents = max(totals["documents"], 1)
    scalars = {
        "flip_rate": float(rates.mean()),
        "flip_rate_max": float(rates.max()),
        "near_ties": float(near.sum() / flips.sum()) if float(flips.sum()) else 1.0,
        "unexplained": float(unexplained.mean()),
        "unexplained_max": float(unexplained.max()),
        "worst_layer": float(unexplained.argmax()),
        "unrecorded": totals["unrecorded"] / totals["tokens"],
        "shifted_documents": totals["shifted"] / documents,
        "exchanged_documents": totals["exchanged"] / documents,
        "tokens": float(totals["tokens"]),
    }
    if per_layer:
        scalars |= {
            f"flip_rate/layer_{index}": float(rate)
            for index, rate in enumerate(rates[:MOST_LAYERS])
        }
    return {f"{PREFIX}{name}": value for name, value in scalars.items()}


def _summed_over_ranks(counts: Tensor) -> Tensor:
    """The counts of all ranks; those of this process where there is one."""
    if not (dist.is_available() and dist.is_initialized()):
        return counts.clone()
    device = torch.device("cuda") if dist.get_backend() == "nccl" else torch.device("cpu")
    total = counts.to(device, copy=True)
    dist.all_reduce(total)
    return total.cpu()


def _is_first_rank() -> bool:
    """Whether this process is the one that warns."""
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0
