"""The parts of a folder that traces and the samples of summaries have in common.

Traces on disk: one folder, one tensor file per layer, read when the layer is touched.

`docs/trace-format.md` describes the format. Loading reads the index, the ids of the tokens and the
headers of the layers' files. A layer's tensors are mapped into memory when the layer is touched;
the first time, its digest and its values are checked.

The counts of one layer of a summary, as tensors and single numbers of a file.

Summaries on disk: the same kind of folder as a trace, with counts in place of rows.

    tieline.json               name, facts and single numbers of each layer, ε grid, sources
    counts-00000.safetensors   tensors of counts of each layer
    tokens, sample-00000       the sample, as in a trace

`docs/trace-format.md` describes the format. A summary is read whole; counts that do not add up to
the number of tokens are refused.

Merging folders: what `tieline merge A B -o C` does.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from tieline.core.errors import TraceError, require
from tieline.trace.check import check_layer
from tieline.trace.counts import EXPONENTS, LOW_BITS, N_BINS, ExactMoments, LogHistogram
from tieline.trace.folders import Folder, check_target, open_folder, read_index, write_folder
from tieline.trace.ops import concatenate
from tieline.trace.record import (
    LAYER_TENSORS,
    TOKEN_IDS,
    LayerFacts,
    LayerTrace,
    LazyLayers,
    RoutingTrace,
    check_epsilons,
    check_tensor,
    kind_of,
)
from tieline.trace.sampling import CAPACITY, DistinctSketch
from tieline.trace.summary import (
    MOST_TOKENS,
    LayerSummary,
    RoutingSummary,
    SharedBias,
    TokenKey,
    distinct_sources,
    merge,
)

__all__ = [
    "FORMAT",
    "MOST_LAYERS",
    "SUMMARY_STORE_FORMAT",
    "TOKEN_FILE",
    "TOKEN_KEYS",
    "VERSION",
    "LayerHead",
    "check_header",
    "counts_of",
    "folder_kind",
    "head_to_json",
    "layer_tensors",
    "load_summary",
    "load_trace",
    "merge_folders",
    "numbers_of",
    "read_counts",
    "read_epsilons",
    "read_heads",
    "read_layer",
    "read_token_ids",
    "save_summary",
    "save_trace",
    "token_ids",
]

TOKEN_FILE = "tokens"  # noqa: S105
TOKEN_KEYS = ("tokens", "documents", "positions")
MOST_LAYERS = 4096
LONGEST_NAME = 1024
MOST_EPSILONS = 1024


class LayerHead(NamedTuple):
    """What is known of a layer before its tensors are read; `entry` is its part of the index."""

    name: str
    facts: LayerFacts
    entry: Mapping[str, object]

    def sizes(self, tokens: int, epsilons: int) -> dict[str, int]:
        """Sizes that the axes of its tensors must have."""
        known = {"k": self.facts.k, "experts": self.facts.n_experts}
        return {"tokens": tokens, "epsilons": epsilons, **known}


def head_to_json(name: str, facts: LayerFacts) -> dict[str, object]:
    """Name and facts of a layer as JSON values."""
    require(len(name) <= LONGEST_NAME, f"a layer's name has {len(name)} letters", TraceError)
    return {"name": name, "facts": asdict(facts)}


def read_heads(value: object, path: Path) -> list[LayerHead]:
    """Names and facts of all layers."""
    if not isinstance(value, list) or not 1 <= len(value) <= MOST_LAYERS:
        raise TraceError(f"{path}: must list 1 ... {MOST_LAYERS} layers")
    heads = [_read_head(entry, path) for entry in value]
    names = {head.name for head in heads}
    require(len(names) == len(heads), f"{path}: two layers have the same name", TraceError)
    return heads


def _read_head(entry: object, path: Path) -> LayerHead:
    if not isinstance(entry, dict):
        raise TraceError(f"{path}: a layer must be a JSON object")
    name, facts = entry.get("name"), entry.get("facts")
    if not isinstance(name, str) or not 0 < len(name) <= LONGEST_NAME:
        raise TraceError(f"{path}: a layer needs a name of 1 ... {LONGEST_NAME} letters")
    kinds = {part.name: type(part.default) for part in fields(LayerFacts)}
    kinds |= {"n_experts": int, "k": int}
    fits = isinstance(facts, dict) and {key: type(part) for key, part in facts.items()} == kinds
    if not isinstance(facts, dict) or not fits:
        raise TraceError(f"{path}: layer {name!r}: facts must be {sorted(kinds)}, each of its type")
    return LayerHead(name, LayerFacts(**facts), entry)


def read_epsilons(value: object, path: Path) -> tuple[float, ...]:
    """The ε grid."""
    fits = isinstance(value, list) and all(type(eps) in (int, float) for eps in value)
    if not isinstance(value, list) or not fits or len(value) > MOST_EPSILONS:
        raise TraceError(f"{path}: epsilons must be a list of numbers")
    epsilons = tuple(float(eps) for eps in value)
    check_epsilons(epsilons)
    return epsilons


def token_ids(trace: RoutingTrace) -> dict[str, Tensor]:
    """The tensors of the file of token ids."""
    return {name: getattr(trace, name) for name in TOKEN_KEYS}


def read_token_ids(folder: Folder) -> dict[str, Tensor]:
    """Token ids, documents and positions."""
    header = folder.header(TOKEN_FILE)
    require(
        set(header) == set(TOKEN_KEYS),
        f"{folder.path}: {TOKEN_FILE} must hold {TOKEN_KEYS}, got {sorted(header)[:5]}",
        TraceError,
    )
    sizes: dict[str, int] = {}
    for name, (dtype, shape) in header.items():
        check_tensor(f"{folder.path}: {name}", TOKEN_IDS, kind_of(dtype), shape, sizes)
        sizes["tokens"] = shape[0]
    return folder.tensors(TOKEN_FILE)


def layer_tensors(layer: LayerTrace, broken_tokens: bool = False) -> dict[str, Tensor]:
    """The tensors of a layer's file; refuses values that no router can have made."""
    check_layer(layer, broken_tokens)
    fields = {name: getattr(layer, name) for name in LAYER_TENSORS}
    return {name: value for name, value in fields.items() if value is not None}


