"""What a side of a comparison is: a saved trace, a file of an engine, or a model.

source_kind    which of them a name stands for
read_source    the trace of a folder or file
read_dtype     "bf16" or "bf16-emulated": the dtype to load and the format to emulate
same_tokens    refuse two tokenisations that differ, naming the first token
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from jaxtyping import Int
from torch import Tensor

from tieline.errors import TraceError, require
from tieline.hf.formats import FORMATS
from tieline.trace.importers import import_trace
from tieline.trace.merging import folder_kind
from tieline.trace.record import RoutingTrace
from tieline.trace.store import load_trace

__all__ = ["SHIPPED", "read_dtype", "read_source", "same_tokens", "source_kind"]

SHIPPED = "shipped"
"""The name of the model in the box."""
EMULATED = "-emulated"


def source_kind(name: str) -> Literal["trace", "file", "model"]:
    """A folder with an index of ours is a trace, a file is that of an engine, all else a model."""
    path = Path(name)
    if path.is_dir() and (path / "tieline.json").is_file():
        return "trace"
    return "file" if path.is_file() or path.suffix in _SUFFIXES else "model"


def read_source(name: str, n_experts: int | None = None, k: int | None = None) -> RoutingTrace:
    """The trace in a folder or file.

    Args:
        name: a folder of `save_trace`, or a file of `import_trace`.
        n_experts: number of experts, for files that do not tell.
        k: how many experts of each line of a table were chosen.
    """
    if source_kind(name) == "file":
        require(Path(name).is_file(), f"no such file: {name}", TraceError)
        return import_trace(name, n_experts, k if Path(name).suffix in (".csv", ".jsonl") else None)
    kind = folder_kind(Path(name))
    require(
        kind == "trace",
        f"{name} is a {kind}: a comparison needs every token, hence a trace",
        TraceError,
    )
    return load_trace(name)


def read_dtype(words: str) -> tuple[str, str | None]:
    """The dtype to load a model in, and the format to emulate."""
    if not words.endswith(EMULATED):
        return words, None
    name = words.removesuffix(EMULATED)
    known = ", ".join(f"{known}{EMULATED}" for known in FORMATS)
    require(name in FORMATS, f"no format {words!r}: emulated are {known}")
    return "fp32", name


def same_tokens(a: Sequence[Int[Tensor, " _"]], b: Sequence[Int[Tensor, " _"]]) -> None:
    """Refuse sequences that differ, naming the first token that does."""
    for number, (first, second) in enumerate(zip(a, b, strict=False)):
        for place, (x, y) in enumerate(zip(first.tolist(), second.tolist(), strict=False)):
            require(
                x == y,
                f"different tokenisations: sequence {number}, token {place} is {x} in A, {y} in B",
                TraceError,
            )
        _same_length(f"sequence {number}", len(first), len(second), "tokens")
    _same_length("the text", len(a), len(b), "sequences")


def _same_length(what: str, a: int, b: int, unit: str) -> None:
    require(a == b, f"different tokenisations: {what} has {a} {unit} in A, {b} in B", TraceError)


_SUFFIXES = (".npy", ".npz", ".safetensors", ".csv", ".jsonl")
