"""Traces and summaries on disk: folders of one layout, written and read by the same functions.

    tieline.json                     layers (name and facts), ε grid; the provenance of a trace, or
                                     sources, sample size and numbers per layer of a summary
    tokens.safetensors               token ids, documents and positions
    layer-00000.safetensors, ...     trace: the tensors of each layer
    sample-00000.safetensors, ...    summary: the same tensors for the sampled tokens
    counts-00000.safetensors, ...    summary: the counts of each layer

A folder is written completely or not at all. No file is trusted: file names are never taken from
the folder, the JSON is bounded, each tensor file must have the size and the digest that the index
states, the safetensors header is bounded before it is parsed, and only plain integers and real
numbers are read. Every problem is a `TraceError` that names the file.

`docs/trace-format.md` describes the format. Loading a trace reads the index, the token ids and the
headers of the layers' files. A layer's tensors are mapped into memory when the layer is accessed;
digest and values are checked the first time. A summary is read at once; counts that do not add up
to the number of tokens raise an error.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from tieline.core.errors import TraceError, naming_unparsable_file, require
from tieline.core.files import file_digest, whole_folder
from tieline.core.records import LONGEST, canonical_json, parse_json
from tieline.core.setting_fields import TraceSettingError
from tieline.core.text import layer_label
from tieline.trace.counts import (
    EXPONENTS,
    LOW_BITS,
    N_BINS,
    SKETCH_CAPACITY,
    DistinctSketch,
    ExactMoments,
    LogHistogram,
)
from tieline.trace.record import (
    LAYER_TENSORS,
    MOST_LAYERS,
    TOKEN_IDS,
    TOKEN_KEYS,
    LayerFacts,
    LayerTrace,
    LazyLayers,
    RoutingTrace,
    check_epsilons,
    check_layer,
    check_tensor_layout,
    number_kind,
)
from tieline.trace.selection import concatenate
from tieline.trace.summary import (
    MOST_TOKENS,
    LayerSummary,
    RoutingSummary,
    SharedBias,
    TokenKey,
    distinct_sources,
    merge_summaries,
)

INDEX = "tieline.json"
SUFFIX = ".safetensors"
TensorFiles = Iterable[tuple[str, Mapping[str, Tensor]]]


def write_tensor_folder(
    directory: str | Path,
    kind: str,
    version: int,
    contents: Mapping[str, object],
    files: TensorFiles,
    overwrite: bool,
) -> None:
    """Write a folder of tensor files with an index, or raise and change nothing.

    Args:
        directory: the folder to make, parents included.
        kind: name of the format.
        version: version of the format.
        contents: JSON values of the index.
        files: name and tensors of each file, taken one at a time.
        overwrite: whether a folder of this kind may be replaced; of other folders only empty ones
            are.
    """
    target = check_replaceable(directory, kind, overwrite)
    has_kind = partial(_is_tensor_folder, kind=kind)
    with whole_folder(target, replace=overwrite, kind=has_kind) as folder:
        written = {
            name: _write_tensor_file(folder / f"{name}{SUFFIX}", tensors) for name, tensors in files
        }
        index = {"format": kind, "version": version, "files": written, **contents}
        text = canonical_json(index).encode()
        if len(text) > LONGEST:
            raise TraceError(f"the index has {len(text)} bytes, at most {LONGEST}")
        (folder / INDEX).write_bytes(text)


def check_replaceable(directory: str | Path, kind: str, overwrite: bool) -> Path:
    """Return the absolute path of a folder to write; raises if it may not be replaced."""
    target = Path(os.path.abspath(directory))
    if not os.path.lexists(target) or (target.is_dir() and not any(target.iterdir())):
        return target
    if not overwrite:
        raise TraceSettingError(
            "{target} exists: choose another place or add {overwrite}", target=target
        )
    if not (target.is_dir() and not target.is_symlink() and _is_tensor_folder(target, kind)):
        raise TraceError(f"{target} exists and is no {kind} folder: it is left alone")
    return target


def _is_tensor_folder(target: Path, kind: str) -> bool:
    """Return whether a folder holds only an index of this format and tensor files."""
    names = {entry.name for entry in target.iterdir()}
    expected = all(name == INDEX or name.endswith(SUFFIX) for name in names)
    if not expected or INDEX not in names:
        return False
    with (target / INDEX).open("rb") as file:
        return f'"format":"{kind}"'.encode() in file.read(LONGEST)


def _write_tensor_file(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, object]:
    """Write a safetensors file and return its size and digest."""
    # clones, because tensors that share memory cannot be stored under two names
    save_file({name: value.detach().contiguous().clone() for name, value in tensors.items()}, path)
    return {"bytes": path.stat().st_size, "sha256": file_digest(path)}


LONGEST_HEADER = 4 << 20
SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
}


class TensorHeader(NamedTuple):
    """Type and shape of a tensor in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass
