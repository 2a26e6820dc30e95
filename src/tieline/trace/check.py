"""Check the values of a trace that comes from a file or goes into one.

Records check shapes and types themselves. Values are checked here:

    experts          in 0 ... E - 1, no expert twice for one token
    scores           descending; finite for the chosen ranks, further ones may be masked by -inf
    weights, faded, bias, inputs    finite
    used             in 1 ... E
    group_gap, distance       >= 0; infinite where there is no tie
    near             in 0 ... E
"""

import torch
from jaxtyping import Bool
from torch import Tensor

from tieline.core.errors import TraceError
from tieline.trace.record import LayerTrace, RoutingTrace, take_tokens


def check_trace(trace: RoutingTrace) -> None:
    """Refuse a trace with impossible values, naming layer, count and first token."""
    for layer in trace.layers:
        check_layer(layer)


def check_layer(layer: LayerTrace, broken_tokens: bool = False) -> None:
    """Refuse a layer with impossible values, naming what, how often and where first.

    Args:
        layer: the layer.
        broken_tokens: whether tokens with a score that is not finite are allowed, as in the sample
            of a summary; only their ids are checked.
    """
    _check_ids(layer)
    if broken_tokens and layer.scores is not None:
        ends = layer.scores[:, [0, layer.facts.k - 1]]
        layer = take_tokens(layer, ends.isfinite().all(1))
    if layer.scores is not None:
        _check_scores(layer, layer.scores)
    for name in ("weights", "faded", "inputs", "bias"):
        value = getattr(layer, name)
        if value is not None:
            _none(~value.isfinite(), layer, f"{name} that are not finite")
    for name in ("group_gap", "distance"):
        value = getattr(layer, name)
        if value is not None:
            _none(~(value >= 0), layer, f"{name} negative or not a number")


def _check_ids(layer: LayerTrace) -> None:
    experts, most = layer.experts, layer.facts.n_experts
    _none((experts < 0) | (experts >= most), layer, f"experts outside 0 ... {most - 1}")
    if layer.used is not None:
        _none((layer.used < 1) | (layer.used > most), layer, f"experts in use outside 1 ... {most}")
    ordered = experts.sort(dim=1).values
    _none(ordered[:, 1:] == ordered[:, :-1], layer, "an expert twice in one token")
    if layer.near is not None:
        wrong = (layer.near < 0) | (layer.near > most)
        _none(wrong, layer, f"counts near the threshold outside 0 ... {most}")


def _check_scores(layer: LayerTrace, scores: Tensor) -> None:
    k = layer.facts.k
    beyond = scores[:, k:]
    _none(~scores[:, :k].isfinite(), layer, "scores that are not finite")
    _none(beyond.isnan() | (beyond == torch.inf), layer, "scores that are not finite")
    _none(scores[:, 1:] > scores[:, :-1], layer, "scores that do not descend")


def _none(wrong: Bool[Tensor, "*where"], layer: LayerTrace, what: str) -> None:
    if wrong.ndim == 2:
        wrong = wrong.any(1)
    count = int(wrong.sum())
    if count:
        first = int(wrong.nonzero()[0])
        raise TraceError(
            f"layer {layer.name!r}: {what}: {count} of {len(wrong)}, the first at index {first}"
        )
