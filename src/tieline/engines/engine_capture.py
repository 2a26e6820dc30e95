"""Record the routing of a model in an engine: `tieline capture` and its result."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Unpack

from tieline.core.records import Result
from tieline.core.setting_fields import SettingError, require_setting, takes_settings
from tieline.engines.engine_registry import (
    TRANSFORMERS,
    check_engine_model,
    engine_named,
    find_python,
)
from tieline.engines.engine_run import Progress, RunOptions, run_engine
from tieline.engines.server_client import is_server
from tieline.engines.server_prompts import server_prompts
from tieline.engines.server_routes import RouteServer, ServerSource
from tieline.engines.trace_sources import (
    EngineSource,
    TokenDocuments,
    TraceSource,
    TransformersSource,
    vocabulary_sample,
)
from tieline.models.model import Model, load_tokenizer
from tieline.run.shared_settings import CaptureOptions, CaptureSettings
from tieline.trace.readers import import_trace, token_documents
from tieline.trace.record import RoutingTrace
from tieline.trace.store import INDEX, load_trace


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


def capture_summary(
    trace: RoutingTrace, model: str, engine: str, output: str = ""
) -> EngineCapture:
    """Summarise the trace of an engine as a result.

    Args:
        trace: the routing, with the provenance of the run.
        model: the model that the engine ran.
        engine: name of the engine.
        output: folder that the trace will be saved in; empty if it will not be saved.

    Raises:
        SettingError: if the scores contradict the choices and would be saved.
    """
    provenance, first = trace.provenance, trace.layers[0]
    off_scores = sum(_provenance_counts(provenance, "off_scores"))
    if off_scores and first.scores is not None and output:
        raise SettingError(
            "{name}: {count} choices are not the largest scores, so that the engine ranks "
            "something else (a bias, groups): save the choice alone ({scores}), or compare "
            "directly with tieline diff MODEL {name}:{model}",
            name=engine,
            count=off_scores,
            model=model,
        )
    bits, timings = provenance.get("bits"), _provenance_table(provenance, "timings")
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
        tied=sum(_provenance_counts(provenance, "ties")),
        off_scores=off_scores,
        dtype=str(provenance.get("dtype", "")),
        bits=float(bits) if isinstance(bits, int | float) else None,
        versions={str(key): str(value) for key, value in versions.items()},
        settings=_provenance_table(provenance, "settings"),
        timings={key: float(value) for key, value in timings.items()},  # pyright: ignore[reportArgumentType]
        trace=trace,
    )


def _provenance_counts(provenance: Mapping[str, object], key: str) -> list[int]:
    """Return a list of counts by layer of the provenance; empty if it is missing."""
    counts = provenance.get(key)
    return [int(count) for count in counts] if isinstance(counts, list) else []


def _provenance_table(provenance: Mapping[str, object], key: str) -> dict[str, object]:
    """Return a table of the provenance; empty if it is missing."""
    value = provenance.get(key)
    return dict(value) if isinstance(value, dict) else {}


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
        model: a folder or hub id, for llama.cpp a GGUF file.
        engine: "vllm", "mlx" or "llama.cpp", or another that was registered.
        ids: token ids of each document.
        python: the Python that the engine is installed in; by default it is searched.
        dtype: precision to compute in, if the engine offers several: "fp32", "bf16", "fp16".
        defaults: whether to keep the engine's default settings, as in deployment: precision,
            precision of the cache, kernels of attention.
        scores: whether to record scores in addition to the choices.
        progress: called with stage, done and total.
    """
    options = RunOptions(python, dtype, defaults, scores=scores)
    return run_engine(model, engine, ids, options, progress).trace


