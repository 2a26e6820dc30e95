"""Compare a run of an inference engine with a model, a trace or another engine.

    diff("demo", "vllm:MODEL")                     transformers against vLLM
    diff("demo", "llama.cpp:demo-q8_0.gguf")       with the dequantised weights in between
    diff("trace/", "mlx:MODEL")                    on the tokens of a trace
    diff("vllm:MODEL", "mlx:MODEL")                two engines

Both sides run the same tokens, document by document. If both return predictions, their KL is
measured as for two models. The expected noise is that of the coarser of the formats that both sides
recorded, because both sides are assumed to run one model.

A quantised copy in an engine differs from the original in two steps: the weights are rounded to the
format, and the engine has its own kernels. The dequantised weights, run by transformers in float32,
separate the two:

    original → dequantised    the effect of the format
    dequantised → engine      the effect of the engine: kernels, rounded activations, or a bug
"""

import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from tieline.analysis.compared_sides import ModelSide, NamedSide, trace_side
from tieline.analysis.comparison import compare_runs, diff_result
from tieline.analysis.diff_records import DequantisedSplit, Pattern, RoutingDiff, ShapeAnswer
from tieline.analysis.inspect_records import Observation
from tieline.analysis.job_settings import DiffSettings
from tieline.analysis.noise_size import (
    PRODUCT_ERRORS,
    ExpectedFormat,
    canonical_format,
    recorded_format,
)
from tieline.analysis.sound_runs import sound_runs
from tieline.analysis.token_distances import (
    TokenDistances,
    check_logits,
    compared_logits,
    token_distances,
)
from tieline.core.errors import TraceError, require
from tieline.core.numerics import one_thread
from tieline.core.setting_fields import require_setting
from tieline.engines import RunOptions, dequantised_weights, engine_named
from tieline.engines.engine_registry import check_engine_model, find_python, split_engine_source
from tieline.engines.trace_sources import (
    EngineSource,
    TokenDocuments,
    engine_model_path,
    vocabulary_sample,
)
from tieline.models.emulate import Region
from tieline.models.model import load_tokenizer
from tieline.models.number_formats import FORMATS
from tieline.run.corpus import default_sequence_length, stacked_batches
from tieline.run.observers import Observer, Outcome
from tieline.run.plan import Pass
from tieline.run.ranks import Ranks
from tieline.run.runner import Progress
from tieline.trace.record import RoutingTrace

MOST_LOGPROBS = 1 << 28
"""Most log-probabilities per side, 1 GiB; beyond that no KL is measured."""


@dataclass(frozen=True)
class _SideRun:
    """One side after its run: routing, log-probabilities (T, V) or None, and the model or None."""

    trace: RoutingTrace
    logprobs: Tensor | None = None
    side: ModelSide | None = None


@dataclass(frozen=True)
class _EngineJob:
    """Tokens and options of the runs of both sides.

    Attributes:
        documents: the tokens.
        predictions: whether log-probabilities are recorded.
        settings: options of the comparison.
        progress: called with stage, done and total.
    """

    documents: TokenDocuments
    predictions: bool
    settings: DiffSettings
    progress: Progress | None


def diff_engines(
    sides: tuple[NamedSide, NamedSide], settings: DiffSettings, progress: Progress | None = None
) -> RoutingDiff:
    """Compare two sides, at least one of them an engine; see `diff`."""
    started = time.perf_counter()
    _check_engines(sides, settings)
    shape = settings.n_experts, settings.k
    traces = {x.side: x.trace(*shape) for x in sides if x.kind not in ("engine", "model")}
    models = {x.side: x.open_model() for x in sides if x.kind == "model"}
    job = _engine_job(sides, traces, models, settings, progress)
    runs = []
    for side in sides:
        if side.side in traces:
            runs.append(_SideRun(traces[side.side]))
        elif side.side in models:
            runs.append(_run_model(models[side.side], job))
        else:
            runs.append(_run_engine(side, job))
    before = time.perf_counter()
    result = _compare_engine_runs(sides, runs[0], runs[1], job)
    timings = {"run": before - started, "compare": time.perf_counter() - before}
    facts = {"text": job.documents.origin, "tokens": job.documents.tokens}
    return replace(result, timings=timings, provenance=result.provenance | facts)


