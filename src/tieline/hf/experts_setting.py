"""Which of transformers' implementations of the experts a model runs with."""

from typing import Any

from torch import nn

from tieline.errors import ParameterError, UnsupportedModelError, require

__all__ = ["can_use_experts", "use_experts"]


def can_use_experts(model: nn.Module) -> bool:
    """Whether the experts of a model have more than one implementation."""
    can = getattr(model, "_can_set_experts_implementation", None)
    return bool(can()) if callable(can) else False


def use_experts(model: nn.Module, name: str | None) -> None:
    """Let the experts run by "eager", "grouped_mm", "batched_mm" or another registered name.

    Args:
        model: a model of transformers.
        name: the implementation; None leaves the model as it is.
    """
    if name is None:
        return
    chooser: Any = model
    require(
        can_use_experts(model),
        f"{type(model).__name__} has one implementation of its experts: {name!r} cannot be set",
        UnsupportedModelError,
    )
    try:
        chooser.set_experts_implementation(name)
    except (ValueError, RuntimeError, ImportError) as problem:
        raise ParameterError(f"experts implementation {name!r}: {problem}") from problem
