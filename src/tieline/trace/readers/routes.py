"""Routes as a program wrote them, and their conversion to and from a trace.

Every reader returns `Routes`: the ids of all rows with all information about their tokens,
unvalidated. `trace_of` validates routes and returns their `RoutingTrace`; `tieline.check` reports
faults of the same `Routes` instead of raising an error.

These rules distinguish ids that mark "not routed" from experts:

    all k ids -1                           not routed: padding, a dense layer, or a token that is
                                           left to the live router
    unsigned ids, all k the largest value  the same, in a type without sign
    k > 1, one id k times in all tokens    a dense layer, with the array's initial value
    k = 1, a layer 0 in all tokens         the same, if another layer is not
    k > 1, 0 k times in all layers         an unwritten row

Layers in which no token was routed are left out, and so are tokens that were not routed in one of
the other layers; the provenance counts them and gives the reasons.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from tieline.core.errors import TraceError, require
from tieline.core.ranking import ranked_choice
from tieline.trace.document_runs import PROVENANCE_KEY as DOCUMENT_RUNS
from tieline.trace.record import (
    MOST_EXPERTS,
    MOST_LAYERS,
    TOKEN_KEYS,
    LayerFacts,
    LayerTrace,
    RoutingTrace,
    check_trace,
    questions_without_data,
    smallest_id_dtype,
)
from tieline.trace.writers import stacked_routes, stacked_weights

LEAST_ROWS = 16
"""Least number of rows with which, for k = 1, a layer of zeros counts as dense."""

LEAST_BITS = 1 << 23
"""Bits of the least normal positive float32, larger than any id of an expert."""

KEPT_RANKS = 4
"""Ranks kept beyond k if a file has the scores of all experts."""


@dataclass(frozen=True)
class RowProblem:
    """A document whose number of rows does not fit its tokens.

    Attributes:
        document: document number.
        rows: number of its rows.
        tokens: number of its tokens.
        start: position of its first row.
        message: both numbers, the likely cause and the argument that helps.
    """

    document: int
    rows: int
    tokens: int
    start: int
    message: str


@dataclass(frozen=True, eq=False)
class Routes:
    """Routes as they were written: the expert ids of all rows, and what is known of the tokens.

    Attributes:
        experts: expert ids (rows, layers, k).
        producer: name of their format.
        name: name of the routes in errors, mostly the file.
        tokens: token ids (rows,), or None.
        documents: document of each row, or None for one document.
        positions: position of each row in its document, or None for 0, 1, ...
        weights: combine weights (rows, layers, k).
        scores: selection scores (rows, layers, k) of chosen experts, or (rows, layers, E) of all.
        layer_names: names of the layers.
        n_experts: number of experts that the file states.
        ends: number of last tokens of documents that have no row.
        prompts: number of prompt tokens of each document, -1 if unknown; empty if all are.
        problems: documents whose number of rows does not fit their tokens.
        notes: observations and assumptions of the reader, as sentences.
    """

    experts: np.ndarray
    producer: str
    name: str
    tokens: np.ndarray | None = None
    documents: np.ndarray | None = None
    positions: np.ndarray | None = None
    weights: np.ndarray | None = None
    scores: np.ndarray | None = None
    layer_names: tuple[str, ...] | None = None
    n_experts: int | None = None
    ends: int = 0
    prompts: tuple[int, ...] = ()
    problems: tuple[RowProblem, ...] = ()
    notes: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        check_route_array(self.experts, self.name)
        rows, layers, k = self.experts.shape
        for key in ("tokens", "documents", "positions"):
            value = getattr(self, key)
            if value is not None:
                fits = value.shape == (rows,) and value.dtype.kind in "iu"
                shape = value.shape
                require(
                    fits,
                    f"{self.name}: {key} must be {rows} integers, one for each row of the routes, "
                    f"got {shape}",
                    TraceError,
                )
        for key, last in (("weights", "k"), ("scores", "k or the number of experts")):
            value = getattr(self, key)
            if value is not None:
                real = value.dtype.kind == "f" and value.ndim == 3
                fits = real and value.shape[:2] == (rows, layers) and value.shape[2] >= k
                require(
                    fits and (key == "scores" or value.shape[2] == k),
                    f"{self.name}: {key} must be real numbers of shape ({rows}, {layers}, {last}), "
                    f"got {(str(value.dtype), value.shape)}",
                    TraceError,
                )

    @property
    def names(self) -> list[str]:
        """The names of the layers, by default "layers.0", "layers.1", ..."""
        return list(self.layer_names or (f"layers.{i}" for i in range(self.experts.shape[1])))


@dataclass(frozen=True, eq=False)
class Request:
    """The rows of one request or sample.

    Attributes:
        experts: integers (rows, layers, k).
        tokens: token ids of the whole request, prompt and answer; None if unknown.
        start: position of the first row.
        weights: combine weights (rows, layers, k).
        scores: selection scores.
        prompt: number of tokens of the prompt; None if unknown.
    """

    experts: np.ndarray
    tokens: np.ndarray | None = None
    start: int = 0
    weights: np.ndarray | None = None
    scores: np.ndarray | None = None
    prompt: int | None = None


def check_route_array(array: np.ndarray, name: str) -> None:
    """Raise unless an array holds integers (tokens, layers, k) of a possible size."""
    fits = array.ndim == 3 and array.dtype.kind in "iu" and min(array.shape, default=0) > 0
    if not (fits and array.shape[1] <= MOST_LAYERS and array.shape[2] <= MOST_EXPERTS):
        raise TraceError(
            f"{name}: need integers of shape (tokens, layers, k), none of them zero, "
            f"got {array.dtype} of {array.shape}"
        )


def split_packed_weights(array: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """Split rows of prime-rl, [ids, bits of float32 weights], into ids and weights.

    Args:
        array: integers (..., 2k). Other arrays are returned unchanged, without weights: the bits
            of a positive float32 weight are never the id of an expert.
    """
    half = array.shape[-1] // 2
    if array.dtype.kind not in "iu" or array.dtype.itemsize < 4 or array.shape[-1] % 2 or not half:
        return array, None
    ids, bits = array[..., :half], array[..., half:]
    written = bits != 0
    if not written.any() or int(bits[written].min()) < LEAST_BITS or int(ids.max()) >= 1 << 16:
        return array, None
    weights = np.ascontiguousarray(bits.astype(np.int32)).view(np.float32)
    inside = bool(np.isfinite(weights).all()) and float(weights.max()) < 1e4
    return (ids, weights) if inside else (array, None)


def row_mismatch_message(rows: int, tokens: int, start: int = 0) -> str | None:
    """Return why `rows` rows do not fit a document of `tokens` tokens; None if they do."""
    if rows in (tokens - start, tokens - start - 1):
        return None
    needed = f"{tokens - start - 1} (the last token has no row) or {tokens - start} are needed"
    given = f"{rows} rows for {tokens} tokens" + (f" from position {start}" if start else "")
    if rows > tokens - start:
        return f"{given}: {needed}; rows of several requests, or padding, without documents?"
    return (
        f"{given}: {needed}; if they are the last ones of the request (a turn's own rows), pass "
        f"start={tokens - 1 - rows}"
    )


def routes_of_requests(
    requests: Sequence[Request], producer: str, name: str, notes: Iterable[str] = ()
) -> Routes:
    """Join requests to routes with one document per request.

    Args:
        requests: rows and tokens of each request.
        producer: name of the format.
        name: name of the routes in errors.
        notes: observations of the reader, as sentences.
    """
    require(bool(requests), f"{name}: holds no routes", TraceError)
    for request in requests:
        check_route_array(request.experts, name)
    shapes = {request.experts.shape[1:] for request in requests}
    require(len(shapes) == 1, f"{name}: requests of (layers, k) {sorted(shapes)[:4]}", TraceError)
    problems, tokens, ends = [], [], 0
    for number, request in enumerate(requests):
        ids, problem = _request_tokens(number, request)
        tokens.append(ids)
        problems += [] if problem is None else [problem]
        if problem is None and request.tokens is not None:
            ends += len(request.tokens) - request.start - len(request.experts)
    messages = [*notes]
    if ends:
        messages.append(f"the last token of {ends} of {len(requests)} requests has no row")
    lengths = [len(request.experts) for request in requests]
    spans = [np.arange(r.start, r.start + len(r.experts)) for r in requests]
    return Routes(
        np.concatenate([request.experts for request in requests]),
        producer,
        name,
        np.concatenate(tokens),
        np.repeat(np.arange(len(requests)), lengths),
        np.concatenate(spans),
        weights=_concatenated_or_none([request.weights for request in requests]),
        scores=_concatenated_or_none([request.scores for request in requests]),
        ends=ends,
        prompts=_prompt_lengths(requests),
        problems=tuple(problems),
        notes=tuple(messages),
    )


def _prompt_lengths(requests: Sequence[Request]) -> tuple[int, ...]:
    """Return the number of prompt tokens of each request, -1 if unknown; empty if all are."""
    known = [-1 if request.prompt is None else request.prompt for request in requests]
    return tuple(known) if max(known) >= 0 else ()


def _request_tokens(number: int, request: Request) -> tuple[np.ndarray, RowProblem | None]:
    """Return the token ids of a request's rows; -1 and the problem if their numbers do not fit."""
    rows, given, start = len(request.experts), request.tokens, request.start
    unknown = np.full(rows, -1)
    if given is None:
        return unknown, None
    message = row_mismatch_message(rows, len(given), start)
    if message is not None:
        return unknown, RowProblem(number, rows, len(given), start, message)
    return given[start : start + rows].astype(np.int64), None