def _check_engines(sides: Sequence[NamedSide], settings: DiffSettings) -> None:
    """Raise for settings of models, and if an engine is missing, before anything is loaded."""
    require_setting(
        not settings.replay, "{replay} is for two models: an engine's routes are not replayed"
    )
    require_setting(
        settings.batch_size_b is None,
        "{batch_size_b} is for two models: engines run documents one by one",
    )
    engine_sides = list(filter(None, (split_engine_source(x.source) for x in sides)))
    engines = {engine for engine, _ in engine_sides}
    require_setting(
        settings.engine_python is None or len(engines) == 1,
        "{engine_python} is for one engine: name the others by their environment variables "
        "(tieline capture --list-engines)",
    )
    for engine in sorted(engines):
        find_python(engine_named(engine), settings.engine_python)
    for engine, model in engine_sides:
        check_engine_model(engine_named(engine), model)


def _engine_job(
    sides: Sequence[NamedSide],
    traces: dict[str, RoutingTrace],
    models: dict[str, ModelSide],
    settings: DiffSettings,
    progress: Progress | None,
) -> _EngineJob:
    """The job on the tokens of a trace, or of the text tokenised for one of the sides."""
    tokenizer = _tokenizer_of_sides(sides, models, settings.tokenizer)
    if traces:
        require_setting(
            settings.text is None,
            "{text}: a text is for models: an engine beside a trace runs its tokens",
        )
        vocabulary = None if tokenizer is None else vocabulary_sample(tokenizer)
        documents = TokenDocuments.of_trace(next(iter(traces.values())), vocabulary)
        return _EngineJob(documents, False, settings, progress)
    require_setting(
        tokenizer is not None,
        "no side has a tokenizer of transformers: name a model that has one by {tokenizer}",
    )
    assert tokenizer is not None
    longest = min([settings.sequence_length, *_context_lengths(sides, models)])
    documents = TokenDocuments.of_text(tokenizer, settings.text, settings.tokens, longest)
    predictions = documents.tokens * len(tokenizer) <= MOST_LOGPROBS
    return _EngineJob(documents, predictions, settings, progress)


def _tokenizer_of_sides(
    sides: Sequence[NamedSide], models: dict[str, ModelSide], name: str | None
) -> Any:
    """The named tokenizer, else that of a model or engine; None if there is none."""
    if name is not None:
        return load_tokenizer(name)
    for model in models.values():
        return model.tokenizer
    for side in sides:
        engine_side = split_engine_source(side.source)
        if engine_side is not None and not engine_named(engine_side[0]).gguf:
            return load_tokenizer(engine_side[1])
    return None


def _context_lengths(sides: Sequence[NamedSide], models: dict[str, ModelSide]) -> list[int]:
    """Longest sequences of the models and engines whose configurations state them."""
    lengths = [default_sequence_length(side.model, 1 << 30) for side in models.values()]
    for side in sides:
        engine = split_engine_source(side.source)
        path = Path(engine_model_path(engine[1])) / "config.json" if engine else Path()
        if path.is_file():
            longest = json.loads(path.read_bytes()).get("max_position_embeddings")
            lengths += [longest] if isinstance(longest, int) else []
    return lengths


def _run_engine(side: NamedSide, job: _EngineJob) -> _SideRun:
    """Run an engine on the tokens of the job."""
    engine_side = split_engine_source(side.source)
    assert engine_side is not None
    engine, model = engine_side
    options = RunOptions(
        job.settings.engine_python,
        "fp32" if side.dtype == "auto" else side.dtype,
        job.settings.engine_defaults,
        logprobs=job.predictions,
    )
    engine_run = EngineSource(model, engine, options).run(job.documents, job.progress)
    logprobs = None if engine_run.logprobs is None else torch.from_numpy(engine_run.logprobs)
    return _SideRun(engine_run.trace, logprobs)


def _run_model(side: ModelSide, job: _EngineJob) -> _SideRun:
    """Run a model of transformers on the tokens of the job."""
    ranks = Ranks.share_batches(
        None, list(stacked_batches(job.documents.sequences, job.settings.batch_size))
    )
    predictions = _LogProbabilities()
    observers = [predictions] if job.predictions else []
    trace = trace_side(side, ranks, observers, job.progress)
    rows = predictions.rows
    return _SideRun(
        job.documents.with_document_numbers(trace), torch.cat(rows) if rows else None, side
    )


