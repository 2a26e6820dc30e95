"""Bars on stderr that tell how far a command is."""

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
)

__all__ = ["Report", "progress_bars"]

Report = Callable[[str, int, int], None]
"""Told a stage, how much of it is done, and of how much."""

FOLLOWED_BY = {"forward": "measure", "jumps": "report", "losses": "report"}
"""Stages that tell nothing about themselves, after those that do."""


@contextmanager
def progress_bars(console: Console | None = None) -> Iterator[Report]:
    """A bar per stage, gone when the work is done; nothing at all where stderr is a file."""
    console = console or Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    hidden = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as bars:
        yield _Stages(bars)


class _Stages:
    """The bars by stage; a stage that begins ends those before it."""

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
