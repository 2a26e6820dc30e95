"""Select, join and compare traces.

    take_tokens         some tokens of one layer
    select_tokens       some tokens, in all layers
    select_documents    the tokens of some documents
    select_layers       some layers, by place or name
    concatenate         the tokens of several traces of the same routers
    identical           whether two records hold the same values, bit by bit

Traces that were loaded from disk stay lazy: a layer is cut when it is touched.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from tieline.core.errors import TraceError, require
from tieline.trace.record import TOKEN_KEYS, LayerTrace, LazyLayers, RoutingTrace, map_layers
from tieline.trace.sampling import token_hash

Index = slice | Int[Tensor, " chosen"] | Bool[Tensor, " tokens"]


def take_tokens(layer: LayerTrace, index: Index) -> LayerTrace:
    """Return some tokens of a layer: a view for a slice, a copy for an index or a mask."""
    return replace(layer, **{name: value[index] for name, value in layer.rows().items()})


def select_tokens(trace: RoutingTrace, index: Index) -> RoutingTrace:
    """Return some tokens, in the order of the index.

    Args:
        trace: any trace.
        index: a slice, indices in 0 ... T - 1, or a mask of all tokens.
    """
    if isinstance(index, Tensor):
        _check_index(index, trace.n_tokens)
    layers = map_layers(trace.layers, lambda layer: take_tokens(layer, index))
    return replace(
        trace, layers=layers, **{name: getattr(trace, name)[index] for name in TOKEN_KEYS}
    )


def select_documents(trace: RoutingTrace, documents: Iterable[int]) -> RoutingTrace:
    """Return the tokens of these documents, in the order of the trace."""
    wanted = torch.tensor(sorted(set(documents)), dtype=torch.int64)
    missing = wanted[~torch.isin(wanted, trace.documents.long())].tolist()
    require(not missing, f"no tokens of documents {missing[:5]} in the trace", TraceError)
    return select_tokens(trace, torch.isin(trace.documents.long(), wanted))


def select_layers(trace: RoutingTrace, layers: Sequence[int | str]) -> RoutingTrace:
    """Return some layers, each by its place (negative from the end) or router name."""
    names: list[str] = []
    if any(isinstance(layer, str) for layer in layers):
        names = [layer.name for layer in trace.layers]
    places = [_place(layer, names, len(trace.layers)) for layer in layers]
    source = trace.layers
    if isinstance(source, LazyLayers):
        return replace(trace, layers=LazyLayers(len(places), lambda i: source[places[i]]))
    return replace(trace, layers=tuple(source[place] for place in places))


def concatenate(
    traces: Sequence[RoutingTrace], documents: Literal["keep", "renumber"] = "keep"
) -> RoutingTrace:
    """Join the tokens of several traces, one after the other.

    All traces must agree in layer names, facts, ranks, optional fields, types, biases and ε. The
    provenance is the common one, or all of them under "parts".

    Args:
        traces: one or more.
        documents: "keep" the numbers of documents, as for parts of one run, and refuse a token that
            two traces hold; or "renumber" each trace's documents to follow the last one.
    """
    require(len(traces) > 0, "nothing to concatenate: got no traces", TraceError)
    parts = _renumbered(traces) if documents == "renumber" else list(traces)
    keys = {name: torch.cat([getattr(part, name) for part in parts]) for name in TOKEN_KEYS}
    require(
        documents == "renumber" or len(parts) == 1 or not _repeats(keys),
        "a token (document, position) occurs twice: the traces overlap, or number their documents "
        'alike and need documents="renumber"',
        TraceError,
    )
    first = parts[0]
    for part in parts[1:]:
        _require_same("number of layers", len(first.layers), len(part.layers))
        _require_same("epsilons", first.epsilons, part.epsilons)
    layers = _joined_layers([part.layers for part in parts])
    return replace(first, layers=layers, provenance=_provenance(parts), **keys)


def _joined_layers(sources: list[Sequence[LayerTrace]]) -> Sequence[LayerTrace]:
    def join(place: int) -> LayerTrace:
        return _joined([layers[place] for layers in sources])

    if any(isinstance(layers, LazyLayers) for layers in sources):
        return LazyLayers(len(sources[0]), join)
    return tuple(join(place) for place in range(len(sources[0])))


def _joined(layers: list[LayerTrace]) -> LayerTrace:
    first = layers[0]
    for layer in layers[1:]:
        _require_same("name", first.name, layer.name)
        for what, of_first, of_layer in zip(
            ("facts", "recorded", "bias"), _recorded(first), _recorded(layer), strict=True
        ):
            _require_same(f"layer {first.name!r}: {what}", of_first, of_layer)
    rows = [layer.rows() for layer in layers]
    return replace(first, **{name: torch.cat([row[name] for row in rows]) for name in rows[0]})


def _recorded(layer: LayerTrace) -> tuple[object, ...]:
    """Facts, type and shape of each field, and the bias."""
    rows = {name: (value.dtype, tuple(value.shape[1:])) for name, value in layer.rows().items()}
    return layer.facts, rows, None if layer.bias is None else layer.bias.tolist()


def _require_same(what: str, first: object, other: object) -> None:
    require(first == other, f"traces must agree in {what}: {first} is not {other}", TraceError)


def _renumbered(traces: Sequence[RoutingTrace]) -> list[RoutingTrace]:
    """Shift documents so that each trace starts one above the last number of the one before."""
    parts, start = [], 0
    for trace in traces:
        numbers = trace.documents.long()
        if len(numbers):
            numbers = numbers - numbers.min() + start
            start = int(numbers.max()) + 1
        parts.append(replace(trace, documents=numbers))
    return parts


def _repeats(keys: dict[str, Tensor]) -> bool:
    """Whether a (document, position) occurs twice; sorted hashes are compared first."""
    documents, positions = keys["documents"].long(), keys["positions"].long()
    hashes = np.sort(token_hash(documents, positions))
    if not (hashes[1:] == hashes[:-1]).any():
        return False
    pairs = torch.stack((documents, positions), dim=1)
    return len(torch.unique(pairs, dim=0)) < len(pairs)


def _provenance(parts: Sequence[RoutingTrace]) -> dict[str, object]:
    first = parts[0].provenance
    same = all(part.provenance == first for part in parts)
    return first if same else {"parts": [part.provenance for part in parts]}


def _place(layer: int | str, names: list[str], count: int) -> int:
    known = layer in names if isinstance(layer, str) else -count <= layer < count
    require(known, f"no layer {layer!r} in the trace of {count} layers", TraceError)
    return names.index(layer) if isinstance(layer, str) else layer % count


def _check_index(index: Tensor, tokens: int) -> None:
    if index.dtype == torch.bool:
        fits = index.shape == (tokens,)
    else:
        fits = not len(index) or (int(index.min()) >= 0 and int(index.max()) < tokens)
    require(fits, f"need indices in 0 ... {tokens - 1} or a mask of {tokens} tokens", TraceError)


def identical(first: object, second: object) -> bool:
    """Whether two traces, summaries or parts of them hold the same values of the same types.

    Tensors must agree in type, shape and every bit, so that a NaN equals itself and 0 is not -0.
    Layers in memory equal the same layers on disk.
    """
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return _same_tensor(first, second)
    if isinstance(first, str | bytes):
        return first == second
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return first.keys() == second.keys() and all(
            identical(value, second[key]) for key, value in first.items()
        )
    if isinstance(first, Sequence) and isinstance(second, Sequence):
        return len(first) == len(second) and all(map(identical, first, second))
    if is_dataclass(first) and not isinstance(first, type):
        return type(first) is type(second) and all(
            identical(getattr(first, part.name), getattr(second, part.name))
            for part in fields(first)
        )
    return type(first) is type(second) and first == second


def _same_tensor(first: Tensor, second: Tensor) -> bool:
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    one, other = (value.contiguous().flatten().view(torch.uint8) for value in (first, second))
    return torch.equal(one, other)