class _LogProbabilities(Observer):
    """Log-probabilities of all tokens, pass by pass."""

    def __init__(self) -> None:
        self.rows: list[Tensor] = []

    def on_pass_done(self, run: Pass, outcome: Outcome) -> None:
        """Append the log-probabilities of a pass."""
        if outcome.logits is not None:
            rows = outcome.logits.flatten(0, 1).double().log_softmax(1)
            self.rows.append(rows.float().cpu())


def _compare_engine_runs(
    sides: Sequence[NamedSide], a: _SideRun, b: _SideRun, job: _EngineJob
) -> RoutingDiff:
    """Compare two runs; for a quantised side, also with its dequantised weights."""
    expected = _expected_format(job.settings.expect, a.trace, b.trace)
    dequantised = _dequantised_run(sides, a, b, job)
    references = _reference_traces(a, b, dequantised, expected, job)
    with one_thread():
        options = {"partial": job.settings.partial, "references": references, "expected": expected}
        compared = compare_runs(a.trace, b.trace, **options)
    result = diff_result(
        compared, compared_logits(compared, _prediction_distances(a, b, job)), {}, expected
    )
    if dequantised is None:
        return result
    return _with_weights_alarm(_with_dequantised_split(result, a, b, dequantised, job), dequantised)


def _with_weights_alarm(result: RoutingDiff, dequantised: "_DequantisedRun") -> RoutingDiff:
    """The result with an alarm if the quantised file does not hold the weights of the original."""
    if not dequantised.mismatched or result.causes is None:
        return result
    name, error = dequantised.mismatched[0]
    count = len(dequantised.mismatched)
    pattern = Pattern("weights", name, error, LARGEST_ERROR, number=count, detail=dequantised.side)
    causes = replace(
        result.causes,
        conclusion="pattern",
        shape=ShapeAnswer("no", (pattern,)),
        patterns=(pattern, *result.causes.patterns),
    )
    observation = Observation("weights:pattern", "warning", error)
    return replace(result, causes=causes, observations=(observation, *result.observations))


def _reference_traces(
    a: _SideRun,
    b: _SideRun,
    dequantised: "_DequantisedRun | None",
    expected: ExpectedFormat | None,
    job: _EngineJob,
) -> list[RoutingTrace]:
    """Reference runs with the noise of the expected format; empty if there can be none.

    The run of the dequantised weights if the format rounds nothing else, as for 4-bit weights; else
    runs of the model emulated in the format.
    """
    models = [x for x in (a, b) if x.side is not None]
    exact = any(recorded_format(x.trace.provenance) == "fp32" for x in models)
    if not exact or any(x.trace.provenance.get("rounded") == "cache" for x in (a, b)):
        return []  # a rounded cache cannot be emulated
    number_format = None if expected is None else FORMATS.get(expected.name)
    rounds_weights = number_format is None or number_format.activations is None
    if dequantised is not None and rounds_weights:
        return [dequantised.run.trace]
    sides = tuple(x.side for x in models if x.side is not None)
    traces = tuple(x.trace for x in models)
    size, emulated = job.settings.batch_size, _emulated_region(a, b, expected)
    sequences = job.documents.sequences
    runs = sound_runs(sides, traces, sequences, expected, size, emulated)
    return [job.documents.with_document_numbers(run) for run in runs]


@dataclass(frozen=True)
class _DequantisedRun:
    """Run of the dequantised weights, their bits, the quantised side, and mismatched tensors."""

    run: _SideRun
    bits: float | None
    side: str
    mismatched: tuple[tuple[str, float], ...] = ()


def _expected_format(
    format_name: str | None, a: RoutingTrace, b: RoutingTrace
) -> ExpectedFormat | None:
    """The named format, else the coarser of those that both sides recorded."""
    if format_name is not None:
        return ExpectedFormat(canonical_format(format_name), "as asked")
    formats = [_product_format(x) for x in (a, b)]
    recorded = [x for x in formats if x is not None]
    if len(recorded) < 2:
        return None
    return ExpectedFormat(
        max(recorded, key=list(PRODUCT_ERRORS).index), "the coarser of both sides"
    )


def _product_format(trace: RoutingTrace) -> str | None:
    """Format that determines the noise of a side's products; weights may be stored in another."""
    stated = str(trace.provenance.get("rounding"))
    return stated if stated in PRODUCT_ERRORS else recorded_format(trace.provenance)


