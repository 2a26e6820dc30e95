"""Traces from other programs.

    import_routed_experts    arrays (tokens, layers, k) of vLLM and SGLang: npy, npz, safetensors
    import_table             CSV and JSONL of (layer, token, experts[, scores])
    import_trace             any of them, by the suffix of the file

`docs/trace-format.md` describes the formats. Files are not trusted: every problem is a `TraceError`
that says where.
"""

from pathlib import Path

from tieline.core.errors import TraceError, require
from tieline.trace.readers.arrays import import_routed_experts, routed_experts_trace
from tieline.trace.readers.tables import import_table
from tieline.trace.record import RoutingTrace

__all__ = ["import_routed_experts", "import_table", "import_trace", "routed_experts_trace"]

_ARRAYS = (".npy", ".npz", ".safetensors")
_TABLES = (".csv", ".jsonl")


def import_trace(
    path: str | Path, n_experts: int | None = None, k: int | None = None
) -> RoutingTrace:
    """Read the trace in a file of any of the formats.

    Args:
        path: a file that ends in .npy, .npz, .safetensors, .csv or .jsonl.
        n_experts: number of experts E; by default one more than the largest id.
        k: how many experts of each line of a table were chosen; arrays hold the chosen ones.
    """
    suffix = Path(path).suffix.lower()
    known = suffix in (*_ARRAYS, *_TABLES)
    require(known, f"{path}: must end in {', '.join((*_ARRAYS, *_TABLES))}", TraceError)
    if suffix in _TABLES:
        return import_table(path, n_experts, k)
    require(k is None, f"{path}: arrays hold the chosen experts, {k=} cannot be given", TraceError)
    return import_routed_experts(path, n_experts)
