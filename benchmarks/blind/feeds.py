"""How documents become forward passes: batches, padding, packing, chunks, single steps.

Every feed returns a trace whose rows are sorted by document and position and numbered as the rows
of the documents, whatever order the model saw them in.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

import tieline as tl
from benchmarks.blind.texts import Documents
from tieline.trace.record import RoutingTrace
from tieline.trace.selection import concatenate, select_tokens

Feed = Callable[[Any, Documents], RoutingTrace]

PADDING = 0
"""Token id that fills rows."""


def numbered(trace: RoutingTrace, documents: Tensor, positions: Tensor) -> RoutingTrace:
    """Return a trace with other document numbers and positions, sorted by them."""
    order = (documents * (int(positions.max()) + 1) + positions).argsort()
    return select_tokens(replace(trace, documents=documents, positions=positions), order)


def ordered(trace: RoutingTrace) -> RoutingTrace:
    """Return a trace sorted by document and position."""
    return numbered(trace, trace.documents, trace.positions)


def batched(model: Any, ids: Documents, size: int = 8) -> RoutingTrace:
    """Equal rows, `size` at a time."""
    with tl.capture(model) as recorder:
        for rows in ids.split(size):
            model(input_ids=rows, use_cache=False)
    return ordered(recorder.trace())


plain: Feed = batched
"""The feed of every reference run."""

one_by_one: Feed = partial(batched, size=1)
in_threes: Feed = partial(batched, size=3)


def reordered(model: Any, ids: Documents) -> RoutingTrace:
    """Documents in another order, in batches of five."""
    order = torch.arange(len(ids)).flip(0).roll(3)
    trace = batched(model, ids[order], size=5)
    return numbered(trace, order[trace.documents.long()], trace.positions.long())


def padded(model: Any, ids: Documents, side: str, masked: bool = True) -> RoutingTrace:
    """Rows filled up by 24 padding tokens, with the mask or, wrongly, without it.

    Args:
        model: the model.
        ids: documents.
        side: "left" or "right".
        masked: whether attention is told of the padding.
    """
    longest = ids.shape[1] + 24
    traces, documents, positions = [], [], []
    for first in range(0, len(ids), 8):
        rows = ids[first : first + 8]
        fills = [1 + 5 * row % 16 for row in range(len(rows))]
        shown = torch.stack([_shown(longest, ids.shape[1], fill, side) for fill in fills])
        filled = torch.full(shown.shape, PADDING).masked_scatter(shown, rows)
        traces.append(_masked_pass(model, filled, shown, masked))
        documents.append((first + torch.arange(len(rows)))[:, None].expand_as(rows).flatten())
        positions.append(torch.arange(ids.shape[1]).repeat(len(rows)))
    return _joined(traces, documents, positions)


def _shown(total: int, length: int, fill: int, side: str) -> Tensor:
    """Mask of the tokens of a document; a left-padded one has `fill` free positions after it."""
    start = total - length - fill if side == "left" else 0
    at = torch.arange(total)
    return (at >= start) & (at < start + length)


def _masked_pass(model: Any, filled: Tensor, shown: Tensor, masked: bool) -> RoutingTrace:
    """Run filled rows, and keep the tokens that are shown."""
    positions = (shown.long().cumsum(1) - 1).clamp(min=0)
    with tl.capture(model) as recorder:
        if masked:
            model(
                input_ids=filled,
                attention_mask=shown.long(),
                position_ids=positions,
                use_cache=False,
            )
        else:
            model(input_ids=filled, use_cache=False)
    trace = recorder.trace()
    return trace if masked else select_tokens(trace, shown.flatten())


def _joined(
    traces: Sequence[RoutingTrace], documents: Sequence[Tensor], positions: Sequence[Tensor]
) -> RoutingTrace:
    """Return several traces as one, numbered anew."""
    parts = [
        replace(trace, documents=document, positions=position)
        for trace, document, position in zip(traces, documents, positions, strict=True)
    ]
    return ordered(concatenate(parts))


padded_left: Feed = partial(padded, side="left")
padded_right: Feed = partial(padded, side="right")
padding_leaks: Feed = partial(padded, side="left", masked=False)


def packed(model: Any, ids: Documents, apart: bool = True, size: int = 3) -> RoutingTrace:
    """Rows of `size` documents each, kept apart by their positions or, wrongly, not at all."""
    traces, documents, positions = [], [], []
    for first in range(0, len(ids), size):
        rows = ids[first : first + size]
        at = torch.arange(ids.shape[1]).repeat(len(rows))
        with tl.capture(model) as recorder:
            if apart:
                model(input_ids=rows.reshape(1, -1), position_ids=at[None], use_cache=False)
            else:
                model(input_ids=rows.reshape(1, -1), use_cache=False)
        traces.append(recorder.trace())
        documents.append((first + torch.arange(len(rows)))[:, None].expand_as(rows).flatten())
        positions.append(at)
    return _joined(traces, documents, positions)


packing_leaks: Feed = partial(packed, apart=False)


def in_steps(
    model: Any, ids: Documents, starts: Sequence[int], shifted: int = 0, size: int = 8
) -> RoutingTrace:
    """Prefill and further chunks with a cache.

    Args:
        model: the model.
        ids: documents.
        starts: positions at which a new chunk begins, after 0.
        shifted: what is added, wrongly, to the positions of chunks after the first.
        size: documents at a time.
    """
    bounds = [0, *starts, ids.shape[1]]
    with tl.capture(model) as recorder:
        for rows in ids.split(size):
            cache = None
            for low, high in pairwise(bounds):
                at = torch.arange(low, high) + (shifted if low else 0)
                output = model(
                    input_ids=rows[:, low:high],
                    position_ids=at[None].expand(len(rows), -1),
                    past_key_values=cache,
                    use_cache=True,
                )
                cache = output.past_key_values
    trace = recorder.trace()
    return numbered(trace, trace.documents.long(), trace.positions.long())


def decoded(model: Any, ids: Documents, shifted: int = 0) -> RoutingTrace:
    """The last 16 tokens of every document one at a time."""
    length = ids.shape[1]
    return in_steps(model, ids, range(length - 16, length), shifted, size=len(ids))


def chunked(model: Any, ids: Documents) -> RoutingTrace:
    """Prefill in chunks of 48 tokens."""
    return in_steps(model, ids, range(48, ids.shape[1], 48))


def decoding_ahead(model: Any, ids: Documents) -> RoutingTrace:
    """Chunks after the first are, wrongly, two positions ahead."""
    return in_steps(model, ids, range(64, ids.shape[1], 32), shifted=2)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Run with that many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def with_threads(model: Any, ids: Documents) -> RoutingTrace:
    """Two threads in place of one."""
    with threads(2):
        return batched(model, ids)


def with_attention(model: Any, ids: Documents, implementation: str) -> RoutingTrace:
    """Another attention kernel."""
    model.set_attn_implementation(implementation)
    return batched(model, ids)


def with_experts(model: Any, ids: Documents, implementation: str) -> RoutingTrace:
    """Another kernel of experts."""
    model.set_experts_implementation(implementation)
    return batched(model, ids)
