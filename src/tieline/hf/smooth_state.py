"""Putting a smoothing on a model and taking it off again.

What is changed: the class of each smoothed router, `_is_expert_parallel` of the experts beside it
(so that they skip the slots that are not used), the number of slots that jetmoe's attention counts
with, and the classes of model and configuration, so that saving tells of the smoothing.
"""

import weakref
from dataclasses import replace
from typing import Any

from torch import nn

from tieline.errors import ParameterError, UnsupportedModelError, require
from tieline.hf.discovery import find_routers
from tieline.hf.families import family_of
from tieline.hf.smooth_layers import LayerPlan, layer_plan, refusal
from tieline.hf.smooth_records import LayerSmoothing, Smoothing
from tieline.hf.smooth_router import RouterSmoothing, attach, detach, smoothing_of
from tieline.hf.smooth_saving import hook_saving, unhook_saving
from tieline.hf.smooth_skip import FLAG, experts_of, skip_rule

__all__ = ["apply_smoothing", "remove_smoothing", "restore_smoothing"]

CHANGED = "tieline_changed"
"""Attribute of the model with what to set back: (module, attribute, value before)."""


def apply_smoothing(model: nn.Module, record: Smoothing) -> Smoothing:
    """Smooth the routers of `model` as the record says; gives the record with its way back."""
    changed: list[tuple[nn.Module, str, Any]] = []
    for layer in record.layers:
        if layer.smoothed:
            _smooth_layer(model, layer, record, changed)
    setattr(model, CHANGED, changed)
    hook_saving(model, record)
    return replace(record, _model=weakref.ref(model))


def restore_smoothing(model: nn.Module, record: Smoothing) -> Smoothing:
    """`apply_smoothing` of a record that was read, refused unless it fits the model."""
    routers = find_routers(model)
    for layer in record.layers:
        router = routers.get(layer.name)
        family = None if router is None else family_of(router)
        if router is None or family is None or refusal(family) is not None:
            raise UnsupportedModelError(
                f"the configuration does not match the checkpoint: it smooths {layer.name!r}, "
                f"which is no router that can be smoothed; the model has {list(routers)}"
            )
        plan = layer_plan(layer.name, router)
        found = (plan.family.name, plan.k, plan.n_experts, plan.units)
        told = (layer.family, layer.k, layer.n_experts, layer.units)
        require(
            found == told,
            f"the configuration does not match the checkpoint: layer {layer.name!r} is smoothed as "
            f"(family, k, experts, units) = {told}, the model has {found}",
            UnsupportedModelError,
        )
    return apply_smoothing(model, record)


def remove_smoothing(model: nn.Module) -> None:
    """Make the model what it was; refuses one that is not smoothed."""
    require(
        hasattr(model, CHANGED),
        f"{type(model).__name__} is not smoothed: there is nothing to undo",
        ParameterError,
    )
    for router in [m for m in model.modules() if smoothing_of(m) is not None]:
        detach(router)
    for module, attribute, value in reversed(getattr(model, CHANGED)):
        setattr(module, attribute, value)
    delattr(model, CHANGED)
    unhook_saving(model)


def _smooth_layer(
    model: nn.Module,
    layer: LayerSmoothing,
    record: Smoothing,
    changed: list[tuple[nn.Module, str, Any]],
) -> None:
    plan = layer_plan(layer.name, model.get_submodule(layer.name))
    experts = experts_of(model, layer.name)
    for module, attribute, value in _settings(model, plan, layer.k_max, experts):
        changed.append((module, attribute, getattr(module, attribute)))
        setattr(module, attribute, value)
    how = RouterSmoothing(
        layer.name,
        plan.family,
        layer.k,
        layer.k_max,
        layer.epsilon,
        record.a,
        record.b,
        record.detach_ramp,
        skip_rule(plan.family.name, experts, layer.n_experts),
    )
    attach(plan.router, plan.family, how)


def _settings(
    model: nn.Module, plan: LayerPlan, k_max: int, experts: nn.Module | None
) -> list[tuple[nn.Module, str, Any]]:
    """What the modules around a router have to be told."""
    if plan.family.layout == "sorted":  # the experts of attention and the attention count slots
        block = plan.name.rpartition(".")[0]
        around = [block, block.rpartition(".")[0]]
        modules = [model.get_submodule(name) for name in around]
        counting = [m for m in modules if isinstance(getattr(m, "top_k", None), int)]
        return [(module, "top_k", k_max) for module in counting]
    if experts is not None and hasattr(experts, FLAG):
        return [(experts, FLAG, True)]
    return []
