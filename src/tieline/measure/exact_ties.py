"""Exact ties: tokens whose last chosen score equals the next, and routers with equal scores."""

from collections.abc import Iterable
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from tieline.core.ranking import gap
from tieline.trace.record import LayerTrace

Routers = Literal["sound", "equal scores", "all chosen"]
"""Whether routers choose between experts: "equal scores" if a layer gives all experts of every
token the same score, "all chosen" if k is the number of experts."""


def router_state(layers: Iterable[LayerTrace]) -> Routers:
    """Return whether routers choose between experts, judged by routing of some tokens."""
    traces = list(layers)
    if any(has_equal_scores(layer) for layer in traces):
        return "equal scores"
    all_chosen = [layer.facts.k == layer.facts.n_experts for layer in traces]
    return "all chosen" if all_chosen and all(all_chosen) else "sound"


def equal_layers(layers: Iterable[LayerTrace]) -> tuple[str, ...]:
    """Return the names of the routers whose scores are all equal."""
    return tuple(layer.name for layer in layers if has_equal_scores(layer))


def has_equal_scores(layer: LayerTrace) -> bool:
    """Return whether a layer gives all recorded experts of every token one score, with k < E."""
    scores, facts = layer.scores, layer.facts
    if scores is None or scores.shape[1] <= facts.k or not len(scores):
        return False
    return bool(torch.equal(scores, scores[:, :1].expand_as(scores)))


def exact_ties(layers: Iterable[LayerTrace]) -> float:
    """Return the largest share of a layer's tokens whose last chosen score equals the next one."""
    recorded = [(layer.scores, layer.facts.k) for layer in layers]
    return max((tied_share(scores, k) for scores, k in recorded if scores is not None), default=0.0)


def tied_share(scores: Float[Tensor, "tokens experts"], k: int) -> float:
    """Return the share of tokens whose k-th largest score equals the next; 0 if there is none."""
    if scores.shape[1] <= k or not len(scores):
        return 0.0
    return (gap(scores, k) == 0).double().mean().item()
