"""The matrix and the bias of routers that choose by linear scores z = W x + b.

logits_matrix         W of a router whose logits are one product with its input
linear_weights        W of each router of a model whose logits it explains
linear_biases         b of those that have one
uncertified_tokens    tokens whose choice another order of summation of W x + b may change
"""

from collections.abc import Mapping
from dataclasses import replace
from operator import attrgetter
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from tieline.measure.measures import gap_status
from tieline.measure.noise_flips import logit_view
from tieline.measure.rounding_flips import certificate_status, certified_by_router
from tieline.models.families import family_of, find_routers
from tieline.models.parallel import full_tensor
from tieline.trace.record import LayerTrace, RoutingTrace, take_tokens

PROBE_TOKENS = 64
"""Number of tokens on which a matrix is checked to reproduce the logits."""


def logits_matrix(router: nn.Module) -> Tensor | None:
    """Return a router's matrix (E, D); None if its logits are not one product with its input."""
    weight = _routing_matrix(router)
    return None if weight is None or weight.is_meta else weight


def makes_one_product(router: nn.Module) -> bool:
    """Whether a router's logits are one product with its input, wherever its weights are."""
    return _routing_matrix(router) is not None


def _routing_matrix(router: nn.Module) -> Tensor | None:
    """The matrix (E, D) of a router; None unless its logits are one product."""
    family = family_of(router)
    if family is None or family.weight is None:
        return None
    try:
        weight = attrgetter(family.weight)(router)
    except AttributeError:  # a router with more than one matrix
        return None
    return weight if weight.ndim == 2 else None


class AffineLogits(NamedTuple):
    """Logits W x + b of a router.

    Attributes:
        weight: W (E, D), in float32.
        bias: b (E,), in float32; None for a router without one.
    """

    weight: Float[Tensor, "experts dim"]
    bias: Float[Tensor, " experts"] | None


def affine_logits(router: nn.Module, layer: LayerTrace) -> AffineLogits | None:
    """Return the matrix and the bias of a router; None unless they explain its logits.

    Args:
        router: the router.
        layer: routes of some tokens, with its inputs.
    """
    matrix = logits_matrix(router)
    if matrix is None or layer.inputs is None or gap_status(layer) != "ok":
        return None
    matrix = full_tensor(matrix.detach())[: layer.facts.n_experts].float().cpu()
    bias = linear_router_bias(router, len(matrix))
    if not _reproduces_logits(layer, matrix, bias):
        return None
    return AffineLogits(matrix, bias.float() if isinstance(bias, Tensor) else None)


def linear_weights(model: nn.Module, trace: RoutingTrace) -> dict[str, Tensor]:
    """Return the (E, D) matrix of each router with logits W x, up to a bias, by layer name."""
    routers = find_routers(model)  # only some of the layers in a pipeline stage
    layers = [layer for layer in trace.layers if layer.name in routers]
    linear = {layer.name: affine_logits(routers[layer.name], layer) for layer in layers}
    return {name: router.weight for name, router in linear.items() if router is not None}


def linear_biases(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the (E,) bias of each router that has one, given the matrices of `linear_weights`."""
    routers = find_routers(model)
    biases = {name: linear_router_bias(routers[name], len(w)) for name, w in weights.items()}
    return {name: bias.float() for name, bias in biases.items() if isinstance(bias, Tensor)}


def linear_router_bias(router: nn.Module, experts: int) -> Tensor | float:
    """Return the bias of a linear router, or 0."""
    family = family_of(router)
    owner = "" if family is None or family.weight is None else family.weight.rpartition(".")[0]
    bias = getattr(router.get_submodule(owner), "bias", None)
    if not isinstance(bias, Tensor) or bias.shape != (experts,) or bias.is_meta:
        return 0.0
    return full_tensor(bias.detach()).double().cpu()


def _reproduces_logits(layer: LayerTrace, matrix: Tensor, bias: Tensor | float) -> bool:
    """Return whether the matrix reproduces the logits of some tokens up to rounding."""
    probes = take_tokens(layer, slice(PROBE_TOKENS))
    logits = logit_view(probes).logits
    assert probes.inputs is not None
    if logits is None or probes.inputs.shape[1] != matrix.shape[1]:
        return False
    computed = probes.inputs.double() @ matrix.double().T + bias
    computed = computed.gather(1, probes.experts.long())
    finite = logits.isfinite()
    return torch.allclose(computed[finite], logits[finite], rtol=0.05, atol=0.05)


def uncertified_tokens(
    router: nn.Module, layer: LayerTrace, inputs: Float[Tensor, "tokens dim"]
) -> Bool[Tensor, " tokens"] | str:
    """Return the tokens that `certified_by_router` does not certify, or why none can be.

    Args:
        router: the router.
        layer: routes of the tokens.
        inputs: inputs of the router for these tokens.
    """
    status = certificate_status(layer)
    if status != "ok":
        return status
    inputs = inputs.detach().cpu()
    linear = affine_logits(router, replace(layer, inputs=inputs))
    if linear is None:
        return "not answerable: no matrix of the router explains its logits"
    return ~certified_by_router(inputs, linear.weight, linear.bias, layer.facts.k)
