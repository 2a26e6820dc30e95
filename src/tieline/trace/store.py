"""Traces on disk: one folder, one tensor file per layer, read when the layer is touched.

`docs/trace-format.md` describes the format. Loading reads the index, the ids of the tokens and the
headers of the layers' files. A layer's tensors are mapped into memory when the layer is touched;
the first time, its digest and its values are checked.
"""

from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from tieline.errors import TraceError, require
from tieline.trace.folder_reader import open_folder
from tieline.trace.folder_writer import write_folder
from tieline.trace.layerfile import (
    TOKEN_FILE,
    check_header,
    head_to_json,
    layer_tensors,
    read_epsilons,
    read_heads,
    read_layer,
    read_token_ids,
    token_ids,
)
from tieline.trace.lazy import LazyLayers
from tieline.trace.record import RoutingTrace

__all__ = ["FORMAT", "VERSION", "load_trace", "save_trace"]

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
