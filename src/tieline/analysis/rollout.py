"""Mismatch between the routes of a rollout and the trained model: a few numbers per training step.

    mismatch = RolloutMismatch(model)
    for batch, routes in steps:                      # routes: what the engine returned
        with mismatch.watch(routes):
            loss = model(**batch).loss
        ...
        logger.log(mismatch.step())                  # dict[str, float], reduced over ranks

A token *flips* in a layer if its live experts differ from the recorded ones. Rounding flips only
tokens near a tie, and `tieline.serving.flip_counts` separates these from other flips. Shifted rows
and exchanged documents are detected by their experts: the record of the document agrees much better
one row further, or with another document.

Only counts are kept, so memory does not grow with the steps, and sums over ranks equal those of a
single process exactly.
"""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from tieline.core.collectives import is_first_rank
from tieline.core.errors import TraceError, require
from tieline.core.predictions import k3_divergence
from tieline.models.capture import capture
from tieline.models.families import find_routers
from tieline.models.pass_tokens import Batch
from tieline.models.replay import MatchedRows, OrderedRows, replay
from tieline.run.forward import evaluation_mode, next_token_logprobs
from tieline.serving.flip_counts import PREFIX, FlipCounts, flip_scalars, summed_over_ranks
from tieline.trace.readers import import_trace
from tieline.trace.record import LayerTrace, RoutingTrace
from tieline.trace.store import save_trace

LEAST_TOKENS = 8
"""Smallest number of recorded tokens for which the agreement of a document is judged."""

AGREEMENT_MARGIN = 0.2
"""Additional share of experts that must agree one row further, or with another document."""

MOST_SUSPECTS, MOST_OTHERS, MOST_LAYERS = 16, 64, 8
"""Largest number of documents per pass that are searched for in others, of those others, and of
layers compared."""

COUNTS = ("tokens", "unrecorded", "documents", "shifted", "exchanged")
"""Names of the counts of a step."""


class RolloutWarning(UserWarning):
    """The routes of a rollout do not fit the model that is trained."""


@dataclass(frozen=True)
class RolloutLimits:
    """Limits above which a step raises a warning.

    Attributes:
        unexplained: share of a layer's tokens with an unexplained flip.
        unrecorded: share of the tokens without a record.
        least: smallest number of tokens with an unexplained flip for a warning.
    """

    unexplained: float = 0.01
    unrecorded: float = 0.05
    least: int = 4


