"""Running an inference engine on a text, on token ids, or on the tokens of another run.

    capture_engine    the routing of a model in an engine, as a trace that can be saved
    engine_tokens     the documents of token ids that an engine is to run
    vocabulary_sample texts of some tokens, which tell a GGUF of another model

The tokens come from a tokenizer of transformers, never from the engine, so that every engine runs
the same. transformers itself is an engine like the others, but runs in this process.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from tieline.analysis.diff import Side, sequences_of, trace_model
from tieline.analysis.settings import TRANSFORMERS, CaptureOptions, CaptureSettings
from tieline.analysis.sources import read_routes
from tieline.analysis.streamed import streamed_trace
from tieline.core.settings import require_setting, takes_settings
from tieline.engines import EngineCapture, RunOptions, engine_named, run_engine
from tieline.engines.capture import captured
from tieline.engines.process import Progress
from tieline.engines.registry import find_python
from tieline.models.demo import DEMO_FOLDER, is_demo
from tieline.models.loading import load_model, load_tokenizer
from tieline.models.running import batches
from tieline.run.corpus import Text, as_text, tokenise
from tieline.run.processes import Ranks
from tieline.trace.readers import token_documents
from tieline.trace.record import RoutingTrace

MOST_TEXTS = 512
"""Tokens whose text is compared with that in a GGUF."""


def engine_model(model: str | Path) -> str:
    """Return what an engine is given for a name: the folder of "demo", else the name itself."""
    return str(DEMO_FOLDER) if is_demo(model) else str(model)


def engine_tokens(
    tokenizer: Any, text: Text, tokens: int, sequence_length: int
) -> tuple[list[Int[Tensor, " _"]], str]:
    """Return the token ids of a text, one tensor per document, and the origin of the text."""
    content, origin = as_text(text)
    return list(tokenise(tokenizer, content, tokens, sequence_length).sequences), origin


def vocabulary_sample(tokenizer: Any) -> dict[int, str]:
    """Return the texts of up to 512 tokens by id, evenly spread over the vocabulary."""
    vocabulary = {int(number): str(text) for text, number in tokenizer.get_vocab().items()}
    numbers = sorted(vocabulary)
    step = max(1, len(numbers) // MOST_TEXTS)
    return {number: vocabulary[number] for number in numbers[::step][:MOST_TEXTS]}


@dataclass(frozen=True)
class _Documents:
    """Documents to run: token ids, document numbers, texts of tokens, and the origin."""

    sequences: list[Any]
    numbers: list[int]
    vocabulary: Mapping[int, str] | None
    origin: str


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
    engine = settings.engine
    if engine == TRANSFORMERS:
        documents = _documents(model, settings)
        trace = _in_transformers(model, documents.sequences, settings, progress)
    else:
        find_python(engine_named(engine), settings.engine_python)  # before anything is loaded
        documents = _documents(model, settings)
        run_options = RunOptions(
            settings.engine_python,
            "fp32" if settings.dtype == "auto" else settings.dtype,
            settings.engine_defaults,
            scores=settings.scores,
            vocabulary=documents.vocabulary if engine_named(engine).gguf else None,
        )
        trace = run_engine(
            engine_model(model), engine, documents.sequences, run_options, progress
        ).trace
    return captured(_renumbered(trace, documents), str(model), engine, str(output or ""))


def _documents(model: str | Path, settings: CaptureSettings) -> _Documents:
    """Documents of token ids: those that were given, those of a trace, or of a text."""
    tokenizer, source = settings.tokenizer, settings.tokens_from
    vocabulary = None if tokenizer is None else vocabulary_sample(load_tokenizer(tokenizer))
    if settings.ids is not None:
        rows = list(token_documents(settings.ids) or ())
        return _Documents(rows, list(range(len(rows))), vocabulary, "ids")
    if source is not None:
        trace = source if isinstance(source, RoutingTrace) else read_routes(source)
        sequences, numbers = sequences_of(trace)
        return _Documents([x.numpy() for x in sequences], numbers, vocabulary, "a trace")
    tokenizer_model = model if tokenizer is None else tokenizer
    require_setting(
        not str(tokenizer_model).endswith(".gguf"),
        "a GGUF has no tokenizer of transformers: name a model that has the same with {tokenizer}, "
        "or the tokens with {ids} or {tokens_from}",
    )
    loaded = load_tokenizer(tokenizer_model)
    text, tokens, length = settings.text, settings.tokens, settings.sequence_length
    sequences, origin = engine_tokens(loaded, text, tokens, length)
    rows, vocabulary = [x.numpy() for x in sequences], vocabulary_sample(loaded)
    return _Documents(rows, list(range(len(rows))), vocabulary, origin)


def _in_transformers(
    model: str | Path,
    sequences: Sequence[Any],
    settings: CaptureSettings,
    progress: Progress | None,
) -> RoutingTrace:
    """Run token ids in transformers, in this process or in those of torchrun."""
    size, parallel = settings.batch_size, settings.parallel
    loaded = load_model(
        model,
        dtype=settings.dtype,
        parallel=parallel,
        stream=settings.stream,
        memory=settings.memory,
        keep=settings.keep_downloads,
    )
    rows = [torch.as_tensor(np.asarray(row, dtype=np.int64)) for row in sequences]
    if loaded.stream is not None:
        on_progress = None if progress is None else partial(progress, "streaming")
        return streamed_trace(loaded.stream, list(batches(rows, size)), on_progress)
    side = Side(loaded.model)
    trace = trace_model(side, rows, batch_size=size, progress=progress, parallel=parallel)
    return replace(trace, provenance=trace.provenance | Ranks(parallel, ()).provenance())


def _renumbered(trace: RoutingTrace, documents: _Documents) -> RoutingTrace:
    """Return the trace with the numbers that its documents had in their source."""
    numbers = torch.tensor(documents.numbers)[trace.documents.long()]
    provenance = trace.provenance | {"text": documents.origin}
    return replace(trace, documents=numbers, provenance=provenance)
