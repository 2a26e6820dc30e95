"""Merging parts of a run into the whole, exactly: traces token by token, summaries by counts."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from tieline.core.records import Result
from tieline.trace.record import RoutingTrace
from tieline.trace.store import merge_folders


@dataclass(frozen=True, repr=False)
class Merged(Result):
    """Result of merging several folders.

    Attributes:
        kind: "trace" or "summary".
        folders: the parts.
        output: the folder of the whole.
        tokens: its tokens.
        sampled: tokens that are kept one by one: all of a trace, a sample of a summary.
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


def merge(
    folders: Sequence[str | Path],
    output: str | Path,
    *,
    overwrite: bool = False,
    renumber: bool = False,
) -> Merged:
    """Merge folders of traces, or of streaming summaries, into one.

    Args:
        folders: the parts, all of one kind.
        output: the folder to make.
        overwrite: replace a folder of the same kind.
        renumber: give documents of traces new numbers, part after part.
    """
    documents = "renumber" if renumber else "keep"
    merged = merge_folders(folders, output, overwrite=overwrite, documents=documents)
    is_trace = isinstance(merged, RoutingTrace)
    return Merged(
        kind="trace" if is_trace else "summary",
        folders=tuple(map(str, folders)),
        output=str(output),
        tokens=merged.n_tokens if is_trace else merged.tokens,
        sampled=merged.n_tokens if is_trace else merged.sample.n_tokens,
        layers=tuple(layer.name for layer in merged.layers),
    )