def check_header(folder: Folder, file: str, head: LayerHead, sizes: Mapping[str, int]) -> None:
    """Refuse a file whose tensors are not those of such a layer, without reading them."""
    header = folder.header(file)
    unknown = sorted(set(header) - set(LAYER_TENSORS))
    require(
        not unknown and "experts" in header,
        f"{folder.path}: layer {head.name!r}: tensors {unknown[:5]} unknown, or experts missing",
        TraceError,
    )
    sizes = dict(sizes)
    for name in _known_order(header):
        dtype, shape = header[name]
        what = f"{folder.path}: layer {head.name!r}: {name}"
        check_tensor(what, LAYER_TENSORS[name], kind_of(dtype), shape, sizes)
        sizes |= zip(LAYER_TENSORS[name].axes, shape, strict=True)


def read_layer(
    folder: Folder,
    file: str,
    head: LayerHead,
    sizes: Mapping[str, int],
    broken_tokens: bool = False,
) -> LayerTrace:
    """A layer, with the checks of its header and, the first time, of its values."""
    new = file not in folder.verified
    check_header(folder, file, head, sizes)
    layer = LayerTrace(name=head.name, facts=head.facts, **folder.tensors(file))
    if new:
        check_layer(layer, broken_tokens)
    return layer


def _known_order(names: Mapping[str, object]) -> Sequence[str]:
    return [name for name in LAYER_TENSORS if name in names]


FORMAT = "tieline-trace"
VERSION = 1
_FIELDS = {"format", "version", "files", "layers", "epsilons", "provenance"}


