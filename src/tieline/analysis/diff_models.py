"""How far the predictions of two models are apart, token by token.

With d_v = log P_B(v) - log P_A(v) and k3(d) = e^d - 1 - d >= 0:

    k3 at the text      k3(d_x), x the token that follows in the text
    KL(A ‖ B)           Σ_v P_A(v) k3(d_v) = Σ_v P_A(v) (-d_v)

The sum of k3 has only terms that are not negative, so that distances far below the rounding of the
log-probabilities do not drown in it. All in float64.

Comparing models on the same tokens: two dtypes, two checkpoints, two expert implementations.

    text = tokenise(tokenizer, words, 4096, 512)
    found = diff_models(Side(model), Side(copy, emulated="bf16"), text.sequences)

Both models run batch by batch side by side, so that no logits are kept.

What a side of a comparison is: a saved trace, a file of an engine, or a model.

source_kind    which of them a name stands for
read_source    the trace of a folder or file
read_dtype     "bf16" or "bf16-emulated": the dtype to load and the format to emulate
same_tokens    refuse two tokenisations that differ, naming the first token
"""

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from tieline.analysis.diff import Compared, compare, summed_up
from tieline.analysis.diff_records import LogitsDiff, RoutingDiff
from tieline.core.errors import TraceError, require
from tieline.core.numerics import one_thread
from tieline.core.statistics import clustered_error, k3
from tieline.hf.capture import capture
from tieline.hf.emulate import Parts, emulate
from tieline.hf.formats import FORMATS
from tieline.hf.running import batches, forward, only_running
from tieline.trace.ops import concatenate
from tieline.trace.readers import import_trace
from tieline.trace.record import RoutingTrace
from tieline.trace.store import folder_kind, load_trace

__all__ = [
    "SHIPPED",
    "ModelsCompared",
    "Side",
    "TokenDistances",
    "diff_models",
    "logits_diff",
    "read_dtype",
    "read_source",
    "same_tokens",
    "sequences_of",
    "source_kind",
    "token_distances",
    "trace_model",
]

ROWS = 128
"""Tokens at a time whose distributions are held in float64."""


class TokenDistances(NamedTuple):
    """Per token: k3 and KL of what it predicts, and both losses; NaN where nothing follows."""

    k3: Float[Tensor, " tokens"]
    kl: Float[Tensor, " tokens"]
    loss_a: Float[Tensor, " tokens"]
    loss_b: Float[Tensor, " tokens"]


def token_distances(
    logits_a: Float[Tensor, "rows length vocabulary"],
    logits_b: Float[Tensor, "rows length vocabulary"],
    ids: Int[Tensor, "rows length"],
) -> TokenDistances:
    """The distances at every token of a batch, row after row."""
    following = torch.cat((ids[:, 1:], torch.zeros_like(ids[:, :1])), dim=1).flatten()
    flat_a, flat_b = logits_a.flatten(0, 1), logits_b.flatten(0, 1)
    parts = [
        _distances(flat_a[rows], flat_b[rows], following[rows])
        for rows in torch.arange(ids.numel()).split(ROWS)
    ]
    joined = [torch.cat(column) for column in zip(*parts, strict=True)]
    last = torch.zeros(ids.shape, dtype=torch.bool)
    last[:, -1] = True
    return TokenDistances(*(column.masked_fill(last.flatten(), torch.nan) for column in joined))


def _distances(a: Tensor, b: Tensor, target: Tensor) -> tuple[Tensor, ...]:
    log_a, log_b = (logits.double().cpu().log_softmax(1) for logits in (a, b))
    terms = k3(log_a, log_b)
    kl = (log_a.exp() * terms).sum(1)
    places = target.cpu()[:, None]
    at_text = (x.gather(1, places).squeeze(1) for x in (terms, -log_a, -log_b))
    of_text, loss_a, loss_b = at_text
    return of_text, kl, loss_a, loss_b


def logits_diff(
    found: TokenDistances, flipped: Bool[Tensor, " tokens"], documents: Int[Tensor, " tokens"]
) -> LogitsDiff | None:
    """Means, errors and tails over the tokens that predict something; None if none does.

    Args:
        found: distances of every token.
        flipped: tokens that flip in at least one layer.
        documents: document of each token.
    """
    known = ~found.kl.isnan()
    if not bool(known.any()):
        return None
    values = TokenDistances(*(column[known] for column in found))
    groups, apart = documents[known], flipped[known]
    return LogitsDiff(
        k3=values.k3.mean().item(),
        k3_error=clustered_error(values.k3, groups),
        kl=values.kl.mean().item(),
        kl_error=clustered_error(values.kl, groups),
        kl_p99=float(np.quantile(values.kl.numpy(), 0.99, method="inverted_cdf")),
        kl_flipped=_mean(values.kl[apart]),
        kl_unflipped=_mean(values.kl[~apart]),
        loss_a=values.loss_a.mean().item(),
        loss_b=values.loss_b.mean().item(),
        tokens=int(known.sum()),
    )


def _mean(values: Tensor) -> float | None:
    return values.mean().item() if len(values) else None


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


SHIPPED = "shipped"
"""The name of the model in the box."""
EMULATED = "-emulated"


def source_kind(name: str) -> Literal["trace", "file", "model"]:
    """A folder with an index of ours is a trace, a file is that of an engine, all else a model."""
    path = Path(name)
    if path.is_dir() and (path / "tieline.json").is_file():
        return "trace"
    return "file" if path.is_file() or path.suffix in _SUFFIXES else "model"


def read_source(name: str, n_experts: int | None = None, k: int | None = None) -> RoutingTrace:
    """The trace in a folder or file.

    Args:
        name: a folder of `save_trace`, or a file of `import_trace`.
        n_experts: number of experts, for files that do not tell.
        k: how many experts of each line of a table were chosen.
    """
    if source_kind(name) == "file":
        require(Path(name).is_file(), f"no such file: {name}", TraceError)
        return import_trace(name, n_experts, k if Path(name).suffix in (".csv", ".jsonl") else None)
    kind = folder_kind(Path(name))
    require(
        kind == "trace",
        f"{name} is a {kind}: a comparison needs every token, hence a trace",
        TraceError,
    )
    return load_trace(name)


def read_dtype(words: str) -> tuple[str, str | None]:
    """The dtype to load a model in, and the format to emulate."""
    if not words.endswith(EMULATED):
        return words, None
    name = words.removesuffix(EMULATED)
    known = ", ".join(f"{known}{EMULATED}" for known in FORMATS)
    require(name in FORMATS, f"no format {words!r}: emulated are {known}")
    return "fp32", name


def same_tokens(a: Sequence[Int[Tensor, " _"]], b: Sequence[Int[Tensor, " _"]]) -> None:
    """Refuse sequences that differ, naming the first token that does."""
    for number, (first, second) in enumerate(zip(a, b, strict=False)):
        for place, (x, y) in enumerate(zip(first.tolist(), second.tolist(), strict=False)):
            require(
                x == y,
                f"different tokenisations: sequence {number}, token {place} is {x} in A, {y} in B",
                TraceError,
            )
        _same_length(f"sequence {number}", len(first), len(second), "tokens")
    _same_length("the text", len(a), len(b), "sequences")


def _same_length(what: str, a: int, b: int, unit: str) -> None:
    require(a == b, f"different tokenisations: {what} has {a} {unit} in A, {b} in B", TraceError)


_SUFFIXES = (".npy", ".npz", ".safetensors", ".csv", ".jsonl")
