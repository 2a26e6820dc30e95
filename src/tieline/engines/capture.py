"""Run an engine on token ids and return what its routers chose.

trace = tieline.engines.capture("model.gguf", engine="llama.cpp", ids=[[5, 17, 3], [8, 2]])
"""

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from tieline._version import __version__
from tieline.core.errors import TraceError, require
from tieline.core.records import Result
from tieline.core.settings import SettingError
from tieline.engines.answers import check_rows, read_answer, trace_of
from tieline.engines.process import EngineError, Progress, run_worker
from tieline.engines.registry import Engine, engine_named, find_python
from tieline.trace.record import RoutingTrace

LEAST_VOCABULARY_AGREEMENT = 0.5
"""Share of tokens whose text must be the tokenizer's."""


@dataclass(frozen=True, repr=False)
class EngineCapture(Result):
    """What the routers of a model chose in an engine.

    Attributes:
        engine: name of the engine.
        model: the model that it ran.
        output: the folder of the trace; empty if it was not saved.
        tokens: tokens that were routed.
        documents: their documents.
        layers: names of the routed layers.
        n_experts: experts per layer.
        k: experts per token.
        has_scores: whether the trace has scores beside the choice.
        tied: choices that an exact tie left open to the engine.
        off_scores: choices that are not the largest scores.
        dtype: number format of the weights or the arithmetic.
        bits: bits per weight; None where the engine does not tell.
        versions: of the engine and what it runs on.
        settings: how it ran.
        timings: seconds to load and to run.
        trace: the routing itself; not part of the JSON.
    """

    format: ClassVar[str] = "tieline-capture"

    engine: str
    model: str
    output: str
    tokens: int
    documents: int
    layers: tuple[str, ...]
    n_experts: int
    k: int
    has_scores: bool
    tied: int
    off_scores: int
    dtype: str
    bits: float | None
    versions: dict[str, str]
    settings: dict[str, object]
    timings: dict[str, float]
    trace: RoutingTrace | None = field(default=None, metadata={"json": False}, compare=False)

    @property
    def metrics(self) -> dict[str, float]:
        """Named numbers: "tokens", "documents", "layers", "tied", "off_scores", "bits"."""
        numbers = {
            "tokens": float(self.tokens),
            "documents": float(self.documents),
            "layers": float(len(self.layers)),
            "tied": float(self.tied),
            "off_scores": float(self.off_scores),
        }
        return numbers if self.bits is None else numbers | {"bits": self.bits}


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


def capture(
    model: str | Path,
    *,
    engine: str,
    ids: Sequence[Any],
    python: str | Path | None = None,
    dtype: str = "fp32",
    defaults: bool = False,
    scores: bool = True,
    progress: Progress | None = None,
) -> RoutingTrace:
    """Record the routing of a model in an inference engine.

    Args:
        model: what the engine takes: a folder or hub id, for llama.cpp a GGUF file.
        engine: "vllm", "mlx" or "llama.cpp", or another that was registered.
        ids: token ids of each document.
        python: the Python that the engine is installed in; by default it is looked for.
        dtype: precision to compute in, where the engine can choose: "fp32", "bf16", "fp16".
        defaults: leave all settings as the engine has them, which is what is deployed: precision,
            precision of the cache, kernels of attention.
        scores: whether to keep the scores beside the choice.
        progress: called with stage, done and total while the work goes on.
    """
    options = RunOptions(python, dtype, defaults, scores=scores)
    return run_engine(model, engine, ids, options, progress).trace


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
    documents = _documents(ids)
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
        answer = read_answer(path, engine)
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
    trace = trace_of(answer, provenance, options.scores)
    return EngineRun(trace, answer.arrays.get("logprobs"), answer.facts)


def dequantised(
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
        answer = read_answer(path, engine)
    missing = sorted(set(names) - set(answer.arrays))
    require(not missing, f"{engine} returned no {missing[:3]} of {model}", TraceError)
    return dict(answer.arrays), answer.facts


def usable_threads() -> int:
    """Threads for a worker: `OMP_NUM_THREADS` if it is set, else the cores of this process."""
    setting = os.environ.get("OMP_NUM_THREADS", "")
    if setting.isdigit() and int(setting) > 0:
        return int(setting)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _documents(ids: Sequence[Any]) -> list[np.ndarray]:
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


def captured(trace: RoutingTrace, model: str, engine: str, output: str = "") -> EngineCapture:
    """Summarise the trace of an engine as a result.

    Args:
        trace: the routing, with the provenance of the run.
        model: the model that the engine ran.
        engine: name of the engine.
        output: folder that the trace will be saved in; empty if it will not be saved.

    Raises:
        SettingError: if scores are to be saved that contradict the choices.
    """
    provenance, first = trace.provenance, trace.layers[0]
    off = sum(_counts(provenance, "off_scores"))
    if off and first.scores is not None and output:
        raise SettingError(
            "{name}: {count} choices are not the largest scores, so that the engine ranks "
            "something else (a bias, groups): save the choice alone ({scores}), or compare "
            "directly with tieline diff MODEL {name}:{model}",
            name=engine,
            count=off,
            model=model,
        )
    bits = provenance.get("bits")
    versions = provenance.get("versions")
    if not isinstance(versions, dict):
        versions = {key: provenance[key] for key in ("transformers", "torch") if key in provenance}
    return EngineCapture(
        engine=engine,
        model=model,
        output=output,
        tokens=trace.n_tokens,
        documents=len(trace.documents.unique()),
        layers=tuple(layer.name for layer in trace.layers),
        n_experts=first.facts.n_experts,
        k=first.facts.k,
        has_scores=first.scores is not None,
        tied=sum(_counts(provenance, "ties")),
        off_scores=off,
        dtype=str(provenance.get("dtype", "")),
        bits=float(bits) if isinstance(bits, int | float) else None,
        versions={str(key): str(value) for key, value in versions.items()},
        settings=_mapping(provenance, "settings"),
        timings={key: float(value) for key, value in _mapping(provenance, "timings").items()},  # pyright: ignore[reportArgumentType]
        trace=trace,
    )


def _counts(provenance: Mapping[str, object], key: str) -> list[int]:
    counts = provenance.get(key)
    return [int(count) for count in counts] if isinstance(counts, list) else []


def _mapping(provenance: Mapping[str, object], key: str) -> dict[str, object]:
    value = provenance.get(key)
    return dict(value) if isinstance(value, dict) else {}
