"""Routers whose choice is that of linear scores: their matrix, their bias, and what checks them.

linear_weights    the matrix of each router of a trace that reproduces its logits
router_offset     the bias of a linear router
linear_choice     why a layer's choice is not the top k of its logits, or "ok"
"""

import torch
from torch import Tensor, nn

from tieline.measure.logit_view import logit_view
from tieline.measure.measures import gap_status
from tieline.models.emulate import logits_matrix
from tieline.models.families import find_routers
from tieline.models.parallel import full_tensor
from tieline.trace.record import LayerTrace, RoutingTrace, take_tokens

PROBES = 64
"""Tokens on which a matrix is checked to make the logits."""


def linear_choice(layer: LayerTrace, weights: dict[str, Tensor]) -> str:
    """Return "ok" if a layer chooses the top k of logits that are affine in its input, or why not.

    Args:
        layer: the layer's trace.
        weights: what `linear_weights` found.
    """
    status = gap_status(layer)
    if status != "ok":
        return status
    if layer.smoothed:
        return "not answerable: a smoothed router has no walls"
    if layer.facts.n_groups > 1:
        return "not answerable: experts are chosen within groups, whose walls are not flat"
    if layer.bias is not None and layer.facts.units != "logits":
        return f"not answerable: a bias is added to {layer.facts.units} scores: walls are not flat"
    if layer.name not in weights:
        return "not answerable: no matrix of the router explains its logits"
    return "ok"


def linear_weights(model: nn.Module, trace: RoutingTrace) -> dict[str, Tensor]:
    """(E, D) matrix of each router whose logits are its product with the inputs, up to a bias."""
    weights = {}
    here = find_routers(model)  # a stage of a pipeline has some of them
    for layer in (layer for layer in trace.layers if layer.name in here):
        router = here[layer.name]
        matrix = logits_matrix(router)
        if matrix is not None and layer.inputs is not None and gap_status(layer) == "ok":
            matrix = full_tensor(matrix.detach())[: layer.facts.n_experts].float().cpu()
            if _reproduces_logits(layer, matrix, router_offset(router, len(matrix))):
                weights[layer.name] = matrix
    return weights


def router_offset(router: nn.Module, experts: int) -> Tensor | float:
    """The bias of a linear router, or 0."""
    bias = getattr(router, "bias", None)
    if not isinstance(bias, Tensor) or bias.shape != (experts,) or bias.is_meta:
        return 0.0
    return full_tensor(bias.detach()).double().cpu()


def _reproduces_logits(layer: LayerTrace, matrix: Tensor, offset: Tensor | float) -> bool:
    """Whether the matrix reproduces the logits of the first tokens, up to the model's rounding."""
    some = take_tokens(layer, slice(PROBES))
    logits = logit_view(some).logits
    assert some.inputs is not None
    if logits is None or some.inputs.shape[1] != matrix.shape[1]:
        return False
    computed = some.inputs.double() @ matrix.double().T + offset
    computed = computed.gather(1, some.experts.long())
    finite = logits.isfinite()
    return torch.allclose(computed[finite], logits[finite], rtol=0.05, atol=0.05)
