"""Select tokens, documents or layers of a trace, and join several traces.

Traces that were loaded from disk stay lazy: each layer is selected when it is accessed.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from tieline.core.errors import TraceError, require
from tieline.core.setting_fields import TraceSettingError
from tieline.core.text import layer_label
from tieline.trace.counts import token_hash
from tieline.trace.record import (
    TOKEN_KEYS,
    Index,
    LayerTrace,
    LazyLayers,
    RoutingTrace,
    map_layers,
    take_tokens,
)


def select_tokens(trace: RoutingTrace, index: Index) -> RoutingTrace:
    """Return the trace of some tokens, in the order of the index.

    Args:
        trace: any trace.
        index: a slice, indices in 0 ... T - 1, or a mask of all tokens.
    """
    if isinstance(index, Tensor):
        _check_selected_tokens(index, trace.n_tokens)
    layers = map_layers(trace.layers, lambda layer: take_tokens(layer, index))
    return replace(
        trace, layers=layers, **{name: getattr(trace, name)[index] for name in TOKEN_KEYS}
    )


def select_documents(trace: RoutingTrace, documents: Iterable[int]) -> RoutingTrace:
    """Return the trace of the tokens of these documents, in the order of the trace."""
    chosen = torch.tensor(sorted(set(documents)), dtype=torch.int64, device="cpu")
    missing = chosen[~torch.isin(chosen, trace.documents.long())].tolist()
    require(not missing, f"no tokens of documents {missing[:5]} in the trace", TraceError)
    return select_tokens(trace, torch.isin(trace.documents.long(), chosen))


def select_layers(trace: RoutingTrace, layers: Sequence[int | str]) -> RoutingTrace:
    """Return the trace of some layers, each by index (negative from the end) or router name."""
    names: list[str] = []
    if any(isinstance(layer, str) for layer in layers):
        names = [layer.name for layer in trace.layers]
    indices = [_selected_layer_index(layer, names, len(trace.layers)) for layer in layers]
    source = trace.layers
    if isinstance(source, LazyLayers):
        return replace(trace, layers=LazyLayers(len(indices), lambda i: source[indices[i]]))
    return replace(trace, layers=tuple(source[index] for index in indices))


def concatenate(
    traces: Sequence[RoutingTrace], documents: Literal["keep", "renumber"] = "keep"
) -> RoutingTrace:
    """Concatenate the tokens of several traces of the same routers.

    All traces must agree in layer names, facts, ranks, optional fields, types, biases and ε. The
    provenance is the common one, or all of them under "parts".

    Args:
        traces: one or more.
        documents: "keep" the document numbers, as for parts of one run, and raise if two traces
            hold the same token; or "renumber" each trace's documents to follow the last one.
    """
    require(len(traces) > 0, "nothing to concatenate: got no traces", TraceError)
    pieces = _renumbered_documents(traces) if documents == "renumber" else list(traces)
    if len(pieces) == 1:
        return pieces[0]
    keys = {name: torch.cat([getattr(piece, name) for piece in pieces]) for name in TOKEN_KEYS}
    if documents != "renumber" and _has_repeated_token(keys):
        raise TraceSettingError(
            "a token (document, position) occurs twice: the traces overlap, or number their "
            "documents alike and need {renumber}"
        )
    first = pieces[0]
    for piece in pieces[1:]:
        _require_equal("number of layers", len(first.layers), len(piece.layers))
        _require_equal("epsilons", first.epsilons, piece.epsilons)
    layers = _joined_layers([piece.layers for piece in pieces])
    return replace(first, layers=layers, provenance=_common_provenance(pieces), **keys)


def _joined_layers(sources: list[Sequence[LayerTrace]]) -> Sequence[LayerTrace]:
    """Concatenate the layers of several traces, lazily if one of them is on disk."""

    def layer_at(index: int) -> LayerTrace:
        return _joined_layer([layers[index] for layers in sources])

    if any(isinstance(layers, LazyLayers) for layers in sources):
        return LazyLayers(len(sources[0]), layer_at)
    return tuple(layer_at(index) for index in range(len(sources[0])))


def _joined_layer(layers: list[LayerTrace]) -> LayerTrace:
    """Concatenate the tokens of one layer of several traces."""
    first = layers[0]
    for layer in layers[1:]:
        _require_equal("name", first.name, layer.name)
        for what, of_first, of_layer in zip(
            ("facts", "recorded", "bias"), _layer_form(first), _layer_form(layer), strict=True
        ):
            _require_equal(f"{layer_label(first.name)}: {what}", of_first, of_layer)
    rows = [layer.rows() for layer in layers]
    return replace(first, **{name: torch.cat([row[name] for row in rows]) for name in rows[0]})


def _layer_form(layer: LayerTrace) -> tuple[object, ...]:
    """Return a layer's facts, the dtype and shape of each field, and the bias, to compare."""
    rows = {name: (value.dtype, tuple(value.shape[1:])) for name, value in layer.rows().items()}
    return layer.facts, rows, None if layer.bias is None else layer.bias.tolist()


