"""Turn feed-forward networks of a dense transformer into `MoE` layers with any gate.

    f(x) = W_out φ(W_in x + b_in) + b_out   →   Σ_e w_e f_e(x),   every f_e = f at first

Gates with weights of sum 1 do not change the model's function at first; expert choice, whose sums
are smaller, and Soft MoE, which mixes tokens before the experts, do. `upcycle_` does the same with
transformers' own blocks, for models that are saved and served; this module uses `routing.MoE`,
whose routers, gates and losses the trainer supports.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tieline.core.errors import UnsupportedModelError, require
from tieline.lab.on_model.upcycled_model import DenseFFN, find_dense_ffns
from tieline.lab.training.config import GateConfig
from tieline.routing.baselines import Smear, SoftMoE, baseline
from tieline.routing.layer import MoE, moe

UNGATED_ACTIVATIONS = {"gelu": F.gelu, "relu": F.relu}


def routed_layer(
    gate: GateConfig, *, d_model: int, n_experts: int, d_hidden: int, activation: str
) -> MoE | SoftMoE | Smear:
    """Build the layer of a gate's configuration, with biases in its experts."""
    sizes: dict[str, Any] = {"d_model": d_model, "n_experts": n_experts, "d_hidden": d_hidden}
    sizes |= {"k": gate.k, "activation": activation, "bias": True}
    if gate.gate in ("soft_moe", "smear"):
        merged = baseline(gate.gate, **sizes, options=dict(gate.gate_options))
        assert isinstance(merged, SoftMoE | Smear)
        return merged
    return moe(
        **sizes,
        router=gate.router,
        gate=gate.gate,
        router_options=dict(gate.router_options),
        gate_options=dict(gate.gate_options),
    )


def route_networks_(
    model: nn.Module, indices: Sequence[int], gate: GateConfig, n_experts: int
) -> list[str]:
    """Replace feed-forward networks of a model by mixtures of their copies; returns their names.

    Args:
        model: a dense model of transformers with plain networks: BERT-like or ViT-like.
        indices: indices of the networks, counted from the last if negative.
        gate: router and gate of the mixtures.
        n_experts: experts of each mixture.
    """
    networks = list(find_dense_ffns(model).values())
    fits = all(-len(networks) <= index < len(networks) for index in indices)
    require(fits, f"the model has {len(networks)} networks, got places {list(indices)}")
    replaced_networks = [networks[index] for index in indices]
    for ffn, layer in [
        (ffn, _mixture_of_copies(ffn, gate, n_experts)) for ffn in replaced_networks
    ]:
        model.set_submodule(ffn.replaced, layer)
        if ffn.emptied is not None:
            model.set_submodule(ffn.emptied, nn.Identity())
    return [ffn.replaced for ffn in replaced_networks]


@torch.no_grad()
def _mixture_of_copies(ffn: DenseFFN, gate: GateConfig, n_experts: int) -> MoE | SoftMoE | Smear:
    """Return a routed layer whose experts are copies of a network."""
    sizes = {"d_model": ffn.dim, "n_experts": n_experts, "d_hidden": ffn.last.in_features}
    layer = routed_layer(gate, activation=_activation_name(ffn), **sizes)
    experts = layer.experts
    sources = {"w_in": ffn.w_in, "w_out": ffn.last.weight, "b_in": ffn.b_in, "b_out": ffn.b_out}
    for name, parameter in experts.named_parameters():
        source = sources[name]
        parameter.copy_(torch.zeros(()) if source is None else source.expand_as(parameter))
    return layer.to(ffn.last.weight)


def _activation_name(ffn: DenseFFN) -> str:
    """Return the name of a network's activation, recognised by its values."""
    x = torch.linspace(-4, 4, 33)
    for name, function in UNGATED_ACTIVATIONS.items():
        if not ffn.gated and torch.allclose(ffn.activation(x), function(x), atol=1e-6):
            return name
    kind = f"{'gated ' if ffn.gated else ''}{type(ffn.activation).__name__}"
    raise UnsupportedModelError(
        f"{ffn.name}: {kind} is not one of {sorted(UNGATED_ACTIVATIONS)}, ungated"
    )
