"""Merging folders: what `tieline merge A B -o C` does."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from tieline.errors import TraceError, require
from tieline.trace import store, summary_store
from tieline.trace.folder_reader import read_index
from tieline.trace.folder_writer import check_target
from tieline.trace.ops import concatenate
from tieline.trace.record import RoutingTrace
from tieline.trace.summary import RoutingSummary, merge

__all__ = ["folder_kind", "merge_folders"]

Kind = Literal["trace", "summary"]
_KINDS: dict[object, Kind] = {store.FORMAT: "trace", summary_store.FORMAT: "summary"}


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
        check_target(output, summary_store.FORMAT, overwrite)
        merged = merge([summary_store.load_summary(directory) for directory in directories])
        summary_store.save_summary(merged, output, overwrite)
        return merged
    check_target(output, store.FORMAT, overwrite)
    joined = concatenate([store.load_trace(directory) for directory in directories], documents)
    store.save_trace(joined, output, overwrite)
    return store.load_trace(output)
