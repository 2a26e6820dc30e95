"""vLLM plug-in for smoothed and rerouted models, by the entry point `vllm.general_plugins`.

A folder of `tieline smooth` has `model_type` "tieline" and the rule of each router in its
config.json. The plug-in reads it as the configuration of the model itself, and gives the experts of
every smoothed layer a `custom_routing_function` with K slots per token: the shared experts first,
the other slots with weight 0. K is E for up to 16 experts, else k + 8, or `TIELINE_VLLM_SLOTS`; a
token with more shared experts keeps the K largest shares. Rerouted models are read by
`vllm_rerouted`.

Needs torch, transformers and vLLM; nothing else of Tieline is imported. Written for vLLM 0.32; in
versions with other interfaces changed models raise an error when they are loaded, and so do, in all
versions, models whose router has groups, a selection bias or a scale, which vLLM applies outside of
the routing function.
"""

import functools
import inspect
import os
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from tieline.serving.modeling_tieline import (
    CHANGED,
    MARKER,
    TielineConfig,
    combine_weights,
    selection_scores,
    shared_experts,
)
from tieline.serving.vllm_rerouted import (
    RULES,
    refuse_unserved_layer,
    require_router_tensors,
    rerouted_function,
    rerouted_rules,
    store_router_tensor,
)

SLOTS_VARIABLE = "TIELINE_VLLM_SLOTS"
EXTRA_SLOTS, FEW_EXPERTS = 8, 16

ROUTED: set[str] = set()
"""Names of the routers that this process has assigned a rule to."""


class SmoothedModelConfig(TielineConfig):
    """Reads the configuration of a smoothed model as that of the model itself, with its rules."""

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **options: Any) -> Any:
        """Return the configuration of the model, an instance of its own class."""
        facts = config_dict.get("tieline") or {}
        if "rules" not in facts:
            raise ValueError("config.json holds no rules of a smoothed model: save it with Tieline")
        refuse_unserved(facts["rules"])
        return _model_config(facts, facts["rules"], options)


class ReroutedModelConfig(TielineConfig):
    """Reads the configuration of a rerouted model as that of the model itself, with its rules."""

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **options: Any) -> Any:
        """Return the configuration of the model, an instance of its own class."""
        facts = config_dict["tieline"]
        return _model_config(facts, rerouted_rules(facts["changes"]), options)


class UnservedModelConfig(TielineConfig):
    """Raises for every changed model: this version of vLLM has other interfaces."""

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **options: Any) -> Any:
        """Raise an error that names the version."""
        raise ValueError(unserved_reason())


def _model_config(facts: dict[str, Any], rules: list[dict[str, Any]], options: Any) -> Any:
    """Return the configuration of the model itself, with the rules of its routers."""
    from transformers import CONFIG_MAPPING

    inner = facts["config"]
    read = CONFIG_MAPPING[inner["model_type"]].from_dict(inner, **options)
    config = read[0] if isinstance(read, tuple) else read
    setattr(config, RULES, rules)
    return read


def refuse_unserved(rules: list[dict[str, Any]]) -> None:
    """Raise for rules with groups, a bias or a scale, which vLLM applies by itself."""
    for rule in rules:
        for field in ("groups", "bias", "bias_argument", "scale"):
            if rule[field] is not None:
                raise ValueError(
                    f"vLLM cannot serve this smoothed model: its router {rule['name']!r} has "
                    f"{field}={rule[field]!r}, which vLLM applies by itself"
                )


def routing_function(rule: dict[str, Any], slots: int) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return a smoothed layer's routing function: float32 weights and int32 experts (T, K)."""

    def route_tokens(
        hidden_states: Tensor, gating_output: Tensor, topk: int, renormalize: bool
    ) -> tuple[Tensor, Tensor]:
        logits = gating_output.float()
        share, ids = shared_experts(rule, selection_scores(rule, logits, None), slots)
        weights = combine_weights(rule, logits, ids, share)
        return weights.float(), ids.to(torch.int32)

    return route_tokens


def slot_count(rule: dict[str, Any], n_experts: int) -> int:
    """Return the number K of slots per token of a layer."""
    slots = os.environ.get(SLOTS_VARIABLE)
    if slots is not None:
        if not slots.isdigit() or not rule["k"] < int(slots) <= n_experts:
            raise ValueError(
                f"{SLOTS_VARIABLE} is a number above k={rule['k']} and at most {n_experts}, "
                f"got {slots!r}"
            )
        return int(slots)
    return n_experts if n_experts <= FEW_EXPERTS else min(n_experts, rule["k"] + EXTRA_SLOTS)


