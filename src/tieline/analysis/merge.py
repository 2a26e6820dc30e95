"""Merge the pieces of a run exactly: traces token by token, summaries by counts."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, Unpack

from tieline.analysis.settings import MergeOptions, MergeSettings
from tieline.core.records import Result
from tieline.core.settings import takes_settings
from tieline.trace.record import RoutingTrace
from tieline.trace.store import merge_folders


@dataclass(frozen=True, repr=False)
class Merged(Result):
    """Result of merging several folders.

    Attributes:
        kind: "trace" or "summary".
        folders: the folders that were merged.
        output: the folder that was made.
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