def _emulated_region(a: _SideRun, b: _SideRun, expected: ExpectedFormat | None) -> Region | None:
    """Region "others" if the side in the expected format has routers in float32, else None."""
    for run in (a, b):
        same = expected is not None and _product_format(run.trace) == expected.name
        if same and run.trace.provenance.get("router") == "fp32":
            return "others"
    return None


def _prediction_distances(a: _SideRun, b: _SideRun, job: _EngineJob) -> list[TokenDistances] | None:
    """Distances of the predictions, document by document; None if a side has no predictions."""
    if a.logprobs is None or b.logprobs is None or a.logprobs.shape != b.logprobs.shape:
        return None
    distances, start = [], 0
    for side, logprobs in (("A", a.logprobs), ("B", b.logprobs)):
        check_logits(logprobs[None], side)
    for ids in job.documents.sequences:
        rows = slice(start, start + len(ids))
        distances.append(token_distances(a.logprobs[rows][None], b.logprobs[rows][None], ids[None]))
        start += len(ids)
    return distances


def _dequantised_run(
    sides: Sequence[NamedSide], a: _SideRun, b: _SideRun, job: _EngineJob
) -> _DequantisedRun | None:
    """Run the dequantised weights in transformers; None without a quantised side and a model."""
    if not job.settings.dequantise:
        return None
    for side, run, other in ((sides[0], a, b), (sides[1], b, a)):
        engine_side = split_engine_source(side.source)
        quantised = str(recorded_format(run.trace.provenance)).startswith("int")
        if engine_side is None or not quantised or other.side is None:
            continue
        if other.side.emulated is not None or not can_dequantise(other.side.model):
            continue
        engine, source = engine_side[0], engine_model_path(engine_side[1])
        python = job.settings.engine_python
        rebuilt = dequantised_model(other.side.model, engine, source, python)
        rebuilt_run = _run_model(ModelSide(rebuilt.model), job)
        return _DequantisedRun(rebuilt_run, rebuilt.bits, side.side, rebuilt.mismatched)
    return None


def _with_dequantised_split(
    result: RoutingDiff,
    a: _SideRun,
    b: _SideRun,
    dequantised: _DequantisedRun,
    job: _EngineJob,
) -> RoutingDiff:
    """The result with the effects of the format and of the engine."""
    dequantised_run, side = dequantised.run, dequantised.side
    original, engine = (b, a) if side == "A" else (a, b)
    with one_thread():
        by_format = compare_runs(original.trace, dequantised_run.trace)
        by_engine = compare_runs(dequantised_run.trace, engine.trace)
    logits = (
        compared_logits(by_format, _prediction_distances(original, dequantised_run, job)),
        compared_logits(by_engine, _prediction_distances(dequantised_run, engine, job)),
    )
    format_kl, engine_kl = (None if x is None else x.kl for x in logits)
    split = DequantisedSplit(
        side=side,
        bits=dequantised.bits,
        format_flips=tuple(layer.flip for layer in by_format.layers),
        engine_flips=tuple(layer.flip for layer in by_engine.layers),
        format_any=by_format.tokens.anywhere,
        engine_any=by_engine.tokens.anywhere,
        format_kl=format_kl,
        engine_kl=engine_kl,
    )
    numbers = {
        "flip:format": split.format_any.value or 0.0,
        "flip:engine": split.engine_any.value or 0.0,
        "kl:format": format_kl,
        "kl:engine": engine_kl,
    }
    metrics = {name: value for name, value in numbers.items() if value is not None}
    observation = Observation("dequantised", "info", metrics["flip:engine"])
    return replace(
        result,
        dequantised=split,
        metrics=result.metrics | metrics,
        observations=(*result.observations, observation),
    )


LARGEST_ERROR = 0.7
"""Relative error beyond which a tensor is not a rounded copy of the original."""
STORED_STEPS = {"F32": 2.0**-23, "F16": 2.0**-10, "BF16": 2.0**-7}
"""Largest relative error of a tensor that is stored unquantised, by format."""
MOST_REBUILT_PARAMETERS = 4_000_000_000
"""Most parameters of a rebuilt model, which takes 12 bytes of disk and memory for each."""
INDEX = "model.safetensors.index.json"


