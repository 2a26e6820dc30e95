"""What one flip costs: the change of a sequence's loss when one token's choice is swapped.

    Δ = Σ_{t > p} [ -log P_swapped(x_t | x_<t) + log P(x_t | x_<t) ]   in nats

for a swap (`audit.swap`) at position p of a single layer. All other choices are the model's own, so
that what follows from the swap in later layers and tokens, further flips too, is part of Δ. Every
row of a batch is a sequence of its own and has exactly one swap; the same batch with the recorded
choice forced at the same places is the reference, so that both runs round alike (Def. 10.4).
"""

from collections import defaultdict
from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tieline.audit.records import JumpMeasures, JumpSample, LossJumps
from tieline.audit.running import forward
from tieline.audit.swap import recorded_choice, swapped_choice
from tieline.errors import UnsupportedModelError, require
from tieline.geometry.records import Quantiles
from tieline.hf.outputs import RouterOutput
from tieline.hf.override import Choice, override_choice
from tieline.numerics import mean_estimate, quantile_bands
from tieline.trace.record import LayerTrace, RoutingTrace

__all__ = ["loss_changes", "with_losses"]


def with_losses(
    model: nn.Module,
    trace: RoutingTrace,
    layer: LayerTrace,
    jumps: JumpMeasures,
    swaps: int,
    batch_size: int,
) -> JumpMeasures:
    """The jumps of a layer with the change of the loss for `swaps` tokens of its near sample.

    They are spread evenly over the sample; tokens that end their sequence, after which nothing is
    predicted, are left out.
    """
    near = jumps.near
    able = _able(trace, near)
    if not able:
        return jumps
    picked = [able[i * len(able) // min(swaps, len(able))] for i in range(min(swaps, len(able)))]
    tokens = torch.tensor([near.tokens[place] for place in picked])
    changes = loss_changes(model, trace, layer, tokens, batch_size)
    losses: list[float | None] = [None] * len(near.tokens)
    for place, change in zip(picked, changes.tolist(), strict=True):
        losses[place] = change
    levels = jumps.near_quantiles.probabilities
    bands = (tuple(column.tolist()) for column in quantile_bands(changes.abs(), levels))
    loss = LossJumps(mean_estimate(changes), Quantiles(levels, *bands), len(picked))
    return replace(jumps, near=replace(near, losses=tuple(losses)), loss=loss)


def loss_changes(
    model: nn.Module,
    trace: RoutingTrace,
    layer: LayerTrace,
    tokens: Int[Tensor, " swaps"],
    batch_size: int,
) -> Float[Tensor, " swaps"]:
    """Δ of each token, in the order given, in float64.

    Args:
        model: a causal language model, in evaluation mode.
        trace: its routing.
        layer: the layer of the trace in which the choice is swapped.
        tokens: places of the tokens in the trace.
        batch_size: sequences per forward pass.
    """
    by_length: dict[int, list[int]] = defaultdict(list)
    sequences = [trace.tokens[trace.documents == trace.documents[t]].long() for t in tokens]
    for place, sequence in enumerate(sequences):
        by_length[len(sequence)].append(place)
    changes = torch.zeros(len(tokens), dtype=torch.float64)
    for places in by_length.values():
        for part in torch.tensor(places).split(batch_size):
            ids = torch.stack([sequences[place] for place in part.tolist()])
            changes[part] = _changes(model, trace, layer, tokens[part], ids)
    return changes


def _changes(
    model: nn.Module, trace: RoutingTrace, layer: LayerTrace, tokens: Tensor, ids: Tensor
) -> Float[Tensor, " rows"]:
    router, positions = model.get_submodule(layer.name), trace.positions[tokens].long()
    places = torch.arange(len(ids)) * ids.shape[1] + positions
    losses = []
    for choice in (recorded_choice(layer, tokens), swapped_choice(layer, tokens, router)):
        with override_choice(router, lambda found, c=choice: _replaced(found, places, c)):
            losses.append(_losses(forward(model, ids), ids, positions))
    return losses[1] - losses[0]


def _replaced(found: RouterOutput, places: Int[Tensor, " rows"], choice: Choice) -> Choice:
    """The router's own choice, except at these places."""
    at = places.to(found.ids.device)
    weights = found.weights.index_copy(0, at, choice.weights.to(found.weights))
    return Choice(weights, found.ids.index_copy(0, at, choice.ids.to(found.ids)))


def _losses(
    output: object, ids: Int[Tensor, "rows length"], positions: Int[Tensor, " rows"]
) -> Float[Tensor, " rows"]:
    """Summed loss of what follows each position, in float64."""
    logits = getattr(output, "logits", None)
    require(
        isinstance(logits, Tensor) and logits.shape[:2] == ids.shape,
        "the model gives no logits for its tokens, so it has no loss: inspect it without the loss",
        UnsupportedModelError,
    )
    assert isinstance(logits, Tensor)
    total = []
    for row, place in enumerate(positions.tolist()):
        scores, target = logits[row, place:-1].float(), ids[row, place + 1 :].to(logits.device)
        each = torch.nn.functional.cross_entropy(scores, target, reduction="none")
        total.append(each.double().sum().cpu())
    return torch.stack(total)


def _able(trace: RoutingTrace, near: JumpSample) -> list[int]:
    """Places in the sample whose token is not the last one of its document."""
    tokens = torch.tensor(near.tokens)
    after = (tokens + 1).clamp(max=trace.n_tokens - 1)
    follows = (trace.documents[after] == trace.documents[tokens]) & (after > tokens)
    return follows.nonzero().squeeze(1).tolist()
