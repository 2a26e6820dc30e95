"""Run an engine on token ids and return the choices of its routers.

trace = tieline.engines.capture("model.gguf", engine="llama.cpp", ids=[[5, 17, 3], [8, 2]])

`run_worker` runs the engine in its own Python. It returns one answer or raises one error, and
leaves no process behind. The worker gets a folder with the request and writes its answer there. It
leads a process group of its own, which is always killed at the end, also after Ctrl-C; if this
process itself is killed, the pipe to the worker's stdin closes and the worker ends its group.

The answer is verified: its rows (every token sent, in order), the expert ids, and the picks against
the scores. A router takes the k largest scores, so min z(chosen) >= max z(left out). Picks are

    exact       strictly above all others
    tied        equal at rank k, up to 8 eps max(1, |z_[k]|) of float32: either choice is right
    off         below an expert that was left out: the engine ranks something else

The picks of an engine are never changed: ties are counted, not broken again.
"""

import json
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch

from tieline._version import __version__
from tieline.core.errors import TielineError, TraceError, require
from tieline.core.ranking import ranked_choice
from tieline.core.records import parse_json
from tieline.engines.engine_registry import (
    WORKERS,
    Engine,
    engine_named,
    environment_of,
    find_python,
)
from tieline.trace.record import TOKEN_KEYS, LayerFacts, LayerTrace, RoutingTrace, smallest_id_dtype

Progress = Callable[[str, int, int], None]

ANSWER_FILE = "answer.npz"
STDERR_TAIL_BYTES = 4000
"""Bytes at the end of the worker's stderr that are searched for an error."""


class EngineError(TielineError):
    """An engine is not installed, rejects a model, or did not finish."""


def run_worker(
    engine: Engine,
    python: Path,
    folder: Path,
    request: Mapping[str, Any],
    documents: Sequence[np.ndarray],
    progress: Progress | None = None,
) -> Path:
    """Run a request in a worker process and return the file with its answer.

    Args:
        engine: the engine.
        python: the Python that the engine is installed in.
        folder: an empty folder for request and answer.
        request: JSON values for the worker; the lengths of the documents are added.
        documents: token ids of each document.
        progress: called with stage, done and total.
    """
    lengths = [len(ids) for ids in documents]
    (folder / "request.json").write_text(json.dumps({**request, "lengths": lengths}))
    flat = np.concatenate([np.zeros(0, np.int64), *documents]).astype(np.int64)
    np.save(folder / "tokens.npy", flat, allow_pickle=False)
    report: dict[str, Any] = {}
    with _started_worker(engine, python, folder) as worker:
        _read_worker_messages(worker, report, lengths, progress)
        code = worker.wait()
    answer = folder / ANSWER_FILE
    if code == 0 and answer.is_file():
        return answer
    stderr = (folder / "stderr").read_bytes()[-STDERR_TAIL_BYTES:].decode(errors="replace")
    raise EngineError(_worker_failure_message(engine, python, code, report, stderr))


@contextmanager
def _started_worker(
    engine: Engine, python: Path, folder: Path
) -> "Iterator[subprocess.Popen[bytes]]":
    """Start a worker, and kill its process group when the block ends."""
    command = [str(python), str(WORKERS / "main.py"), str(engine.worker), str(folder)]
    with (folder / "stderr").open("wb") as stderr:
        try:
            worker = subprocess.Popen(  # noqa: S603
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=environment_of(engine, python),
                cwd=Path.cwd(),
                start_new_session=True,
            )
        except OSError as problem:
            why = problem.strerror or problem
            raise EngineError(f"engine_python: cannot run {python}: {why}") from problem
        try:
            yield worker
        finally:
            kill_worker_group(worker)


