"""Faults of what was written about a run: rows, layers and experts out of place."""

from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.blind.changes import Case, Change
from tieline.trace.record import LayerTrace, RoutingTrace
from tieline.trace.selection import select_tokens


def with_rows(trace: RoutingTrace, index: Tensor) -> RoutingTrace:
    """Return a trace whose rows come from elsewhere while tokens and positions stay."""
    labels = {name: getattr(trace, name) for name in ("tokens", "documents", "positions")}
    return replace(select_tokens(trace, index), **labels)


def exchanged_documents(case: Case, trace: RoutingTrace) -> RoutingTrace:
    """Two documents of equal length have each other's rows."""
    length = case.documents.shape[1]
    index = torch.arange(trace.n_tokens).view(-1, length)
    first = case.draw(len(index) - 1)
    index[[first, first + 1]] = index[[first + 1, first]]
    return with_rows(trace, index.flatten())


def late_rows(case: Case, trace: RoutingTrace) -> RoutingTrace:
    """The rows of a quarter of the documents are one position late."""
    length = case.documents.shape[1]
    index = torch.arange(trace.n_tokens).view(-1, length)
    for document in range(0, len(index), 4):
        index[document, 1:] = index[document, :-1].clone()
    return with_rows(trace, index.flatten())


def repeated_rows(_: Case, trace: RoutingTrace) -> RoutingTrace:
    """One token in 16 has the row of the token before."""
    index = torch.arange(trace.n_tokens)
    return with_rows(trace, torch.where(index % 16 == 9, index - 1, index))


def with_layer(trace: RoutingTrace, at: int, layer: LayerTrace) -> RoutingTrace:
    """Return a trace with one layer replaced."""
    layers = list(trace.layers)
    layers[at] = layer
    return replace(trace, layers=layers)


def renumbered_experts(case: Case, trace: RoutingTrace) -> RoutingTrace:
    """Experts of one layer are numbered in another order."""
    at = case.draw(len(trace.layers))
    layer = trace.layers[at]
    number = torch.randperm(layer.facts.n_experts, generator=case.generator)
    experts = number[layer.experts.long()].to(layer.experts.dtype)
    bias = (
        None if layer.bias is None else torch.empty_like(layer.bias).scatter(0, number, layer.bias)
    )
    return with_layer(trace, at, replace(layer, experts=experts, bias=bias))


def next_best(case: Case, trace: RoutingTrace) -> RoutingTrace:
    """In 4 % of the tokens of one layer ranks k and k + 1 have changed places."""
    at = case.draw(len(trace.layers))
    layer = trace.layers[at]
    k, experts = layer.facts.k, layer.experts.clone()
    rows = (torch.rand(len(experts), generator=case.generator) < 0.04).nonzero().squeeze(1)
    experts[rows, k - 1], experts[rows, k] = layer.experts[rows, k], layer.experts[rows, k - 1]
    return with_layer(trace, at, replace(layer, experts=experts))


def layers_swapped(case: Case, trace: RoutingTrace) -> RoutingTrace:
    """Two neighbouring layers have each other's rows."""
    layers = list(trace.layers)
    at = case.draw(len(layers) - 1)
    first, second = layers[at], layers[at + 1]
    layers[at], layers[at + 1] = replace(second, name=first.name), replace(first, name=second.name)
    return replace(trace, layers=layers)


FILE_FAULTS: tuple[Change, ...] = (
    Change("documents exchanged", file=exchanged_documents, hints=("document", "batch")),
    Change("rows late", file=late_rows, hints=("lag", "shift", "document", "position")),
    Change("rows repeated", file=repeated_rows, hints=("lag", "shift", "position", "token")),
    Change("experts renumbered", file=renumbered_experts, hints=("number", "layer", "expert")),
    Change("next best expert", file=next_best, hints=("layer", "scores", "router", "token")),
    Change("layers exchanged in the file", file=layers_swapped, hints=("layer", "number", "shift")),
)
"""Faults of files."""
