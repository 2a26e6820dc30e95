"""The files of a run: checked before the work, made in memory, then written one by one, whole."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tieline.core.errors import require
from tieline.core.files import check_target, json_target
from tieline.report.drawing import check_figure_path

__all__ = ["JSON_FORMAT", "JSON_VERSION", "Outputs", "to_json"]

JSON_FORMAT, JSON_VERSION = "tieline-inspection", 1


@dataclass(frozen=True)
class Outputs:
    """Where the results of an inspection go; None for what is not wanted.

    Attributes:
        page: the HTML page.
        json: a file, or "-" for stdout, which is not written here.
        figure: the figure for papers.
        trace: a new folder for the routing itself.
    """

    page: Path | None = None
    json: str | None = None
    figure: Path | None = None
    trace: Path | None = None

    @property
    def to_stdout(self) -> bool:
        """Whether stdout belongs to the JSON."""
        return self.json == "-"

    @property
    def files(self) -> list[Path]:
        """Every file and folder that will be written."""
        named = json_target(self.json)
        return [path for path in (self.page, named, self.figure, self.trace) if path is not None]

    def check(self) -> None:
        """Refuse places that cannot be written to, or that are named twice, before any work."""
        targets = [os.path.abspath(path) for path in self.files]
        require(len(set(targets)) == len(targets), f"one file for two outputs: {targets}")
        for path in self.files:
            if path != self.trace:
                check_target(path)
        if self.figure is not None:
            check_figure_path(self.figure)
        for wanted, package in ((self.page, "plotly"), (self.figure, "matplotlib")):
            if wanted is not None and find_spec(package) is None:
                raise ModuleNotFoundError(f"{wanted} needs {package}", name=package)
        if self.trace is not None:
            empty = not self.trace.exists() or (
                self.trace.is_dir() and not any(self.trace.iterdir())
            )
            require(empty, f"{self.trace} exists: a trace is saved in a new folder")


def to_json(result: Mapping[str, Any], kind: str = JSON_FORMAT) -> str:
    """The result as JSON text, with the name and version of its format first."""
    head = {"format": kind, "version": JSON_VERSION}
    return json.dumps(head | dict(result), allow_nan=False, indent=1) + "\n"
