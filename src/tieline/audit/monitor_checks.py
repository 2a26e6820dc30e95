"""What goes wrong with routing in training without an error: told once, while a step is watched.

An auxiliary loss is silently off where
    a transformers model has a coefficient for it, but does not compute it: it does so only with
        `output_router_logits`, which is off by default;
    it is computed but carries no gradient, as under reentrant checkpointing;
    its coefficient is zero although it is computed;
    nobody collects the routing of a layer of ours, which has no correction bias to move either.

"Router logits" are already probabilities where every row is >= 0 and sums to 1: a loss that takes
their softmax then sees all experts almost alike.
"""

from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from tieline.audit.monitor_calls import LogitSums
from tieline.audit.monitor_watch import untraced
from tieline.audit.running import text_config
from tieline.recompute import is_recomputing
from tieline.routing.collect import is_collected
from tieline.routing.layer import MoE
from tieline.routing.selective import SelectiveGate

__all__ = ["LossCheck", "RoutingWarning", "probability_warning"]

COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef", "ffn_config.moe_loss_weight")
ROW_ERROR = 0.02
"""Probabilities of 64 experts in bf16 sum to 1 within this."""

Tell = Callable[[str | None, str], None]


class RoutingWarning(UserWarning):
    """Something about the routing of a model in training needs a look."""


def probability_warning(layer: str, logits: LogitSums) -> str | None:
    """The warning for a router whose logits are probabilities; None if they are not."""
    if logits.least < 0 or logits.row_error > ROW_ERROR:
        return None
    return (
        f'the "router logits" of layer {layer!r} are probabilities already (all >= 0, rows sum to '
        "1): a balance or z-loss that takes their softmax is nearly blind, use their logarithms"
    )


class LossCheck:
    """Looks at the forward passes of a model in training for auxiliary losses that are off."""

    def __init__(self, model: nn.Module, tell: Tell) -> None:
        """Watch `model` while entered; `tell` gets a message and its kind."""
        self._model, self._tell, self._hooks = model, tell, ExitStack()

    def __enter__(self) -> "LossCheck":
        add = self._hooks.callback
        if _coefficient(self._model) is not None:
            hook = self._model.register_forward_hook(untraced(self._look))
            add(hook.remove)
        for name, layer in self._model.named_modules():
            if isinstance(layer, MoE):
                hook = untraced(_own_look(name, layer, self._tell))
                add(layer.register_forward_hook(hook).remove)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._hooks.close()

    def _look(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if _learns(model):
            self._tell(transformers_warning(model, output), "auxiliary loss")


def transformers_warning(model: nn.Module, output: Any) -> str | None:
    """What is wrong with the auxiliary loss in this output of a model in training, if anything."""
    found = _coefficient(model)
    if found is None or not hasattr(output, "loss"):
        return None
    name, value = found
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


def _own_look(name: str, layer: MoE, tell: Tell) -> Callable[..., None]:
    def look(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        gate = layer.gate
        if not (_learns(layer) and isinstance(gate, SelectiveGate)):
            return
        if gate.selection_bias is None and not is_collected(layer):
            tell(
                f"no auxiliary loss can reach layer {name!r}: nobody collects its routing "
                "(collect_routing, auxiliary_loss) and its gate has no selection_bias that a "
                "controller could move",
                "auxiliary loss",
            )

    return look


def _learns(module: nn.Module) -> bool:
    return module.training and torch.is_grad_enabled() and not is_recomputing()


def _coefficient(model: nn.Module) -> tuple[str, float] | None:
    """Name and value of the coefficient in the model's configuration."""
    config = text_config(model)
    for path in COEFFICIENTS:
        value: Any = config
        for name in path.split("."):
            value = getattr(value, name, None)
        if isinstance(value, int | float):
            return path, float(value)
    return None
