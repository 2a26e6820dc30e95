"""The tokens of each forward pass of a model: documents, positions, padding left out.

    counter = document_counter(model)
    batch = counter.read_batch(arguments)                       # in the `begin` of a `PassListener`

Documents are numbered from 0 over all passes. A row of a batch is a document, unless it is packed:

    cu_seq_lens_q, cu_seqlens    documents end at these offsets into the tokens of the pass
    seq_idx                      a document begins where the number changes
    attention_mask above 1       the same: the mask holds numbers of documents, 0 is padding
    position_ids                 a document begins where a position is not the one before plus 1,
                                 as transformers tells them; beside a mask, where it is not larger

A pass that continues a cache (as the steps of `generate` do) continues the documents of the pass
before. Padding is left out: tokens that the attention mask hides, those after the last offset, in a
cached step padding fed to rows that have ended, and in a packed row padding that is a document of
one token.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from tieline.core.errors import TielineError, require
from tieline.models.forward_hooks import TOKEN_ARGUMENTS, module_taking_tokens

OFFSETS = ("cu_seq_lens_q", "cu_seqlens_q", "cu_seqlens", "cu_seq_lens")
"""Arguments with the offsets at which packed documents begin and end."""


@dataclass(frozen=True)
class Batch:
    """Tokens of one forward pass, padding left out.

    Attributes:
        tokens: token ids, -1 where the model was given embeddings.
        documents: number of the document that each token belongs to.
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
    """Numbers the documents of successive forward passes."""

    def __init__(self, padding: int | None = None, ends: frozenset[int] = frozenset()) -> None:
        """Take the padding id that `generate` feeds to ended rows, and the ids that end a row."""
        self._padding = padding
        self._ends = ends if padding is None else ends | {padding}
        self._next = 0
        self._rows: Tensor | None = None
        self._last: Tensor | None = None
        self._packed = False

    def read_batch(self, arguments: Mapping[str, Any]) -> Batch:
        """Return the tokens of a forward pass with these arguments."""
        ids = _pass_token_ids(arguments)
        mask: Any = arguments.get("attention_mask")
        two_axes = isinstance(mask, Tensor) and mask.ndim == 2 and mask.shape[1] >= ids.shape[1]
        mask = mask.detach().cpu() if two_axes else None  # masks of other forms tell no padding
        past = _cached_length(arguments, ids.shape[1], mask)
        visible = ids.new_ones(len(ids), past + ids.shape[1]) if mask is None else mask
        shown = visible[:, -ids.shape[1] :].bool() & ~self._after_end(ids, past > 0)
        self._last = ids[:, -1]
        starts = None if past > 0 else _packed_starts(arguments, mask, shown)
        if starts is not None:
            return self._packed_batch(ids, shown, starts)
        require(
            not (past > 0 and self._packed),
            "the pass continues a cache of packed documents, and which of them a token belongs to "
            "is not known: generate from rows of one document each",
            TielineError,
        )
        self._packed = False
        if past == 0 or self._rows is None or len(self._rows) != len(ids):
            self._rows = torch.arange(self._next, self._next + len(ids), device="cpu")
            self._next += len(ids)
        positions = (visible.bool().cumsum(dim=1) - 1)[:, -ids.shape[1] :]
        return _visible_batch(ids, self._rows[:, None].expand_as(ids), positions, shown)

    def _packed_batch(self, ids: Tensor, shown: Tensor, starts: Tensor) -> Batch:
        """Tokens of rows of several documents, each of which begins at one of `starts`."""
        if self._padding is not None:  # padding of a packed row has no mask: its positions stay
            follows = torch.cat([starts[:, 1:], starts.new_ones(len(ids), 1)], dim=1)
            padding = starts & follows & (ids == self._padding)
            shown, starts = shown & ~padding, starts & ~padding
        number = starts.flatten().cumsum(0) - 1
        order = shown.flatten().cumsum(0) - 1
        first = order[starts.flatten()]
        positions = order - (first[number.clamp(min=0)] if len(first) else 0)
        documents = self._next + number
        self._next += len(first)
        self._rows, self._packed = None, True
        return _visible_batch(ids, documents.view_as(ids), positions.view_as(ids), shown)

    def _after_end(self, ids: Tensor, continues: bool) -> Tensor:
        """Mask of the padding in a cached step after an end or other padding."""
        last = self._last if self._padding is not None and continues else None
        if last is None or len(last) != len(ids):
            return torch.zeros_like(ids, dtype=torch.bool)
        previous = torch.cat([last[:, None], ids[:, :-1]], dim=1)
        ended = torch.isin(previous, previous.new_tensor(sorted(self._ends)))
        return ended & (ids == self._padding)


def _visible_batch(ids: Tensor, documents: Tensor, positions: Tensor, shown: Tensor) -> Batch:
    """The batch of the tokens that are shown."""
    kept = None if bool(shown.all()) else shown.flatten().nonzero().squeeze(1)
    tokens, documents, positions = (x[shown] for x in (ids, documents, positions))
    return Batch(tokens, documents, positions, kept, ids.numel())


