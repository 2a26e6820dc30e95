"""Sources of traces: a model in an inference engine, or of transformers in this process.

    documents = TokenDocuments.of_text(tokenizer, None, tokens=4096, length=256)
    EngineSource("model.gguf", "llama.cpp").trace(documents)
    TransformersSource(Model.open("demo")).trace(documents)

The tokens come from a tokenizer of transformers, never from the engine, so that every source routes
the same tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from tieline.core.errors import require
from tieline.engines.engine_registry import engine_named
from tieline.engines.engine_run import EngineRun, Progress, RunOptions, run_engine
from tieline.models.demo import DEMO_FOLDER, is_demo
from tieline.models.model import Model
from tieline.run.corpus import Text, check_token_ids, stacked_batches, text_and_origin, tokenise
from tieline.run.ranks import Ranks
from tieline.run.runner import recorded_routes
from tieline.trace.record import RoutingTrace
from tieline.trace.selection import token_sequences

MOST_TEXTS = 512
"""Number of tokens whose text is compared with that in a GGUF."""


@dataclass(frozen=True, eq=False)
class TokenDocuments:
    """Token ids of documents.

    Attributes:
        sequences: token ids of each document.
        numbers: number of each document.
        origin: their source: "ids", "a trace", or the name of a text.
        vocabulary: texts of some tokens by id, to detect a GGUF of another model.
    """

    sequences: Sequence[Int[Tensor, " _"]]
    numbers: Sequence[int]
    origin: str
    vocabulary: Mapping[int, str] | None = None

    @classmethod
    def of_ids(
        cls, ids: Sequence[Any], vocabulary: Mapping[int, str] | None = None
    ) -> "TokenDocuments":
        """Return documents of these token ids, numbered 0, 1, ..."""
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
        """Return the documents of a trace, with their numbers."""
        sequences, numbers = token_sequences(trace)
        return cls(sequences, numbers, "a trace", vocabulary)

    @classmethod
    def of_text(cls, tokenizer: Any, text: Text, tokens: int, length: int) -> "TokenDocuments":
        """Return the first tokens of a text, in documents of `length` tokens."""
        content, origin = text_and_origin(text)
        sequences = tokenise(tokenizer, content, tokens, length).sequences
        return cls(sequences, range(len(sequences)), origin, vocabulary_sample(tokenizer))

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return sum(map(len, self.sequences))

    def with_document_numbers(self, trace: RoutingTrace) -> RoutingTrace:
        """Replace the documents 0, 1, ... of a trace by their numbers."""
        numbers = torch.tensor(self.numbers, device="cpu")
        return replace(trace, documents=numbers[trace.documents.long()])


def vocabulary_sample(tokenizer: Any) -> dict[int, str]:
    """Return the texts of up to 512 tokens by id, evenly spread over the vocabulary."""
    vocabulary = {int(number): str(text) for text, number in tokenizer.get_vocab().items()}
    numbers = sorted(vocabulary)
    step = max(1, len(numbers) // MOST_TEXTS)
    return {number: vocabulary[number] for number in numbers[::step][:MOST_TEXTS]}


def engine_model_path(model: str | Path) -> str:
    """Return the model's name as an engine takes it: the folder for "demo", else unchanged."""
    return str(DEMO_FOLDER) if is_demo(model) else str(model)


@runtime_checkable
class TraceSource(Protocol):
    """A model or server that routes documents and returns their trace."""

    def trace(self, documents: TokenDocuments, progress: Progress | None = None) -> RoutingTrace:
        """Return the trace of the documents, which keep their numbers."""
        ...


@dataclass(frozen=True)
class EngineSource:
    """A model in an inference engine, run by a worker process.

    Attributes:
        model: a folder, a hub id, "demo", or a GGUF file, as the engine takes it.
        engine: name of the engine.
        options: options of the run.
    """

    model: str | Path
    engine: str
    options: RunOptions = RunOptions()  # noqa: RUF009

    def trace(self, documents: TokenDocuments, progress: Progress | None = None) -> RoutingTrace:
        """Return the trace of the documents."""
        return self.run(documents, progress).trace

    def run(self, documents: TokenDocuments, progress: Progress | None = None) -> EngineRun:
        """Run the documents and return trace, log-probabilities and facts of the engine."""
        gguf = engine_named(self.engine).gguf
        options = replace(self.options, vocabulary=documents.vocabulary if gguf else None)
        rows = [row.numpy() for row in documents.sequences]
        run = run_engine(engine_model_path(self.model), self.engine, rows, options, progress)
        return replace(run, trace=documents.with_document_numbers(run.trace))


@dataclass(frozen=True, eq=False)
class TransformersSource:
    """A model of transformers in this process, or in the processes of torchrun.

    Attributes:
        model: the model, in memory or streamed.
        batch_size: documents per forward pass.
        parallel: how processes share the model; the model must be opened accordingly.
        memory: bytes that a streamed model may take; None for the free memory.
    """

    model: Model
    batch_size: int = 8
    parallel: str | None = None
    memory: int | None = None

    def trace(self, documents: TokenDocuments, progress: Progress | None = None) -> RoutingTrace:
        """Return the trace of the documents."""
        check_token_ids(self.model.module, documents.sequences)
        ranks = Ranks.share_batches(
            self.parallel, list(stacked_batches(documents.sequences, self.batch_size))
        )
        trace = recorded_routes(self.model, ranks, memory=self.memory, on_progress=progress)
        provenance = trace.provenance | ranks.provenance()
        return documents.with_document_numbers(replace(trace, provenance=provenance))