class TensorFolder:
    """A folder with an index, whose tensor files are read on request.

    Attributes:
        path: the folder.
        index: JSON values of the index.
        verified: files whose digest has been checked.
    """

    path: Path
    index: Mapping[str, object]
    verified: set[str] = field(default_factory=set)

    def header(self, name: str) -> dict[str, TensorHeader]:
        """Return dtype and shape of each tensor of a file, without reading the tensors."""
        path = self._tensor_path(name)
        stated = self._stated_size_and_digest(name)["bytes"]
        size = path.stat().st_size
        require(size == stated, f"{path}: has {size} bytes, the index says {stated}", TraceError)
        check_header_length(path)
        with naming_unparsable_file(path), safe_open(path, framework="pt") as file:
            slices = [(tensor, file.get_slice(tensor)) for tensor in list(file.keys())]
            stored = {tensor: (part.get_dtype(), part.get_shape()) for tensor, part in slices}
        headers = {}
        for tensor, (kind, shape) in stored.items():
            require(
                kind in SAFETENSORS_DTYPES,
                f"{path}: {tensor!r:.80} has type {kind}, not read",
                TraceError,
            )
            headers[tensor] = TensorHeader(SAFETENSORS_DTYPES[kind], tuple(shape))
        return headers

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Map the tensors of a file into memory; the first call checks its digest."""
        names, path = self.header(name), self._tensor_path(name)
        if name not in self.verified:
            with naming_unparsable_file(path):
                digest = file_digest(path)
            stated = self._stated_size_and_digest(name)["sha256"]
            require(digest == stated, f"{path}: is damaged: its digest is not {stated}", TraceError)
            self.verified.add(name)
        with naming_unparsable_file(path), safe_open(path, framework="pt") as file:
            return {tensor: file.get_tensor(tensor) for tensor in names}

    def _tensor_path(self, name: str) -> Path:
        """Return the path of a tensor file; raises if it is missing."""
        path = self.path / f"{name}{SUFFIX}"
        require(path.is_file(), f"{path}: is missing", TraceError)
        return path

    def _stated_size_and_digest(self, name: str) -> Mapping[str, object]:
        """Return size and digest of a tensor file, as the index states them."""
        files = self.index.get("files")
        stated = files.get(name) if isinstance(files, dict) else None
        if not isinstance(stated, dict) or stated.keys() != {"bytes", "sha256"}:
            raise TraceError(f"{self.path / INDEX}: states no size and digest of {name!r}")
        return stated


def read_index(directory: str | Path) -> dict[str, object]:
    """Read the JSON index of a folder."""
    file = Path(directory) / INDEX
    require(file.is_file(), f"{directory}: is no folder with a {INDEX}", TraceError)
    with naming_unparsable_file(file), file.open("rb") as stream:
        index = parse_json(stream.read(LONGEST + 1), str(file))
    if not isinstance(index, dict):
        raise TraceError(f"{file}: must hold a JSON object")
    return index


def open_tensor_folder(directory: str | Path, kind: str, version: int) -> TensorFolder:
    """Open a folder and read its index; raises unless it has this kind and version."""
    index = read_index(directory)
    stated = index.get("format"), index.get("version")
    if not (stated == (kind, version) and type(stated[1]) is int):
        raise TraceError(
            f"{directory}: must be {kind} version {version}, got {stated[0]!r:.80} version "
            f"{stated[1]!r:.80}"
        )
    return TensorFolder(Path(directory), index)


def check_header_length(path: Path) -> None:
    """Raise if the header of a safetensors file is longer than 4 MiB or than the file."""
    with naming_unparsable_file(path), path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        size = path.stat().st_size
    fault = f"{path}: not a safetensors file: header of {length} bytes in {size}"
    require(length <= min(LONGEST_HEADER, size), fault, TraceError)


Kind = Literal["trace", "summary"]
FORMATS: Mapping[Kind, str] = {"trace": "tieline-trace", "summary": "tieline-summary"}
VERSION = 1
TOKEN_FILE = "tokens"  # noqa: S105
LONGEST_NAME = 1024
MOST_EPSILONS = 1024

_ROW_FILES: Mapping[Kind, str] = {"trace": "layer", "summary": "sample"}
_COMMON_FIELDS = {"format", "version", "files", "layers", "epsilons"}
_FIELDS_OF_KIND: Mapping[Kind, set[str]] = {
    "trace": {"provenance"},
    "summary": {"sample_size", "sources"},
}


def save_trace(trace: RoutingTrace, directory: str | Path, overwrite: bool = False) -> None:
    """Write a trace to a new folder, completely or not at all.

    Args:
        trace: any trace whose values `check_layer` accepts; layers on disk are copied one by one.
        directory: the folder to create, parents included.
        overwrite: whether an existing trace may be replaced.
    """
    contents, files = _index_contents(trace), _files_to_write(trace)
    write_tensor_folder(directory, FORMATS["trace"], VERSION, contents, files, overwrite)


def save_summary(summary: RoutingSummary, directory: str | Path, overwrite: bool = False) -> None:
    """Write a summary to a new folder, completely or not at all.

    Args:
        summary: any summary.
        directory: the folder to create, parents included.
        overwrite: whether an existing summary may be replaced.
    """
    contents, files = _index_contents(summary), _files_to_write(summary)
    write_tensor_folder(directory, FORMATS["summary"], VERSION, contents, files, overwrite)


def load_trace(directory: str | Path) -> RoutingTrace:
    """Load a trace from a folder; each layer is read when it is accessed."""
    stored = _open_stored(directory, "trace")
    provenance = stored.folder.index["provenance"]
    if not isinstance(provenance, dict):
        raise TraceError(f"{directory}: provenance must be a JSON object")
    count = len(stored.entries)
    for index in range(count):
        stored.check_header(index)
    layers = LazyLayers(count, stored.layer)
    return RoutingTrace(layers, epsilons=stored.epsilons, provenance=provenance, **stored.ids)


def load_summary(directory: str | Path) -> RoutingSummary:
    """Load a summary from a folder."""
    stored = _open_stored(directory, "summary")
    size, sources = (stored.folder.index[name] for name in ("sample_size", "sources"))
    if type(size) is not int or not isinstance(sources, list):
        raise TraceError(f"{directory}: sample_size must be an integer and sources a list")
    if not all(isinstance(source, dict) for source in sources):
        raise TraceError(f"{directory}: every source must be a JSON object")
    rows = tuple(stored.layer(index) for index in range(len(stored.entries)))
    tokens, documents, positions = (stored.ids[name] for name in TOKEN_KEYS)
    sample = RoutingTrace(rows, tokens, documents, positions, stored.epsilons)
    layers = tuple(stored.counts(index, layer) for index, layer in enumerate(rows))
    return RoutingSummary(layers, sample, size, stored.epsilons, distinct_sources(sources))


def folder_kind(directory: str | Path) -> Kind:
    """Return whether a folder holds a trace or a summary."""
    stated = read_index(directory).get("format")
    for kind, name in FORMATS.items():
        if stated == name:
            return kind
    raise TraceError(f"{directory}: is neither a trace nor a summary: {stated!r:.80}")


def merge_folders(
    directories: Sequence[str | Path],
    output: str | Path,
    overwrite: bool = False,
    documents: Literal["keep", "renumber"] = "keep",
) -> RoutingTrace | RoutingSummary:
    """Merge summaries, or concatenate traces, of parts of a run, and save the result.

    Args:
        directories: folders of one kind.
        output: the folder to create.
        overwrite: whether a folder of that kind may be replaced; it may be one of the inputs.
        documents: for traces, whether documents keep their numbers (`concatenate`); summaries
            merge by (document, position), so they always keep them.

    Returns:
        The saved trace or summary; a trace is loaded anew, since its parts may have been replaced.
    """
    require(len(directories) > 0, "nothing to merge: got no folders", TraceError)
    kinds: dict[str, Kind] = {str(directory): folder_kind(directory) for directory in directories}
    require(len(set(kinds.values())) == 1, f"cannot merge different kinds: {kinds}", TraceError)
    kind = next(iter(kinds.values()))
    if kind == "summary" and documents != "keep":
        raise TraceError("summaries keep the numbers of their documents")
    check_replaceable(output, FORMATS[kind], overwrite)
    if kind == "summary":
        merged = merge_summaries([load_summary(directory) for directory in directories])
        save_summary(merged, output, overwrite)
        return merged
    joined = concatenate([load_trace(directory) for directory in directories], documents)
    save_trace(joined, output, overwrite)
    return load_trace(output)


def _numbered_file(kind: str, index: int) -> str:
    """Return the name of a layer's file, without suffix."""
    return f"{kind}-{index:05d}"


