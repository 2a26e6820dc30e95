"""Which of transformers' implementations of the experts a model runs with."""

from typing import Any

from torch import nn

from tieline.errors import ParameterError, UnsupportedModelError, require

__all__ = ["use_experts"]


def use_experts(model: nn.Module, name: str | None) -> None:
    """Let the experts run by "eager", "grouped_mm", "batched_mm" or another registered name.

    Args:
        model: a model of transformers.
        name: the implementation; None leaves the model as it is.
    """
    if name is None:
        return
    chooser: Any = model
    can = getattr(chooser, "_can_set_experts_implementation", lambda: False)
    require(
        bool(can()),
        f"{type(model).__name__} has one implementation of its experts: {name!r} cannot be set",
        UnsupportedModelError,
    )
    try:
        chooser.set_experts_implementation(name)
    except (ValueError, RuntimeError, ImportError) as problem:
        raise ParameterError(f"experts implementation {name!r}: {problem}") from problem