def kill_worker_group(worker: "subprocess.Popen[bytes]") -> None:
    """Kill a worker's process group, close its pipes and wait for it."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(worker.pid, signal.SIGKILL)
    for pipe in (worker.stdin, worker.stdout):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()
    worker.wait()


def _read_worker_messages(
    worker: "subprocess.Popen[bytes]",
    report: dict[str, Any],
    lengths: Sequence[int],
    progress: Progress | None,
) -> None:
    """Read the messages of a worker, progress or an error, into `report` until it ends."""
    assert worker.stdout is not None
    total = sum(lengths)
    if progress is not None:
        progress("engine", 0, total)
    # a child of the worker may keep the pipe open after the worker has ended
    waiter = threading.Thread(target=_kill_group_when_ended, args=(worker,), daemon=True)
    waiter.start()
    for line in worker.stdout:
        with suppress(ValueError):
            message = json.loads(line)
            if not isinstance(message, dict):
                continue
            report.update(message)
            done = message.get("done")
            if progress is not None and isinstance(done, int):
                progress("engine", sum(lengths[:done]), total)


def _kill_group_when_ended(worker: "subprocess.Popen[bytes]") -> None:
    """Wait for a worker to end, then kill its process group, so that its pipes close."""
    worker.wait()
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(worker.pid, signal.SIGKILL)


def _worker_failure_message(
    engine: Engine, python: Path, code: int, report: Mapping[str, Any], stderr: str
) -> str:
    """Return the error message for a worker that gave no answer."""
    if report.get("missing"):
        return (
            f"{python} has no module {report['missing']}, which {engine.name} needs: name another "
            "Python with engine_python, or install it (tieline capture --list-engines says how)"
        )
    if report.get("error"):
        message = str(report["error"])
        has_name = message.casefold().startswith(engine.name.casefold())
        return message if has_name else f"{engine.name}: {message}"
    last = next((x.strip() for x in reversed(stderr.splitlines()) if x.strip()), "it said nothing")
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else str(-code)
        hint = " (out of memory?)" if name == "SIGKILL" else ""
        return f"the {engine.name} worker was ended by {name}{hint}; its last words: {last:.300}"
    if code == 0:
        return f"{python} ended without an answer: is it a Python? Its last words: {last:.300}"
    return f"the {engine.name} worker left with code {code}: {last:.300}"


ANSWER_AXES = {"picks": 3, "logits": 3, "weights": 3, "logprobs": 2}
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
"""Facts of a worker's answer that are stored in the provenance of the trace."""
KEPT_RANKS = 4
"""Ranks kept beyond k, as `tieline.capture` keeps them."""
TIE_ROUNDING = 8 * float(np.finfo(np.float32).eps)


@dataclass(frozen=True)
class WorkerAnswer:
    """The arrays and facts of a worker's answer, unverified.

    Attributes:
        engine: name of the engine, for messages.
        arrays: arrays by name: picks, logits, weights, logprobs, tokens, documents, positions.
        facts: JSON values: layers, units, dtype, versions, settings, timings.
    """

    engine: str
    arrays: Mapping[str, np.ndarray]
    facts: Mapping[str, Any]


def read_worker_answer(path: Path, engine: str) -> WorkerAnswer:
    """Read the answer file of a worker; raises if it is no archive of arrays with JSON facts."""
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


def check_worker_answer(answer: WorkerAnswer, documents: Sequence[np.ndarray]) -> None:
    """Raise unless an answer has all rows of the documents and arrays of consistent shapes."""
    name, arrays = answer.engine, answer.arrays
    sent_tokens = np.concatenate(list(documents))
    require("picks" in arrays, f"{name}: the answer has no picks", TraceError)
    for key, axes in ANSWER_AXES.items():
        if key in arrays:
            _check_answer_array(answer, key, axes, len(sent_tokens))
    order = np.concatenate([np.arange(len(x)) for x in documents])
    numbers = np.repeat(np.arange(len(documents)), [len(x) for x in documents])
    for key, expected in zip(TOKEN_KEYS, (sent_tokens, numbers, order), strict=True):
        same = key in arrays and np.array_equal(arrays[key], expected)
        require(
            same, f"{name} routed other {key} than were sent: rows are not comparable", TraceError
        )
    layers = answer.facts.get("layers")
    count = arrays["picks"].shape[1]
    fits = isinstance(layers, list) and len(layers) == count
    require(fits, f"{name}: {count} layers of picks, but names {layers!r:.80}", TraceError)