def _index_contents(stored: RoutingTrace | RoutingSummary) -> dict[str, object]:
    """Return the index of a trace or summary, without format, version and files."""
    contents: dict[str, object] = {
        "layers": [_layer_entry(layer) for layer in stored.layers],
        "epsilons": list(stored.epsilons),
    }
    if isinstance(stored, RoutingTrace):
        return contents | {"provenance": stored.provenance}
    return contents | {"sample_size": stored.sample_size, "sources": list(stored.sources)}


def _layer_entry(layer: LayerTrace | LayerSummary) -> dict[str, object]:
    """Return a layer's entry in the index: name, facts and, for a summary, its scalar counts."""
    size = len(layer.name)
    require(size <= LONGEST_NAME, f"a layer's name has {size} letters", TraceError)
    entry: dict[str, object] = {"name": layer.name, "facts": asdict(layer.facts)}
    if isinstance(layer, LayerTrace):
        return entry
    first = layer.first_nonfinite
    return entry | {
        "tokens": layer.tokens,
        "nonfinite": layer.nonfinite,
        "first_nonfinite": None if first is None else list(first),
        "group_decides": layer.group_decides,
        "bias_changed": layer.bias.changed,
    }


def _files_to_write(
    stored: RoutingTrace | RoutingSummary,
) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield name and tensors of each file; raises for values that no router can have produced."""
    kind: Kind = "trace" if isinstance(stored, RoutingTrace) else "summary"
    rows = stored if isinstance(stored, RoutingTrace) else stored.sample
    yield TOKEN_FILE, {name: getattr(rows, name) for name in TOKEN_KEYS}
    for index, layer in enumerate(rows.layers):
        check_layer(layer, broken_tokens=kind == "summary")
        yield _numbered_file(_ROW_FILES[kind], index), layer.tensors()
    if isinstance(stored, RoutingSummary):
        for index, layer in enumerate(stored.layers):
            yield _numbered_file("counts", index), _layer_counts(layer)


class _LayerEntry(NamedTuple):
    """Name and facts of a layer, and all values of its entry in the index."""

    name: str
    facts: LayerFacts
    values: Mapping[str, object]


@dataclass(frozen=True)
class _StoredLayers:
    """An open folder of a trace or summary: index and token ids, and methods that read layers."""

    folder: TensorFolder
    kind: Kind
    entries: list[_LayerEntry]
    epsilons: tuple[float, ...]
    ids: dict[str, Tensor]

    def check_header(self, index: int) -> None:
        """Raise if a layer's file has tensors of another kind or shape, without reading them."""
        entry = self.entries[index]
        header = self.folder.header(_numbered_file(_ROW_FILES[self.kind], index))
        unknown = sorted(set(header) - set(LAYER_TENSORS))
        label = f"{self.folder.path}: {layer_label(entry.name)}"
        if unknown or "experts" not in header:
            raise TraceError(f"{label}: tensors {unknown[:5]} unknown, or experts missing")
        sizes = {"tokens": len(self.ids["tokens"]), "epsilons": len(self.epsilons)}
        sizes |= {"k": entry.facts.k, "experts": entry.facts.n_experts}
        for name, layout in LAYER_TENSORS.items():
            if name in header:
                dtype, shape = header[name]
                check_tensor_layout(f"{label}: {name}", layout, number_kind(dtype), shape, sizes)
                sizes |= zip(layout.axes, shape, strict=True)
                sizes["ranks past k"] = sizes["ranks"] - sizes["k"]

    def layer(self, index: int) -> LayerTrace:
        """Read a layer; checks its header every time and its values the first time."""
        file, entry = _numbered_file(_ROW_FILES[self.kind], index), self.entries[index]
        new = file not in self.folder.verified
        self.check_header(index)
        layer = LayerTrace(entry.name, entry.facts, **self.folder.tensors(file))
        if new:
            check_layer(layer, broken_tokens=self.kind == "summary")
        return layer

    def counts(self, index: int, sample: LayerTrace) -> LayerSummary:
        """Read the statistics of a layer; raises if counts contradict its number of tokens.

        Args:
            index: index of the layer.
            sample: its sampled tokens, which give the numbers of ranks and ε.
        """
        entry = self.entries[index]
        label, numbers = f"{self.folder.path}: {layer_label(entry.name)}", entry.values
        tokens = _read_integer(numbers, "tokens", MOST_TOKENS, label)
        nonfinite = _read_integer(numbers, "nonfinite", tokens, label)
        measured = tokens - nonfinite
        tensors = _read_count_tensors(self.folder, _numbered_file("counts", index), sample, label)
        _check_count_sums(tensors, tokens * entry.facts.k, measured, label)
        changed = numbers.get("bias_changed")
        require(type(changed) is bool, f"{label}: bias_changed must be true or false", TraceError)
        return LayerSummary(
            name=entry.name,
            facts=entry.facts,
            tokens=tokens,
            load=tensors["load"],
            coalitions=_read_sketch(tensors["coalitions"], tokens, label),
            bias=SharedBias(sample.bias, changed=bool(changed)),
            nonfinite=nonfinite,
            first_nonfinite=_read_first_nonfinite(numbers.get("first_nonfinite"), nonfinite, label),
            group_decides=_read_integer(numbers, "group_decides", measured, label),
            near=tensors.get("near"),
            orders=tensors.get("orders"),
            moments=_read_moments(tensors, measured, label),
            **{name: LogHistogram(tensors[name]) for name in _HISTOGRAMS if name in tensors},
        )


