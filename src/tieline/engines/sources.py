"""What traces tokens: a model in an inference engine, or a model of transformers in this process.

    documents = TokenDocuments.of_text(tokenizer, None, tokens=4096, length=256)
    EngineSource("model.gguf", "llama.cpp").trace(documents)
    TransformersSource(Model.open("demo")).trace(documents)

    capture_engine(model, engine="vllm")       both steps in one, as `tieline capture` does

The tokens come from a tokenizer of transformers, never from the engine, so that every source traces
the same.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, Unpack, runtime_checkable

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from tieline.core.errors import require
from tieline.core.settings import require_setting, takes_settings
from tieline.engines.capture import EngineCapture, EngineRun, RunOptions, captured, run_engine
from tieline.engines.process import Progress
from tieline.engines.registry import TRANSFORMERS, engine_named, find_python
from tieline.models.demo import DEMO_FOLDER, is_demo
from tieline.models.model import Model, load_tokenizer
from tieline.models.running import batches
from tieline.run.corpus import Text, as_text, check_ids, tokenise
from tieline.run.processes import Ranks
from tieline.run.recorder import recorded_routes
from tieline.run.settings import CaptureOptions, CaptureSettings
from tieline.trace.readers import import_trace, token_documents
from tieline.trace.record import RoutingTrace
from tieline.trace.selection import token_sequences
from tieline.trace.store import load_trace
from tieline.trace.tensor_folders import INDEX

MOST_TEXTS = 512
"""Tokens whose text is compared with that in a GGUF."""


@dataclass(frozen=True, eq=False)
class TokenDocuments:
    """Token ids of documents.

    Attributes:
        sequences: token ids of each document.
        numbers: number of each document.
        origin: where they come from: "ids", "a trace", or the name of a text.
        vocabulary: texts of some tokens by id, which tell a GGUF of another model.
    """

    sequences: Sequence[Int[Tensor, " _"]]
    numbers: Sequence[int]
    origin: str
    vocabulary: Mapping[int, str] | None = None

    @classmethod
    def of_ids(
        cls, ids: Sequence[Any], vocabulary: Mapping[int, str] | None = None
    ) -> "TokenDocuments":
        """Documents of these token ids."""
        arrays = [np.asarray(row) for row in ids]
        for number, array in enumerate(arrays):
            fits = array.ndim == 1 and array.size > 0 and array.dtype.kind in "iu"
            require(fits, f"document {number} must be token ids, got {array!r:.60}")
        sequences = [torch.from_numpy(array.astype(np.int64)) for array in arrays]
        return cls(sequences, range(len(sequences)), "ids", vocabulary)

    @classmethod
    def of_trace(
        cls, trace: RoutingTrace, vocabulary: Mapping[int, str] | None = None
    ) -> "TokenDocuments":
        """The documents of a trace."""
        sequences, numbers = token_sequences(trace)
        return cls(sequences, numbers, "a trace", vocabulary)

    @classmethod
    def of_text(cls, tokenizer: Any, text: Text, tokens: int, length: int) -> "TokenDocuments":
        """The first tokens of a text, in documents of `length` tokens."""
        content, origin = as_text(text)
        sequences = tokenise(tokenizer, content, tokens, length).sequences
        return cls(sequences, range(len(sequences)), origin, vocabulary_sample(tokenizer))

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return sum(map(len, self.sequences))

    def numbered(self, trace: RoutingTrace) -> RoutingTrace:
        """Return a trace of the documents, which it calls 0, 1, ..., with their numbers."""
        return replace(trace, documents=torch.tensor(self.numbers)[trace.documents.long()])


def vocabulary_sample(tokenizer: Any) -> dict[int, str]:
    """Return the texts of up to 512 tokens by id, evenly spread over the vocabulary."""
    vocabulary = {int(number): str(text) for text, number in tokenizer.get_vocab().items()}
    numbers = sorted(vocabulary)
    step = max(1, len(numbers) // MOST_TEXTS)
    return {number: vocabulary[number] for number in numbers[::step][:MOST_TEXTS]}


def engine_model(model: str | Path) -> str:
    """Return what an engine is given for a name: the folder of "demo", else the name itself."""
    return str(DEMO_FOLDER) if is_demo(model) else str(model)


@runtime_checkable
class TraceSource(Protocol):
    """What routes tokens and tells how."""

    def trace(self, documents: TokenDocuments, progress: Progress | None = None) -> RoutingTrace:
        """Return the routing of the documents, which keep their numbers."""
        ...


@dataclass(frozen=True)
class EngineSource:
    """A model in an inference engine, run by a worker process.

    Attributes:
        model: what the engine takes: a folder, a hub id, "demo", or a GGUF file.
        engine: name of the engine.
        options: how it runs.
    """

    model: str | Path
    engine: str
    options: RunOptions = RunOptions()  # noqa: RUF009

    def trace(self, documents: TokenDocuments, progress: Progress | None = None) -> RoutingTrace:
        """Return the routing of the documents."""
        return self.run(documents, progress).trace

    def run(self, documents: TokenDocuments, progress: Progress | None = None) -> EngineRun:
        """Run the documents; the trace has their numbers."""
        gguf = engine_named(self.engine).gguf
        options = replace(self.options, vocabulary=documents.vocabulary if gguf else None)
        rows = [row.numpy() for row in documents.sequences]
        run = run_engine(engine_model(self.model), self.engine, rows, options, progress)
        return replace(run, trace=documents.numbered(run.trace))


@dataclass(frozen=True, eq=False)
class TransformersSource:
    """A model of transformers in this process, or in those of torchrun.

    Attributes:
        model: the model, in memory or streamed.
        batch_size: documents per forward pass.
        parallel: how processes share the model, which was opened so.
        memory: bytes that a streamed model may take; None for what is free.
    """

    model: Model
    batch_size: int = 8
    parallel: str | None = None
    memory: int | None = None

    def trace(self, documents: TokenDocuments, progress: Progress | None = None) -> RoutingTrace:
        """Return the routing of the documents."""
        check_ids(self.model.module, documents.sequences)
        ranks = Ranks.of(self.parallel, list(batches(documents.sequences, self.batch_size)))
        trace = recorded_routes(self.model, ranks, memory=self.memory, on_progress=progress)
        provenance = trace.provenance | ranks.provenance()
        return documents.numbered(replace(trace, provenance=provenance))


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
    """A trace, the folder of one, or a file of routes."""
    if isinstance(source, RoutingTrace):
        return source
    return load_trace(source) if (Path(source) / INDEX).is_file() else import_trace(source)