class RolloutMismatch:
    """Compares the routes of rollouts with the live routers of a model, step by step.

    Args:
        model: a Mixture-of-Experts model of transformers; may be wrapped.
        limits: limits above which a warning is raised; None for no warnings.
        per_layer: whether the scalars include the flip rate of each layer.
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
        self._last_traces: tuple[RoutingTrace, RoutingTrace] | None = None
        self._reset_counts()

    def _reset_counts(self) -> None:
        """Set all counts to zero."""
        self._counts = torch.zeros(len(COUNTS), dtype=torch.int64, device="cpu")
        self._flips = FlipCounts(len(self._names))

    @contextmanager
    def watch(self, routes: RoutingTrace | Any) -> Iterator[None]:
        """Compare the forward passes inside the block with recorded routes.

        Works around and inside `tieline.replay`: the choice of the live router is compared, even if
        a replay overrides it.

        Args:
            routes: a trace, or anything that `tieline.trace.import_trace` reads. Documents are
                matched by their tokens, or in order if the record has no token ids.
        """
        record = routes if isinstance(routes, RoutingTrace) else import_trace(routes)
        with capture(self.model, ranks=1, epsilons=(), distances=False) as recorder:
            yield
        self.add(recorder.trace(), record)

    def add(self, live: RoutingTrace, record: RoutingTrace) -> None:
        """Count the live routes of a pass against the record of their documents."""
        rows = record_rows(live, record)
        layers = paired_layers(live, record)
        self._last_traces = live, record
        recorded = rows >= 0
        overlaps = []
        for index, (live_layer, recorded_layer) in enumerate(layers):
            overlaps.append(_set_overlap(live_layer.experts, recorded_layer, rows))
            self._flips.add(index, live_layer.gap[recorded], overlaps[-1][recorded] < 1)
        some_layers = slice(None, None, max(1, len(layers) // MOST_LAYERS))
        agreement = torch.stack(overlaps[some_layers]).mean(dim=0)
        documents = _count_document_matches(live, record, rows, layers[some_layers], agreement)
        unrecorded = ~recorded & ~_unsampled_last_tokens(live, recorded)
        counts = (len(rows), int(unrecorded.sum()), *documents)
        self._counts += torch.tensor(counts, device="cpu")

    def step(self) -> dict[str, float]:
        """Return the scalars of the passes since the last call, over all ranks; may be empty.

        Every rank must call it. Warnings are raised on the first rank only.
        """
        counts, gaps = summed_over_ranks(self._counts), summed_over_ranks(self._flips.gaps)
        self._reset_counts()
        totals: dict[str, int] = dict(zip(COUNTS, counts.tolist(), strict=True))
        if not totals["tokens"]:
            return {}
        scalars = _rollout_scalars(totals, gaps, self.per_layer)
        if self.limits is not None and is_first_rank():
            self._warn(scalars, totals, gaps)
        return scalars

    @torch.no_grad()
    def kl_split(
        self,
        inputs: Mapping[str, Any],
        routes: RoutingTrace | Any,
        logprobs: Float[Tensor, "rows length"],
        temperature: float = 1.0,
    ) -> dict[str, float]:
        """Return the KL of the live policy to the rollout's, and how much of it is due to routing.

        With d = log p_rollout - log p_live of a sampled token, the mean of e^{-d} - 1 + d over
        tokens estimates KL(rollout ‖ live) without bias and is never negative. It is computed for
        the live model (`kl`), with the recorded experts (`kl_ids_replayed`) and also with the
        recorded combine weights (`kl_weights_replayed`, absent if the record has none): two or
        three forward passes, in evaluation mode. Every rank must call it.

        Args:
            inputs: arguments of the model's forward, with `input_ids` (rows, length).
            routes: as for `watch`.
            logprobs: log-probability of each input token under the rollout; NaN for tokens that
                were not sampled, as in prompts and padding.
            temperature: temperature of the rollout, by which the logits are divided.
        """
        record = routes if isinstance(routes, RoutingTrace) else import_trace(routes)
        shape = tuple(inputs["input_ids"].shape)
        fits = tuple(logprobs.shape) == shape and temperature > 0
        require(fits, f"need logprobs {shape} and temperature > 0, got {tuple(logprobs.shape)}")
        match = "tokens" if bool((record.tokens >= 0).all()) else "order"
        runs: dict[str, Any] = {"kl": nullcontext()}
        runs["kl_ids_replayed"] = replay(self.model, record, match=match)
        if all(layer.weights is not None for layer in record.layers):
            runs["kl_weights_replayed"] = replay(self.model, record, "recorded", match=match)
        sampled = logprobs[:, 1:].isfinite()
        sums = [sampled.sum().double().cpu()]
        with evaluation_mode(self.model):
            for run in runs.values():
                with run:
                    live = next_token_logprobs(self.model, inputs, temperature)
                terms = k3_divergence(logprobs[:, 1:].to(live), live)[sampled]
                sums.append(terms.double().sum().cpu())
        count, *totals = summed_over_ranks(torch.stack(sums)).tolist()
        return {
            f"{PREFIX}{name}": total / max(count, 1)
            for name, total in zip(runs, totals, strict=True)
        }

    def save(self, folder: str | Path) -> None:
        """Write the traces of the last pass to `folder`/live and `folder`/rollout, for `diff`."""
        require(self._last_traces is not None, "nothing was compared yet")
        assert self._last_traces is not None
        for name, trace in zip(("live", "rollout"), self._last_traces, strict=True):
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
                warnings.warn(f"{sentence}. {DIFF_ADVICE}", RolloutWarning, stacklevel=3)


DIFF_ADVICE = (
    'To see which tokens, call mismatch.save("mismatch") and run '
    "`tieline diff mismatch/rollout mismatch/live`"
)


def record_rows(live: RoutingTrace, record: RoutingTrace) -> Int[Tensor, " tokens"]:
    """Return the row of the record that matches each live token; -1 if there is none."""
    batch = Batch(
        live.tokens.long(), live.documents.long(), live.positions.long(), None, len(live.tokens)
    )
    if bool((record.tokens >= 0).all()) and bool((live.tokens >= 0).all()):
        return MatchedRows(record, record.layers).rows_of(batch)
    return OrderedRows(record).rows_of(batch)


def paired_layers(live: RoutingTrace, record: RoutingTrace) -> list[tuple[LayerTrace, LayerTrace]]:
    """Pair each live layer with its recorded layer: by name, else in order if numbers are equal."""
    by_name = {layer.name: layer for layer in record.layers}
    if all(layer.name in by_name for layer in live.layers):
        pairs = [(layer, by_name[layer.name]) for layer in live.layers]
    else:
        require(
            len(live.layers) == len(record.layers),
            f"the record has {len(record.layers)} layers, the model {len(live.layers)} routers",
            TraceError,
        )
        pairs = list(zip(live.layers, record.layers, strict=True))
    for live_layer, recorded in pairs:
        require(
            live_layer.facts.k == recorded.facts.k,
            f"the record has {recorded.facts.k} experts per token in layer {recorded.name!r}, "
            f"the model {live_layer.facts.k}",
            TraceError,
        )
    return pairs


def _unsampled_last_tokens(
    live: RoutingTrace, recorded: Bool[Tensor, " tokens"]
) -> Bool[Tensor, " tokens"]:
    """Return a mask of the last tokens of recorded documents, from which nothing was sampled.

    An engine has no route of the last token that it samples, and the loss does not need it.
    """
    documents, positions = live.documents.long(), live.positions.long()
    size = int(documents.max()) + 1
    last = torch.zeros(size, dtype=torch.int64, device="cpu")
    last.scatter_reduce_(0, documents, positions, "amax")
    has_record = torch.bincount(documents[recorded], minlength=size) > 0
    return (positions == last[documents]) & has_record[documents]


def _set_overlap(
    experts: Int[Tensor, "tokens ranks"], record: LayerTrace, rows: Int[Tensor, " tokens"]
) -> Float[Tensor, " tokens"]:
    """Return the share of a token's live experts that are recorded; undefined for rows of -1."""
    k = record.facts.k
    recorded = record.experts[:, :k].to(experts.dtype)[rows.clamp(min=0)]
    return (experts[:, :k, None] == recorded[:, None, :]).any(dim=2).sum(dim=1) / k


