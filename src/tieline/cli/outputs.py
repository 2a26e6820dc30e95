"""The outputs of a command: files and folders that its result is written to.

outputs = Outputs(html=html, json=json_to, overwrite=overwrite)
outputs.check_targets(model, text)  # before any work: with the inputs, which no output may replace
result = run_job("tieline.analysis.audit:audit", model, settings=settings, activity="auditing")
deliver(result, outputs)            # nothing is written before all files are complete in memory
"""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from tieline.cli.progress import progress_bars
from tieline.cli.terminal_session import closed_pipe_ignored, print_to_stderr
from tieline.cli.torchrun import is_main_process
from tieline.core.errors import require
from tieline.core.files import (
    check_folder,
    check_target,
    holds_model,
    naming_full_disk,
    would_overwrite,
    write_whole,
)
from tieline.core.records import Result
from tieline.core.text import unfiltered_stream

STDOUT = Path("-")
DEMO_FOLDER = Path(__file__).parents[1] / "demo"
"""The built-in model, which is the input if none is named."""

REPLACEABLE_SUFFIXES = (".html", ".pdf", ".png", ".svg")
"""Suffixes of files that may be replaced inside an input, as no model or trace has them."""


@dataclass(frozen=True)
class Outputs:
    """Files and folders that a result is written to; None for those that are not.

    Attributes:
        html: file of the page, or "-" for stdout.
        json: file of the JSON, or "-" for stdout.
        figure: file of the main figure: .pdf, .png or .svg.
        trace: folder for the trace.
        model: folder for the model that the command creates.
        extended: file or folder that the command itself writes or adds results to.
        overwrite: whether to replace files without asking, and folders of the same kind.
        page_package: optional package that the page needs.
    """

    html: Path | None = None
    json: str | None = None
    figure: Path | None = None
    trace: Path | None = None
    model: Path | None = None
    extended: Path | None = None
    overwrite: bool = False
    page_package: str = "plotly"
    _replaceable: set[Path] = field(default_factory=set, init=False, repr=False, compare=False)

    @property
    def to_stdout(self) -> bool:
        """Whether the JSON or the page is written to stdout."""
        return self.json == "-" or self.html == STDOUT

    @property
    def files(self) -> list[Path]:
        """All files that `deliver` writes, without stdout."""
        data = None if self.json is None else Path(self.json)
        paths = (self.html, data, self.figure)
        return [path for path in paths if path not in (None, STDOUT)]

    @property
    def written(self) -> list[Path]:
        """All files and folders that `deliver` writes."""
        return self.files + [path for path in (self.trace, self.model) if path is not None]

    @property
    def _targets(self) -> list[Path]:
        """All files and folders that `deliver` or the command itself writes."""
        return self.written + ([] if self.extended is None else [self.extended])

    def check_targets(self, *inputs: object) -> None:
        """Raise if a target cannot be written, is named twice or is an input.

        Called before any work. On a terminal, asks before a file is replaced.

        Args:
            inputs: inputs of the command: names of files, folders, models and others.
        """
        self._check_target_names()
        for path in self.files:
            check_target(path)
        if self.figure is not None:
            from tieline.report.matplotlib_figures import check_figure_path

            check_figure_path(self.figure)
        for path, package in ((self.html, self.page_package), (self.figure, "matplotlib")):
            if path is not None and find_spec(package) is None:
                raise ModuleNotFoundError(f"{path} needs {package}", name=package)
        names = [Path(name) for name in inputs if isinstance(name, str | Path)]
        sources = [DEMO_FOLDER, *(path for path in names if path.exists())]
        for output in self._targets:
            for source in sources:
                _check_output_apart(output, source)
        if self.trace is not None and not _is_new_folder(self.trace, self.overwrite):
            from tieline.trace.store import FORMATS, check_replaceable

            check_replaceable(self.trace, FORMATS["trace"], self.overwrite)
        if self.model is not None:
            allowed = _is_new_folder(self.model, self.overwrite) or holds_model(self.model)
            require(allowed, f"{self.model} holds something else than a model: it is not replaced")
        existing = [path for path in self.files if path.is_file()]
        if not self.overwrite:
            _ask_to_replace(existing)
        self._replaceable.update(existing)

    def may_replace(self, path: Path) -> bool:
        """Return whether a file may be replaced: if it existed at the check, or with overwrite."""
        return self.overwrite or path in self._replaceable

    def _check_target_names(self) -> None:
        """Raise for two outputs of one name, and for folders or two files to stdout."""
        to_stdout = [self.json == "-", self.html == STDOUT]
        require(sum(to_stdout) < 2, "--json - and --html -: only one of them can go to stdout")
        require(not any(to_stdout) or sys.stdout is not None, "stdout is closed")
        for folder in (self.trace, self.model):
            require(folder != STDOUT, "a folder cannot go to stdout: name it")
        paths = [os.path.realpath(path) for path in self._targets]
        require(len(set(paths)) == len(paths), f"one file for two outputs: {paths}")


