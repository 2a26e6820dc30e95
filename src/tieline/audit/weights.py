"""What the sections about router inputs need: room for the inputs, and the routers' matrices."""

from collections.abc import Collection
from operator import attrgetter

import torch
from torch import Tensor, nn

from tieline.audit.running import text_config
from tieline.geometry.sections import scored
from tieline.geometry.units import logit_view
from tieline.hf.families import RouterFamily, family_of
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
    """(E, D) matrix of each router whose logits are the product of it with the kept inputs."""
    found = {}
    for layer in trace.layers:
        matrix = _matrix(model.get_submodule(layer.name))
        if matrix is not None and layer.inputs is not None and scored(layer) == "ok":
            matrix = matrix.detach()[: layer.facts.n_experts].float().cpu()
            if _explains(layer, matrix):
                found[layer.name] = matrix
    return found


def _matrix(router: nn.Module) -> Tensor | None:
    family: RouterFamily | None = family_of(router)
    if family is None or family.weight is None:
        return None
    weight = attrgetter(family.weight)(router)
    return None if weight.is_meta or weight.ndim != 2 else weight


def _explains(layer: LayerTrace, matrix: Tensor) -> bool:
    """Whether the matrix makes the logits of the first tokens, up to the model's rounding."""
    some = take_tokens(layer, slice(PROBES))
    logits = logit_view(some).logits
    assert some.inputs is not None
    if logits is None or some.inputs.shape[1] != matrix.shape[1]:
        return False
    made = (some.inputs.double() @ matrix.double().T).gather(1, some.experts.long())
    seen = logits.isfinite()
    return torch.allclose(made[seen], logits[seen], rtol=0.05, atol=0.05)