def _pass_token_ids(arguments: Mapping[str, Any]) -> Int[Tensor, "rows length"]:
    """Token ids of a pass, -1 where it was given embeddings."""
    ids, embeddings = (arguments.get(name) for name in TOKEN_ARGUMENTS)
    if isinstance(ids, Tensor) and ids.ndim == 2:
        return ids.detach().cpu().long()
    if isinstance(embeddings, Tensor) and embeddings.ndim == 3:
        return torch.full(embeddings.shape[:2], -1, device="cpu")
    raise TielineError(
        "the model was called without `input_ids` (rows, length) or `inputs_embeds` (rows, length, "
        "width), so its routers' tokens are unknown"
    )


def _cached_length(arguments: Mapping[str, Any], length: int, mask: Tensor | None) -> int:
    """Tokens in the cache that a pass continues; 0 without one."""
    if mask is not None:
        return mask.shape[1] - length
    cache = arguments.get("past_key_values")
    if cache is None or not hasattr(cache, "get_seq_length"):
        return 0
    try:
        return int(cache.get_seq_length())
    except ValueError:  # a cache of linear attention alone has no length
        return 0


def _packed_starts(
    arguments: Mapping[str, Any], mask: Tensor | None, shown: Bool[Tensor, "rows length"]
) -> Bool[Tensor, "rows length"] | None:
    """Visible tokens that begin a document; None where each row is one. Hides tokens of none."""
    starts = _offset_starts(arguments, shown)
    if starts is None:
        numbers = _document_numbers(arguments, mask, shown.shape)
        starts = None if numbers is None else _document_starts(numbers, shown, torch.ne)
    if starts is None:
        positions = _text_positions(arguments, shown.shape)
        is_start = (lambda now, last: now != last + 1) if mask is None else torch.le
        starts = None if positions is None else _document_starts(positions, shown, is_start)
    if starts is None or not bool((starts.sum(dim=1) > 1).any()):
        return None
    return starts


def _offset_starts(arguments: Mapping[str, Any], shown: Tensor) -> Tensor | None:
    """Starts by offsets into the tokens of all rows; tokens after the last offset are hidden."""
    name = next((name for name in OFFSETS if isinstance(arguments.get(name), Tensor)), None)
    if name is None:
        return None
    offsets = arguments[name].detach().cpu().long().flatten()
    bounds = offsets.tolist()
    keys = arguments.get(name.replace("_q", "_k"))
    require(
        not isinstance(keys, Tensor) or torch.equal(keys.detach().cpu().long().flatten(), offsets),
        f"{name} and {name.replace('_q', '_k')} differ: the pass continues packed documents in a "
        "cache, and which of them a token belongs to is not known",
        TielineError,
    )
    require(
        len(bounds) > 1 and bounds[0] == 0 and bounds == sorted(bounds),
        f"{name} must rise from 0, got {bounds[:6]}",
        TielineError,
    )
    require(
        bounds[-1] <= shown.numel(),
        f"{name} ends at {bounds[-1]}, but the pass has {shown.numel()} tokens",
        TielineError,
    )
    shown.view(-1)[bounds[-1] :] = False
    tokens = torch.arange(shown.numel(), device=offsets.device)
    numbers = torch.bucketize(tokens, offsets, right=True).view_as(shown)
    return _document_starts(numbers, shown, torch.ne)


def _document_numbers(
    arguments: Mapping[str, Any], mask: Tensor | None, shape: torch.Size
) -> Tensor | None:
    """Numbers of documents (rows, length) that the arguments hold; None if they hold none."""
    numbers = arguments.get("seq_idx")
    if isinstance(numbers, Tensor) and numbers.shape == shape:
        return numbers.detach().cpu().long()
    integers = mask is not None and not mask.is_floating_point() and mask.dtype != torch.bool
    if integers and mask is not None and mask.shape == shape and bool((mask > 1).any()):
        return mask.long()
    return None


def _text_positions(arguments: Mapping[str, Any], shape: torch.Size) -> Tensor | None:
    """Positions (rows, length) of text; None for those of images, which repeat."""
    positions = arguments.get("position_ids")
    if not isinstance(positions, Tensor):
        return None
    if positions.ndim == 3 and len(positions) == 4:  # text, then time, height and width
        positions = positions[0]
    if positions.ndim == 1:
        positions = positions[None]
    if positions.ndim != 2 or positions.shape[1] != shape[1]:
        return None
    return positions.detach().cpu().long().expand(shape)


def _document_starts(values: Tensor, shown: Tensor, is_start: Any) -> Bool[Tensor, "rows length"]:
    """Visible tokens that are the first of their row, or `begins(value, that before)` is true."""
    row = torch.arange(len(shown), device=shown.device)[:, None].expand_as(shown)[shown]
    visible = values[shown]
    first = torch.ones_like(visible, dtype=torch.bool)
    first[1:] = is_start(visible[1:], visible[:-1]) | (row[1:] != row[:-1])
    starts = torch.zeros_like(shown)
    starts[shown] = first
    return starts


def document_counter(model: nn.Module) -> DocumentCounter:
    """Document counter that knows the padding fed by `generate` to rows that have ended."""
    config = getattr(module_taking_tokens(model), "generation_config", None)
    ends = getattr(config, "eos_token_id", None)
    ends = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
    padding = getattr(config, "pad_token_id", None)
    return DocumentCounter((ends or [None])[0] if padding is None else padding, frozenset(ends))
