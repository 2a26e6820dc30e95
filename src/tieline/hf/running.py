"""Run a model for its routing, and tell which tokens a forward pass routes.

Rows of a batch are documents, numbered from 0 over all batches. A pass that continues a cache (as
the steps of `generate` do) continues the documents of the pass before. Padding is left out: tokens
that the attention mask hides and, in a cached step, padding fed to rows that have ended.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from tieline.core.errors import TielineError


@dataclass(frozen=True)
class Batch:
    """Tokens of one forward pass, padding left out.

    Attributes:
        tokens: token ids, -1 where the model was given embeddings.
        documents: number of the row that each token belongs to.
        positions: number of tokens before it in its document.
        kept: the rows of the routers' inputs that hold these tokens; None if all do.
        routed: number of rows that every router sees, padding included.
    """

    tokens: Int[Tensor, " tokens"]
    documents: Int[Tensor, " tokens"]
    positions: Int[Tensor, " tokens"]
    kept: Int[Tensor, " tokens"] | None
    routed: int


class DocumentCounter:
    """Numbers the rows of successive forward passes."""

    def __init__(self, padding: int | None = None, ends: frozenset[int] = frozenset()) -> None:
        """Take the padding id that `generate` feeds to ended rows, and the ids that end a row."""
        self._padding = padding
        self._ends = ends if padding is None else ends | {padding}
        self._next = 0
        self._rows: Tensor | None = None
        self._last: Tensor | None = None

    def read(self, arguments: Mapping[str, Any]) -> Batch:
        """Return the tokens of a forward pass with these arguments."""
        ids = _token_ids(arguments)
        visible = _attention_mask(arguments, ids.shape)
        past = _past_length(arguments, ids.shape[1], visible)
        if visible is None:
            visible = torch.ones(ids.shape[0], past + ids.shape[1], dtype=torch.bool)
        rows = self._documents(len(ids), past > 0)
        positions = (visible.cumsum(dim=1) - 1)[:, -ids.shape[1] :]
        shown = visible[:, -ids.shape[1] :] & ~self._after_end(ids, past > 0)
        self._last = ids[:, -1]
        return _batch(ids, rows, positions, shown)

    def _documents(self, rows: int, continues: bool) -> Tensor:
        if not continues or self._rows is None or len(self._rows) != rows:
            self._rows = torch.arange(self._next, self._next + rows)
            self._next += rows
        return self._rows

    def _after_end(self, ids: Tensor, continues: bool) -> Tensor:
        """Mask of the padding in a cached step after an end or other padding."""
        if self._padding is None or self._last is None or not continues:
            return torch.zeros_like(ids, dtype=torch.bool)
        if len(self._last) != len(ids):
            return torch.zeros_like(ids, dtype=torch.bool)
        before = torch.cat([self._last[:, None], ids[:, :-1]], dim=1)
        ended = torch.isin(before, torch.tensor(sorted(self._ends)))
        return ended & (ids == self._padding)


def _batch(ids: Tensor, rows: Tensor, positions: Tensor, shown: Tensor) -> Batch:
    documents = rows[:, None].expand_as(ids)
    kept = None if bool(shown.all()) else shown.flatten().nonzero().squeeze(1)
    tokens, documents, positions = (x[shown] for x in (ids, documents, positions))
    return Batch(tokens, documents, positions, kept, ids.numel())


def _token_ids(arguments: Mapping[str, Any]) -> Int[Tensor, "rows length"]:
    ids, embeddings = arguments.get("input_ids"), arguments.get("inputs_embeds")
    if isinstance(ids, Tensor) and ids.ndim == 2:
        return ids.detach().cpu().long()
    if isinstance(embeddings, Tensor) and embeddings.ndim == 3:
        return torch.full(embeddings.shape[:2], -1)
    raise TielineError(
        "the model was called without `input_ids` (rows, length) or `inputs_embeds` (rows, length, "
        "width), so its routers' tokens are unknown"
    )


def _attention_mask(arguments: Mapping[str, Any], shape: torch.Size) -> Tensor | None:
    """The mask (rows, past + length) as booleans; None for masks of other forms."""
    mask = arguments.get("attention_mask")
    if isinstance(mask, Tensor) and mask.ndim == 2 and mask.shape[1] >= shape[1]:
        return mask.detach().cpu().bool()
    return None


def _past_length(arguments: Mapping[str, Any], length: int, visible: Tensor | None) -> int:
    if visible is not None:
        return visible.shape[1] - length
    cache = arguments.get("past_key_values")
    if cache is None or not hasattr(cache, "get_seq_length"):
        return 0
    try:
        return int(cache.get_seq_length())
    except ValueError:  # a cache of linear attention alone has no length
        return 0


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
