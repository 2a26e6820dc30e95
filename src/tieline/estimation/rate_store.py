"""Results of a rate study on disk: one line of JSON for each sample size and repetition.

A line is appended, and brought to the disk, as soon as its block of repetitions is done; a run that
is killed loses the block it was at, and at most leaves half a line at the end, which the next run
cuts off. A line counts for the very same study: its `study` is the study's key.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tieline.errors import TraceError, require
from tieline.trace.jsonio import canonical, parse_json

__all__ = ["FIELDS", "RateStore", "Row"]

FIELDS = ("raw", "quotient", "function", "loss")
LARGEST = 256 << 20
Row = dict[str, Any]
"""study, n, repetition, radius, and the numbers of `FIELDS`, status, iterations, seconds, empty."""


@dataclass(frozen=True)
class RateStore:
    """A file of results.

    Attributes:
        path: made when the first row is added.
    """

    path: Path

    def check(self) -> None:
        """Refuse a place that cannot be written to, before any work."""
        folder = self.path.absolute().parent
        require(folder.is_dir(), f"cannot keep results in {self.path}: there is no {folder}")
        require(not self.path.is_dir(), f"cannot keep results in {self.path}: it is a folder")
        place = self.path if self.path.exists() else folder
        require(os.access(place, os.W_OK), f"cannot keep results in {place}: it is read-only")

    def load(self, study: str) -> list[Row]:
        """The rows of a study; a broken last line is left out, any other is refused."""
        return [row for row in self._rows() if row["study"] == study]

    def add(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append rows, after cutting off what a killed run left of a line."""
        text = "".join(canonical(dict(row)) + "\n" for row in rows).encode()
        whole = self._whole_length()
        with self.path.open("r+b" if self.path.exists() else "xb") as file:
            file.truncate(whole)
            file.seek(whole)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())

    def _bytes(self) -> bytes:
        if not self.path.exists():
            return b""
        size = self.path.stat().st_size
        require(size <= LARGEST, f"{self.path}: {size} bytes, at most {LARGEST}", TraceError)
        return self.path.read_bytes()

    def _whole_length(self) -> int:
        """Bytes up to the end of the last line that is one."""
        data = self._bytes()
        end = data.rfind(b"\n") + 1
        begin = data.rfind(b"\n", 0, max(0, end - 1)) + 1
        try:
            _row(parse_json(data[begin:end], str(self.path)))
        except TraceError:
            return begin
        return end

    def _rows(self) -> list[Row]:
        lines = self._bytes().split(b"\n")
        rows = []
        for number, line in enumerate(lines[:-1], start=1):
            try:
                rows.append(_row(parse_json(line, f"{self.path}, line {number}")))
            except TraceError:
                if number < len(lines) - 1:
                    raise
        return rows


def _row(value: object) -> Row:
    """A line as a row: every field there, and of its kind."""
    row = value if isinstance(value, dict) else {}
    whole = ("n", "repetition", "status", "iterations", "empty")
    numbers = (*FIELDS, "radius", "seconds")
    good = (
        isinstance(row.get("study"), str)
        and all(isinstance(row.get(name), int) and row[name] >= 0 for name in whole)
        and all(
            row.get(name, "") is None or isinstance(row.get(name), int | float) for name in numbers
        )
    )
    require(good, f"no row of a rate study: {str(value)[:80]!r}", TraceError)
    return row
