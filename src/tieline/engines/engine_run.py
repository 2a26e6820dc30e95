"""Run an engine on token ids and return what its routers chose.

trace = tieline.engines.capture("model.gguf", engine="llama.cpp", ids=[[5, 17, 3], [8, 2]])
"""

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tieline._version import __version__
from tieline.core.errors import TraceError, require
from tieline.engines.engine_registry import Engine, engine_named, find_python
from tieline.engines.worker_answers import answer_trace, check_rows, read_worker_answer
from tieline.engines.worker_process import EngineError, Progress, run_worker
from tieline.trace.record import RoutingTrace

LEAST_VOCABULARY_AGREEMENT = 0.5
"""Share of tokens whose text must be the tokenizer's."""


@dataclass(frozen=True)
class EngineRun:
    """One run of an engine.

    Attributes:
        trace: the routing.
        logprobs: (T, V) log-probabilities of the next token, float32; None unless asked for.
        facts: what the worker told: layers, versions, settings, timings.
    """

    trace: RoutingTrace
    logprobs: np.ndarray | None
    facts: Mapping[str, Any]


@dataclass(frozen=True)
class RunOptions:
    """How an engine is run; see `capture`.

    Attributes:
        python: the engine's Python.
        dtype: precision.
        defaults: whether settings are the engine's own.
        logprobs: whether to return final log-probabilities.
        scores: whether the trace keeps scores.
        threads: threads of the engine.
        vocabulary: texts of tokens by id, to tell a GGUF of another model.
    """

    python: str | Path | None = None
    dtype: str = "fp32"
    defaults: bool = False
    logprobs: bool = False
    scores: bool = True
    threads: int = 0
    vocabulary: Mapping[int, str] | None = None


def run_engine(
    model: str | Path,
    engine: str,
    ids: Sequence[Any],
    options: RunOptions = RunOptions(),  # noqa: B008
    progress: Progress | None = None,
) -> EngineRun:
    """Run an engine; see `capture`. Its files are removed and its process has ended on return."""
    record = engine_named(engine)
    documents = _checked_documents(ids)
    _check_request(record, model, options)
    python = find_python(record, options.python)
    vocabulary = dict(options.vocabulary or {})
    request = {
        "job": "capture",
        "model": str(model),
        "dtype": options.dtype,
        "defaults": options.defaults,
        "logprobs": options.logprobs,
        "threads": options.threads or usable_threads(),
        "words": sorted(vocabulary),
    }
    with tempfile.TemporaryDirectory(prefix="tieline-engine-") as folder:
        path = run_worker(record, python, Path(folder), request, documents, progress)
        answer = read_worker_answer(path, engine)
    check_rows(answer, documents)
    _check_vocabulary(record, answer.facts, vocabulary)
    provenance = {
        "source": "engine",
        "engine": engine,
        "model": str(model),
        "engine_python": str(python),
        "engine_defaults": options.defaults,
        "tieline": __version__,
        "torch": torch.__version__,
    }
    trace = answer_trace(answer, provenance, options.scores)
    return EngineRun(trace, answer.arrays.get("logprobs"), answer.facts)


def dequantised_weights(
    model: str | Path,
    engine: str,
    names: Sequence[str],
    python: str | Path | None = None,
) -> tuple[dict[str, np.ndarray], Mapping[str, Any]]:
    """Return the weights that an engine stores for a quantised model, in float32, and facts.

    Args:
        model: the quantised model.
        engine: the engine that reads it.
        names: names of the tensors in a checkpoint of transformers.
        python: the engine's Python.
    """
    record = engine_named(engine)
    engine_python = find_python(record, python)
    request = {"job": "weights", "model": str(model), "names": list(names)}
    with tempfile.TemporaryDirectory(prefix="tieline-engine-") as folder:
        path = run_worker(record, engine_python, Path(folder), request, [])
        answer = read_worker_answer(path, engine)
    missing = sorted(set(names) - set(answer.arrays))
    require(not missing, f"{engine} returned no {missing[:3]} of {model}", TraceError)
    return dict(answer.arrays), answer.facts


def usable_threads() -> int:
    """Threads for a worker: `OMP_NUM_THREADS` if it is set, else the cores of this process."""
    setting = os.environ.get("OMP_NUM_THREADS", "")
    if setting.isdigit() and int(setting) > 0:
        return int(setting)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _checked_documents(ids: Sequence[Any]) -> list[np.ndarray]:
    """Token ids of each document as arrays; refuses what is none."""
    documents = [np.asarray(row) for row in ids]
    require(len(documents) > 0, "there are no tokens to run: ids is empty")
    for number, row in enumerate(documents):
        valid = row.ndim == 1 and len(row) > 0 and row.dtype.kind in "iu" and int(row.min()) >= 0
        require(
            valid,
            f"document {number} must be token ids >= 0, got {row.dtype} of shape {row.shape}",
        )
    return [row.astype(np.int64) for row in documents]


def _check_request(engine: Engine, model: str | Path, options: RunOptions) -> None:
    """Refuse a precision or a kind of model that the engine does not take."""
    formats = ", ".join(engine.formats)
    require(
        options.defaults or options.dtype in engine.formats,
        f"dtype {options.dtype!r} is not computed by {engine.name} here: {formats}",
    )
    gguf = str(model).endswith(".gguf")
    require(
        gguf == engine.gguf,
        f"{engine.name} takes {engine.model}, got {str(model)!r:.200}"
        + (": convert it first (docs: Which engine is right?)" if engine.gguf else ""),
        EngineError,
    )


def _check_vocabulary(
    engine: Engine, facts: Mapping[str, Any], vocabulary: Mapping[int, str]
) -> None:
    """Refuse a file whose vocabulary is not the tokenizer's."""
    texts = facts.get("words")
    if not vocabulary or not isinstance(texts, list) or len(texts) != len(vocabulary):
        return
    same = sum(
        text == str(other)
        for (_, text), other in zip(sorted(vocabulary.items()), texts, strict=True)
    )
    require(
        same >= LEAST_VOCABULARY_AGREEMENT * len(vocabulary),
        f"{engine.name}: {len(vocabulary) - same} of {len(vocabulary)} tokens have another text in "
        "this file than in the tokenizer: it is a GGUF of another model",
        TraceError,
    )
