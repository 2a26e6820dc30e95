"""Running an inference engine on a text, on token ids, or on the tokens of another run.

    capture_engine    the routing of a model in an engine, as a trace that can be saved
    list_engines      the engines, where they were found and how they are installed
    engine_tokens     the documents of token ids that an engine is to run
    known_words       texts of some tokens, by which a GGUF of another model is told

The tokens come from a tokenizer of transformers, never from the engine, so that every engine runs
the same. transformers itself is an engine like the others, but runs in this process.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from tieline.analysis.diff import Side, sequences_of, trace_model
from tieline.analysis.sources import read_routes
from tieline.analysis.streamed import streamed_trace
from tieline.core.errors import ParameterError, TraceError, require
from tieline.core.records import Result
from tieline.engines import ENGINES, RunOptions, engine_named, installed, run_engine
from tieline.engines.process import Progress
from tieline.engines.registry import find_python
from tieline.models.demo import DEMO_FOLDER, is_demo
from tieline.models.loading import LoadedModel, load_model, load_tokenizer
from tieline.models.running import batches
from tieline.run.corpus import Text, as_text, tokenise
from tieline.run.processes import Ranks
from tieline.trace.readers import token_documents
from tieline.trace.record import RoutingTrace

TRANSFORMERS = "transformers"
BATCH = 8
"""Documents per forward pass of transformers."""

MOST_WORDS = 512
"""Tokens whose text is compared with that in a GGUF."""


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
        found = {
            "tokens": float(self.tokens),
            "documents": float(self.documents),
            "layers": float(len(self.layers)),
            "tied": float(self.tied),
            "off_scores": float(self.off_scores),
        }
        return found if self.bits is None else found | {"bits": self.bits}


@dataclass(frozen=True)
class EngineEntry:
    """One engine of the list.

    Attributes:
        name: what `--engine` calls it.
        python: the Python it was found in; empty if it was not found.
        versions: of its packages.
        takes: what its models are.
        folder: where it is looked for first.
        install: shell commands that install it there, with that folder as `$VENV`.
        size: what it takes on disk.
    """

    name: str
    python: str
    versions: dict[str, str]
    takes: str
    folder: str
    install: tuple[str, ...]
    size: str


@dataclass(frozen=True, repr=False)
class EngineList(Result):
    """The engines that can be looked into, and how to install those that are not there.

    Attributes:
        engines: one entry each, transformers first.
    """

    format: ClassVar[str] = "tieline-engines"

    engines: tuple[EngineEntry, ...]

    @property
    def metrics(self) -> dict[str, float]:
        """Named numbers: "engines" and "found"."""
        return {
            "engines": float(len(self.engines)),
            "found": float(sum(bool(one.python) for one in self.engines)),
        }


def list_engines() -> EngineList:
    """Return every engine with the Python it was found in and how to install it."""
    import sys

    import transformers

    own = EngineEntry(
        TRANSFORMERS,
        sys.executable,
        {"transformers": transformers.__version__, "torch": torch.__version__},
        "a folder, a hub id or 'demo'",
        "",
        ("pip install 'tieline[hf]'",),
        "",
    )
    entries = [own]
    for engine in ENGINES.values():
        found = installed(engine)
        entries.append(
            EngineEntry(
                engine.name,
                str(found.python or ""),
                found.versions,
                engine.model,
                str(engine.folder),
                engine.install,
                engine.size,
            )
        )
    return EngineList(tuple(entries))


def model_place(model: str | Path) -> str:
    """What an engine is given for a name: the folder of the model in the box, or the name."""
    return str(DEMO_FOLDER) if is_demo(model) else str(model)


def engine_tokens(
    tokenizer: Any, text: Text, tokens: int, sequence_length: int
) -> tuple[list[Int[Tensor, " _"]], str]:
    """Documents of token ids of a text, and where the text is from."""
    words, origin = as_text(text)
    return list(tokenise(tokenizer, words, tokens, sequence_length).sequences), origin


def known_words(tokenizer: Any) -> dict[int, str]:
    """Texts of up to 512 tokens, evenly spread over the vocabulary."""
    vocabulary = {int(number): str(word) for word, number in tokenizer.get_vocab().items()}
    numbers = sorted(vocabulary)
    step = max(1, len(numbers) // MOST_WORDS)
    return {number: vocabulary[number] for number in numbers[::step][:MOST_WORDS]}


@dataclass(frozen=True)
class _Tokens:
    """Documents to run: token ids, their numbers, texts of tokens, and the origin."""

    sequences: list[Any]
    documents: list[int]
    words: Mapping[int, str] | None
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
    require(sum(given) <= 1, "--text, --ids and --tokens-from exclude each other: name one")
    if engine == TRANSFORMERS:
        require(engine_python is None, "--engine-python is for other engines than transformers")
        require(not engine_defaults, "--engine-defaults is for other engines than transformers")
    else:
        require(not stream, "--stream is for transformers: other engines load the whole model")
        alone = f"{engine} runs by itself: capture with it in one process, without torchrun"
        require(parallel is None, alone)
        find_python(engine_named(engine), engine_python)  # before anything is loaded
    found = _tokens(model, engine, text, ids, tokens_from, tokenizer, tokens, sequence_length)
    if engine == TRANSFORMERS:
        streaming = {"stream": stream, "memory": memory, "keep": keep}
        loaded = load_model(model, dtype=dtype, parallel=parallel, **streaming)
        trace = _in_transformers(loaded, found.sequences, progress, parallel)
    else:
        options = RunOptions(
            engine_python,
            "fp32" if dtype == "auto" else dtype,
            engine_defaults,
            scores=scores,
            words=found.words if engine_named(engine).gguf else None,
        )
        trace = run_engine(model_place(model), engine, found.sequences, options, progress).trace
    return _captured(_renumbered(trace, found), str(model), engine, str(output or ""))


def _tokens(
    model: str | Path,
    engine: str,
    text: Text,
    ids: Any,
    tokens_from: Any,
    tokenizer: str | Path | None,
    tokens: int,
    length: int,
) -> _Tokens:
    words = None if tokenizer is None else known_words(load_tokenizer(tokenizer))
    if ids is not None:
        rows = list(token_documents(ids) or ())
        return _Tokens(rows, list(range(len(rows))), words, "ids")
    if tokens_from is not None:
        trace = tokens_from if isinstance(tokens_from, RoutingTrace) else read_routes(tokens_from)
        sequences, documents = sequences_of(trace)
        return _Tokens([x.numpy() for x in sequences], documents, words, "a trace")
    named = model if tokenizer is None else tokenizer
    require(
        not str(named).endswith(".gguf"),
        "a GGUF has no tokenizer of transformers: name a model that has the same with --tokenizer, "
        "or the tokens with --ids or --tokens-from",
    )
    cutter = load_tokenizer(named)
    sequences, origin = engine_tokens(cutter, text, tokens, length)
    words = known_words(cutter)
    return _Tokens([x.numpy() for x in sequences], list(range(len(sequences))), words, origin)


def _in_transformers(
    loaded: LoadedModel,
    sequences: Sequence[Any],
    progress: Progress | None,
    parallel: str | None,
) -> RoutingTrace:
    rows = [torch.as_tensor(np.asarray(row, dtype=np.int64)) for row in sequences]
    if loaded.stream is not None:
        told = None if progress is None else partial(progress, "streaming")
        return streamed_trace(loaded.stream, list(batches(rows, BATCH)), told)
    side = Side(loaded.model)
    trace = trace_model(side, rows, batch_size=BATCH, progress=progress, parallel=parallel)
    return replace(trace, provenance=trace.provenance | Ranks(parallel, ()).provenance())


def _renumbered(trace: RoutingTrace, found: _Tokens) -> RoutingTrace:
    """The trace with the numbers that the documents had where they came from."""
    numbers = torch.tensor(found.documents)[trace.documents.long()]
    told = trace.provenance | {"text": found.origin}
    return replace(trace, documents=numbers, provenance=told)


def _captured(trace: RoutingTrace, model: str, engine: str, output: str) -> EngineCapture:
    told, first = trace.provenance, trace.layers[0]
    off = sum(_counts(told, "off_scores"))
    if off and first.scores is not None and output:
        raise TraceError(
            f"{engine}: {off} choices are not the largest scores, so that the engine ranks "
            "something else (a bias, groups): save the choice alone with --no-scores, or compare "
            f"directly with tieline diff MODEL {engine}:{model}"
        )
    bits = told.get("bits")
    versions = told.get("versions")
    if not isinstance(versions, dict):
        versions = {key: told[key] for key in ("transformers", "torch") if key in told}
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
        tied=sum(_counts(told, "ties")),
        off_scores=off,
        dtype=str(told.get("dtype", "")),
        bits=float(bits) if isinstance(bits, int | float) else None,
        versions={str(key): str(value) for key, value in versions.items()},
        settings=_mapping(told, "settings"),
        timings={key: float(value) for key, value in _mapping(told, "timings").items()},  # pyright: ignore[reportArgumentType]
        trace=trace,
    )


def _counts(told: Mapping[str, object], key: str) -> list[int]:
    found = told.get(key)
    return [int(one) for one in found] if isinstance(found, list) else []


def _mapping(told: Mapping[str, object], key: str) -> dict[str, object]:
    found = told.get(key)
    return dict(found) if isinstance(found, dict) else {}


def known_engine(name: str) -> str:
    """Return the name of an engine; raises with all names otherwise."""
    if name != TRANSFORMERS and name not in ENGINES:
        known = ", ".join([TRANSFORMERS, *ENGINES])
        raise ParameterError(f"--engine: no engine is called {name!r:.40}; there are {known}")
    return name
