"""Reading what was saved, and telling what a name stands for.

load           a saved trace, summary or result
source_kind    whether a name stands for a saved result, a trace, a file of routes or a model
read_routes    the trace in a folder or in a file of an engine
"""

from pathlib import Path
from typing import Literal

from tieline.core.errors import TraceError, require
from tieline.core.records import Result, read_result
from tieline.trace.readers import SUFFIXES, import_trace, recognise
from tieline.trace.readers.megatron import FILES as MEGATRON_FILES
from tieline.trace.record import RoutingTrace
from tieline.trace.store import folder_kind, load_summary, load_trace
from tieline.trace.summary import RoutingSummary

ROUTE_FIELDS = (b"routed_experts", b"moe_topk_indices", b"top_indices")
"""Names of fields that tell routes in JSON from a result."""


def source_kind(name: str | Path) -> Literal["result", "trace", "file", "model"]:
    """What a name stands for.

    A JSON file that names a format of ours is a saved result, a folder with an index of ours a
    trace (or summary), another file, or a folder of Megatron's traces, the routes of an engine, and
    everything else a model.
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
    """Whether a JSON file begins as our results do, or holds no routes of anybody."""
    with path.open("rb") as stream:
        head = stream.read(1 << 16)
    return b'"tieline-' in head or not any(field in head for field in ROUTE_FIELDS)


def read_routes(
    name: str | Path, n_experts: int | None = None, k: int | None = None
) -> RoutingTrace:
    """The trace in a folder of `save_trace` or in a file of an engine.

    Args:
        name: the folder or file.
        n_experts: number of experts, for files that do not state it.
        k: how many experts of each line of a table were chosen.
    """
    if source_kind(name) == "file":
        require(Path(name).exists(), f"no such file: {name}", TraceError)
        array = Path(name).is_file() and recognise(name) == "array"
        return import_trace(name, n_experts, None if array else k)
    kind = folder_kind(Path(name))
    require(kind == "trace", f"{name} is a {kind}: a trace with every token is needed", TraceError)
    return load_trace(name)


def load(path: str | Path) -> RoutingTrace | RoutingSummary | Result:
    """Read what was saved: the folder of a trace or summary, routes of an engine, or a result.

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
    return read_routes(path)
