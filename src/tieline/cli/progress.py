"""Progress on stderr: bars on a terminal, now and then a line in a file.

with progress_bars() as progress:
    progress("forward", 3, 8)      # stage, how much of it is done, and of how much
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from tieline.cli.terminal_session import print_to_stderr
from tieline.cli.torchrun import is_first
from tieline.core.text import printable_line, unfiltered_stream

Report = Callable[[str, int, int], None]
"""Called with a stage, how much of it is done, and of how much."""

FOLLOWED_BY = {"forward": "measure", "streaming": "report", "jumps": "report", "losses": "report"}
"""Stages that report nothing themselves, after those that do."""

BYTES = ("streaming",)
"""Stages whose progress is counted in bytes that were read."""

FIRST = "loading the model"
"""The stage before anything is reported."""

LONG, MEASURED = 10.0, 1.0
"""Seconds above which a stage is announced, and for which it is measured before."""

IN_ALL = "in all"
"""Stage that gives the seconds of the whole job (`run.plan`)."""

PATIENCE, LONGEST_PAUSE = 2.0, 30.0
"""Seconds before the first line in a file, and between later ones, which come ever more rarely."""


@contextmanager
def progress_bars(console: Console | None = None, first: str = FIRST) -> Iterator[Report]:
    """Show the progress of the block.

    Args:
        console: where to; by default stderr.
        first: the stage until another is reported.
    """
    if not is_first():
        yield lambda stage, done, total: None
        return
    console = console or Console(file=unfiltered_stream(sys.stderr))
    if not console.is_terminal:
        with _progress_lines(first) as lines:
            yield lines
        return
    spinner = SpinnerColumn("dots" if console.encoding.startswith("utf") else "line")
    description = TextColumn("{task.description}{task.fields[done]}", markup=False)
    columns = (spinner, description, BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bars:
        yield _StageBars(bars, first)


@contextmanager
def _progress_lines(first: str) -> Iterator["_ProgressLines"]:
    """Print lines from a thread, because one step of a stage may take minutes."""
    lines, ended = _ProgressLines(first), threading.Event()

    def print_lines() -> None:
        pause = PATIENCE
        while not ended.wait(pause):
            lines.print_line()
            pause = min(2 * pause, LONGEST_PAUSE)

    thread = threading.Thread(target=print_lines, daemon=True)
    thread.start()
    try:
        yield lines
    finally:
        ended.set()
        thread.join()


class _ProgressLines:
    """Prints a line with the stage, how much of it is done, and the time since the start."""

    def __init__(self, first: str) -> None:
        self._began = time.monotonic()
        self._latest = (first, 0, 0)
        self._start: tuple[float, int] | None = None  # time and amount of the stage's first report

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage == IN_ALL:
            print_to_stderr(job_duration_sentence(total))
            return
        now = time.monotonic()
        if stage != self._latest[0]:
            self._start = (now, done)
        self._latest = (stage, done, total)
        if self._start is not None and now - self._start[0] >= MEASURED:
            self._announce(now)

    def _announce(self, now: float) -> None:
        """Say once per stage how long it will take, if that is long, by what was measured."""
        assert self._start is not None
        (began, before), (stage, done, total) = self._start, self._latest
        if done <= before:
            return
        self._start = None
        remaining = (now - began) * (total - done) / (done - before)
        if remaining > LONG:
            from tieline.report.words.numbers import duration

            amount = _progress_amount(stage, done, total)
            print_to_stderr(f"{stage}: about {duration(remaining, 1)} more, after{amount}")

    def print_line(self) -> None:
        """Print the latest state to stderr, with the time that is left of a stage of bytes."""
        stage, done, total = self._latest
        seconds = time.monotonic() - self._began
        remaining = ""
        if stage in BYTES and 0 < done < total:
            remaining = f", about {seconds * (total - done) / done:.0f} s left"
        amount = _progress_amount(stage, done, total)
        print_to_stderr(f"{stage}{amount}, {seconds:.0f} s{remaining}")


def _progress_amount(stage: str, done: int, total: int) -> str:
    """Return how much of a stage is done, as text."""
    if stage in BYTES:
        return f" {done / 1e9:.1f} of {total / 1e9:.1f} GB"
    return f" {done:,} of {total:,}" if total > 1 else ""


def job_duration_sentence(seconds: int) -> str:
    """Return how long the job will take, as a line."""
    from tieline.report.words.numbers import duration

    return f"This will take about {duration(float(seconds), 1)}."


class _StageBars:
    """Bars by stage; a stage that begins ends those before it."""

    def __init__(self, bars: Progress, first: str) -> None:
        self._bars = bars
        self._tasks: dict[str, TaskID] = {}
        self._begin(first, None)

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage == IN_ALL:
            self._bars.console.print(job_duration_sentence(total), markup=False, highlight=False)
            return
        if stage not in self._tasks:
            self._begin(stage, total)
        amount = _progress_amount(stage, done, total) if stage in BYTES else ""
        self._bars.update(self._tasks[stage], completed=done, total=total, done=amount)
        if done >= total and stage in FOLLOWED_BY:
            self._begin(FOLLOWED_BY[stage], None)

    def _begin(self, stage: str, total: int | None) -> None:
        """Begin a stage and end those before it."""
        for task in self._tasks.values():
            self._bars.update(task, completed=1, total=1)
            self._bars.stop_task(task)
        if stage not in self._tasks:
            self._tasks[stage] = self._bars.add_task(printable_line(stage), total=total, done="")