def factory_with_rules(
    factory: Callable[..., Any],
    current_rules: Callable[[], Any],
    returns_routes: Callable[[], bool] = bool,
) -> Callable[..., Any]:
    """Wrap vLLM's factory of expert layers, so that changed layers get their routing function.

    Args:
        factory: `FusedMoEFactory`.
        current_rules: returns the rules of the model that is being built, or None.
        returns_routes: returns whether vLLM was asked for routes, for which it has k places per
            token: the slots of a smoothed layer would end the server at its first request.
    """

    @functools.wraps(factory)
    def build_layer(*args: Any, **options: Any) -> Any:
        block = str(options.get("prefix", "")).rpartition(".")[0]
        rules = {rule["name"].rpartition(".")[0]: rule for rule in current_rules() or ()}
        rule = rules.get(block)
        if rule is None:
            return factory(*args, **options)
        bound = inspect.signature(factory).bind(*args, **options)
        if "router" in rule:
            refuse_unserved_layer(bound.arguments, rule["name"])
            function = rerouted_function(rule)
        else:
            if returns_routes():
                raise ValueError(
                    f"vLLM returns routes of k={rule['k']} experts per token, and a smoothed model "
                    "shares a token among more: serve it without --enable-return-routed-experts"
                )
            slots = slot_count(rule, int(bound.arguments["num_experts"]))
            bound.arguments["top_k"] = slots
            function = routing_function(rule, slots)
        bound.arguments["custom_routing_function"] = function
        ROUTED.add(rule["name"])
        return factory(*bound.args, **bound.kwargs)

    return build_layer


def reader_without_marker(
    read: Callable[..., Any], current_rules: Callable[[], Any]
) -> Callable[..., Any]:
    """Wrap vLLM's reader of weights: skip Tieline's tensors, and raise for layers without rule."""

    @functools.wraps(read)
    def unmarked_weights(*args: Any, **options: Any) -> Iterator[tuple[str, Tensor]]:
        missing = [rule["name"] for rule in current_rules() or () if rule["name"] not in ROUTED]
        if missing:
            raise ValueError(
                f"vLLM built {missing[0]!r} and {len(missing) - 1} more without Tieline's rule: "
                "this version builds the experts of the model in another way than 0.32"
            )
        for name, tensor in read(*args, **options):
            if name != MARKER and not store_router_tensor(name, tensor):
                yield name, tensor
        require_router_tensors([rule for rule in current_rules() or () if "router" in rule])

    return unmarked_weights


def changed_parts() -> tuple[Any, Any, Any] | None:
    """Return what the plug-in changes: module of layers, its package, and the reader of weights.

    Returns None if this version of vLLM has other interfaces than 0.32.
    """
    try:
        package = import_module("vllm.model_executor.layers.fused_moe")
        layer = import_module("vllm.model_executor.layers.fused_moe.layer")
        reader = import_module("vllm.model_executor.model_loader.default_loader").DefaultModelLoader
        parameters = inspect.signature(layer.FusedMoEFactory).parameters
        needed = reader.get_all_weights, import_module("vllm.config").get_current_vllm_config
    except (ImportError, AttributeError):
        return None
    known = "custom_routing_function" in parameters and all(map(callable, needed))
    return (layer, package, reader) if known else None


def register() -> None:
    """Enable this process to load changed models; vLLM calls this in each of its processes.

    A version of vLLM with other interfaces refuses changed models, and serves all others.
    """
    parts = changed_parts()
    if parts is not None and hasattr(parts[0].FusedMoEFactory, "__wrapped__"):
        return
    smoothed, rerouted = SmoothedModelConfig, ReroutedModelConfig
    if parts is None:
        smoothed = rerouted = UnservedModelConfig
    try:
        registry = import_module("vllm.transformers_utils.config")._CONFIG_REGISTRY
    except (ImportError, AttributeError):
        raise RuntimeError(f"{unserved_reason()} (VLLM_PLUGINS= turns the plug-in off)") from None
    registry[TielineConfig.model_type] = smoothed
    for kind in import_module("transformers").CONFIG_MAPPING:
        registry[CHANGED.format(kind=kind, changes="reroute")] = rerouted
    if parts is not None:
        layer, package, reader = parts
        smoothing_factory = factory_with_rules(
            layer.FusedMoEFactory, rules_of_built_model, routes_are_returned
        )
        for module in (layer, package):
            vars(module)["FusedMoEFactory"] = smoothing_factory
        reader.get_all_weights = reader_without_marker(reader.get_all_weights, rules_of_built_model)


def unserved_reason() -> str:
    """Return why changed models cannot be served by this version of vLLM."""
    version = getattr(import_module("vllm"), "__version__", "unknown")
    return (
        f"Tieline's plug-in knows vLLM 0.32, this is {version}: smoothed and rerouted models "
        "cannot be served here"
    )


def routes_are_returned() -> bool:
    """Return whether vLLM was started with --enable-return-routed-experts."""
    config = import_module("vllm.config").get_current_vllm_config()
    parts = (getattr(config, name, None) for name in ("aux_output_config", "model_config"))
    return any(bool(getattr(part, "enable_return_routed_experts", False)) for part in parts)


def rules_of_built_model() -> Any:
    """Return the rules of the model that vLLM is building; None for any other model."""
    model_config = import_module("vllm.config").get_current_vllm_config().model_config
    return getattr(getattr(model_config, "hf_config", None), RULES, None)