class DequantisedModel(NamedTuple):
    """A model with dequantised weights.

    Attributes:
        model: the model, in float32.
        bits: bits per weight of the quantised form; None if unknown.
        mismatched: tensors that are no rounded copies of the original, with their relative error
            |w' - w| / |w|, for example 1.6 for two exchanged experts of the demo model.
    """

    model: nn.Module
    bits: float | None
    mismatched: tuple[tuple[str, float], ...]


def dequantised_model(
    model: nn.Module, engine: str, quantised: str, python: str | Path | None = None
) -> DequantisedModel:
    """Build a copy of a model with the dequantised weights of its quantised form.

    Args:
        model: the original, a model of transformers.
        engine: the engine that reads the quantised form.
        quantised: its file or folder.
        python: the engine's Python.
    """
    original: Any = model
    with tempfile.TemporaryDirectory(prefix="tieline-dequantised-") as name:
        folder = Path(name)
        original.save_pretrained(folder)
        shapes = _stored_shapes(folder)
        arrays, facts = dequantised_weights(quantised, engine, sorted(shapes), python)
        arrays = {
            key: _checkpoint_array(array, shapes[key], f"{quantised}: {key}")
            for key, array in arrays.items()
        }
        mismatched = _mismatched_tensors(folder, arrays, facts.get("unquantised") or {})
        for old in (*folder.glob("*.safetensors"), folder / INDEX):
            old.unlink(missing_ok=True)
        tensors = {key: torch.from_numpy(array).contiguous() for key, array in arrays.items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        copy = type(original).from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    bits = facts.get("bits")
    bits_per_weight = float(bits) if isinstance(bits, int | float) else None
    return DequantisedModel(copy.eval(), bits_per_weight, mismatched)


def _checkpoint_array(array: np.ndarray, shape: tuple[int, ...], name: str) -> np.ndarray:
    """Return an array in the shape of the checkpoint; raises if it has another.

    GGUF leaves out a first axis of one, as the gate of a shared expert has.
    """
    same = [n for n in array.shape if n != 1] == [n for n in shape if n != 1]
    message = f"{name} is {tuple(array.shape)}, the model has {shape}: it is of another model"
    require(same, message, TraceError)
    return array.reshape(shape)


def _mismatched_tensors(
    folder: Path, arrays: Mapping[str, np.ndarray], unquantised: Mapping[str, str]
) -> tuple[tuple[str, float], ...]:
    """Tensors whose relative error their format does not explain, largest error first.

    Args:
        folder: the checkpoint of the original.
        arrays: the tensors of the quantised form, in float32.
        unquantised: storage format of the tensors that are not quantised.
    """
    errors: dict[str, float] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as stored:
            for key in set(stored.keys()) & set(arrays):
                original = stored.get_tensor(key)
                change = torch.from_numpy(arrays[key]).double() - original.double()
                # equal tensors of zeros, as biases of a new model, have no relative error
                error = float(change.norm() / original.double().norm()) if change.any() else 0.0
                if not error <= _largest_error(key, original, unquantised.get(key)):
                    errors[key] = error
    return tuple(sorted(errors.items(), key=lambda pair: -pair[1]))


def _largest_error(name: str, original: Tensor, stored_format: str | None) -> float:
    """Largest relative error that the format of a tensor explains.

    Unquantised matrices and selection biases are equal up to the rounding of their formats. Vectors
    of norms may differ more, because converters add constants that an engine leaves out.
    """
    is_exact = original.ndim >= 2 or "correction_bias" in name
    if stored_format not in STORED_STEPS or not is_exact:
        return LARGEST_ERROR
    return max(STORED_STEPS[stored_format], torch.finfo(original.dtype).eps)


def can_dequantise(model: nn.Module) -> bool:
    """Whether a model can be saved and is small enough to be rebuilt."""
    count = sum(parameter.numel() for parameter in model.parameters())
    return count <= MOST_REBUILT_PARAMETERS and hasattr(model, "save_pretrained")


def _stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shape of each tensor of a checkpoint, by name."""
    files = sorted(folder.glob("*.safetensors"))
    if (folder / INDEX).is_file():
        file_names = json.loads((folder / INDEX).read_bytes())["weight_map"].values()
        files = [folder / name for name in sorted(set(file_names))]
    shapes: dict[str, tuple[int, ...]] = {}
    for path in files:
        with safe_open(path, framework="pt") as stored:
            shapes |= {key: tuple(stored.get_slice(key).get_shape()) for key in stored.keys()}  # noqa: SIM118
    return shapes
