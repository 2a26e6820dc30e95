"""What a worker wrote, verified and turned into a trace.

Verified are the rows (every token sent, in order), the ids of experts, and the picks against the
scores. A router takes the k largest scores, so min z(chosen) >= max z(left out). Picks are

    exact       strictly above all others
    tied        equal at rank k, up to 8 eps max(1, |z_[k]|) of float32: either choice is right
    off         below an expert that was left out: the engine ranks something else

The picks of an engine are data: ties are counted apart and never decided anew.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch

from tieline.core.errors import TraceError, require
from tieline.core.ranking import ranked_choice
from tieline.core.records import parse_json
from tieline.trace.record import LayerFacts, LayerTrace, RoutingTrace

KEYS = ("tokens", "documents", "positions")
SHAPES = {"picks": 3, "logits": 3, "weights": 3, "logprobs": 2}
PROVENANCE_FACTS = (
    "dtype",
    "rounding",
    "rounded",
    "router",
    "bits",
    "architecture",
    "versions",
    "settings",
    "timings",
    "python",
)
"""Facts of a worker that go into the provenance of a trace."""
KEPT_RANKS = 4
"""Ranks kept beyond k, as `tieline.capture` keeps them."""
ROUNDING = 8 * float(np.finfo(np.float32).eps)


@dataclass(frozen=True)
class WorkerAnswer:
    """The arrays and facts of a worker, as they were written.

    Attributes:
        engine: name of the engine, for messages.
        arrays: by name.
        facts: JSON values: layers, units, dtype, versions, settings, timings.
    """

    engine: str
    arrays: Mapping[str, np.ndarray]
    facts: Mapping[str, Any]


def read_worker_answer(path: Path, engine: str) -> WorkerAnswer:
    """Read the answer file of a worker; raises if it is malformed."""
    try:
        with np.load(path, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}
    except (OSError, ValueError, BadZipFile, EOFError) as problem:
        raise TraceError(f"{engine}: the answer cannot be read: {problem}") from problem
    facts = arrays.pop("facts", None)
    require(facts is not None, f"{engine}: the answer has no facts", TraceError)
    assert facts is not None
    content = parse_json(facts.tobytes(), f"{engine}: facts")
    require(isinstance(content, dict), f"{engine}: facts must be a JSON object", TraceError)
    return WorkerAnswer(engine, arrays, content)  # pyright: ignore[reportArgumentType]


def check_rows(answer: WorkerAnswer, documents: Sequence[np.ndarray]) -> None:
    """Refuse an answer that lacks rows, has other tokens, or arrays of other shapes."""
    name, arrays = answer.engine, answer.arrays
    sent = np.concatenate(list(documents))
    require("picks" in arrays, f"{name}: the answer has no picks", TraceError)
    for key, axes in SHAPES.items():
        if key in arrays:
            _check_answer_array(answer, key, axes, len(sent))
    order = np.concatenate([np.arange(len(x)) for x in documents])
    numbers = np.repeat(np.arange(len(documents)), [len(x) for x in documents])
    for key, expected in zip(KEYS, (sent, numbers, order), strict=True):
        same = key in arrays and np.array_equal(arrays[key], expected)
        require(
            same, f"{name} routed other {key} than were sent: rows are not comparable", TraceError
        )
    layers = answer.facts.get("layers")
    count = arrays["picks"].shape[1]
    fits = isinstance(layers, list) and len(layers) == count
    require(fits, f"{name}: {count} layers of picks, but names {layers!r:.80}", TraceError)


def _check_answer_array(answer: WorkerAnswer, key: str, axes: int, tokens: int) -> None:
    """Refuse an array of another shape or type, with missing rows or NaN."""
    array, picks = answer.arrays[key], answer.arrays["picks"]
    name = answer.engine
    require(array.ndim == axes, f"{name}: {key} has shape {array.shape}", TraceError)
    require(
        len(array) == tokens,
        f"{name} returned {len(array)} rows of {key} for {tokens} tokens: rows are missing (cached "
        "prefixes, chunked prefill or a last token without a row?)",
        TraceError,
    )
    kind = "iu" if key == "picks" else "f"
    require(array.dtype.kind in kind, f"{name}: {key} has type {array.dtype}", TraceError)
    if axes == 3:
        fits = array.shape[1] == picks.shape[1]
        require(
            fits, f"{name}: {key} has {array.shape[1]} layers, picks {picks.shape[1]}", TraceError
        )
    if key != "picks":
        require(not np.isnan(array).any(), f"{name}: {key} has NaN", TraceError)


@dataclass(frozen=True)
class ScoreAgreement:
    """Ties and contradictions between the picks of a layer and its scores.

    Attributes:
        tied: tokens whose choice a tie leaves open.
        off: tokens that chose an expert with a smaller score than one left out.
    """

    tied: int
    off: int


def score_agreement(picks: np.ndarray, scores: np.ndarray) -> ScoreAgreement:
    """Compare picks (T, k) with scores (T, E); -inf marks experts that cannot be chosen."""
    chosen = np.take_along_axis(scores, picks, 1).astype(np.float64)
    others = scores.astype(np.float64).copy()
    np.put_along_axis(others, picks, -np.inf, 1)
    if picks.shape[1] == scores.shape[1]:
        return ScoreAgreement(0, 0)
    low, high = chosen.min(1), others.max(1)
    room = ROUNDING * np.maximum(1.0, np.abs(high))
    tied = (low <= high) & (low >= high - room)
    return ScoreAgreement(int(tied.sum()), int((low < high - room).sum()))


def answer_trace(
    answer: WorkerAnswer, provenance: Mapping[str, object], scores: bool = True
) -> RoutingTrace:
    """Return the trace of a verified answer.

    Args:
        answer: what `check_rows` accepted.
        provenance: JSON values beside those of the worker.
        scores: whether to keep the scores.
    """
    arrays, facts = answer.arrays, answer.facts
    layers = [_answer_layer(answer, index, scores) for index in range(arrays["picks"].shape[1])]
    counts = [agreed for _, agreed in layers if agreed is not None]
    recorded: dict[str, object] = dict(provenance)
    if counts:
        recorded["ties"] = [agreed.tied for agreed in counts]
        recorded["off_scores"] = [agreed.off for agreed in counts]
    for key in PROVENANCE_FACTS:
        if facts.get(key) is not None:
            recorded[key] = facts[key]
    tokens, documents, positions = (torch.from_numpy(arrays[key].astype(np.int64)) for key in KEYS)
    return RoutingTrace(
        tuple(layer for layer, _ in layers), tokens, documents, positions, provenance=recorded
    )


def _answer_layer(
    answer: WorkerAnswer, index: int, keep: bool
) -> tuple[LayerTrace, ScoreAgreement | None]:
    """The trace of one layer, and how its picks agree with the scores if it has any."""
    arrays, facts, name = answer.arrays, answer.facts, str(answer.facts["layers"][index])
    picks = np.ascontiguousarray(arrays["picks"][:, index]).astype(np.int64)
    scores = arrays["logits"][:, index].astype(np.float32) if "logits" in arrays else None
    size = _answer_experts(answer, picks) if scores is None else scores.shape[1]
    _check_picks(answer.engine, name, picks, size)
    weights = arrays["weights"][:, index] if "weights" in arrays else None
    layer_facts = LayerFacts(size, picks.shape[1], facts.get("units", "logits"), affine=False)
    small = torch.int16 if size < 1 << 15 else torch.int32
    if scores is None or not keep:
        held = None if weights is None else torch.from_numpy(weights.astype(np.float32))
        return LayerTrace(name, layer_facts, torch.from_numpy(picks).to(small), weights=held), None
    agreed = score_agreement(picks, scores)
    experts, values = _ranked_picks(picks, scores, agreed)
    held = (
        None if weights is None else _weights_by_rank(weights, picks, experts[:, : layer_facts.k])
    )
    return LayerTrace(name, layer_facts, experts.to(small), values, held), agreed


def _answer_experts(answer: WorkerAnswer, picks: np.ndarray) -> int:
    """Number of experts: as stated, else one more than the largest pick."""
    stated = answer.facts.get("n_experts")
    return int(stated) if isinstance(stated, int) else int(picks.max()) + 1


def _check_picks(engine: str, layer: str, picks: np.ndarray, size: int) -> None:
    """Refuse picks that are no experts, or one twice for a token."""
    wrong = (picks < 0) | (picks >= size)
    require(
        not wrong.any(),
        f"{engine}: layer {layer!r} picks experts outside 0 ... {size - 1} in "
        f"{int(wrong.any(1).sum())} of {len(picks)} tokens",
        TraceError,
    )
    ordered = np.sort(picks, 1)
    twice = (ordered[:, 1:] == ordered[:, :-1]).any(1)
    require(
        not twice.any(),
        f"{engine}: layer {layer!r} picks an expert twice in {int(twice.sum())} tokens",
        TraceError,
    )


def _ranked_picks(picks: np.ndarray, scores: np.ndarray, agreed: ScoreAgreement) -> tuple[Any, Any]:
    """Experts and scores of the kept ranks, those that were picked first."""
    k, ranks = picks.shape[1], min(picks.shape[1] + KEPT_RANKS, scores.shape[1])
    chosen, values = torch.from_numpy(picks), torch.from_numpy(scores)
    if not agreed.off:
        ranked = ranked_choice(values, chosen, k, ranks)
        return ranked.indices, ranked.values
    # the picks contradict the scores: both are kept as they are, for `diff` to say so
    raised = values.scatter(
        1, chosen, values.gather(1, chosen) + 2 * (values.amax() - values.amin())
    )
    experts = torch.argsort(raised, dim=1, descending=True, stable=True)[:, :ranks]
    return experts, values.gather(1, experts)


def _weights_by_rank(weights: np.ndarray, picks: np.ndarray, experts: Any) -> Any:
    """Weights of the picks in the order of the ranks."""
    order = (torch.from_numpy(picks)[:, None, :] == experts[:, :, None]).long().argmax(2)
    return torch.from_numpy(weights.astype(np.float32)).gather(1, order)