def save_trace(trace: RoutingTrace, directory: str | Path, overwrite: bool = False) -> None:
    """Write a trace to a new folder, whole or not at all.

    Args:
        trace: any trace whose values `check_layer` accepts; layers on disk are copied one by one.
        directory: the folder to make, parents included.
        overwrite: whether a trace that is there may be replaced.
    """
    contents = {
        "layers": [head_to_json(layer.name, layer.facts) for layer in trace.layers],
        "epsilons": list(trace.epsilons),
        "provenance": trace.provenance,
    }
    write_folder(directory, FORMAT, VERSION, contents, _parts(trace), overwrite)


def load_trace(directory: str | Path) -> RoutingTrace:
    """The trace in a folder; layers are read when they are touched."""
    folder = open_folder(directory, FORMAT, VERSION)
    index, path = folder.index, folder.path
    require(set(index) == _FIELDS, f"{path}: must have {sorted(_FIELDS)}", TraceError)
    heads, epsilons = read_heads(index["layers"], path), read_epsilons(index["epsilons"], path)
    provenance = index["provenance"]
    if not isinstance(provenance, dict):
        raise TraceError(f"{path}: provenance must be a JSON object")
    keys = read_token_ids(folder)
    sizes = [head.sizes(len(keys["tokens"]), len(epsilons)) for head in heads]
    for place, head in enumerate(heads):
        check_header(folder, _file(place), head, sizes[place])
    layers = LazyLayers(
        len(heads), lambda place: read_layer(folder, _file(place), heads[place], sizes[place])
    )
    return RoutingTrace(layers=layers, epsilons=epsilons, provenance=provenance, **keys)


def _parts(trace: RoutingTrace) -> Iterator[tuple[str, dict[str, Tensor]]]:
    yield TOKEN_FILE, token_ids(trace)
    for place, layer in enumerate(trace.layers):
        yield _file(place), layer_tensors(layer)


def _file(place: int) -> str:
    return f"layer-{place:05d}"


_HISTOGRAMS = ("gaps", "group_gaps", "distances")
_TABLES = ("near", "orders")
_MOMENTS = ("count", "first", "high", "low")


def numbers_of(layer: LayerSummary) -> dict[str, object]:
    """The single numbers of a layer as JSON values."""
    first = layer.first_nonfinite
    return {
        "tokens": layer.tokens,
        "nonfinite": layer.nonfinite,
        "first_nonfinite": None if first is None else list(first),
        "group_decides": layer.group_decides,
        "bias_changed": layer.bias.changed,
    }


def counts_of(layer: LayerSummary) -> dict[str, Tensor]:
    """The tensors of a layer; its bias goes with the sample."""
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


def read_counts(folder: Folder, file: str, head: LayerHead, sample: LayerTrace) -> LayerSummary:
    """A layer of a summary; refuses counts that cannot be those of its tokens.

    Args:
        folder: the folder.
        file: name of the layer's file of counts.
        head: name, facts and single numbers of the layer.
        sample: its part of the sample, which says how many ranks and ε there are.
    """
    where = f"{folder.path}: layer {head.name!r}"
    numbers = head.entry
    tokens = _integer(numbers, "tokens", MOST_TOKENS, where)
    nonfinite = _integer(numbers, "nonfinite", tokens, where)
    measured = tokens - nonfinite
    tensors = _checked_tensors(folder, file, head, sample, where)
    _check_sums(tensors, tokens * head.facts.k, measured, where)
    changed = numbers.get("bias_changed")
    require(type(changed) is bool, f"{where}: bias_changed must be true or false", TraceError)
    histograms = {
        name: LogHistogram(tensors[name]) if name in tensors else None for name in _HISTOGRAMS
    }
    return LayerSummary(
        name=head.name,
        facts=head.facts,
        tokens=tokens,
        load=tensors["load"],
        coalitions=_sketch(tensors["coalitions"], tokens, where),
        bias=SharedBias(sample.bias, changed=bool(changed)),
        nonfinite=nonfinite,
        first_nonfinite=_first(numbers.get("first_nonfinite"), nonfinite, where),
        group_decides=_integer(numbers, "group_decides", measured, where),
        near=tensors.get("near"),
        orders=tensors.get("orders"),
        moments=_moments(tensors, measured, where),
        **histograms,
    )


