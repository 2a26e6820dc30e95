"""Progress on stderr: bars on a terminal, occasional lines in a file.

with progress_bars() as progress:
    progress("forward", 3, 8)      # stage, amount done and total amount
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tieline.cli.terminal_session import print_to_stderr
from tieline.cli.torchrun import is_main_process
from tieline.core.text import printable_line, unfiltered_stream

if TYPE_CHECKING:  # Rich takes a quarter of the start of a command that needs no bars
    from rich.console import Console
    from rich.progress import Progress, TaskID

ReportProgress = Callable[[str, int, int], None]
"""Function that is called with a stage, the amount done and the total amount."""

NEXT_STAGE = {"forward": "measure", "streaming": "report", "jumps": "report", "losses": "report"}
"""For each stage, the next one if that reports no progress itself."""

BYTE_STAGES = ("streaming",)
"""Stages whose progress is counted in bytes."""

FIRST_STAGE = "loading the model"
"""Name of the stage before the first report."""

ANNOUNCED_SECONDS, MEASURED_SECONDS = 10.0, 1.0
"""Remaining seconds above which a stage's duration is announced, and seconds measured before."""

IN_ALL = "in all"
"""Stage whose total is the estimated seconds of the whole job (`run.plan`)."""

FIRST_PAUSE, LONGEST_PAUSE = 2.0, 30.0
"""Seconds before the first line in a file, which double with each line, and their maximum."""


@contextmanager
def progress_bars(
    console: "Console | None" = None, first_stage: str = FIRST_STAGE
) -> Iterator[ReportProgress]:
    """Show the progress of the block; yields the function that reports it.

    Args:
        console: console to print on; by default stderr.
        first_stage: name of the stage before the first report.
    """
    if not is_main_process():
        yield lambda stage, done, total: None
        return
    from rich.console import Console

    console = console or Console(file=unfiltered_stream(sys.stderr))
    if not console.is_terminal:
        with _progress_lines(first_stage) as lines:
            yield lines
        return
    with _stage_columns(console) as bars:
        yield _StageBars(bars, first_stage)


def _stage_columns(console: "Console") -> "Progress":
    """Return the bars of Rich, with spinner, stage, elapsed and remaining time."""
    from rich.progress import (
        BarColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    spinner = SpinnerColumn("dots" if console.encoding.startswith("utf") else "line")
    description = TextColumn("{task.description}{task.fields[done]}", markup=False)
    columns = (spinner, description, BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True)


@contextmanager
def _progress_lines(first: str) -> Iterator["_ProgressLines"]:
    """Print progress lines from a thread, because one step of a stage may take minutes."""
    lines, ended = _ProgressLines(first), threading.Event()

    def print_lines() -> None:
        pause = FIRST_PAUSE
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
    """Prints lines with the stage, the amount done, and the time since the start."""

    def __init__(self, first: str) -> None:
        self._start_time = time.monotonic()
        self._latest = (first, 0, 0)
        self._stage_start: tuple[float, int] | None = None  # time and amount of its first report

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage == IN_ALL:
            print_to_stderr(job_duration_sentence(total))
            return
        now = time.monotonic()
        if stage != self._latest[0]:
            self._stage_start = (now, done)
        self._latest = (stage, done, total)
        if self._stage_start is not None and now - self._stage_start[0] >= MEASURED_SECONDS:
            self._announce_remaining_time(now)

    def _announce_remaining_time(self, now: float) -> None:
        """Print the measured remaining time of a stage, once and if it exceeds 10 s."""
        assert self._stage_start is not None
        (began, before), (stage, done, total) = self._stage_start, self._latest
        if done <= before:
            return
        self._stage_start = None
        remaining = (now - began) * (total - done) / (done - before)
        if remaining > ANNOUNCED_SECONDS:
            from tieline.report.words.numbers import duration

            amount = _progress_text(stage, done, total)
            print_to_stderr(f"{stage}: about {duration(remaining, 1)} more, after{amount}")

    def print_line(self) -> None:
        """Print the latest state, with the remaining time for stages that count bytes."""
        stage, done, total = self._latest
        seconds = time.monotonic() - self._start_time
        remaining = ""
        if stage in BYTE_STAGES and 0 < done < total:
            remaining = f", about {seconds * (total - done) / done:.0f} s left"
        amount = _progress_text(stage, done, total)
        print_to_stderr(f"{stage}{amount}, {seconds:.0f} s{remaining}")


def _progress_text(stage: str, done: int, total: int) -> str:
    """Return amount done and total of a stage as text."""
    if stage in BYTE_STAGES:
        return f" {done / 1e9:.1f} of {total / 1e9:.1f} GB"
    return f" {done:,} of {total:,}" if total > 1 else ""


def job_duration_sentence(seconds: int) -> str:
    """Return a sentence with the duration of the job."""
    from tieline.report.words.numbers import duration

    return f"This will take about {duration(float(seconds), 1)}."


class _StageBars:
    """Shows a bar for each stage; a new stage ends the previous ones."""

    def __init__(self, bars: "Progress", first: str) -> None:
        self._bars = bars
        self._tasks: dict[str, TaskID] = {}
        self._begin(first, None)

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage == IN_ALL:
            self._bars.console.print(job_duration_sentence(total), markup=False, highlight=False)
            return
        if stage not in self._tasks:
            self._begin(stage, total)
        amount = _progress_text(stage, done, total) if stage in BYTE_STAGES else ""
        self._bars.update(self._tasks[stage], completed=done, total=total, done=amount)
        if done >= total and stage in NEXT_STAGE:
            self._begin(NEXT_STAGE[stage], None)

    def _begin(self, stage: str, total: int | None) -> None:
        """Start the bar of a stage and end the previous ones."""
        for task in self._tasks.values():
            self._bars.update(task, completed=1, total=1)
            self._bars.stop_task(task)
        if stage not in self._tasks:
            self._tasks[stage] = self._bars.add_task(printable_line(stage), total=total, done="")
