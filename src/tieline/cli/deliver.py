"""Delivering a result: page, figure, JSON, folder and terminal text, the same for all commands.

outputs = Outputs(html=html, json=json_to)
outputs.check()             # before any work
deliver(result, outputs)    # nothing is written before every file was made in memory
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from tieline.cli.app import say
from tieline.core.errors import require
from tieline.core.files import check_target, write_whole
from tieline.core.records import Result


@dataclass(frozen=True)
class Outputs:
    """Where a result goes; None for what is not wanted.

    Attributes:
        html: file of the page.
        json: file of the JSON, or "-" for stdout.
        figure: file of the main figure: .pdf, .png or .svg.
        trace: new folder for the routing itself.
        made: new folder for what the command makes, such as a model.
        overwrite: whether `made` may replace the folder of a model; None if that is no option.
        page_package: package that draws the page.
    """

    html: Path | None = None
    json: str | None = None
    figure: Path | None = None
    trace: Path | None = None
    made: Path | None = None
    overwrite: bool | None = None
    page_package: str = "plotly"

    @property
    def to_stdout(self) -> bool:
        """Whether stdout belongs to the JSON."""
        return self.json == "-"

    @property
    def json_file(self) -> Path | None:
        """The file that --json names; None for stdout and for no JSON at all."""
        return None if self.json is None or self.to_stdout else Path(self.json)

    @property
    def written(self) -> list[Path]:
        """Every file and folder that is written."""
        every = (self.html, self.json_file, self.figure, self.trace, self.made)
        return [path for path in every if path is not None]

    def check(self, kept: Path | None = None) -> None:
        """Refuse places that cannot be written to or are named twice, before any work.

        Args:
            kept: another file that the command writes itself.
        """
        places = [os.path.abspath(path) for path in (*self.written, kept) if path is not None]
        require(len(set(places)) == len(places), f"one file for two outputs: {places}")
        for path in (self.html, self.json_file, self.figure, kept):
            if path is not None:
                check_target(path)
        if self.figure is not None:
            from tieline.report.drawing import check_figure_path

            check_figure_path(self.figure)
        for path, package in ((self.html, self.page_package), (self.figure, "matplotlib")):
            if path is not None and find_spec(package) is None:
                raise ModuleNotFoundError(f"{path} needs {package}", name=package)
        if self.trace is not None:
            require(_is_new(self.trace), f"{self.trace} exists: a trace is saved in a new folder")
        if self.made is not None:
            _check_folder(self.made, self.overwrite)


def deliver(result: Result, outputs: Outputs, hint: str = "") -> None:
    """Write and print a result.

    Args:
        result: what a front-door function returned.
        outputs: where it goes.
        hint: advice that is printed if nothing was written.
    """
    from tieline import report

    files: list[tuple[Path, bytes]] = []
    if outputs.html is not None:
        files.append((outputs.html, report.page(result).encode()))
    if outputs.json_file is not None:
        files.append((outputs.json_file, result.to_json().encode()))
    if outputs.figure is not None:
        from tieline.report.drawing import drawn_bytes

        files.append((outputs.figure, drawn_bytes(result.plot, outputs.figure)))
    _save_folders(result, outputs)
    for path, data in files:
        write_whole(path, data)
    if outputs.to_stdout:
        sys.stdout.write(result.to_json())
    else:
        console = Console(highlight=False, soft_wrap=False)
        console.print(report.terminal(result, console.width))
    for path in outputs.written:
        say(f"wrote {path}")
    if hint and not outputs.written and not outputs.to_stdout:
        say(hint)


def _save_folders(result: Any, outputs: Outputs) -> None:
    if outputs.trace is not None:
        from tieline.trace.store import save_trace

        save_trace(result.trace, outputs.trace)
    if outputs.made is not None:
        result.save(outputs.made)


def _is_new(folder: Path) -> bool:
    return not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))


def _check_folder(folder: Path, overwrite: bool | None) -> None:
    require(not folder.exists() or folder.is_dir(), f"not a folder: {folder}")
    new = _is_new(folder)
    advice = "choose another folder" + (" or add --overwrite" if overwrite is False else "")
    require(new or bool(overwrite), f"{folder} is not empty: {advice}")
    is_model = new or (folder / "config.json").is_file()
    require(is_model, f"{folder} holds something else than a model: it is not replaced")
    parent = folder.absolute().parent
    require(parent.is_dir(), f"no such folder: {parent}")


Report = Callable[[str, int, int], None]
"""Called with a stage, how much of it is done, and of how much."""

FOLLOWED_BY = {"forward": "measure", "jumps": "report", "losses": "report"}
"""Stages that report nothing themselves, after those that do."""


@contextmanager
def progress_bars(console: Console | None = None) -> Iterator[Report]:
    """Show a bar per stage on stderr while the work goes on; nothing if stderr is a file."""
    console = console or Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    hidden = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as bars:
        yield _Stages(bars)


class _Stages:
    """Bars by stage; a stage that begins ends those before it."""

    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage not in self._tasks:
            self._begin(stage, total)
        self._bars.update(self._tasks[stage], completed=done, total=total)
        if done >= total and stage in FOLLOWED_BY:
            self._begin(FOLLOWED_BY[stage], None)

    def _begin(self, stage: str, total: int | None) -> None:
        for task in self._tasks.values():
            self._bars.update(task, completed=1, total=1)
            self._bars.stop_task(task)
        if stage not in self._tasks:
            self._tasks[stage] = self._bars.add_task(stage, total=total)