def _check_answer_array(answer: WorkerAnswer, key: str, axes: int, tokens: int) -> None:
    """Raise if an array of an answer has another shape or type, missing rows or NaN."""
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
    """How the picks of a layer agree with its scores.

    Attributes:
        tied: number of tokens with a tie at the threshold, where either choice is right.
        off_scores: number of tokens that chose an expert with a smaller score than one left out.
    """

    tied: int
    off_scores: int


def score_agreement(picks: np.ndarray, scores: np.ndarray) -> ScoreAgreement:
    """Count ties and contradictions of picks (T, k) and scores (T, E); -inf bars an expert."""
    chosen = np.take_along_axis(scores, picks, 1).astype(np.float64)
    others = scores.astype(np.float64).copy()
    np.put_along_axis(others, picks, -np.inf, 1)
    if picks.shape[1] == scores.shape[1]:
        return ScoreAgreement(0, 0)
    low, high = chosen.min(1), others.max(1)
    tolerance = TIE_ROUNDING * np.maximum(1.0, np.abs(high))
    tied = (low <= high) & (low >= high - tolerance)
    return ScoreAgreement(int(tied.sum()), int((low < high - tolerance).sum()))


def answer_trace(
    answer: WorkerAnswer, provenance: Mapping[str, object], scores: bool = True
) -> RoutingTrace:
    """Return the trace of a verified answer.

    Args:
        answer: an answer that `check_worker_answer` accepts.
        provenance: JSON values that are stored with the facts of the worker.
        scores: whether to keep the scores.
    """
    arrays, facts = answer.arrays, answer.facts
    layers = [_answer_layer(answer, index, scores) for index in range(arrays["picks"].shape[1])]
    counts = [agreement for _, agreement in layers if agreement is not None]
    recorded: dict[str, object] = dict(provenance)
    if counts:
        recorded["ties"] = [agreement.tied for agreement in counts]
        recorded["off_scores"] = [agreement.off_scores for agreement in counts]
    for key in PROVENANCE_FACTS:
        if facts.get(key) is not None:
            recorded[key] = facts[key]
    tokens, documents, positions = (
        torch.from_numpy(arrays[key].astype(np.int64)) for key in TOKEN_KEYS
    )
    records = tuple(layer for layer, _ in layers)
    return RoutingTrace(records, tokens, documents, positions, provenance=recorded)


def _answer_layer(
    answer: WorkerAnswer, index: int, keep_scores: bool
) -> tuple[LayerTrace, ScoreAgreement | None]:
    """Return the trace of one layer, and how its picks agree with its scores, if it has any."""
    arrays, facts, name = answer.arrays, answer.facts, str(answer.facts["layers"][index])
    picks = np.ascontiguousarray(arrays["picks"][:, index]).astype(np.int64)
    scores = arrays["logits"][:, index].astype(np.float32) if "logits" in arrays else None
    stated = facts.get("n_experts")
    size = stated if isinstance(stated, int) else int(picks.max()) + 1
    size = size if scores is None else scores.shape[1]
    _check_picks(answer.engine, name, picks, size)
    weights = arrays["weights"][:, index] if "weights" in arrays else None
    layer_facts = LayerFacts(size, picks.shape[1], facts.get("units", "logits"), affine=False)
    small = smallest_id_dtype(size)
    layer_weights = None if weights is None else torch.from_numpy(weights.astype(np.float32))
    if scores is None or not keep_scores:
        return LayerTrace(
            name, layer_facts, torch.from_numpy(picks).to(small), weights=layer_weights
        ), None
    agreement = score_agreement(picks, scores)
    experts, values = _ranked_picks(picks, scores, agreement)
    ranks = experts[:, : layer_facts.k, None]
    order = (torch.from_numpy(picks)[:, None, :] == ranks).long().argmax(2)
    layer_weights = None if layer_weights is None else layer_weights.gather(1, order)
    return LayerTrace(name, layer_facts, experts.to(small), values, layer_weights), agreement


