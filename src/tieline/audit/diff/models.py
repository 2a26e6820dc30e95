"""Comparing models on the same tokens: two dtypes, two checkpoints, two expert implementations.

    text = tokenise(tokenizer, words, 4096, 512)
    found = diff_models(Side(model), Side(copy, emulated="bf16"), text.sequences)

Both models run batch by batch side by side, so that no logits are kept.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor, nn

from tieline.audit.diff.compare import Compared, compare, summed_up
from tieline.audit.diff.logits import TokenDistances, logits_diff, token_distances
from tieline.audit.diff.records import LogitsDiff, RoutingDiff
from tieline.audit.running import batches, forward, only_running
from tieline.errors import TraceError, require
from tieline.hf.capture import capture
from tieline.hf.rounding_hooks import Parts, emulate
from tieline.numerics import one_thread
from tieline.trace.ops import concatenate
from tieline.trace.record import RoutingTrace

__all__ = ["ModelsCompared", "Side", "diff_models", "sequences_of", "trace_model"]

Progress = Callable[[str, int, int], None]


class Side(NamedTuple):
    """A model to run, as it is or in an emulated number format.

    Attributes:
        model: a Mixture-of-Experts model of transformers.
        emulated: name in `hf.formats.FORMATS` of a format that is emulated by rounding; the model
            must be in float32 then.
        parts: what is in that format: "all", "router" or "others".
    """

    model: nn.Module
    emulated: str | None = None
    parts: Parts = "all"


class ModelsCompared(NamedTuple):
    """The result and the routing of both models."""

    diff: RoutingDiff
    trace_a: RoutingTrace
    trace_b: RoutingTrace


def diff_models(
    a: Side,
    b: Side,
    sequences: Sequence[Int[Tensor, " _"]],
    *,
    batch_size: int = 8,
    progress: Progress | None = None,
) -> ModelsCompared:
    """How two models route and predict the same tokens.

    Args:
        a: the model that is compared with.
        b: the other; it must be another object, for both run at once.
        sequences: token ids, each sequence a document.
        batch_size: sequences per forward pass.
        progress: is told how far the work is.
    """
    require(a.model is not b.model, "A and B are one model: compare it with a copy (deepcopy)")
    started, total = time.perf_counter(), sum(map(len, sequences))
    distances: list[TokenDistances] | None = []
    parts: tuple[list[RoutingTrace], list[RoutingTrace]] = [], []
    done = 0
    for ids in batches(sequences, batch_size):
        (trace_a, logits_a), (trace_b, logits_b) = _run(a, ids), _run(b, ids)
        parts[0].append(trace_a)
        parts[1].append(trace_b)
        if distances is not None:
            distances = _with(distances, logits_a, logits_b, ids)
        done += ids.numel()
        if progress is not None:
            progress("forward", done, total)
    traces = [concatenate(part, documents="renumber") for part in parts]
    ran = time.perf_counter()
    with one_thread():
        found = compare(*traces)
    timings = {"forward": ran - started, "compare": time.perf_counter() - ran}
    return ModelsCompared(summed_up(found, _of_logits(found, distances), timings), *traces)


def trace_model(
    side: Side,
    sequences: Sequence[Int[Tensor, " _"]],
    *,
    documents: Sequence[int] | None = None,
    batch_size: int = 8,
    progress: Progress | None = None,
) -> RoutingTrace:
    """The routing of one model on these sequences.

    Args:
        side: the model.
        sequences: token ids.
        documents: number of each sequence as a document; 0, 1, ... by default.
        batch_size: sequences per forward pass.
        progress: is told how far the work is.
    """
    total, done, parts = sum(map(len, sequences)), 0, []
    for ids in batches(sequences, batch_size):
        parts.append(_run(side, ids)[0])
        done += ids.numel()
        if progress is not None:
            progress("forward", done, total)
    trace = concatenate(parts, documents="renumber")
    if documents is None:
        return trace
    return replace(trace, documents=torch.tensor(documents)[trace.documents.long()])


def sequences_of(trace: RoutingTrace) -> tuple[list[Int[Tensor, " _"]], list[int]]:
    """The token ids of each document of a trace, and the documents' numbers.

    Refuses a trace whose ids are unknown or whose documents have holes: no model could be run on
    what is left.
    """
    require(
        trace.n_tokens > 0 and bool((trace.tokens >= 0).all()),
        "the trace does not know its token ids, so that no model can be run on them: save them "
        "with it under `tokens`",
        TraceError,
    )
    sequences, numbers = [], []
    for number in trace.documents.unique().tolist():
        places = (trace.documents == number).nonzero().squeeze(1)
        places = places[trace.positions[places].argsort()]
        positions = trace.positions[places].long()
        gap = (positions != torch.arange(len(positions))).nonzero()
        require(
            len(gap) == 0,
            f"document {number} of the trace has no token at position "
            f"{int(gap[0]) if len(gap) else 0}: no model can be run on it",
            TraceError,
        )
        sequences.append(trace.tokens[places].long())
        numbers.append(int(number))
    return sequences, numbers


def _run(side: Side, ids: Tensor) -> tuple[RoutingTrace, Any]:
    """The routing of one batch, and the logits if there are any."""
    # entered for the run of this side alone: the emulation rounds whatever runs inside it
    format_ = (
        nullcontext() if side.emulated is None else emulate(side.model, side.emulated, side.parts)
    )
    with only_running(side.model), format_:
        with capture(side.model, epsilons=(), distances=False) as seen:
            logits = getattr(forward(side.model, ids), "logits", None)
        trace = seen.trace()
    told = {}
    if side.emulated is not None:
        told["emulated"] = side.emulated if side.parts == "all" else f"{side.emulated} {side.parts}"
    return replace(trace, provenance=trace.provenance | told), logits


def _with(
    distances: list[TokenDistances], a: Any, b: Any, ids: Tensor
) -> list[TokenDistances] | None:
    """The distances of one more batch; None for models that do not predict the same tokens."""
    able = isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape
    if not able or a.shape[:2] != ids.shape:
        return None
    return [*distances, token_distances(a, b, ids)]


def _of_logits(found: Compared, distances: list[TokenDistances] | None) -> LogitsDiff | None:
    if not distances:
        return None
    joined = TokenDistances(*(torch.cat(column) for column in zip(*distances, strict=True)))
    places = found.aligned.places.in_a
    of_tokens = TokenDistances(*(column[places] for column in joined))
    return logits_diff(of_tokens, found.flips.any(0), found.documents)