def _open_stored(directory: str | Path, kind: Kind) -> _StoredLayers:
    """Open the folder of a trace or summary without reading its layers."""
    folder = open_tensor_folder(directory, FORMATS[kind], VERSION)
    index, path, expected = folder.index, folder.path, _COMMON_FIELDS | _FIELDS_OF_KIND[kind]
    require(set(index) == expected, f"{path}: must have {sorted(expected)}", TraceError)
    entries, epsilons = (
        _read_layer_entries(index["layers"], path),
        _read_epsilons(index["epsilons"], path),
    )
    return _StoredLayers(folder, kind, entries, epsilons, _read_token_ids(folder))


def _read_layer_entries(value: object, path: Path) -> list[_LayerEntry]:
    """Read the entries of all layers of an index."""
    if not isinstance(value, list) or not 1 <= len(value) <= MOST_LAYERS:
        raise TraceError(f"{path}: must list 1 ... {MOST_LAYERS} layers")
    entries = [_read_layer_entry(entry, path) for entry in value]
    names = {entry.name for entry in entries}
    require(len(names) == len(entries), f"{path}: two layers have the same name", TraceError)
    return entries


def _read_layer_entry(entry: object, path: Path) -> _LayerEntry:
    """Read the entry of one layer of an index."""
    if not isinstance(entry, dict):
        raise TraceError(f"{path}: a layer must be a JSON object")
    name, facts = entry.get("name"), entry.get("facts")
    if not isinstance(name, str) or not 0 < len(name) <= LONGEST_NAME:
        raise TraceError(f"{path}: a layer needs a name of 1 ... {LONGEST_NAME} letters")
    kinds = {field.name: type(field.default) for field in fields(LayerFacts)}
    kinds |= {"n_experts": int, "k": int}
    fits = isinstance(facts, dict) and {key: type(field) for key, field in facts.items()} == kinds
    if not isinstance(facts, dict) or not fits:
        raise TraceError(
            f"{path}: {layer_label(name)}: facts must be {sorted(kinds)}, each of its type"
        )
    return _LayerEntry(name, LayerFacts(**facts), entry)


