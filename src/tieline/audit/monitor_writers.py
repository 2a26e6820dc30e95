"""Where the scalars of a monitor go: lines of JSON, TensorBoard, or anything with two methods."""

import json
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from tieline.errors import ParameterError
from tieline.geometry.records import plain

__all__ = ["JsonlWriter", "TensorBoardWriter", "Writer"]


@runtime_checkable
class Writer(Protocol):
    """Takes the scalars of logged steps."""

    def write(self, step: int, scalars: dict[str, float]) -> None:
        """Take the scalars of a step."""
        ...

    def close(self) -> None:
        """No more will come."""
        ...


class JsonlWriter:
    """One line of JSON per logged step, {"step": n, name: value, ...}; null where not finite.

    Args:
        path: file to append to; folders are made.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, step: int, scalars: dict[str, float]) -> None:
        """Append a line; the file is closed after each, so that it can be read meanwhile."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **_finite(scalars)}) + "\n")

    def close(self) -> None:
        """Nothing is open."""


class TensorBoardWriter:
    """Scalars for TensorBoard.

    Args:
        target: a folder, for which TensorBoard must be installed, or any writer with `add_scalar`.
    """

    def __init__(self, target: Any) -> None:
        self._own = isinstance(target, str | Path)
        self._writer = _summary_writer(target) if self._own else target

    def write(self, step: int, scalars: dict[str, float]) -> None:
        """One point on the curve of each scalar."""
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Close the writer if it was made here."""
        if self._own:
            self._writer.close()


def _summary_writer(folder: str | Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as missing:
        raise ParameterError(
            "TensorBoardWriter was given a folder, but TensorBoard is not installed: "
            "pip install tensorboard, or pass a writer that has add_scalar"
        ) from missing
    return SummaryWriter(str(folder))


def _finite(scalars: dict[str, float]) -> dict[str, object]:
    return {name: plain(value) for name, value in scalars.items()}
