"""What the sections about router inputs need: room for the inputs, and the routers' matrices."""

from collections.abc import Collection

import torch
from torch import Tensor, nn

from tieline.audit.running import text_config
from tieline.geometry.sections import scored
from tieline.geometry.units import logit_view
from tieline.hf.families import family_of
from tieline.hf.router_scope import logits_matrix
from tieline.trace.ops import take_tokens
from tieline.trace.record import LayerTrace, RoutingTrace

__all__ = ["inputs_fit", "linear_weights"]

MOST_BYTES = 1 << 30
"""Router inputs are kept, in memory and for the time of the measurement, up to this size."""

PROBES = 64
"""Tokens on which a matrix is checked to make the logits."""


def inputs_fit(model: nn.Module, names: Collection[str], tokens: int) -> bool:
    """Whether the inputs of these routers for so many tokens can be kept, and may be."""
    families = [family_of(model.get_submodule(name)) for name in names]
    if any(family is None or family.layout == "method" for family in families):
        return False
    width = getattr(text_config(model), "hidden_size", None)
    return isinstance(width, int) and 4 * len(names) * tokens * width <= MOST_BYTES


def linear_weights(model: nn.Module, trace: RoutingTrace) -> dict[str, Tensor]:
    """(E, D) matrix of each router whose logits are its product with the inputs, up to a bias."""
    found = {}
    for layer in trace.layers:
        router = model.get_submodule(layer.name)
        matrix = logits_matrix(router)
        if matrix is not None and layer.inputs is not None and scored(layer) == "ok":
            matrix = matrix.detach()[: layer.facts.n_experts].float().cpu()
            if _explains(layer, matrix, _offset(router, len(matrix))):
                found[layer.name] = matrix
    return found


def _offset(router: nn.Module, experts: int) -> Tensor | float:
    """What a linear layer with a bias adds to the product."""
    bias = getattr(router, "bias", None)
    if not isinstance(bias, Tensor) or bias.shape != (experts,) or bias.is_meta:
        return 0.0
    return bias.detach().double().cpu()


def _explains(layer: LayerTrace, matrix: Tensor, offset: Tensor | float) -> bool:
    """Whether the matrix makes the logits of the first tokens, up to the model's rounding."""
    some = take_tokens(layer, slice(PROBES))
    logits = logit_view(some).logits
    assert some.inputs is not None
    if logits is None or some.inputs.shape[1] != matrix.shape[1]:
        return False
    made = some.inputs.double() @ matrix.double().T + offset
    made = made.gather(1, some.experts.long())
    seen = logits.isfinite()
    return torch.allclose(made[seen], logits[seen], rtol=0.05, atol=0.05)
