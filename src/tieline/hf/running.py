"""Running a model for its routing: plain forward passes of batches that need no padding."""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from tieline.errors import TielineError

__all__ = ["batches", "forward", "model_device", "only_running", "text_config"]


def forward(model: nn.Module, ids: Int[Tensor, "rows length"]) -> Any:
    """The model's output for these tokens, all of them visible, without a cache."""
    options: dict[str, Any] = {}
    if "use_cache" in inspect.signature(model.forward).parameters:
        options["use_cache"] = False
    return model(input_ids=ids.to(model_device(model)), **options)


def model_device(model: nn.Module) -> torch.device:
    """Where the model takes its tokens: the device of its first parameter that has one."""
    for parameter in model.parameters():
        if not parameter.is_meta:
            return parameter.device
    raise TielineError(f"{type(model).__name__} has no parameters in memory: nothing can be run")


def text_config(model: nn.Module) -> Any:
    """The configuration of the language model, which is a part of that of a model with images."""
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def batches(
    sequences: Sequence[Int[Tensor, " _"]], batch_size: int
) -> Iterator[Int[Tensor, "rows length"]]:
    """Sequences in order, neighbours of equal length together, at most `batch_size` at a time."""
    rows: list[Tensor] = []
    for sequence in sequences:
        if rows and (len(rows) == batch_size or len(sequence) != len(rows[0])):
            yield torch.stack(rows)
            rows = []
        rows.append(sequence)
    if rows:
        yield torch.stack(rows)


@contextmanager
def only_running(model: nn.Module) -> Iterator[None]:
    """Evaluation mode and no gradients; the mode of every module is what it was afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        for module in training:
            module.training = True