def _require_equal(what: str, first: object, other: object) -> None:
    """Raise unless a quantity is equal in two traces."""
    require(first == other, f"traces must agree in {what}: {first} is not {other}", TraceError)


def _renumbered_documents(traces: Sequence[RoutingTrace]) -> list[RoutingTrace]:
    """Shift document numbers so that each trace starts above the last number of the previous."""
    renumbered, start = [], 0
    for trace in traces:
        numbers = trace.documents.long()
        if len(numbers):
            numbers = numbers - numbers.min() + start
            start = int(numbers.max()) + 1
        renumbered.append(replace(trace, documents=numbers))
    return renumbered


def _has_repeated_token(keys: dict[str, Tensor]) -> bool:
    """Return whether a (document, position) occurs twice; compares sorted hashes first."""
    documents, positions = keys["documents"].long(), keys["positions"].long()
    hashes = np.sort(token_hash(documents, positions))
    if not (hashes[1:] == hashes[:-1]).any():
        return False
    pairs = torch.stack((documents, positions), dim=1)
    return len(torch.unique(pairs, dim=0)) < len(pairs)


def _common_provenance(traces: Sequence[RoutingTrace]) -> dict[str, object]:
    """Return the provenance that all traces share, else all of them under "parts"."""
    first = traces[0].provenance
    is_common = all(trace.provenance == first for trace in traces)
    return first if is_common else {"parts": [trace.provenance for trace in traces]}


def _selected_layer_index(layer: int | str, names: list[str], count: int) -> int:
    """Return the index of a layer that is given by index or name."""
    valid = layer in names if isinstance(layer, str) else -count <= layer < count
    require(valid, f"no layer {layer!r} in the trace of {count} layers", TraceError)
    return names.index(layer) if isinstance(layer, str) else layer % count


def _check_selected_tokens(index: Tensor, tokens: int) -> None:
    """Raise if indices are out of range or a mask has another length."""
    if index.dtype == torch.bool:
        fits = index.shape == (tokens,)
    else:
        fits = not len(index) or (int(index.min()) >= 0 and int(index.max()) < tokens)
    require(fits, f"need indices in 0 ... {tokens - 1} or a mask of {tokens} tokens", TraceError)


def token_sequences(trace: RoutingTrace) -> tuple[list[Int[Tensor, " _"]], list[int]]:
    """Return the token ids of each document of a trace, and the documents' numbers.

    Raises if token ids are unknown or a document lacks a position: no model can be run on these.
    """
    require(
        trace.n_tokens > 0 and bool((trace.tokens >= 0).all()),
        "the trace does not know its token ids, so that no model can be run on them: save them "
        "with it under `tokens`",
        TraceError,
    )
    sequences, numbers = [], []
    for number in trace.documents.unique().tolist():
        rows = (trace.documents == number).nonzero().squeeze(1)
        rows = rows[trace.positions[rows].argsort()]
        positions = trace.positions[rows].long()
        gap = (positions != torch.arange(len(positions), device=positions.device)).nonzero()
        require(
            len(gap) == 0,
            f"document {number} of the trace has no token at position "
            f"{int(gap[0]) if len(gap) else 0}: no model can be run on it",
            TraceError,
        )
        sequences.append(trace.tokens[rows].long())
        numbers.append(int(number))
    return sequences, numbers
