"""Hooks that tell where forward passes of a model begin and end, and which arguments are tokens.

for handle in watch_forward(model, listener): ...     # listener.begin(arguments by name)

Models inside of wrappers (DistributedDataParallel, DataParallel, FSDP, torch.compile, adapters) are
watched at the wrapper: positional arguments have the names that the model inside gives them.
"""

import inspect
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, Protocol, runtime_checkable
from weakref import WeakKeyDictionary

import torch
from torch import nn

from tieline.core.numerics import is_recomputing

TOKEN_ARGUMENTS = ("input_ids", "inputs_embeds")


@runtime_checkable
class PassListener(Protocol):
    """What is told where the forward passes of a model begin and end."""

    def begin(self, arguments: Mapping[str, Any]) -> None:
        """Take the arguments of a pass that begins."""
        ...

    def finish(self) -> None:
        """Take note that the pass has ended without an error."""
        ...


def module_taking_tokens(model: nn.Module) -> nn.Module:
    """Return the topmost part of a model whose forward names its tokens: the model in a wrapper.

    The model itself where no part names them.
    """
    for module in model.modules():
        if any(name in TOKEN_ARGUMENTS for name in _forward_parameters(module)):
            return module
    return model


def _forward_parameters(module: nn.Module) -> Mapping[str, inspect.Parameter]:
    """Parameters of a module's forward by name; none where they cannot be read."""
    forward: Any = module.forward
    try:
        if getattr(forward, "__self__", None) is not module:
            return inspect.signature(forward).parameters
        function = forward.__func__
        if function not in _PARAMETERS:  # to read them is half of what it takes to begin a capture
            _PARAMETERS[function] = inspect.signature(forward).parameters
        return _PARAMETERS[function]
    except (TypeError, ValueError):  # a forward of compiled code
        return {}


_PARAMETERS: MutableMapping[Any, Mapping[str, inspect.Parameter]] = WeakKeyDictionary()
"""Parameters of the methods that were looked at, without the object itself."""


def module_called_with_tokens(model: nn.Module) -> nn.Module:
    """Return the part whose calls have the tokens as arguments: a wrapper that hands them on."""
    any_kind = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    hands_on = all(p.kind in any_kind for p in _forward_parameters(model).values())
    return model if hands_on else module_taking_tokens(model)


def forward_argument_names(model: nn.Module) -> list[str]:
    """Return the names of the positional arguments of `module_called_with_tokens(model)`."""
    return [*_forward_parameters(module_taking_tokens(model))]


def watch_forward(
    model: nn.Module, listener: PassListener
) -> Iterator[torch.utils.hooks.RemovableHandle]:
    """Hook the model to tell a listener where forward passes begin and end."""

    def begin_pass(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not is_recomputing():
            listener.begin(dict(zip(names, args, strict=False)) | kwargs)

    def finish_pass(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not is_recomputing():
            listener.finish()

    names, part = forward_argument_names(model), module_called_with_tokens(model)
    yield part.register_forward_pre_hook(begin_pass, with_kwargs=True)
    yield part.register_forward_hook(finish_pass)
