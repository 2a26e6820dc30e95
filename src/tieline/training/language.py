"""Language modelling: the decoder on a stream of tokens, scored on whole held-out windows.

    loss         mean -log p(token | tokens before it in its window), nats per token
    bpc          loss / ln 2, bits per byte or character
    perplexity   exp(loss); per word exp(total loss / words) where the data count words

Standard errors are those of the mean over windows, so they are clustered by sequence.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tieline.errors import require
from tieline.routing.collect import collect_routing
from tieline.routing.selective import TopK
from tieline.routing.smooth import SmoothTopK
from tieline.training.config import DecoderConfig, TrainConfig
from tieline.training.model import (
    SwitchForCausalLM,
    decoder,
    moe_layers,
    smoothing_of,
    stock_form,
    why_not_stock,
)
from tieline.training.streams import Stream, TextStreams, Windows, load_streams
from tieline.training.tasks import register_task

__all__ = ["LanguageModelling", "hard_gates", "window_losses"]

BATCH = 16


@dataclass(frozen=True, eq=False)
class LanguageData:
    """Windows to train on and the streams they come from."""

    train: Windows
    streams: TextStreams
    about: str


class LanguageModelling:
    """The task "language"."""

    def data(self, config: TrainConfig) -> LanguageData:
        """Windows drawn by the seed of the run."""
        shape = _shape(config)
        streams = load_streams(config.data)
        length = config.optim.steps * config.optim.batch
        train = Windows(streams.train, context=shape.context, length=length, seed=config.seed)
        return LanguageData(train, streams, streams.about)

    def model(self, config: TrainConfig) -> SwitchForCausalLM:
        """A fresh decoder."""
        return decoder(_shape(config), config.gate)

    def evaluate(self, model: nn.Module, data: LanguageData, config: TrainConfig) -> dict[str, Any]:
        """Scores of validation and test split, attacked ones too, and what the gates do."""
        streams, context = data.streams, _shape(config).context
        splits = {"validation": streams.validation, "test": streams.test, **streams.attacked}
        found: dict[str, Any] = {}
        with hard_gates(model) if config.gate.evaluate_hard else _as_they_are():
            for name, stream in splits.items():
                losses, active = window_losses(model, stream, context, config.evaluate_items)
                words = streams.words.get(name)
                found[name] = _scores(losses, stream.numel() / words if words else None)
                found[name]["experts_per_token"] = active
        found["smoothing"] = smoothing_of(model)
        return found

    def save(self, model: nn.Module, data: LanguageData, folder: Path) -> None:
        """The model with its tokenizer; its stock form beside it where it has one."""
        assert isinstance(model, SwitchForCausalLM)
        model.save_pretrained(folder)
        data.streams.tokenizer.save_pretrained(folder)
        if why_not_stock(model) is None:
            stock = folder.parent / "stock"
            stock_form(model).save_pretrained(stock)
            data.streams.tokenizer.save_pretrained(stock)


def _shape(config: TrainConfig) -> DecoderConfig:
    require(
        isinstance(config.model, DecoderConfig),
        f"language modelling needs a DecoderConfig, got {type(config.model).__name__}",
    )
    assert isinstance(config.model, DecoderConfig)
    return config.model


@torch.no_grad()
def window_losses(
    model: nn.Module, stream: Stream, context: int, limit: int
) -> tuple[Float[Tensor, " windows"], float]:
    """Loss of each of the first `limit` whole windows, spread over the stream, and experts in use.

    Args:
        model: maps ids (B, context) to an output with logits.
        stream: held-out token ids.
        context: tokens of a window; the first is not predicted.
        limit: windows at most; the stream is sampled at even distances.
    """
    whole = stream[: stream.numel() // context * context].view(-1, context)
    require(len(whole) >= 2, f"{stream.numel()} held-out tokens make no two windows of {context}")
    every = max(1, len(whole) // limit)
    losses, active, calls = [], 0.0, 0
    model.eval()
    for rows in whole[::every][:limit].long().split(BATCH):
        with collect_routing(model) as records:
            logits = model(input_ids=rows).logits
        flat = cross_entropy(logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten(), reduction="none")
        losses.append(flat.view(len(rows), -1).double().mean(dim=1))
        for record in records:
            active += record.routing.active.double().sum().item() / context
            calls += len(rows)
    return torch.cat(losses), active / max(1, calls)


def _scores(losses: Float[Tensor, " windows"], tokens_per_word: float | None) -> dict[str, float]:
    mean, error = losses.mean().item(), (losses.std() / math.sqrt(len(losses))).item()
    found = {
        "loss": mean,
        "standard_error": error,
        "bpc": mean / math.log(2),
        "perplexity": math.exp(mean),
        "windows": len(losses),
    }
    if tokens_per_word is not None:
        found["word_perplexity"] = math.exp(mean * tokens_per_word)
    return found


@contextmanager
def hard_gates(model: nn.Module) -> Iterator[None]:
    """Every smooth gate replaced by hard top-k while the block lasts."""
    layers = moe_layers(model)
    before = {name: layer.gate for name, layer in layers.items()}
    for layer in layers.values():
        if isinstance(layer.gate, SmoothTopK):
            layer.gate = TopK(layer.gate.k)
    try:
        yield
    finally:
        for name, layer in layers.items():
            layer.gate = before[name]


@contextmanager
def _as_they_are() -> Iterator[None]:
    yield


register_task("language", LanguageModelling())