def _read_epsilons(value: object, path: Path) -> tuple[float, ...]:
    """Read the ε grid of an index."""
    fits = isinstance(value, list) and all(type(epsilon) in (int, float) for epsilon in value)
    if not isinstance(value, list) or not fits or len(value) > MOST_EPSILONS:
        raise TraceError(f"{path}: epsilons must be a list of numbers")
    epsilons = tuple(float(epsilon) for epsilon in value)
    check_epsilons(epsilons)
    return epsilons


def _read_token_ids(folder: TensorFolder) -> dict[str, Tensor]:
    """Read token ids, documents and positions of a folder."""
    header = folder.header(TOKEN_FILE)
    if set(header) != set(TOKEN_KEYS):
        raise TraceError(
            f"{folder.path}: {TOKEN_FILE} must hold {TOKEN_KEYS}, got {sorted(header)[:5]}"
        )
    sizes: dict[str, int] = {}
    for name, (dtype, shape) in header.items():
        check_tensor_layout(f"{folder.path}: {name}", TOKEN_IDS, number_kind(dtype), shape, sizes)
        sizes["tokens"] = shape[0]
    return folder.tensors(TOKEN_FILE)


_HISTOGRAMS = ("gaps", "group_gaps", "distances")
_TABLES = ("near", "orders")
_MOMENTS = ("count", "first", "high", "low")


