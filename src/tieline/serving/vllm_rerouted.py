"""Models with new routers (`tieline reroute`) in vLLM: compute their scores from the tokens.

vLLM passes a `custom_routing_function` the hidden states and the logits of the old router, so that
a linear or cosine router is computed there, with k experts as before. Its tensors are stored in the
folder in addition to those of the old router. vLLM does not know them; the plug-in keeps them while
vLLM reads the others.

Other gates, quadratic routers, and layers with groups, a selection bias, a scale or sigmoids, which
vLLM applies by itself, raise an error. Needs torch and transformers.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

RULES = "tieline_rules"
"""Attribute of the model's configuration with the rules of its routers."""

ROUTER = ".tieline_router."
"""Separator of the old router's name and the tensor name of the new one."""

SERVED = {"linear": ("weight",), "cosine": ("weight",)}
"""Kinds of routers that are served, and the tensors that each must have."""

TENSORS: dict[str, dict[str, Tensor]] = {}
"""Tensors of new routers that this process has read, by name of the old router."""


def rerouted_rules(changes: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a rule per rerouted layer; raises for models that vLLM cannot serve."""
    facts = changes["reroute"]
    if len(changes) > 1 or facts["gate"] is not None or facts["router"] not in SERVED:
        change = facts["gate"] or facts["router"] if len(changes) == 1 else ", ".join(changes)
        raise ValueError(
            f"vLLM cannot serve this rerouted model ({change}): only new routers of the kinds "
            f"{' and '.join(SERVED)} are served, with the choice of the model itself"
        )
    by_layer = facts.get("layer_options", {})
    return [
        {
            "name": name,
            "router": facts["router"],
            "options": facts["router_options"] | by_layer.get(name, {}),
        }
        for name in facts["layers"]
    ]


def store_router_tensor(name: str, tensor: Tensor) -> bool:
    """Store a tensor if it belongs to a new router; returns whether it does."""
    layer, separator, field = name.partition(ROUTER)
    if separator:
        TENSORS.setdefault(layer, {})[field] = tensor.detach().clone()
    return bool(separator)


def require_router_tensors(rules: list[dict[str, Any]]) -> None:
    """Raise if tensors of a new router were not read."""
    for rule in rules:
        kept = TENSORS.get(rule["name"], {})
        missing = [name for name in SERVED[rule["router"]] if name not in kept]
        if missing:
            raise ValueError(f"the folder has no {rule['name']}{ROUTER}{missing[0]}")


def refuse_unserved_layer(arguments: Mapping[str, Any], name: str) -> None:
    """Raise for layers that choose otherwise than by top-k of softmaxed scores."""
    plain = {"scoring_func": "softmax", "routed_scaling_factor": 1.0, "use_grouped_topk": False}
    plain |= {"e_score_correction_bias": None}
    for field, value in plain.items():
        if arguments.get(field, value) != value:
            raise ValueError(
                f"vLLM cannot serve this rerouted model: its router {name!r} has "
                f"{field}={arguments[field]!r}, which vLLM applies by itself"
            )


def rerouted_function(rule: Mapping[str, Any]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return a rerouted layer's routing function: float32 weights and int32 experts (T, k)."""

    def route_tokens(
        hidden_states: Tensor, gating_output: Tensor, topk: int, renormalize: bool
    ) -> tuple[Tensor, Tensor]:
        scores = rerouted_scores(rule, TENSORS[rule["name"]], hidden_states).float()
        ids = scores.sort(dim=-1, descending=True, stable=True).indices[:, :topk]  # as in Tieline
        weights = scores.softmax(dim=-1).gather(1, ids)
        if renormalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights, ids.to(torch.int32)

    return route_tokens


def rerouted_scores(
    rule: Mapping[str, Any], tensors: Mapping[str, Tensor], tokens: Tensor
) -> Tensor:
    """Return the scores (T, E) of a linear or cosine router, in the tokens' type."""
    moved = {name: tensor.to(tokens) for name, tensor in tensors.items()}
    weight = moved["weight"]
    if rule["router"] == "linear":
        return F.linear(tokens, weight, moved.get("bias"))
    tau, temperature = rule["options"].get("tau", (0.0, 0.0)), rule["options"].get("temperature", 1)
    if "projection" in moved:
        tokens = F.linear(tokens, moved["projection"])
    return F.linear(_divide_by_norm(tokens, tau[1]), _divide_by_norm(weight, tau[0])) / temperature


def _divide_by_norm(v: Tensor, tau: float) -> Tensor:
    """Return v / (‖v‖ + τ), 0 for v = 0."""
    norm = torch.linalg.vector_norm(v, dim=-1, keepdim=True) + tau
    return v / norm.masked_fill(norm == 0, 1)
