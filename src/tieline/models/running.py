"""Run a model for its routing: batches of token ids, evaluation mode, no gradients, no cache."""

import inspect
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn
from transformers.utils import logging

from tieline.core.errors import TielineError


def forward(model: nn.Module, ids: Int[Tensor, "rows length"]) -> Any:
    """Return the model's output for these tokens, all visible, without a cache."""
    options: dict[str, Any] = {}
    if "use_cache" in inspect.signature(model.forward).parameters:
        options["use_cache"] = False
    return model(input_ids=ids.to(model_device(model)), **options)


def model_device(model: nn.Module) -> torch.device:
    """Return the device of the first parameter that is not on the meta device."""
    for parameter in model.parameters():
        if not parameter.is_meta:
            return parameter.device
    raise TielineError(f"{type(model).__name__} has no parameters in memory: nothing can be run")


def text_config(model: nn.Module) -> Any:
    """Return the configuration of the language model, also inside that of a multimodal model."""
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def batches(
    sequences: Sequence[Int[Tensor, " _"]], batch_size: int
) -> Iterator[Int[Tensor, "rows length"]]:
    """Stack neighbouring sequences of equal length, at most `batch_size` at a time."""
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
    """Evaluation mode and no gradients; restores each module's training mode on exit."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def no_bars() -> Iterator[None]:
    """No progress bars of transformers inside the block: files and layers are not the user's."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def quiet_transformers() -> None:
    """Silence warnings of transformers, and its progress bars off a terminal, for commands."""
    logging.set_verbosity_error()
    if not sys.stderr.isatty():
        logging.disable_progress_bar()
