"""Capturing the routing of a model in an inference engine, or in transformers, as a trace.

Runs a text, token ids, or the tokens of another run; see `tieline.engines.sources`.
"""

from dataclasses import replace
from pathlib import Path
from typing import Unpack

from tieline.analysis.settings import TRANSFORMERS, CaptureOptions, CaptureSettings
from tieline.analysis.sources import read_routes
from tieline.core.settings import require_setting, takes_settings
from tieline.engines import EngineCapture, RunOptions, engine_named
from tieline.engines.capture import captured
from tieline.engines.process import Progress
from tieline.engines.registry import find_python
from tieline.engines.sources import (
    EngineSource,
    TokenDocuments,
    TraceSource,
    TransformersSource,
    vocabulary_sample,
)
from tieline.models.loading import load_tokenizer
from tieline.models.model import Model
from tieline.trace.readers import token_documents
from tieline.trace.record import RoutingTrace


@takes_settings(CaptureSettings)
def capture_engine(
    model: str | Path = "demo",
    *,
    output: str | Path | None = None,
    settings: CaptureSettings | None = None,
    progress: Progress | None = None,
    **options: Unpack[CaptureOptions],
) -> EngineCapture:
    """Run a model in an engine and record what its routers choose.

    Args:
        model: a folder, a hub id or "demo"; for llama.cpp a GGUF file.
        output: name of the folder that the trace will be saved in, for the record.
        settings: the options; keyword arguments change single ones. `text` may also be the text
            itself, `ids` lists of ids, `tokens_from` a trace. With `parallel`, all processes must
            call, and all get the result.
        progress: called with stage, done and total.
    """
    settings = CaptureSettings.of(settings, options)
    if settings.engine != TRANSFORMERS:  # before anything is loaded
        find_python(engine_named(settings.engine), settings.engine_python)
    documents = _documents(model, settings)
    trace = _source(model, settings).trace(documents, progress)
    trace = replace(trace, provenance=trace.provenance | {"text": documents.origin})
    return captured(trace, str(model), settings.engine, str(output or ""))


def _source(model: str | Path, settings: CaptureSettings) -> TraceSource:
    """The engine, or the model of transformers, that routes the tokens."""
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


def _documents(model: str | Path, settings: CaptureSettings) -> TokenDocuments:
    """The documents that were given, those of a trace, or those of a text."""
    tokenizer, source = settings.tokenizer, settings.tokens_from
    vocabulary = None if tokenizer is None else vocabulary_sample(load_tokenizer(tokenizer))
    if settings.ids is not None:
        return TokenDocuments.of_ids(list(token_documents(settings.ids) or ()), vocabulary)
    if source is not None:
        trace = source if isinstance(source, RoutingTrace) else read_routes(source)
        return TokenDocuments.of_trace(trace, vocabulary)
    tokenizer_model = model if tokenizer is None else tokenizer
    require_setting(
        not str(tokenizer_model).endswith(".gguf"),
        "a GGUF has no tokenizer of transformers: name a model that has the same with {tokenizer}, "
        "or the tokens with {ids} or {tokens_from}",
    )
    loaded = load_tokenizer(tokenizer_model)
    return TokenDocuments.of_text(loaded, settings.text, settings.tokens, settings.sequence_length)
