"""Traces from other programs.

    read_routes              routes of any format, unvalidated
    trace_of                 the validated trace of routes
    import_trace             both at once
    import_table             CSV and JSONL of (layer, token, experts[, scores])
    imatrix_load             the load of experts in an importance matrix of llama.cpp
    recognise_format         the name of a file's format
    register_reader          add a format

`docs/trace-format.md` describes the formats. Files are not trusted: every problem is a `TraceError`
with file and line or field.
"""

from pathlib import Path
from typing import Any

from tieline.trace.readers.moe_trace_and_imatrix import ImatrixLoad, imatrix_load
from tieline.trace.readers.route_formats import (
    FORMATS,
    SUFFIXES,
    ReadOptions,
    read_routes,
    read_tokens,
    recognise_format,
    register_reader,
    token_documents,
)
from tieline.trace.readers.routes import Routes, routes_of_trace, trace_of
from tieline.trace.readers.table_files import import_table
from tieline.trace.record import RoutingTrace

__all__ = [
    "FORMATS",
    "SUFFIXES",
    "ImatrixLoad",
    "ReadOptions",
    "Routes",
    "imatrix_load",
    "import_table",
    "import_trace",
    "read_routes",
    "read_tokens",
    "recognise_format",
    "register_reader",
    "routes_of_trace",
    "token_documents",
    "trace_of",
]


def import_trace(
    source: Any,
    n_experts: int | None = None,
    k: int | None = None,
    *,
    format: str | None = None,  # noqa: A002
    layers: int | None = None,
    start: int | None = None,
    tokens: Any = None,
) -> RoutingTrace:
    """Read routes of any format, from a file or from memory, and return their trace.

    Args:
        source: a file or folder, an array (tokens, layers, k), or answers of an engine.
        n_experts: number of experts E; by default as the file states, or one more than the largest
            id.
        k: number of experts of each line of a table that were chosen, or experts per token for
            SGLang and moe-trace, which do not state it. Arrays hold the chosen experts only.
        format: name of the format, one of `FORMATS`; by default it is recognised by content.
        layers: number of layers of the array, for SGLang.
        start: position of the first row of a request.
        tokens: a file of token ids (`read_tokens`), or the ids of each document.
    """
    options = ReadOptions(format, n_experts, k, layers, start, token_documents(tokens))
    is_path = isinstance(source, str | Path)
    if is_path and (format or recognise_format(source)) == "table" and tokens is None:
        return import_table(source, n_experts, k)
    routes = read_routes(source, options)
    origin: dict[str, object] = {"source": "routed_experts", "producer": routes.producer}
    if is_path:
        origin["file"] = Path(source).name
    return trace_of(routes, n_experts, provenance=origin)