@takes_settings(CaptureSettings)
def capture_engine(
    model: str | Path = "demo",
    *,
    output: str | Path | None = None,
    settings: CaptureSettings | None = None,
    progress: Progress | None = None,
    **options: Unpack[CaptureOptions],
) -> EngineCapture:
    """Run a model in an engine, or query a running server, and record the routers' choices.

    Args:
        model: a folder, a hub id or "demo"; for llama.cpp a GGUF file; for a running server its
            address, http://HOST:PORT.
        output: name of the folder that the trace will be saved in, for the result.
        settings: the options; keyword arguments change single ones. `text` may also be the text
            itself, `ids` lists of ids, `tokens_from` a trace. With `parallel`, all processes must
            call this and all get the result.
        progress: called with stage, done and total.
    """
    settings = CaptureSettings.of(settings, options)
    if is_server(model):
        source, documents = _server_and_documents(str(model), settings, progress)
    else:
        require_setting(
            settings.prompts is None, "{prompts} is for a running server, http://HOST:PORT"
        )
        if settings.engine != TRANSFORMERS:  # before anything is loaded
            find_python(engine_named(settings.engine), settings.engine_python)
            check_engine_model(engine_named(settings.engine), model)
        documents = _capture_documents(model, settings)
        source = _open_trace_source(model, settings)
    trace = source.trace(documents, progress)
    trace = replace(trace, provenance=trace.provenance | {"text": documents.origin})
    return capture_summary(trace, str(model), settings.engine, str(output or ""))


def _open_trace_source(model: str | Path, settings: CaptureSettings) -> TraceSource:
    """Return the engine as a source of traces, or open the model of transformers."""
    if settings.engine != TRANSFORMERS:
        dtype = "fp32" if settings.dtype == "auto" else settings.dtype
        python, defaults = settings.engine_python, settings.engine_defaults
        run_options = RunOptions(python, dtype, defaults, scores=settings.scores)
        return EngineSource(model, settings.engine, run_options)
    loaded = Model.open(
        model,
        dtype=settings.dtype,
        parallel=settings.parallel,
        stream=settings.stream,
        memory=settings.memory,
        keep=settings.keep_downloads,
    )
    return TransformersSource(loaded, settings.batch_size, settings.parallel, settings.memory)


def _server_and_documents(
    url: str, settings: CaptureSettings, progress: Progress | None
) -> tuple[ServerSource, TokenDocuments]:
    """Open a running server; return it with documents from ids, a trace, prompts or a text."""
    server = RouteServer.open(url, settings.engine, settings)
    source = ServerSource(server, settings.concurrency)
    if settings.ids is not None:
        return source, TokenDocuments.of_ids(list(token_documents(settings.ids) or ()))
    if settings.tokens_from is not None:
        return source, TokenDocuments.of_trace(_read_trace(settings.tokens_from))
    sizes = (settings.tokens, settings.sequence_length)
    prompts = server_prompts(server, settings, settings.text, sizes, progress)
    return replace(source, chat_routes=prompts.chat_routes), prompts.documents


def _capture_documents(model: str | Path, settings: CaptureSettings) -> TokenDocuments:
    """Return the documents to route, from ids, a trace or a text."""
    tokenizer, source = settings.tokenizer, settings.tokens_from
    vocabulary = None if tokenizer is None else vocabulary_sample(load_tokenizer(tokenizer))
    if settings.ids is not None:
        return TokenDocuments.of_ids(list(token_documents(settings.ids) or ()), vocabulary)
    if source is not None:
        return TokenDocuments.of_trace(_read_trace(source), vocabulary)
    tokenizer_model = model if tokenizer is None else tokenizer
    require_setting(
        not str(tokenizer_model).endswith(".gguf"),
        "a GGUF has no tokenizer of transformers: name a model that has the same with {tokenizer}, "
        "or the tokens with {ids} or {tokens_from}",
    )
    loaded = load_tokenizer(tokenizer_model)
    return TokenDocuments.of_text(loaded, settings.text, settings.tokens, settings.sequence_length)


def _read_trace(source: str | Path | RoutingTrace) -> RoutingTrace:
    """Return a trace, given as such, as its folder or as a file of routes."""
    if isinstance(source, RoutingTrace):
        return source
    return load_trace(source) if (Path(source) / INDEX).is_file() else import_trace(source)