def _layer_counts(layer: LayerSummary) -> dict[str, Tensor]:
    """Return the tensors of a layer's counts file; its bias is stored with the sample."""
    tensors = {"load": layer.load, "coalitions": layer.coalitions.hashes}
    for name in _HISTOGRAMS:
        histogram = getattr(layer, name)
        tensors |= {} if histogram is None else {name: histogram.counts}
    for name in _TABLES:
        table = getattr(layer, name)
        tensors |= {} if table is None else {name: table}
    if layer.moments is not None:
        tensors |= {f"moments.{name}": getattr(layer.moments, name) for name in _MOMENTS}
    return tensors


def _read_count_tensors(
    folder: TensorFolder, file: str, sample: LayerTrace, label: str
) -> dict[str, Tensor]:
    """Read a counts file; raises unless its tensors are int64 and have the layer's shapes."""
    experts, ranks = sample.facts.n_experts, sample.experts.shape[1]
    epsilons = 0 if sample.near is None else sample.near.shape[1]
    shapes: dict[str, tuple[int, ...]] = {
        "load": (experts,),
        **dict.fromkeys(_HISTOGRAMS, (N_BINS,)),
        "near": (epsilons, experts + 1),
        "orders": (epsilons, experts),
        **dict.fromkeys((f"moments.{name}" for name in _MOMENTS), (ranks, EXPONENTS)),
        "moments.count": (ranks,),
    }
    header = folder.header(file)
    for name, (dtype, shape) in header.items():
        fits = shape == shapes.get(name) or (name == "coalitions" and len(shape) == 1)
        if not (fits and dtype == torch.int64):
            raise TraceError(
                f"{label}: no count is called {name!r:.80}, or it is not int64 of the right shape, "
                f"got {shape}"
            )
    needed = {"load", "coalitions"} - set(header)
    require(not needed, f"{label}: {sorted(needed)} missing", TraceError)
    return folder.tensors(file)


