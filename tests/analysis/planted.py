"""Two runs whose every difference is planted, so that the truth about them is known."""

from dataclasses import replace

import numpy as np
import torch

from tieline.core.ranking import stable_topk
from tieline.trace import LayerFacts, LayerTrace, RoutingTrace

RANKS = 4


def layer_of(scores, k, name, ranks=RANKS):
    """The record of a layer with these scores (T, E)."""
    kept = stable_topk(scores, min(k + ranks, scores.shape[1]))
    weights = scores.softmax(-1).gather(1, kept.indices[:, :k])
    facts = LayerFacts(scores.shape[1], k)
    return LayerTrace(name, facts, kept.indices, kept.values.float(), weights.float())


def all_scores(seed, layers=4, tokens=400, experts=12):
    """Scores of unrelated layers on the grid Z/64, without ties within a token."""
    generator = torch.Generator().manual_seed(seed)
    rows = [
        torch.rand(tokens, 512, generator=generator).argsort(dim=1)[:, :experts]
        for _ in range(layers)
    ]
    return [(row.double() - 256) / 64 for row in rows]


def trace_of(scores, k=3, first=0, documents=5, names="model.layers.{}.mlp.gate", ids=True):
    """A trace of several documents whose tokens have ids."""
    count = len(scores[0])
    layers = tuple(layer_of(z, k, names.format(first + i)) for i, z in enumerate(scores))
    positions = torch.arange(count)
    size = -(-count // documents)
    tokens = torch.from_numpy(np.random.default_rng(7).integers(0, 1000, count))
    tokens = tokens if ids else torch.full((count,), -1)
    return RoutingTrace(layers, tokens, positions // size, positions % size)


def without_scores(trace):
    """The same trace with ids alone."""
    layers = tuple(
        LayerTrace(x.name, x.facts, x.experts[:, : x.facts.k].clone()) for x in trace.layers
    )
    unknown = torch.full_like(trace.tokens, -1)
    return replace(trace, layers=layers, tokens=unknown)


def renumbered(trace, renumbered_layers, seed):
    """Renumber the experts of some layers; returns the trace and the new numbers by layer."""
    generator, maps, layers = torch.Generator().manual_seed(seed), {}, []
    for index, layer in enumerate(trace.layers):
        if index in renumbered_layers:
            order = torch.randperm(layer.facts.n_experts, generator=generator)
            maps[layer.name] = order.tolist()
            layer = replace(layer, experts=order[layer.experts.long()])
        layers.append(layer)
    return replace(trace, layers=tuple(layers)), maps


def moved_tokens(trace, shift):
    """The trace with `shift` added to every position."""
    return replace(trace, positions=trace.positions + shift)