def _concatenated_or_none(arrays: Sequence[np.ndarray | None]) -> np.ndarray | None:
    """Concatenate the arrays of all requests; None if one of them has none."""
    recorded = [array for array in arrays if array is not None]
    return np.concatenate(recorded) if recorded and len(recorded) == len(arrays) else None


def routes_with_tokens(routes: Routes, documents: Sequence[np.ndarray], start: int = 0) -> Routes:
    """Assign the tokens of documents to the rows.

    Rows are those of all documents in order, one per token, with or without each last token.

    Args:
        routes: routes; tokens that they have are replaced.
        documents: token ids of each document.
        start: position of the first row, for a single document.
    """
    rows, lengths = len(routes.experts), [len(ids) for ids in documents]
    total = sum(lengths)
    require(start == 0 or len(lengths) == 1, "start is for the rows of one document", TraceError)
    if len(lengths) == 1:
        cuts = [rows]
    elif rows in (total, total - len(lengths)):
        cuts = [length - (rows != total) for length in lengths]
    else:
        message = (
            f"{rows} rows for {len(lengths)} documents of {total} tokens: {total - len(lengths)} "
            f"(the last token of each has no row) or {total} are needed"
        )
        return replace(routes, problems=(RowProblem(0, rows, total, start, message),))
    bounds = np.cumsum([0, *cuts]).tolist()
    requests = [
        Request(
            routes.experts[a:b], np.asarray(ids), start, *_weights_and_scores_between(routes, a, b)
        )
        for a, b, ids in zip(bounds, bounds[1:], documents, strict=False)
    ]
    assembled = routes_of_requests(requests, routes.producer, routes.name, routes.notes)
    return replace(assembled, layer_names=routes.layer_names, n_experts=routes.n_experts)