def _checked_tensors(
    folder: Folder, file: str, head: LayerHead, sample: LayerTrace, where: str
) -> dict[str, Tensor]:
    """The tensors of a file, all of them int64 and of the shapes that a layer has."""
    experts, ranks = head.facts.n_experts, sample.experts.shape[1]
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
        known = shape == shapes.get(name) or (name == "coalitions" and len(shape) == 1)
        require(
            known and dtype == torch.int64,
            f"{where}: no count is called {name!r:.80}, or it has not int64 and {shape}",
            TraceError,
        )
    needed = {"load", "coalitions"} - set(header)
    require(not needed, f"{where}: {sorted(needed)} missing", TraceError)
    return folder.tensors(file)


def _check_sums(tensors: Mapping[str, Tensor], chosen: int, measured: int, where: str) -> None:
    """Refuse counts that are negative or do not add up to the number of tokens."""
    totals = {"load": chosen, **dict.fromkeys((*_HISTOGRAMS, *_TABLES), measured)}
    for name, total in totals.items():
        if name in tensors:
            counts = tensors[name]
            inside = bool(((counts >= 0) & (counts <= total)).all())
            require(
                inside and bool((counts.sum(-1) == total).all()),
                f"{where}: {name} must be counts that add up to {total}",
                TraceError,
            )


def _sketch(hashes: Tensor, tokens: int, where: str) -> DistinctSketch:
    most = min(CAPACITY, tokens)
    ascending = bool((hashes[1:] > hashes[:-1]).all()) and bool((hashes >= 0).all())
    require(
        ascending and len(hashes) <= most,
        f"{where}: coalitions must be at most {most} ascending hashes",
        TraceError,
    )
    return DistinctSketch(hashes)


def _moments(tensors: Mapping[str, Tensor], measured: int, where: str) -> ExactMoments | None:
    parts = [tensors.get(f"moments.{name}") for name in _MOMENTS]
    if all(part is None for part in parts):
        return None
    most = measured << LOW_BITS
    limits = ((0, measured), (-most, most), (0, most), (0, (1 << LOW_BITS) - 1))
    for part, (low, high) in zip(parts, limits, strict=True):
        fits = part is not None and bool(((part >= low) & (part <= high)).all())
        require(fits, f"{where}: moments are incomplete or too large", TraceError)
    return ExactMoments(*(part for part in parts if part is not None))


def _first(value: object, nonfinite: int, where: str) -> TokenKey | None:
    if value is None and nonfinite == 0:
        return None
    fits = isinstance(value, list) and len(value) == 2 and all(type(x) is int for x in value)
    if not isinstance(value, list) or not fits or nonfinite == 0:
        raise TraceError(f"{where}: first_nonfinite must be a document and a position, or null")
    return TokenKey(*value)


def _integer(numbers: Mapping[str, object], name: str, most: int, where: str) -> int:
    value = numbers.get(name)
    if type(value) is not int or not 0 <= value <= most:
        raise TraceError(f"{where}: {name} must be an integer in 0 ... {most}, got {value!r:.40}")
    return value


SUMMARY_STORE_FORMAT = "tieline-summary"
_summary_store_FIELDS = {
    "format",
    "version",
    "files",
    "layers",
    "epsilons",
    "sample_size",
    "sources",
}


def save_summary(summary: RoutingSummary, directory: str | Path, overwrite: bool = False) -> None:
    """Write a summary to a new folder, whole or not at all.

    Args:
        summary: any summary.
        directory: the folder to make, parents included.
        overwrite: whether a summary that is there may be replaced.
    """
    write_folder(
        directory,
        SUMMARY_STORE_FORMAT,
        VERSION,
        _contents(summary),
        _summary_store_parts(summary),
        overwrite,
    )


