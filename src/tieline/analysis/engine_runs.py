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
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from tieline.analysis.diff import Side, sequences_of, trace_model
from tieline.analysis.sources import read_routes
from tieline.analysis.streamed import streamed_trace
from tieline.core.errors import require
from tieline.engines import EngineCapture, RunOptions, engine_named, run_engine
from tieline.engines.capture import captured
from tieline.engines.process import Progress
from tieline.engines.registry import TRANSFORMERS, find_python
from tieline.models.demo import DEMO_FOLDER, is_demo
from tieline.models.loading import LoadedModel, load_model, load_tokenizer
from tieline.models.running import batches
from tieline.run.corpus import Text, as_text, tokenise
from tieline.run.processes import Ranks
from tieline.trace.readers import token_documents
from tieline.trace.record import RoutingTrace

BATCH = 8
"""Documents per forward pass of transformers."""

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


def capture_engine(
    model: str | Path = "demo",
    *,
    engine: str = TRANSFORMERS,
    text: Text = None,
    ids: str | Path | Sequence[Any] | None = None,
    tokens_from: str | Path | RoutingTrace | None = None,
    tokenizer: str | Path | None = None,
    tokens: int = 4096,
    sequence_length: int = 256,
    engine_python: str | Path | None = None,
    engine_defaults: bool = False,
    dtype: str = "auto",
    scores: bool = True,
    output: str | Path | None = None,
    stream: bool | None = None,
    memory: int | None = None,
    keep: bool = True,
    parallel: str | None = None,
    progress: Progress | None = None,
) -> EngineCapture:
    """Run a model in an engine and record what its routers choose.

    Args:
        model: a folder, a hub id or "demo"; for llama.cpp a GGUF file.
        engine: "transformers", "vllm", "mlx", "llama.cpp", or another that was registered.
        text: what to run: a str, the Path of a file, or None for the text in the box.
        ids: token ids instead: a file (see `tieline.trace.readers.read_tokens`) or lists of ids.
        tokens_from: the tokens of a trace or a file of routes instead.
        tokenizer: model whose tokenizer cuts the text, where MODEL has none.
        tokens: how many tokens of the text.
        sequence_length: tokens per document.
        engine_python: the Python that the engine is installed in.
        engine_defaults: leave all settings as the engine has them: what is deployed.
        dtype: precision: "fp32" (which "auto" means here), "bf16", "fp16".
        scores: whether to keep the scores beside the choice.
        output: name of the folder that the trace will be saved in, for the record.
        stream: whether transformers reads the weights layer by layer, each byte once; by default
            where they exceed the free memory.
        memory: bytes of memory that a streamed model may take, by default what is free.
        keep: whether files that are fetched from the hub for a streamed model stay.
        parallel: how the processes of torchrun share a model in transformers (`hf.spread`); all
            must call, and all get the result.
        progress: called with stage, done and total.
    """
    given = [x is not None for x in (text, ids, tokens_from)]
    require(sum(given) <= 1, "text, ids and tokens_from exclude each other: name one")
    if engine == TRANSFORMERS:
        require(engine_python is None, "engine_python is for other engines than transformers")
        require(not engine_defaults, "engine_defaults is for other engines than transformers")
    else:
        require(not stream, "stream is for transformers: other engines load the whole model")
        require(
            parallel is None,
            f"{engine} runs by itself: capture with it in one process, without torchrun",
        )
        find_python(engine_named(engine), engine_python)  # before anything is loaded
    documents = _documents(model, text, ids, tokens_from, tokenizer, tokens, sequence_length)
    if engine == TRANSFORMERS:
        streaming = {"stream": stream, "memory": memory, "keep": keep}
        loaded = load_model(model, dtype=dtype, parallel=parallel, **streaming)
        trace = _in_transformers(loaded, documents.sequences, progress, parallel)
    else:
        options = RunOptions(
            engine_python,
            "fp32" if dtype == "auto" else dtype,
            engine_defaults,
            scores=scores,
            vocabulary=documents.vocabulary if engine_named(engine).gguf else None,
        )
        trace = run_engine(
            engine_model(model), engine, documents.sequences, options, progress
        ).trace
    return captured(_renumbered(trace, documents), str(model), engine, str(output or ""))


def _documents(
    model: str | Path,
    text: Text,
    ids: Any,
    tokens_from: Any,
    tokenizer: str | Path | None,
    tokens: int,
    length: int,
) -> _Documents:
    vocabulary = None if tokenizer is None else vocabulary_sample(load_tokenizer(tokenizer))
    if ids is not None:
        rows = list(token_documents(ids) or ())
        return _Documents(rows, list(range(len(rows))), vocabulary, "ids")
    if tokens_from is not None:
        trace = tokens_from if isinstance(tokens_from, RoutingTrace) else read_routes(tokens_from)
        sequences, numbers = sequences_of(trace)
        return _Documents([x.numpy() for x in sequences], numbers, vocabulary, "a trace")
    tokenizer_model = model if tokenizer is None else tokenizer
    require(
        not str(tokenizer_model).endswith(".gguf"),
        "a GGUF has no tokenizer of transformers: name a model that has the same with `tokenizer`, "
        "or the tokens with `ids` or `tokens_from`",
    )
    loaded = load_tokenizer(tokenizer_model)
    sequences, origin = engine_tokens(loaded, text, tokens, length)
    rows, vocabulary = [x.numpy() for x in sequences], vocabulary_sample(loaded)
    return _Documents(rows, list(range(len(rows))), vocabulary, origin)


def _in_transformers(
    loaded: LoadedModel,
    sequences: Sequence[Any],
    progress: Progress | None,
    parallel: str | None,
) -> RoutingTrace:
    rows = [torch.as_tensor(np.asarray(row, dtype=np.int64)) for row in sequences]
    if loaded.stream is not None:
        on_progress = None if progress is None else partial(progress, "streaming")
        return streamed_trace(loaded.stream, list(batches(rows, BATCH)), on_progress)
    side = Side(loaded.model)
    trace = trace_model(side, rows, batch_size=BATCH, progress=progress, parallel=parallel)
    return replace(trace, provenance=trace.provenance | Ranks(parallel, ()).provenance())


def _renumbered(trace: RoutingTrace, documents: _Documents) -> RoutingTrace:
    """Return the trace with the numbers that its documents had in their source."""
    numbers = torch.tensor(documents.numbers)[trace.documents.long()]
    provenance = trace.provenance | {"text": documents.origin}
    return replace(trace, documents=numbers, provenance=provenance)