class DocumentMatches(NamedTuple):
    """Documents with a record, those shifted by a row, and those exchanged with another one."""

    recorded: int
    shifted: int
    exchanged: int


def _count_document_matches(
    live: RoutingTrace,
    record: RoutingTrace,
    rows: Int[Tensor, " tokens"],
    layers: list[tuple[LayerTrace, LayerTrace]],
    overlaps: Float[Tensor, " tokens"],
) -> DocumentMatches:
    """Count documents with a record, documents shifted by a row, and exchanged documents.

    Args:
        live: routes of the live model.
        record: routes of the rollout.
        rows: row of the record of each live token, -1 without one.
        layers: live and recorded layers to compare.
        overlaps: mean share of experts in common with the record, over these layers.
    """
    documents = live.documents.long()
    tokens, agreement = _document_means(documents, rows >= 0, overlaps)
    suspects = (tokens >= LEAST_TOKENS) & (agreement <= 1 - AGREEMENT_MARGIN)
    shifted = torch.zeros_like(suspects)
    exchanged = 0
    if bool(suspects.any()):
        index = _RecordIndex(record)
        least = torch.maximum(tokens // 2, torch.full_like(tokens, LEAST_TOKENS))
        for step in (-1, 1):
            shifted_rows = index.shifted(rows, step)
            shifted_overlaps = _mean_overlaps(layers, slice(None), shifted_rows)
            counts, means = _document_means(documents, shifted_rows >= 0, shifted_overlaps)
            shifted |= suspects & (counts >= least) & (means > agreement + AGREEMENT_MARGIN)
        for number in (suspects & ~shifted).nonzero().flatten()[:MOST_SUSPECTS].tolist():
            inside = ((documents == number) & (rows >= 0)).nonzero().flatten()
            exchanged += _matches_another_document(
                layers, index, inside, rows[inside], float(agreement[number])
            )
    return DocumentMatches(int((tokens > 0).sum()), int(shifted.sum()), exchanged)


def _document_means(
    documents: Int[Tensor, " tokens"], counted: Bool[Tensor, " tokens"], values: Tensor
) -> tuple[Int[Tensor, " documents"], Float[Tensor, " documents"]]:
    """Return the number of counted tokens of each document and the mean of their values."""
    size = int(documents.max()) + 1
    tokens = torch.bincount(documents[counted], minlength=size)
    sums = torch.bincount(documents[counted], values[counted].double(), minlength=size)
    return tokens, sums / tokens.clamp(min=1)


class _RecordIndex:
    """Finds rows of a record relative to others: some rows further, or in other documents."""

    def __init__(self, record: RoutingTrace) -> None:
        self.table = OrderedRows(record)
        numbers, order = np.unique(record.documents.numpy(), return_inverse=True)
        self.count, self.documents = len(numbers), torch.from_numpy(order).long()
        self.positions = record.positions.long()

    def shifted(self, rows: Int[Tensor, " tokens"], step: int) -> Int[Tensor, " tokens"]:
        """Return the rows `step` positions further in their documents; -1 if there is none."""
        positions = self.positions[rows.clamp(min=0)] + step
        shifted = self.table.rows_at(self.documents[rows.clamp(min=0)], positions.clamp(min=0))
        return shifted.masked_fill((positions < 0) | (rows < 0), -1)

    def in_other_documents(self, rows: Int[Tensor, " tokens"]) -> Int[Tensor, "others tokens"]:
        """Return the rows of the same positions in other documents; -1 if there is none."""
        others = torch.arange(self.count, device="cpu")
        others = others[others != self.documents[rows[0]]][:MOST_OTHERS, None]
        documents, positions = torch.broadcast_tensors(others, self.positions[rows])
        return self.table.rows_at(documents.flatten(), positions.flatten()).view_as(documents)


def _matches_another_document(
    layers: list[tuple[LayerTrace, LayerTrace]],
    index: _RecordIndex,
    tokens: Int[Tensor, " inside"],
    rows: Int[Tensor, " inside"],
    agreement: float,
) -> bool:
    """Return whether the record of another document agrees much better with a document's tokens."""
    candidates = index.in_other_documents(rows)
    least = max(LEAST_TOKENS, len(tokens) // 2)
    for other_rows in candidates[(candidates >= 0).sum(dim=1) >= least]:
        exists = other_rows >= 0
        overlap = _mean_overlaps(layers, tokens[exists], other_rows[exists])
        if float(overlap.mean()) > agreement + AGREEMENT_MARGIN:
            return True
    return False


def _mean_overlaps(
    layers: list[tuple[LayerTrace, LayerTrace]], tokens: Tensor | slice, rows: Tensor
) -> Float[Tensor, " tokens"]:
    """Return the share of experts that live tokens share with recorded rows, mean over layers."""
    overlaps = [_set_overlap(live.experts[tokens], recorded, rows) for live, recorded in layers]
    return torch.stack(overlaps).mean(dim=0)


def _rollout_scalars(totals: dict[str, int], gaps: Tensor, per_layer: bool) -> dict[str, float]:
    """Return the scalars of a step from its counts."""
    documents = max(totals["documents"], 1)
    scalars = flip_scalars(gaps, per_layer) | {
        "unrecorded": totals["unrecorded"] / totals["tokens"],
        "shifted_documents": totals["shifted"] / documents,
        "exchanged_documents": totals["exchanged"] / documents,
        "tokens": float(totals["tokens"]),
    }
    return {f"{PREFIX}{name}": value for name, value in scalars.items()}