def _weights_and_scores_between(
    routes: Routes, first: int, last: int
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Return weights and scores of the rows first ... last - 1, None where unknown."""
    weights, scores = routes.weights, routes.scores
    return (
        None if weights is None else weights[first:last],
        None if scores is None else scores[first:last],
    )


@dataclass(frozen=True)
class RoutedExtent:
    """The rows and layers in which tokens were routed.

    Attributes:
        mask: (rows, layers), true where a token was routed.
        dense: indices of layers in which no token was routed, each with a reason.
        unwritten: mask of unwritten rows: zeros in all routed layers.
    """

    mask: np.ndarray
    dense: Mapping[int, str]
    unwritten: np.ndarray


def routed_extent(array: np.ndarray, n_experts: int | None = None) -> RoutedExtent:
    """Find the rows and layers in which tokens were routed, by the rules above."""
    rows, layers, k = array.shape
    mask, zero = np.ones((rows, layers), bool), np.zeros((rows, layers), bool)
    same = np.zeros(layers, bool)
    for layer in range(layers):
        column = array[:, layer]
        mask[:, layer] = ~_unrouted_mask(column, k, n_experts)
        zero[:, layer] = (column == 0).all(1)
        constant = (column == column[:, :1]).all(1) if k > 1 else zero[:, layer]
        same[layer] = bool((constant | ~mask[:, layer]).all())
    if k == 1 and (rows < LEAST_ROWS or same.all()):
        same[:] = False
    dense = {}
    for layer in range(layers):
        if not mask[:, layer].any():
            dense[layer] = "no token was routed in it"
        elif same[layer]:
            first = int(array[int(mask[:, layer].argmax()), layer, 0])
            dense[layer] = f"every token has {first}" + (f" {k} times" if k > 1 else "")
    mask[:, list(dense)] = False
    others = [layer for layer in range(layers) if layer not in dense]
    unwritten = np.zeros(rows, bool)
    if k > 1 and others:
        unwritten = np.asarray(zero[:, others].all(1))
        mask[unwritten] = False
    return RoutedExtent(mask, dense, unwritten)


def _unrouted_mask(column: np.ndarray, k: int, n_experts: int | None) -> np.ndarray:
    """Return the mask of tokens whose k ids mark them as not routed."""
    if column.dtype.kind == "i":
        return (column == -1).all(1)
    largest = np.iinfo(column.dtype).max
    if k == 1 and (n_experts is None or n_experts > largest):
        return np.zeros(len(column), bool)  # the largest value is an expert like any other
    return (column == largest).all(1)


def trace_of(
    routes: Routes,
    n_experts: int | None = None,
    layer_names: Sequence[str] | None = None,
    provenance: Mapping[str, object] | None = None,
) -> RoutingTrace:
    """Return the trace of routes; raises for ids that no router can have chosen.

    Args:
        routes: routes as a reader returns them.
        n_experts: number of experts E; by default as the file states, or one more than the largest
            id.
        layer_names: name of each layer of the array.
        provenance: JSON values about the source of the routes.
    """
    name, array = routes.name, routes.experts
    for problem in routes.problems:
        where = f"document {problem.document}: " if problem.document else ""
        raise TraceError(f"{name}: {where}{problem.message}")
    names = list(layer_names or routes.names)
    require(len(names) == array.shape[1], f"{name}: {len(names)} names of layers", TraceError)
    stated = routes.n_experts if n_experts is None else n_experts
    extent = routed_extent(array, stated)
    layers = [layer for layer in range(array.shape[1]) if layer not in extent.dense]
    require(bool(extent.mask.any()), f"{name}: no token was routed in any layer", TraceError)
    kept = np.flatnonzero(extent.mask[:, layers].all(1))
    require(len(kept) > 0, f"{name}: no token was routed in all layers with experts", TraceError)
    total = _expert_count(routes, layers, kept, stated)
    facts = LayerFacts(total, array.shape[2], affine=False)
    records, notes = _layer_records(routes, layers, kept, facts, names)
    origin = {
        **(provenance or {}),
        **({DOCUMENT_RUNS: {"prompts": list(routes.prompts)}} if routes.prompts else {}),
        "n_experts": "inferred from the largest id" if stated is None else "given",
        "layers_left_out": [names[layer] for layer in extent.dense],
        "tokens_left_out": len(array) - len(kept),
        "said": [*routes.notes, *_left_out_notes(extent, names), *notes],
        "cannot_answer": questions_without_data(records),
    }
    tokens, documents, positions = _token_keys(routes, kept)
    trace = RoutingTrace(records, tokens, documents, positions, provenance=origin)
    check_trace(trace)
    return trace


def routes_of_trace(trace: RoutingTrace, name: str) -> Routes:
    """Return the chosen experts of a trace as routes, with its tokens and weights.

    Raises if layers have different k, since an array has one.
    """
    layers = list(trace.layers)
    return Routes(
        stacked_routes(trace, range(len(layers)), len(layers), -1),
        "trace",
        name,
        *(getattr(trace, key).numpy().astype(np.int64) for key in TOKEN_KEYS),
        weights=stacked_weights(trace),
        layer_names=tuple(layer.name for layer in layers),
        n_experts=max(layer.facts.n_experts for layer in layers),
    )


def _left_out_notes(extent: RoutedExtent, names: Sequence[str]) -> list[str]:
    """Describe the layers and rows that were left out."""
    notes = [f"layer {names[layer]} is left out: {why}" for layer, why in extent.dense.items()]
    count = int(extent.unwritten.sum())
    if count:
        notes.append(f"{count} rows of zeros are left out: nothing was written to them")
    return notes


def _token_keys(routes: Routes, kept: np.ndarray) -> list[Tensor]:
    """Return tokens, documents and positions of the kept rows: by default one document in order."""
    count = len(routes.experts)
    keys = (
        np.full(count, -1) if routes.tokens is None else routes.tokens,
        np.zeros(count, np.int64) if routes.documents is None else routes.documents,
        np.arange(count) if routes.positions is None else routes.positions,
    )
    return [torch.from_numpy(value[kept].astype(np.int64)) for value in keys]


def _expert_count(
    routes: Routes, layers: Sequence[int], kept: np.ndarray, stated: int | None
) -> int:
    """Return the number of experts E; raises for ids outside 0 ... E - 1."""
    array, complete = routes.experts, len(kept) == len(routes.experts)
    most, high = MOST_EXPERTS if stated is None else stated, 0
    for layer in layers:
        column = array[:, layer] if complete else array[kept, layer]
        low, high = int(column.min()), max(high, int(column.max()))
        if low < 0 or high >= most:
            row, rank = np.argwhere((column < 0) | (column >= most))[0].tolist()
            raise TraceError(
                f"{routes.name}: experts must lie in 0 ... {most - 1}, or all k of a token be -1; "
                f"got {int(column[row, rank])} at (token, layer, rank) "
                f"{(int(kept[row]), layer, rank)}"
            )
    return max(high + 1, array.shape[2]) if stated is None else stated


def _layer_records(
    routes: Routes,
    layers: Sequence[int],
    kept: np.ndarray,
    facts: LayerFacts,
    names: Sequence[str],
) -> tuple[tuple[LayerTrace, ...], list[str]]:
    """Return the layers of a trace, and notes on scores that were left out."""
    records, notes = [], []
    for layer in layers:
        record, unexplained = _layer_record(routes, layer, kept, facts, names[layer])
        records.append(record)
        if unexplained:
            notes.append(
                f"scores of layer {names[layer]} are left out: {unexplained} tokens chose experts "
                "that they do not rank first (a correction bias, or groups?)"
            )
    return tuple(records), notes


def _layer_record(
    routes: Routes, layer: int, kept: np.ndarray, facts: LayerFacts, name: str
) -> tuple[LayerTrace, int]:
    """Return one layer and the number of tokens whose choice its scores do not explain."""
    chosen = torch.from_numpy(routes.experts[kept, layer].astype(np.int32))
    experts = chosen.to(smallest_id_dtype(facts.n_experts))
    weights = None
    if routes.weights is not None:
        weights = torch.from_numpy(routes.weights[kept, layer].astype(np.float32))
    if routes.scores is None:
        return LayerTrace(name, facts, experts, weights=weights), 0
    scores = torch.from_numpy(routes.scores[kept, layer].astype(np.float32))
    if scores.shape[1] == facts.k < facts.n_experts:
        order = scores.sort(dim=1, descending=True, stable=True).indices
        chosen = experts.gather(1, order), scores.gather(1, order)
        ranked = None if weights is None else weights.gather(1, order)
        return LayerTrace(name, facts, *chosen, weights=ranked), 0
    width = scores.shape[1]
    require(
        width == facts.n_experts,
        f"{routes.name}: scores must have k={facts.k} or E={facts.n_experts} columns, got {width}",
        TraceError,
    )
    return _ranked_layer(name, facts, experts, weights, scores)


def _ranked_layer(
    name: str, facts: LayerFacts, experts: Tensor, weights: Tensor | None, scores: Tensor
) -> tuple[LayerTrace, int]:
    """Return a layer ranked by the scores of all experts, with the number of unexplained tokens."""
    ids, k = experts.long(), facts.k
    distinct = bool((ids.sort(dim=1).values.diff(dim=1) != 0).all())
    ranks = min(facts.n_experts, k + KEPT_RANKS)
    kth = scores.topk(k, dim=1).values[:, -1:]
    short = int((scores.gather(1, ids) < kth).any(1).sum()) if distinct else len(ids)
    if short or not bool(scores.isfinite().all()):
        return LayerTrace(name, facts, experts, weights=weights), short or len(ids)
    ranked = ranked_choice(scores, ids, k, ranks)
    if weights is not None:
        of_all = torch.zeros_like(scores).scatter_(1, ids, weights)
        weights = of_all.gather(1, ranked.indices[:, :k])
    return LayerTrace(
        name, facts, ranked.indices.to(experts.dtype), ranked.values, weights=weights
    ), 0
