"""Load, convert and merge saved files of routes, traces, summaries and results."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Unpack

import torch

from tieline.analysis.job_settings import (
    ConvertOptions,
    ConvertSettings,
    MergeOptions,
    MergeSettings,
)
from tieline.core.errors import TraceError, require
from tieline.core.files import check_target
from tieline.core.records import Result, read_result
from tieline.core.setting_fields import require_setting, takes_settings
from tieline.trace.readers import SUFFIXES, import_trace, recognise_format, routes_of_trace
from tieline.trace.readers.megatron import TRACE_FILES as MEGATRON_FILES
from tieline.trace.record import RoutingTrace
from tieline.trace.repetition import repeated_row_mask
from tieline.trace.selection import select_tokens
from tieline.trace.store import folder_kind, load_summary, load_trace, merge_folders
from tieline.trace.summary import RoutingSummary
from tieline.trace.writers import FORMS, export

DROPPABLE = ("warm-up",)
ROUTE_FIELDS = (b"routed_experts", b"moe_topk_indices", b"top_indices")
"""Names of fields in JSON files of routes, which distinguish them from results."""


def source_kind(name: str | Path) -> Literal["result", "trace", "file", "model"]:
    """Kind of source that a name refers to.

    A JSON file of a Tieline format is a saved result, a folder with Tieline's index a trace (or
    summary), any other file, or a folder of Megatron's traces, a file of routes, and any other name
    a model.
    """
    path = Path(name)
    if path.is_file() and path.suffix == ".json" and _is_result(path):
        return "result"
    if path.is_dir() and (path / "tieline.json").is_file():
        return "trace"
    if path.is_dir() and any(path.glob(MEGATRON_FILES)):
        return "file"
    return "file" if path.is_file() or path.suffix in SUFFIXES else "model"


def _is_result(path: Path) -> bool:
    """Whether a JSON file begins like a result, or without a field of routes."""
    with path.open("rb") as stream:
        head = stream.read(1 << 16)
    return b'"tieline-' in head or not any(field in head for field in ROUTE_FIELDS)


def load_routes(
    name: str | Path, n_experts: int | None = None, k: int | None = None
) -> RoutingTrace:
    """The trace in a folder of `save_trace` or in a file of an engine.

    Args:
        name: the folder or file.
        n_experts: number of experts, for files that do not state it.
        k: number of chosen experts in each line of a table.
    """
    if source_kind(name) == "file":
        require(Path(name).exists(), f"no such file: {name}", TraceError)
        array = Path(name).is_file() and recognise_format(name) == "array"
        return import_trace(name, n_experts, None if array else k)
    kind = folder_kind(Path(name))
    require(kind == "trace", f"{name} is a {kind}: a trace with every token is needed", TraceError)
    return load_trace(name)


def load(path: str | Path) -> RoutingTrace | RoutingSummary | Result:
    """Load a saved trace or summary from its folder, routes of an engine, or a result.

    Args:
        path: a folder of `RoutingTrace.save` or `--save-trace`, a folder of a streaming summary, a
            file of routes (.npy, .npz, .safetensors, .csv, .jsonl), or the JSON of any command.
    """
    require(isinstance(path, str | Path), f"load takes a path, got {type(path).__name__}")
    require(Path(path).exists(), f"no such file or folder: {path}", TraceError)
    kind = source_kind(path)
    if kind == "result":
        return read_result(path)
    if kind == "model":
        raise TraceError(f"{path} holds no trace, summary or result (a model is loaded by name)")
    if kind == "trace" and folder_kind(Path(path)) == "summary":
        return load_summary(path)
    return load_routes(path)


@dataclass(frozen=True, repr=False)
class Converted(Result):
    """Result of writing routes in another form.

    Attributes:
        source: file or folder that was read.
        producer: format of the source.
        output: file or folder that was written.
        form: form of the output.
        tokens: number of tokens written.
        documents: number of their documents.
        layers: names of the routed layers.
        k: experts per token.
        said: notes of the reader on what it found, assumed and left out.
        dropped: rows that `drop` left out.
    """

    format: ClassVar[str] = "tieline-conversion"

    source: str
    producer: str
    output: str
    form: str
    tokens: int
    documents: int
    layers: tuple[str, ...]
    k: int
    said: tuple[str, ...]
    dropped: int = 0

    @property
    def metrics(self) -> dict[str, float]:
        """Named numbers: "tokens", "documents", "layers", "k" and "dropped"."""
        names = ("tokens", "documents", "layers", "k", "dropped")
        counts = (self.tokens, self.documents, len(self.layers), self.k, self.dropped)
        return dict(zip(names, map(float, counts), strict=True))


@takes_settings(ConvertSettings)
def convert(
    source: str | Path,
    output: str | Path,
    *,
    settings: ConvertSettings | None = None,
    **options: Unpack[ConvertOptions],
) -> Converted:
    """Read routes and write them in another form; never leaves a partial output.

    Args:
        source: a file of routes of any producer, or the folder of a trace.
        output: the file or folder to make; never the source.
        settings: the options; keyword arguments change single ones.
    """
    settings = ConvertSettings.of(settings, options)
    form = settings.to
    require_setting(
        form in FORMS,
        "{to}: no form is called {form}; there are {forms}",
        form=f"{form!r:.40}",
        forms=", ".join(FORMS),
    )
    require_setting(
        settings.drop in (None, *DROPPABLE),
        "{drop}: {given} cannot be dropped; there is {drops}",
        given=f"{settings.drop!r:.40}",
        drops=", ".join(DROPPABLE),
    )
    same = os.path.realpath(source) == os.path.realpath(output)
    require(not same, f"{output} is the input: it is not written over")
    require_setting(
        settings.overwrite or not os.path.lexists(output),
        "{output} exists: choose another name or add {overwrite}",
        output=output,
    )
    if form != "trace":
        check_target(Path(output))
    trace = _trace_to_convert(source, settings.import_arguments)
    read_tokens = trace.n_tokens
    trace = trace if settings.drop is None else _without_warm_up(trace, str(source))
    export(trace, output, form, layers=settings.model_layers, overwrite=settings.overwrite)
    notes = trace.provenance.get("said", [])
    return Converted(
        source=str(source),
        producer=str(trace.provenance.get("producer", "trace")),
        output=str(output),
        form=form,
        tokens=trace.n_tokens,
        documents=len(trace.documents.unique()),
        layers=tuple(layer.name for layer in trace.layers),
        k=trace.layers[0].facts.k,
        said=tuple(map(str, notes)) if isinstance(notes, list) else (),
        dropped=read_tokens - trace.n_tokens,
    )


def _without_warm_up(trace: RoutingTrace, name: str) -> RoutingTrace:
    """The trace without the repeated rows of warm-up; documents are renumbered from 0."""
    repeated = repeated_row_mask(routes_of_trace(trace, name))
    require(not repeated.all(), f"{name}: every row is warm-up: nothing would be left", TraceError)
    if not repeated.any():
        return trace
    remainder = select_tokens(trace, torch.from_numpy(~repeated))
    return replace(remainder, documents=remainder.documents.unique(return_inverse=True)[1])


def _trace_to_convert(source: str | Path, options: dict[str, Any]) -> RoutingTrace:
    """Read a trace from its folder, or from a file of routes."""
    require(Path(source).exists(), f"no such file or folder: {source}", TraceError)
    if not (Path(source) / "tieline.json").is_file():
        return import_trace(source, **options)
    kind = folder_kind(source)
    require(kind == "trace", f"{source} is a {kind}: a trace is needed", TraceError)
    return load_trace(source)


@dataclass(frozen=True, repr=False)
class Merged(Result):
    """Result of merging several folders.

    Attributes:
        kind: "trace" or "summary".
        folders: the merged folders.
        output: the folder that was written.
        tokens: number of its tokens.
        sampled: number of tokens stored one by one: all of a trace, a sample of a summary.
        layers: names of its layers.
    """

    format: ClassVar[str] = "tieline-merge"

    kind: Literal["trace", "summary"]
    folders: tuple[str, ...]
    output: str
    tokens: int
    sampled: int
    layers: tuple[str, ...]

    @property
    def metrics(self) -> dict[str, float]:
        """Named numbers: "tokens", "sampled" and "layers"."""
        counts = {"tokens": self.tokens, "sampled": self.sampled, "layers": len(self.layers)}
        return {name: float(count) for name, count in counts.items()}


@takes_settings(MergeSettings)
def merge(
    folders: Sequence[str | Path],
    output: str | Path,
    *,
    settings: MergeSettings | None = None,
    **options: Unpack[MergeOptions],
) -> Merged:
    """Merge folders of traces, or of streaming summaries, into one.

    Args:
        folders: the inputs, all of one kind.
        output: the folder to make.
        settings: the options; keyword arguments change single ones.
    """
    settings = MergeSettings.of(settings, options)
    documents = "renumber" if settings.renumber else "keep"
    merged = merge_folders(folders, output, overwrite=settings.overwrite, documents=documents)
    is_trace = isinstance(merged, RoutingTrace)
    return Merged(
        kind="trace" if is_trace else "summary",
        folders=tuple(map(str, folders)),
        output=str(output),
        tokens=merged.n_tokens if is_trace else merged.tokens,
        sampled=merged.n_tokens if is_trace else merged.sample.n_tokens,
        layers=tuple(layer.name for layer in merged.layers),
    )