def _check_picks(engine: str, layer: str, picks: np.ndarray, size: int) -> None:
    """Raise if picks are out of range, or a token has an expert twice."""
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


def _ranked_picks(
    picks: np.ndarray, scores: np.ndarray, agreement: ScoreAgreement
) -> tuple[Any, Any]:
    """Return experts and scores of the kept ranks; the picked experts come first."""
    k, ranks = picks.shape[1], min(picks.shape[1] + KEPT_RANKS, scores.shape[1])
    chosen, values = torch.from_numpy(picks), torch.from_numpy(scores)
    if not agreement.off_scores:
        ranked = ranked_choice(values, chosen, k, ranks)
        return ranked.indices, ranked.values
    # the picks contradict the scores: both are kept as they are, for `diff` to say so
    raised = values.scatter(
        1, chosen, values.gather(1, chosen) + 2 * (values.amax() - values.amin())
    )
    experts = torch.argsort(raised, dim=1, descending=True, stable=True)[:, :ranks]
    return experts, values.gather(1, experts)


LEAST_VOCABULARY_AGREEMENT = 0.5
"""Least share of tokens whose text in a GGUF must be that of the tokenizer."""


@dataclass(frozen=True)
class EngineRun:
    """One run of an engine.

    Attributes:
        trace: the routing.
        logprobs: (T, V) log-probabilities of the next token, float32; None unless asked for.
        facts: JSON values of the worker: layers, versions, settings, timings.
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
        defaults: whether to keep the default settings of the engine.
        logprobs: whether to return final log-probabilities.
        scores: whether the trace keeps scores.
        threads: number of threads of the engine; 0 for `usable_threads`.
        vocabulary: texts of tokens by id, to detect a GGUF of another model.
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
    """Run an engine on token ids and return trace, log-probabilities and facts; see `capture`."""
    record = engine_named(engine)
    documents = _checked_documents(ids)
    _require_supported_request(record, model, options)
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
    check_worker_answer(answer, documents)
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
    """Return the weights of a quantised model as its engine dequantises them, and facts.

    Args:
        model: the quantised model.
        engine: the engine that reads it.
        names: names of the tensors in a checkpoint of transformers.
        python: the engine's Python.

    Returns:
        float32 arrays by name, and the JSON values of the worker.
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
    """Return the number of threads of a worker: `OMP_NUM_THREADS`, else this process's cores."""
    setting = os.environ.get("OMP_NUM_THREADS", "")
    if setting.isdigit() and int(setting) > 0:
        return int(setting)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _checked_documents(ids: Sequence[Any]) -> list[np.ndarray]:
    """Return token ids of each document as int64 arrays; raises if some are no token ids."""
    documents = [np.asarray(row) for row in ids]
    require(len(documents) > 0, "there are no tokens to run: ids is empty")
    for number, row in enumerate(documents):
        valid = row.ndim == 1 and len(row) > 0 and row.dtype.kind in "iu" and int(row.min()) >= 0
        require(
            valid,
            f"document {number} must be token ids >= 0, got {row.dtype} of shape {row.shape}",
        )
    return [row.astype(np.int64) for row in documents]


def _require_supported_request(engine: Engine, model: str | Path, options: RunOptions) -> None:
    """Raise if the engine does not take this precision or this kind of model file."""
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
    """Raise if the vocabulary of a GGUF is not that of the tokenizer."""
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
