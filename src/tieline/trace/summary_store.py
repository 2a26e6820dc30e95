"""Summaries on disk: the same kind of folder as a trace, with counts in place of rows.

    tieline.json               name, facts and single numbers of each layer, ε grid, sources
    counts-00000.safetensors   tensors of counts of each layer
    tokens, sample-00000       the sample, as in a trace

`docs/trace-format.md` describes the format. A summary is read whole; counts that do not add up to
the number of tokens are refused.
"""

from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from tieline.errors import TraceError, require
from tieline.trace.folder_reader import Folder, open_folder
from tieline.trace.folder_writer import write_folder
from tieline.trace.layerfile import (
    TOKEN_FILE,
    TOKEN_KEYS,
    LayerHead,
    head_to_json,
    layer_tensors,
    read_epsilons,
    read_heads,
    read_layer,
    read_token_ids,
    token_ids,
)
from tieline.trace.record import RoutingTrace
from tieline.trace.summary import RoutingSummary, distinct_sources
from tieline.trace.summary_file import counts_of, numbers_of, read_counts

__all__ = ["FORMAT", "VERSION", "load_summary", "save_summary"]

FORMAT = "tieline-summary"
VERSION = 1
_FIELDS = {"format", "version", "files", "layers", "epsilons", "sample_size", "sources"}


def save_summary(summary: RoutingSummary, directory: str | Path, overwrite: bool = False) -> None:
    """Write a summary to a new folder, whole or not at all.

    Args:
        summary: any summary.
        directory: the folder to make, parents included.
        overwrite: whether a summary that is there may be replaced.
    """
    write_folder(directory, FORMAT, VERSION, _contents(summary), _parts(summary), overwrite)


def load_summary(directory: str | Path) -> RoutingSummary:
    """The summary in a folder."""
    folder = open_folder(directory, FORMAT, VERSION)
    index, path = folder.index, folder.path
    require(set(index) == _FIELDS, f"{path}: must have {sorted(_FIELDS)}", TraceError)
    heads, epsilons = read_heads(index["layers"], path), read_epsilons(index["epsilons"], path)
    size, sources = index["sample_size"], index["sources"]
    if type(size) is not int or not isinstance(sources, list):
        raise TraceError(f"{path}: sample_size must be an integer and sources a list")
    if not all(isinstance(source, dict) for source in sources):
        raise TraceError(f"{path}: every source must be a JSON object")
    sample = _read_sample(folder, heads, epsilons)
    layers = tuple(
        read_counts(folder, _file("counts", place), heads[place], layer)
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
        layers.append(read_layer(folder, _file("sample", place), head, sizes, True))
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


def _parts(summary: RoutingSummary) -> Iterator[tuple[str, dict[str, Tensor]]]:
    yield TOKEN_FILE, token_ids(summary.sample)
    for place, layer in enumerate(summary.sample.layers):
        yield _file("sample", place), layer_tensors(layer, broken_tokens=True)
    for place, layer in enumerate(summary.layers):
        yield _file("counts", place), counts_of(layer)


def _file(kind: str, place: int) -> str:
    return f"{kind}-{place:05d}"