def _check_count_sums(
    tensors: Mapping[str, Tensor], chosen: int, measured: int, label: str
) -> None:
    """Raise if counts are negative or do not add up to the number of tokens."""
    totals = {"load": chosen, **dict.fromkeys((*_HISTOGRAMS, *_TABLES), measured)}
    for name, total in totals.items():
        if name in tensors:
            counts = tensors[name]
            inside = bool(((counts >= 0) & (counts <= total)).all())
            if not (inside and bool((counts.sum(-1) == total).all())):
                raise TraceError(f"{label}: {name} must be counts that add up to {total}")


def _read_sketch(hashes: Tensor, tokens: int, label: str) -> DistinctSketch:
    """Return the sketch of coalitions; raises unless its hashes ascend and are few enough."""
    most = min(SKETCH_CAPACITY, tokens)
    ascending = bool((hashes[1:] > hashes[:-1]).all()) and bool((hashes >= 0).all())
    if not (ascending and len(hashes) <= most):
        raise TraceError(f"{label}: coalitions must be at most {most} ascending hashes")
    return DistinctSketch(hashes)


def _read_moments(tensors: Mapping[str, Tensor], measured: int, label: str) -> ExactMoments | None:
    """Return the exact moments of a layer; None if they were not recorded."""
    columns = [tensors.get(f"moments.{name}") for name in _MOMENTS]
    if all(column is None for column in columns):
        return None
    most = measured << LOW_BITS
    limits = ((0, measured), (-most, most), (0, most), (0, (1 << LOW_BITS) - 1))
    for column, (low, high) in zip(columns, limits, strict=True):
        fits = column is not None and bool(((column >= low) & (column <= high)).all())
        require(fits, f"{label}: moments are incomplete or too large", TraceError)
    return ExactMoments(*(column for column in columns if column is not None))


def _read_first_nonfinite(value: object, nonfinite: int, label: str) -> TokenKey | None:
    """Read document and position of the first token with non-finite scores, or None."""
    if value is None and nonfinite == 0:
        return None
    fits = isinstance(value, list) and len(value) == 2 and all(type(x) is int for x in value)
    if not isinstance(value, list) or not fits or nonfinite == 0:
        raise TraceError(f"{label}: first_nonfinite must be a document and a position, or null")
    return TokenKey(*value)


def _read_integer(numbers: Mapping[str, object], name: str, most: int, label: str) -> int:
    """Read an integer in 0 ... `most` of an index."""
    value = numbers.get(name)
    if type(value) is not int or not 0 <= value <= most:
        raise TraceError(f"{label}: {name} must be an integer in 0 ... {most}, got {value!r:.40}")
    return value