def load_summary(directory: str | Path) -> RoutingSummary:
    """The summary in a folder."""
    folder = open_folder(directory, SUMMARY_STORE_FORMAT, VERSION)
    index, path = folder.index, folder.path
    require(
        set(index) == _summary_store_FIELDS,
        f"{path}: must have {sorted(_summary_store_FIELDS)}",
        TraceError,
    )
    heads, epsilons = read_heads(index["layers"], path), read_epsilons(index["epsilons"], path)
    size, sources = index["sample_size"], index["sources"]
    if type(size) is not int or not isinstance(sources, list):
        raise TraceError(f"{path}: sample_size must be an integer and sources a list")
    if not all(isinstance(source, dict) for source in sources):
        raise TraceError(f"{path}: every source must be a JSON object")
    sample = _read_sample(folder, heads, epsilons)
    layers = tuple(
        read_counts(folder, _summary_store_file("counts", place), heads[place], layer)
        for place, layer in enumerate(sample.layers)
    )
    return RoutingSummary(layers, sample, size, epsilons, distinct_sources(sources))


def _read_sample(
    folder: Folder, heads: list[LayerHead], epsilons: tuple[float, ...]
) -> RoutingTrace:
    keys = read_token_ids(folder)
    layers = []
    for place, head in enumerate(heads):
        sizes = head.sizes(len(keys["tokens"]), len(epsilons))
        layers.append(read_layer(folder, _summary_store_file("sample", place), head, sizes, True))
    tokens, documents, positions = (keys[name] for name in TOKEN_KEYS)
    return RoutingTrace(tuple(layers), tokens, documents, positions, epsilons)


def _contents(summary: RoutingSummary) -> dict[str, object]:
    heads = [
        {**head_to_json(layer.name, layer.facts), **numbers_of(layer)} for layer in summary.layers
    ]
    return {
        "layers": heads,
        "epsilons": list(summary.epsilons),
        "sample_size": summary.sample_size,
        "sources": list(summary.sources),
    }


def _summary_store_parts(summary: RoutingSummary) -> Iterator[tuple[str, dict[str, Tensor]]]:
    yield TOKEN_FILE, token_ids(summary.sample)
    for place, layer in enumerate(summary.sample.layers):
        yield _summary_store_file("sample", place), layer_tensors(layer, broken_tokens=True)
    for place, layer in enumerate(summary.layers):
        yield _summary_store_file("counts", place), counts_of(layer)


def _summary_store_file(kind: str, place: int) -> str:
    return f"{kind}-{place:05d}"


Kind = Literal["trace", "summary"]
_KINDS: dict[object, Kind] = {FORMAT: "trace", SUMMARY_STORE_FORMAT: "summary"}


def folder_kind(directory: str | Path) -> Kind:
    """Whether a folder holds a trace or a summary."""
    found = read_index(directory).get("format")
    known = isinstance(found, str) and found in _KINDS
    require(known, f"{directory}: is neither a trace nor a summary: {found!r:.80}", TraceError)
    return _KINDS[found]


def merge_folders(
    directories: Sequence[str | Path],
    output: str | Path,
    overwrite: bool = False,
    documents: Literal["keep", "renumber"] = "keep",
) -> RoutingTrace | RoutingSummary:
    """Merge summaries, or concatenate traces, of parts of a run, and save what comes out.

    Args:
        directories: folders of one kind.
        output: the folder to make.
        overwrite: whether a folder of that kind may be replaced; it may be one of the inputs.
        documents: for traces, whether documents keep their numbers (`concatenate`); summaries
            merge by the tokens that they hold, so they always keep them.

    Returns:
        What was saved; a trace as `load_trace` opens it, for its parts may have been replaced.
    """
    require(len(directories) > 0, "nothing to merge: got no folders", TraceError)
    kinds = {str(directory): folder_kind(directory) for directory in directories}
    require(len(set(kinds.values())) == 1, f"cannot merge different kinds: {kinds}", TraceError)
    if "summary" in kinds.values():
        require(documents == "keep", "summaries keep the numbers of their documents", TraceError)
        check_target(output, SUMMARY_STORE_FORMAT, overwrite)
        merged = merge([load_summary(directory) for directory in directories])
        save_summary(merged, output, overwrite)
        return merged
    check_target(output, FORMAT, overwrite)
    joined = concatenate([load_trace(directory) for directory in directories], documents)
    save_trace(joined, output, overwrite)
    return load_trace(output)