def _check_output_apart(output: Path, source: Path) -> None:
    """Raise if an output is an input or would replace a file of one."""
    clash = would_overwrite(output, source)
    require(not clash, f"{output} is the input {source}: an output never replaces an input")
    is_inside = source.is_dir() and would_overwrite(source, output)
    replaces = is_inside and output.is_file() and output.suffix not in REPLACEABLE_SUFFIXES
    require(not replaces, f"{output} is a part of the input {source}: an output never replaces one")


def _is_new_folder(folder: Path, overwrite: bool) -> bool:
    """Return whether a folder is missing or empty; raises if it cannot be created or replaced."""
    check_folder(folder)
    if not folder.exists() or not any(folder.iterdir()):
        return True
    require(overwrite, f"{folder} is not empty: choose another folder or add --overwrite")
    return False


def _ask_to_replace(existing: list[Path]) -> None:
    """Ask whether files may be replaced and raise if not; without a terminal they may be."""
    if not existing or not (sys.stdin and sys.stdin.isatty() and sys.stderr.isatty()):
        return
    names = " and ".join(map(str, existing))
    refusal = f"{names} stays as it is: choose another name, or add --overwrite"
    require(typer.confirm(f"{names} exists. Replace it?", err=True), refusal)


def deliver(result: Result, outputs: Outputs, hint: str = "") -> None:
    """Write and print a result.

    Args:
        result: result of a command's job.
        outputs: files and folders to write.
        hint: advice that is printed if nothing was written.
    """
    if not is_main_process():  # one process writes for all
        return
    from tieline import report

    with progress_bars(first_stage="report"):
        contents = _file_contents(result, outputs)
        _save_folders(result, outputs)
        for path, data in contents.items():
            if path != STDOUT:
                write_whole(path, data, replace=outputs.may_replace(path))
    with closed_pipe_ignored():
        if outputs.to_stdout:
            _write_to_stdout(contents[STDOUT])
        else:
            console = Console(file=unfiltered_stream(sys.stdout), highlight=False, soft_wrap=False)
            console.print(report.terminal(result, console.width), crop=False)  # commands are copied
    for path in outputs.written:
        print_to_stderr(f"wrote {path}")
    if hint and not outputs.written and not outputs.to_stdout:
        print_to_stderr(hint)


def _file_contents(result: Result, outputs: Outputs) -> dict[Path, bytes]:
    """Return the contents of every file by its path."""
    from tieline import report
    from tieline.report.matplotlib_figures import figure_bytes

    figure = outputs.figure
    makers: list[tuple[Path | None, Callable[[], bytes]]] = [
        (outputs.html, lambda: report.page(result).encode()),
        (None if outputs.json is None else Path(outputs.json), lambda: result.to_json().encode()),
        (figure, lambda: figure_bytes(result.plot, figure) if figure else b""),
    ]
    return {path: make() for path, make in makers if path is not None}


def _write_to_stdout(data: bytes) -> None:
    """Write bytes to stdout, whatever its encoding."""
    with naming_full_disk(Path("/dev/stdout")):
        binary = getattr(sys.stdout, "buffer", None)
        if binary is None:
            sys.stdout.write(data.decode())
        else:
            sys.stdout.flush()
            binary.write(data)
        sys.stdout.flush()


def _save_folders(result: Any, outputs: Outputs) -> None:
    """Save the trace and the model of a result in their folders."""
    if outputs.trace is not None:
        from tieline.trace.store import save_trace

        save_trace(result.trace, outputs.trace, overwrite=outputs.overwrite)
    if outputs.model is not None:
        result.save(outputs.model, overwrite=outputs.overwrite)
