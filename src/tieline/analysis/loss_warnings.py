"""Warn in training if auxiliary losses of a model are off or reach no router."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tieline.core.numerics import is_recomputing
from tieline.core.text import layer_label
from tieline.models.class_changes import untraced
from tieline.models.configuration import text_config
from tieline.models.forward_hooks import module_taking_tokens
from tieline.routing.gates import SelectiveGate
from tieline.routing.layer import MoE
from tieline.routing.losses import is_collected

LOSS_COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef", "ffn_config.moe_loss_weight")
"""Paths in a model's configuration to the coefficient of its auxiliary loss."""
WarnCallback = Callable[[str | None, str], None]
"""Called with a message, or None for no warning, and the kind of warning."""


@contextmanager
def watch_losses(model: nn.Module, warn: WarnCallback) -> Iterator[None]:
    """Warn if training passes inside the block have auxiliary losses that are off."""

    def check_output(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Warn if the auxiliary loss of this forward pass is off."""
        if _is_training_pass(module):
            warn(transformers_loss_warning(module, output), "auxiliary loss")

    with ExitStack() as hooks:
        if _loss_coefficient(model) is not None:
            hooks.callback(model.register_forward_hook(untraced(check_output)).remove)
        for name, layer in model.named_modules():
            if isinstance(layer, MoE):
                hook = untraced(_layer_loss_hook(name, layer, warn))
                hooks.callback(layer.register_forward_hook(hook).remove)
        yield


def transformers_loss_warning(model: nn.Module, output: Any) -> str | None:
    """Return the warning about the auxiliary loss in a model's output; None if it works."""
    coefficient = _loss_coefficient(model)
    if coefficient is None or not hasattr(output, "loss"):
        return None
    name, value = coefficient
    loss = getattr(output, "aux_loss", None)
    if value > 0 and loss is None:
        return (
            f"the auxiliary loss is silently off: {name} = {value:g}, but the model did not "
            "compute it; set model.config.output_router_logits = True, if its class has this loss"
        )
    if isinstance(loss, Tensor) and value > 0 and not loss.requires_grad:
        return (
            f"the auxiliary loss ({name} = {value:g}) carries no gradient, so it balances nothing: "
            "frozen routers, or reentrant checkpointing (pass use_reentrant=False)"
        )
    if isinstance(loss, Tensor) and value == 0:
        return f"the auxiliary loss is computed, but silently off: {name} = 0"
    return None


def _layer_loss_hook(name: str, layer: MoE, warn: WarnCallback) -> Callable[..., None]:
    """Return a forward hook that warns if no auxiliary loss can reach a layer."""

    def check_layer(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Warn if nothing can balance the layer."""
        gate = layer.gate
        if not (_is_training_pass(layer) and isinstance(gate, SelectiveGate)):
            return
        if gate.selection_bias is None and not is_collected(layer):
            warn(
                f"no auxiliary loss can reach {layer_label(name)}: nothing collects its routing "
                "(collect_routing, auxiliary_loss) and its gate has no selection_bias that a "
                "controller could move",
                "auxiliary loss",
            )

    return check_layer


def _is_training_pass(module: nn.Module) -> bool:
    """Return whether the current forward pass of the module is a training pass."""
    return module.training and torch.is_grad_enabled() and not is_recomputing()


def _loss_coefficient(model: nn.Module) -> tuple[str, float] | None:
    """Return name and value of the auxiliary loss coefficient in the model's configuration."""
    config = text_config(module_taking_tokens(model))
    for path in LOSS_COEFFICIENTS:
        value: Any = config
        for name in path.split("."):
            value = getattr(value, name, None)
        if isinstance(value, int | float):
            return path, float(value)
    return None
